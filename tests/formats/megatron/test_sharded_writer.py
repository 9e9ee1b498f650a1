"""`torch_dist` folders as ucp writes them have the keys, shapes and bytes of those that megatron-core wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ucp.api
from tests.formats.megatron.test_writer import check_same_atoms
from ucp.errors import UsageError
from ucp.files.torchzip import TorchFile
from ucp.formats.megatron.distributed import read_torch_dist
from ucp.formats.registry import ReadOptions, open_checkpoint
from ucp.model.coverage import coverage

# (source, the variant that Megatron wrote, options)
JOURNEYS: list[tuple[str, str, dict[str, Any]]] = [
    ("gpt_tp1_pp1_torch", "gpt_tp2_pp2_torchdist", {"tp": 2, "pp": 2}),
    ("gpt_tp2_pp2_torchdist", "gpt_tp1_pp1_torchdist", {"tp": 1, "pp": 1}),
    ("gpt_tp1_pp2_vpp2_torch", "gpt_tp1_pp1_torchdist", {"pp": 1}),
    ("gptfp16_tp1_torch", "gptfp16_tp1_torchdist", {}),
    ("llama_tp2_pp2_torch", "llama_tp1_pp1_torchdist", {"tp": 1, "pp": 1}),
    ("llama_tp2_dp2_do_torch", "llama_tp2_dp2_do_full_torchdist", {}),
    ("llama_tp1_dp1_do_torch", "llama_tp2_dp2_do_full_torchdist", {"tp": 2, "dp": 2}),
    ("qwen_tp1_pp1_torch", "qwen_tp1_pp1_torchdist", {}),
    ("moe_tp2_ep2_etp2_torch", "moe_ep2_torchdist", {"tp": 1, "ep": 2, "dp": 2}),
    ("moe_ep2_torchdist", "moe_ep1_torchdist", {"ep": 1, "dp": 1, "only": "weights"}),
    ("moegg_ep2_torch", "moegg_ep2_torchdist", {"dp": 2}),
    ("mla_tp2_ep2_torchdist", "mla_tp2_ep2_torchdist", {}),
]


def iteration(root: Path) -> Path:
    return next(root.glob("iter_*"))


@pytest.mark.parametrize("source, expected, options", JOURNEYS, ids=[f"{a}-{b}" for a, b, _ in JOURNEYS])
def test_it_is_what_megatron_core_writes(
    corpus: Path, tmp_path: Path, source: str, expected: str, options: dict[str, Any]
) -> None:
    root = corpus / "megatron"
    ucp.api.convert(root / source, tmp_path / "out", to="torch-dist", **options)
    made, real = (read_torch_dist(iteration(folder)) for folder in (tmp_path / "out", root / expected))
    assert sorted(made.tensors) == sorted(real.tensors)
    for key, tensor in real.tensors.items():
        assert (made.tensors[key].shape, made.tensors[key].dtype) == (tensor.shape, tensor.dtype), key
        assert not list(coverage(tensor.shape, list(made.tensors[key].blocks))), key
    assert sorted(made.objects) == sorted(real.objects)
    ours, theirs = (TorchFile(iteration(folder) / "common.pt").tree for folder in (tmp_path / "out", root / expected))
    assert list(ours) == list(theirs)
    assert shape_of(ours.get("optimizer")) == shape_of(theirs.get("optimizer"))
    assert ours["content_metadata"] == theirs["content_metadata"]
    for field in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "padded_vocab_size", "world_size"):
        assert ours["args"].state[field] == theirs["args"].state[field], field
    metadata = (iteration(folder) / "metadata.json" for folder in (tmp_path / "out", root / expected))
    assert len({file.read_bytes() for file in metadata}) == 1
    check_same_atoms(root / expected, tmp_path / "out")


# source → the options that take it elsewhere; there is no variant of Megatron's to compare with
ELSEWHERE: dict[str, dict[str, Any]] = {
    "gpt_dp2_do_buckets_torch": {"tp": 2, "pp": 4, "dp": 1, "zero": 0},
    "gptfp32_tp1_torch": {"tp": 4},
    "llama_tp2_dp2_do_dpresh_torchdist": {"tp": 4, "pp": 2},
    "mla_tp1_torch": {"tp": 2, "ep": 4},
    "moe_ep2_dp2_do_dpresh_torchdist": {"ep": 1},
    "old_gpt_tp1_zarr": {"tp": 2},
    "old_gpt_tp2_dp2_do_flat_torchdist": {"tp": 1, "pp": 2},
    "old_premcore_tp1_torch": {"tp": 2, "pp": 2},
}


@pytest.mark.parametrize("source", ELSEWHERE)
def test_what_is_written_reads_as_the_same_atoms(corpus: Path, tmp_path: Path, source: str) -> None:
    ucp.api.convert(corpus / "megatron" / source, tmp_path / "out", to="torch-dist", **ELSEWHERE[source])
    check_same_atoms(corpus / "megatron" / source, tmp_path / "out")
    made = open_checkpoint(tmp_path / "out", ReadOptions())
    assert made.format == "torch-dist"
    for degree, value in ELSEWHERE[source].items():
        assert getattr(made.mesh, degree) == value


def test_half_a_stack_is_refused(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="of the 4 parameters that megatron-core stacks"):
        ucp.api.convert(
            corpus / "megatron/gpt_tp1_pp1_torch", tmp_path / "out", to="torch-dist", exclude=["decoder.layers.2.*"]
        )


def test_only_the_distributed_optimizer_is_zero(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Megatron has no ZeRO-3"):
        ucp.api.convert(corpus / "megatron/gpt_tp1_pp1_torch", tmp_path / "out", to="torch-dist", zero=3)


def shape_of(tree: Any) -> Any:
    """A tree with its tensors reduced to what they look like."""
    if isinstance(tree, dict):
        return {key: shape_of(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [shape_of(value) for value in tree]
    return (tree.dtype, tree.shape) if hasattr(tree, "storage") else tree
