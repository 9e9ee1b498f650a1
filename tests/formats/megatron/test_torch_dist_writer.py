"""`torch_dist` folders as ucp writes them have the keys, shapes and bytes of those that megatron-core wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ucp
import ucp.api
from tests.formats.megatron.comparison import check_same, check_same_atoms, files_of
from ucp.containers.torch_file import TorchFile
from ucp.core.box import Box, coverage
from ucp.errors import UsageError
from ucp.formats.megatron.optimizer_groups import optimizers_of
from ucp.formats.megatron.read.sharded_containers import read_torch_dist
from ucp.formats.registry import ReadOptions, open_checkpoint

# (source, the variant that Megatron wrote, options)
CONVERSIONS: list[tuple[str, str, dict[str, Any]]] = [
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
    ("llama_tp2_dp2_do_dpresh_torchdist", "llama_tp2_dp2_do_dpresh_torchdist", {}),
    ("moe_ep2_dp2_do_dpresh_torchdist", "moe_ep2_dp2_do_dpresh_torchdist", {}),
    ("moegg_ep2_torch", "moegg_ep2_torchdist", {"dp": 2}),
    ("mla_tp2_ep2_torchdist", "mla_tp2_ep2_torchdist", {}),
]


def start(box: Box) -> tuple[int, ...]:
    return box.start


def iteration(root: Path) -> Path:
    return next(root.glob("iter_*"))


@pytest.mark.parametrize("source, expected, options", CONVERSIONS, ids=[f"{a}-{b}" for a, b, _ in CONVERSIONS])
def test_output_equals_what_megatron_core_writes(
    corpus: Path, tmp_path: Path, source: str, expected: str, options: dict[str, Any]
) -> None:
    root = corpus / "megatron"
    ucp.api.convert(root / source, tmp_path / "out", to="torch-dist", **options)
    made, real = (read_torch_dist(iteration(folder)) for folder in (tmp_path / "out", root / expected))
    assert sorted(made.tensors) == sorted(real.tensors)
    for key, tensor in real.tensors.items():
        assert (made.tensors[key].shape, made.tensors[key].dtype) == (tensor.shape, tensor.dtype), key
        assert not list(coverage(tensor.shape, list(made.tensors[key].blocks))), key
        if ".distributed." in key:
            assert sorted(made.tensors[key].blocks, key=start) == sorted(tensor.blocks, key=start), key
    assert sorted(made.objects) == sorted(real.objects)
    for key, value in real.objects.items():
        if ".distributed." in key:
            assert made.objects[key] == value, key
    ours, theirs = (TorchFile(iteration(folder) / "common.pt").tree for folder in (tmp_path / "out", root / expected))
    assert list(ours) == list(theirs)
    assert shape_of(ours.get("optimizer")) == shape_of(theirs.get("optimizer"))
    assert ours["content_metadata"] == theirs["content_metadata"]
    for field in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "padded_vocab_size", "world_size"):
        assert ours["args"].state[field] == theirs["args"].state[field], field
    metadata = (iteration(folder) / "metadata.json" for folder in (tmp_path / "out", root / expected))
    assert len({file.read_bytes() for file in metadata}) == 1
    check_same_atoms(root / expected, tmp_path / "out")


# source → the options for another layout, for which Megatron wrote no variant to compare with
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
def test_output_has_the_same_atoms(corpus: Path, tmp_path: Path, source: str) -> None:
    ucp.api.convert(corpus / "megatron" / source, tmp_path / "out", to="torch-dist", **ELSEWHERE[source])
    check_same_atoms(corpus / "megatron" / source, tmp_path / "out")
    made = open_checkpoint(tmp_path / "out", ReadOptions())
    assert made.format == "torch-dist"
    for degree, value in ELSEWHERE[source].items():
        assert getattr(made.mesh, degree) == value


@pytest.mark.parametrize(
    "source, options",
    [
        ("gpt_tp1_pp1_torch", {"tp": 2, "pp": 2, "dp": 3}),  # tied: the shared embedding has its own bucket
        ("gpt_tp1_pp2_vpp2_torch", {"dp": 2}),  # one buffer per model chunk
        ("gpt_dp2_do_buckets_torch", {"tp": 2, "dp": 4}),  # many buckets
        ("gptfp16_tp1_torch", {"dp": 5}),
        ("llama_tp2_dp2_do_full_torchdist", {"tp": 1, "pp": 4, "dp": 3}),
        ("moe_tp2_ep2_etp2_torch", {"tp": 1, "ep": 4, "dp": 8}),
        ("moe_ep2_dp2_do_dpresh_torchdist", {"ep": 1, "tp": 2, "pp": 2}),
        ("moegg_ep2_torchdist", {"ep": 4, "pp": 2}),
        ("mla_tp2_ep2_torchdist", {"tp": 4, "ep": 1, "dp": 2}),
    ],
)
def test_optimizer_state_survives_buckets(corpus: Path, tmp_path: Path, source: str, options: dict[str, Any]) -> None:
    """State is written as the buffers of any job's ranks, and read again by computing their layout."""
    options = {"to": "torch-dist", "optimizer": "distributed", "optimizer_sharding": "dp_reshardable", **options}
    plan = ucp.api.plan(corpus / "megatron" / source, tmp_path / "out", **options)
    assert "optimizer-sharding" in {note.id for note in plan.writer.notes}
    plan.run()
    made = read_torch_dist(iteration(tmp_path / "out"))
    assert not any(key.startswith("optimizer.state.") for key in made.tensors)
    assert sum(key.endswith(".exp_avg") for key in made.tensors) >= options.get("pp", 1) * options.get("tp", 1)
    for key, tensor in made.tensors.items():
        assert not list(coverage(tensor.shape, list(tensor.blocks))), key
    check_same_atoms(corpus / "megatron" / source, tmp_path / "out")


