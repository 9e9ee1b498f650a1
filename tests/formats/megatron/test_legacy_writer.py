"""The legacy layout as ucp writes it equals that of Megatron for the same training state and job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ucp
import ucp.api
from tests.formats.megatron.comparison import check_same, check_same_atoms, files_of, leaves, payload
from tests.paths import FIXTURES
from ucp.containers.inert import TensorRef
from ucp.errors import UsageError
from ucp.formats.registry import ReadOptions, open_checkpoint

# (source, the variant that Megatron wrote, options)
CONVERSIONS: list[tuple[str, str, dict[str, Any]]] = [
    ("gpt_tp1_pp1_torch", "gpt_tp2_pp2_torch", {"tp": 2, "pp": 2}),
    ("gpt_tp2_pp2_torch", "gpt_tp1_pp1_torch", {"tp": 1, "pp": 1}),
    ("gpt_tp1_pp2_vpp2_torch", "gpt_tp2_pp2_torch", {"tp": 2, "pp": 2, "stages": (0, 2)}),
    ("gpt_tp2_pp2_torchdist", "gpt_tp1_pp1_torch", {"tp": 1, "pp": 1}),
    ("gpt_tp1_pp1_torchdist", "gpt_tp2_pp2_torch", {"tp": 2, "pp": 2}),
    ("gptfp16_tp1_torchdist", "gptfp16_tp1_torch", {}),
    ("llama_tp2_pp2_torchdist", "llama_tp2_pp2_torch", {}),
    ("llama_tp1_pp1_torchdist", "llama_tp2_pp2_torch", {"tp": 2, "pp": 2}),
    ("qwen_tp1_pp1_torchdist", "qwen_tp1_pp1_torch", {}),
    ("moe_ep2_torchdist", "moe_tp2_ep2_etp2_torch", {"tp": 2, "ep": 2}),
    ("moegg_ep2_torchdist", "moegg_ep2_torch", {}),
    ("moegg_ep2_torchdist", "moegg_ep1_torch", {"ep": 1, "only": "weights"}),
    ("moe_tp2_ep2_etp2_torch", "moe_ep1_torch", {"tp": 1, "ep": 1, "only": "weights"}),
    ("mla_tp2_ep2_torchdist", "mla_tp1_torch", {"tp": 1, "ep": 1, "only": "weights"}),
]


@pytest.mark.parametrize("source, expected, options", CONVERSIONS, ids=[f"{a}-{b}" for a, b, _ in CONVERSIONS])
def test_output_equals_what_megatron_writes(
    corpus: Path, tmp_path: Path, source: str, expected: str, options: dict[str, Any]
) -> None:
    root = corpus / "megatron"
    ucp.api.convert(root / source, tmp_path / "out", to="megatron", **options)
    made, real = files_of(tmp_path / "out"), files_of(root / expected)
    assert list(made) == list(real)
    for name, file in made.items():
        tp = int(Path(name).parent.name.split("_")[2])
        assert check_same(file, real[name], tp) > 10
        ours, theirs = file.tree["args"].state, real[name].tree["args"].state
        for field in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
            "padded_vocab_size",
            "num_layers",
            "use_distributed_optimizer",
        ):
            assert ours.get(field) == theirs.get(field), field
        assert len(file.tree["rng_state"]) == len(real[name].tree["rng_state"])
    assert (tmp_path / "out/latest_checkpointed_iteration.txt").read_text() == "2"


@pytest.mark.parametrize("source", ["gpt_tp1_pp1_torch", "gpt_tp2_pp2_torchdist"])
def test_virtual_pipelines_are_copied_from_another_checkpoint(corpus: Path, tmp_path: Path, source: str) -> None:
    expected = corpus / "megatron/gpt_tp1_pp2_vpp2_torch"
    ucp.api.convert(corpus / "megatron" / source, tmp_path / "out", to="megatron", like=expected)
    made, real = files_of(tmp_path / "out"), files_of(expected)
    assert list(made) == list(real)
    for name, file in made.items():
        assert list(file.tree)[:5] == ["args", "checkpoint_version", "iteration", "model0", "model1"]
        assert check_same(file, real[name], 0) > 20


DISTRIBUTED = ["gpt_dp2_do_buckets_torch", "gpt_tp2_dp2_do_torch", "llama_tp1_dp1_do_torch", "moe_ep2_dp2_do_torch"]


@pytest.mark.parametrize("variant", [*DISTRIBUTED, "gpt_tp1_pp2_vpp2_torch", "gptfp16_tp1_torch", "moegg_ep2_torch"])
def test_the_same_job_gets_the_same_files(corpus: Path, tmp_path: Path, variant: str) -> None:
    """The trees that Megatron wrote, with their keys in order, and every tensor byte for byte."""
    source = corpus / "megatron" / variant
    ucp.api.convert(source, tmp_path / "out", to="megatron")
    made, real = files_of(tmp_path / "out"), files_of(source)
    assert list(made) == list(real)
    for name, file in made.items():
        theirs = real[name]
        trees = [tree.tree if "distrib_optim" in name else {**tree.tree, "args": None} for tree in (file, theirs)]
        ours, expected = (list(leaves(tree)) for tree in trees)
        assert [path for path, _ in ours] == [path for path, _ in expected], name
        for (path, a), (_, b) in zip(ours, expected, strict=True):
            if not isinstance(b, TensorRef):
                assert a == b or "rng_state" in path, (name, path)
                continue
            assert (a.dtype, a.shape, a.attributes) == (b.dtype, b.shape, b.attributes), (name, path)
            assert payload(file, a) == payload(theirs, b), (name, path)


@pytest.mark.parametrize(
    "source, expected, options",
    [
        ("llama_tp1_dp1_do_torch", "llama_tp2_dp2_do_torch", {"tp": 2, "dp": 2}),
        ("llama_tp2_dp2_do_full_torchdist", "llama_tp2_dp2_do_torch", {}),
        ("llama_tp2_dp2_do_torch", "llama_tp1_dp1_do_torch", {"tp": 1, "dp": 1}),
    ],
)
def test_buffers_equal_those_that_megatron_writes(
    corpus: Path, tmp_path: Path, source: str, expected: str, options: dict[str, Any]
) -> None:
    root = corpus / "megatron"
    ucp.api.convert(root / source, tmp_path / "out", to="megatron", **options)
    made, real = files_of(tmp_path / "out"), files_of(root / expected)
    assert list(made) == list(real)
    for name in (name for name in real if name.endswith("distrib_optim.pt")):
        ours, theirs = (list(leaves(tree)) for tree in (made[name].tree, real[name].tree))
        assert [path for path, _ in ours] == [path for path, _ in theirs]
        assert [getattr(a, "shape", a) for _, a in ours] == [getattr(b, "shape", b) for _, b in theirs]
    check_same_atoms(root / expected, tmp_path / "out")


@pytest.mark.parametrize(
    "source, options",
    [
        ("gpt_tp1_pp1_torch", {"tp": 2, "pp": 2, "dp": 3}),  # tied: the shared embedding has its own bucket
        ("gpt_tp1_pp2_vpp2_torch", {"dp": 2}),  # one buffer per model chunk
        ("gpt_dp2_do_buckets_torch", {"tp": 2, "dp": 1}),
        ("gptfp16_tp1_torch", {"dp": 2}),
        ("gptfp32_tp1_torch", {"tp": 2}),
        ("moe_tp2_ep2_etp2_torch", {"tp": 1, "ep": 4, "dp": 8}),
        ("moe_ep2_dp2_do_torch", {"ep": 1, "tp": 2}),
        ("moegg_ep2_torchdist", {"ep": 1, "pp": 2}),
        ("mla_tp2_ep2_torchdist", {"tp": 1, "ep": 2}),
    ],
)
def test_optimizers_are_converted_to_the_other_kind_and_back(
    corpus: Path, tmp_path: Path, source: str, options: dict[str, Any]
) -> None:
    """From any optimizer to the distributed one, and from there to the plain one of the first job."""
    start = corpus / "megatron" / source
    ucp.api.convert(start, tmp_path / "distributed", to="megatron", optimizer="distributed", **options)
    made = open_checkpoint(tmp_path / "distributed", ReadOptions())
    assert made.mesh.zero == 1
    assert made.details["distributed_optimizer"] is True
    check_same_atoms(start, tmp_path / "distributed")
    back = open_checkpoint(start, ReadOptions()).mesh
    degrees = {"tp": back.tp, "pp": back.pp, "dp": back.dp, "ep": back.ep}
    plan = ucp.api.plan(tmp_path / "distributed", tmp_path / "plain", to="megatron", optimizer="plain", **degrees)
    assert "load it without --use-distributed-optimizer" in " ".join(note.text for note in plan.writer.notes)
    plan.run()
    assert open_checkpoint(tmp_path / "plain", ReadOptions()).mesh.zero == 0
    assert not list((tmp_path / "plain").rglob("distrib_optim.pt"))
    check_same_atoms(start, tmp_path / "plain")


@pytest.mark.parametrize("source", ["gpt_tp1_pp1_torch", "gpt_tp2_pp2_torchdist"])
def test_virtual_pipelines_equal_what_megatron_writes(corpus: Path, tmp_path: Path, source: str) -> None:
    expected = corpus / "megatron/gpt_tp1_pp2_vpp2_torch"
    ucp.api.convert(corpus / "megatron" / source, tmp_path / "out", to="megatron", tp=1, pp=2, vpp=2)
    made, real = files_of(tmp_path / "out"), files_of(expected)
    assert list(made) == list(real)
    for name, file in made.items():
        assert check_same(file, real[name], 0) > 20
        for field in ("virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage"):
            assert file.tree["args"].state[field] == real[name].tree["args"].state[field]


STAGES: list[tuple[str, dict[str, Any], list[list[int]]]] = [
    ("gpt_tp1_pp1_torch", {"pp": 2, "stages": (0, 3)}, [[3], [1]]),
    ("gpt_tp1_pp1_torch", {"pp": 4, "stages": (0, 0, 2, 4)}, [[0], [2], [2], [0]]),  # only the ends of the model
    ("gpt_tp2_pp2_torchdist", {"pp": 2, "stages": (0, 1, 2, 2)}, [[1, 0], [1, 2]]),  # two chunks per stage
    ("gpt_tp1_pp2_vpp2_torch", {"pp": 2, "vpp": 1}, [[2], [2]]),
    ("llama_tp2_dp2_do_torch", {"pp": 3, "tp": 1, "stages": (0, 1, 3), "dp": 2}, [[1], [2], [1]]),
    ("gpt_tp2_dp2_do_torch", {"pp": 2, "tp": 1, "vpp": 2, "dp": 3}, [[1, 1], [1, 1]]),
    ("moe_ep2_dp2_do_torch", {"pp": 2, "ep": 1, "stages": (0, 2)}, [[2], [0]]),
]


@pytest.mark.parametrize("to", ["megatron", "torch-dist"])
@pytest.mark.parametrize("source, options, layers", STAGES, ids=[f"{s}-{o}" for s, o, _ in STAGES])
def test_stages_have_the_requested_layers(
    corpus: Path, tmp_path: Path, to: str, source: str, options: dict[str, Any], layers: list[list[int]]
) -> None:
    ucp.api.convert(corpus / "megatron" / source, tmp_path / "out", to=to, **options)
    check_same_atoms(corpus / "megatron" / source, tmp_path / "out")
    for name, file in files_of(tmp_path / "out").items():
        if name.endswith("distrib_optim.pt"):
            continue
        stage = layers[int(Path(name).parent.name.split("_")[3])]
        models = [file.tree["model"]] if len(stage) == 1 else [file.tree[f"model{i}"] for i in range(len(stage))]
        assert [len({k.split(".")[2] for k in model if "layers" in k}) for model in models] == stage


# source → the options for another layout
ELSEWHERE: dict[str, dict[str, Any]] = {
    "gpt_dp2_do_buckets_torch": {"tp": 2, "pp": 2, "dp": 1},
    "gpt_tp2_dp2_do_torch": {"tp": 4, "pp": 4},
    "gptfp32_tp1_torch": {"tp": 2, "pp": 2},
    "llama_tp2_dp2_do_dpresh_torchdist": {"tp": 1, "pp": 4},
    "llama_tp2_dp2_do_full_torchdist": {"tp": 4, "pp": 2, "stages": (0, 3)},
    "llama_tp1_dp1_do_torch": {"tp": 2},
    "mla_tp2_ep2_torchdist": {"tp": 1, "pp": 3, "ep": 1},
    "moe_ep2_dp2_do_torch": {"tp": 2, "ep": 4},
    "moe_ep2_dp2_do_dpresh_torchdist": {"ep": 1, "pp": 2},
    "moegg_ep2_torch": {"ep": 4, "tp": 2},
    "old_gpt_tp1_zarr": {"tp": 2},
    "old_gpt_tp2_dp2_do_flat_torchdist": {"tp": 1, "pp": 2},
    "old_premcore_tp1_torch": {"tp": 2, "pp": 2},
    "qwen_tp1_pp1_torch": {"tp": 2},
}


@pytest.mark.parametrize("source", ELSEWHERE)
def test_output_has_the_same_atoms(corpus: Path, tmp_path: Path, source: str) -> None:
    ucp.api.convert(corpus / "megatron" / source, tmp_path / "out", to="megatron", **ELSEWHERE[source])
    check_same_atoms(corpus / "megatron" / source, tmp_path / "out")
    made = open_checkpoint(tmp_path / "out", ReadOptions())
    for degree, value in ELSEWHERE[source].items():
        if degree != "stages":
            assert getattr(made.mesh, degree) == value
    assert made.mesh.zero == ("_do_" in source)


@pytest.mark.parametrize(
    "source, options, said",
    [
        ("gpt_tp1_pp1_torch", {"tp": 5}, "do not divide over tp=5"),
        ("gpt_tp1_pp1_torch", {"pp": 3}, "4 layers do not divide over 3 stages"),
        ("gpt_tp1_pp1_torch", {"ep": 2}, "the model has no experts"),
        ("gpt_tp1_pp1_torch", {"zero": 2}, "Megatron has no ZeRO-2"),
        ("gpt_tp1_pp1_torch", {"zero": 1, "optimizer": "plain"}, "--zero 1 is not the plain optimizer"),
        ("gpt_tp1_pp1_torch", {"dtype": "float64"}, "Megatron cannot train in float64"),
        ("gpt_tp1_pp1_torch", {"vocab_size": 100}, "a vocabulary of 122 does not fit a size of 100"),
        ("gpt_tp1_pp1_torch", {"pp": 2, "stages": (1, 2)}, "do not assign 4 layers to pp=2"),
        ("gpt_tp1_pp1_torch", {"pp": 2, "vpp": 2, "stages": (0, 2)}, "do not assign 4 layers to pp=2 × vpp=2"),
        ("gpt_tp1_pp1_torch", {"pp": 2, "vpp": 3}, "4 layers do not divide over 2 stages of 3 chunks"),
        ("gpt_tp1_pp1_torch", {"vpp": 2}, "vpp=2 with pp=1"),
        ("gpt_tp1_pp1_torch", {"etp": 1}, "the model has no experts"),
        ("moe_ep1_torch", {"tp": 2, "etp": 4}, "split over etp=4 ranks, which does not divide tp=2"),
        ("moe_ep1_torch", {"ep": 3}, "4 experts do not divide over ep=3"),
        ("moe_ep1_torch", {"ep": 2, "dp": 3}, "ep=2 × etp=1 does not divide tp=1 × dp=3"),
    ],
)
def test_impossible_jobs_are_refused(
    corpus: Path, tmp_path: Path, source: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        ucp.api.convert(corpus / "megatron" / source, tmp_path / "out", to="megatron", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["megatron", "torch-dist"])
@pytest.mark.parametrize("optimizer", ["plain", "distributed"])
def test_weights_take_another_dtype_from_their_masters(corpus: Path, tmp_path: Path, to: str, optimizer: str) -> None:
    source = corpus / "megatron/llama_tp2_pp2_torch"
    options: dict[str, Any] = {"to": to, "optimizer": optimizer}
    ucp.api.convert(source, tmp_path / "single", dtype="fp32", tp=1, **options)
    start, single = ucp.open(source), ucp.open(tmp_path / "single")
    assert single.index.details["dtype"] == "float32"
    for name in start:
        assert single[name].read("weight").tobytes() == start[name].read("master").tobytes(), name
    ucp.api.convert(tmp_path / "single", tmp_path / "back", dtype="bf16", tp=2, **options)
    check_same_atoms(source, tmp_path / "back")


def test_other_frameworks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="do not have megatron-core's names"):
        ucp.api.convert(FIXTURES / "z1_bf16_dp2", tmp_path / "out", to="megatron")


@pytest.mark.parametrize("to", ["megatron", "torch-dist"])
def test_atoms_of_a_megatron_job_go_back_to_megatron(corpus: Path, tmp_path: Path, to: str) -> None:
    source = corpus / "megatron/moe_ep2_dp2_do_torch"
    ucp.api.convert(source, tmp_path / "atoms")
    options: dict[str, Any] = {"to": to, "tp": 2, "ep": 2}
    plan = ucp.api.plan(tmp_path / "atoms", tmp_path / "out", **options)
    assert {"rng-repeated", "vocabulary-padding"} <= {note.id for note in plan.writer.notes}
    ucp.api.convert(tmp_path / "atoms", tmp_path / "out", **options)
    check_same_atoms(source, tmp_path / "out")


def test_other_targets_do_not_support_megatrons_optimizer_options(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--optimizer is not supported with --to deepspeed"):
        ucp.api.convert(FIXTURES / "z1_bf16_dp2", tmp_path / "out", to="deepspeed", optimizer="plain")