def test_the_sharding_is_the_one_that_the_job_would_write(corpus: Path, tmp_path: Path) -> None:
    root, options = corpus / "megatron", {"to": "torch-dist", "optimizer": "distributed"}
    expected = {"gpt_tp1_pp1_torch": "dp_reshardable", "llama_tp2_dp2_do_torch": "fully_reshardable"}
    for source, flavour in expected.items():
        ucp.api.convert(root / source, tmp_path / source, **options)
        tree = TorchFile(iteration(tmp_path / source) / "common.pt").tree
        assert tree["content_metadata"]["distrib_optim_sharding_type"] == flavour
        assert tree["optimizer"]["param_state_sharding_type"] == flavour
        assert tree["args"].state["dist_ckpt_optim_fully_reshardable"] is (flavour == "fully_reshardable")


@pytest.mark.parametrize(
    "options, said",
    [
        ({"to": "torch-dist"}, "but the target is for the plain one"),
        ({"to": "megatron", "optimizer": "distributed"}, "--optimizer-sharding is not supported with --to megatron"),
    ],
)
def test_optimizer_sharding_needs_the_distributed_optimizer(
    corpus: Path, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        ucp.api.plan(corpus / "megatron/gpt_tp1_pp1_torch", tmp_path, optimizer_sharding="dp_reshardable", **options)


@pytest.mark.parametrize("to", ["megatron", "torch-dist"])
@pytest.mark.parametrize("optimizer", ["plain", "distributed"])
def test_experts_are_merged_to_one_rank_and_split_again(corpus: Path, tmp_path: Path, to: str, optimizer: str) -> None:
    """Megatron itself cannot load optimizer state of parallel experts on a single rank."""
    expected = corpus / "megatron/moe_tp2_ep2_etp2_torch"
    ucp.api.convert(expected, tmp_path / "one", to=to, optimizer=optimizer, tp=1, ep=1, dp=1)
    check_same_atoms(expected, tmp_path / "one")
    tree = next(iter(ucp.open(tmp_path / "one").extras.trees.values()))
    assert len(optimizers_of(tree["optimizer"])) == 1
    ucp.api.convert(tmp_path / "one", tmp_path / "back", to="megatron", optimizer="plain", tp=2, ep=2, dp=2)
    made, real = files_of(tmp_path / "back"), files_of(expected)
    assert list(made) == list(real)
    assert sum(check_same(file, real[name], int(name.split("mp_rank_")[1][:2])) for name, file in made.items()) > 200


@pytest.mark.parametrize("to", ["megatron", "torch-dist"])
@pytest.mark.parametrize("optimizer", ["plain", "distributed"])
def test_experts_have_their_own_tensor_parallel_degree(corpus: Path, tmp_path: Path, to: str, optimizer: str) -> None:
    source = corpus / "megatron/moe_tp2_ep2_etp2_torch"
    options: dict[str, Any] = {"to": to, "optimizer": optimizer, "tp": 4, "pp": 2}
    for ep, etp in ((2, 1), (4, 2), (1, 2)):
        ucp.api.convert(source, tmp_path / f"{ep}", ep=ep, etp=etp, **options)
        check_same_atoms(source, tmp_path / f"{ep}")
        made = open_checkpoint(tmp_path / f"{ep}", ReadOptions())
        assert (made.mesh.ep, made.details["expert_tp"]) == (ep, etp)


@pytest.mark.parametrize("optimizer", ["plain", "distributed"])
def test_grouped_experts_become_separate_and_grouped_again(corpus: Path, tmp_path: Path, optimizer: str) -> None:
    source = corpus / "megatron/moegg_ep2_torch"
    options: dict[str, Any] = {"to": "megatron", "optimizer": optimizer}
    ucp.api.convert(source, tmp_path / "single", experts="sequential", **options)
    check_same_atoms(source, tmp_path / "single")
    model = files_of(tmp_path / "single")["iter_0000002/mp_rank_00_000/model_optim_rng.pt"].tree["model"]
    assert "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight" in model
    assert not any(name.endswith("experts.weight1") for name in model)
    ucp.api.convert(tmp_path / "single", tmp_path / "back", to="megatron", optimizer="plain", experts="grouped")
    made, real = files_of(tmp_path / "back"), files_of(source)
    assert list(made) == list(real)
    assert sum(check_same(file, real[name], 0) for name, file in made.items()) > 100


def test_an_incomplete_stack_is_refused(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="of the 4 parameters that megatron-core stacks"):
        ucp.api.convert(
            corpus / "megatron/gpt_tp1_pp1_torch", tmp_path / "out", to="torch-dist", exclude=["decoder.layers.2.*"]
        )


def test_only_the_distributed_optimizer_is_zero(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Megatron has no ZeRO-3"):
        ucp.api.convert(corpus / "megatron/gpt_tp1_pp1_torch", tmp_path / "out", to="torch-dist", zero=3)


def shape_of(tree: Any) -> Any:
    """A tree with the dtype and shape of each tensor in its place."""
    if isinstance(tree, dict):
        return {key: shape_of(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [shape_of(value) for value in tree]
    return (tree.dtype, tree.shape) if hasattr(tree, "storage") else tree
