"""dcp folders that we write are loaded by real jobs, and those that real jobs write are read, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ucp
from tests.interop.fsdp_rank import TorchJob
from tests.interop.fsdp_worker import TorchResult, TorchTrainer
from tests.interop.jobs import Trainer
from tests.interop.spec import Spec
from ucp.formats.dcp import writer

pytestmark = [pytest.mark.slow, pytest.mark.interop]

FP32 = Spec(dtype="fp32")
STYLES: dict[str, dict[str, Any]] = {
    "nested": {},
    "flattened": {"flattened": True},
    "torchtitan": {"model_key": None, "optimizer_key": "optimizer", "flattened": True},
}


@pytest.fixture(scope="module")
def torch_trainer() -> Iterator[TorchTrainer]:
    with TorchTrainer() as worker:
        yield worker


@pytest.fixture(autouse=True)
def cut_small_tensors_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models here are tiny, and a tensor in one piece proves little."""
    monkeypatch.setattr(writer, "SMALLEST_SPLIT_BYTES", 64)


@pytest.fixture(scope="module")
def trained(torch_trainer: TorchTrainer, tmp_path_factory: pytest.TempPathFactory) -> TorchResult:
    """Two FSDP2 ranks train two steps, save, and go on for one more."""
    out = tmp_path_factory.mktemp("fsdp2")
    return torch_trainer.run(TorchJob(2, "fsdp2", str(out), FP32, steps=2, save=str(out / "saved"), steps_after=1))


def different(expected: Mapping[str, Any], got: Mapping[str, Any]) -> list[str]:
    """Keys whose tensors are not the same, bit for bit, or are on one side only."""
    import torch

    return sorted(
        key
        for key in expected.keys() | got.keys()
        if key not in expected
        or key not in got
        or expected[key].dtype != got[key].dtype
        or not torch.equal(expected[key], got[key])
    )


def read_all(path: Path) -> dict[str, Any]:
    opened = ucp.open(path)
    return {f"{p.name}|{kind}": p.read(kind, as_torch=True) for p in opened.parameters.values() for kind in p.kinds}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("layout", ["fsdp2", "hsdp", "ddp"])
def test_what_real_jobs_save_is_read(torch_trainer: TorchTrainer, tmp_path: Path, layout: str, style: str) -> None:
    saved, spec = tmp_path / "saved", replace(FP32, groups=3, frozen=("pos",), tied=layout == "fsdp2")
    world = 4 if layout == "hsdp" else 2
    job = TorchJob(world, layout, str(tmp_path), spec, steps=2, save=str(saved), **STYLES[style])
    result = torch_trainer.run(job)
    assert different(result.state(), read_all(saved)) == []
    index = ucp.open(saved).index
    assert index.step == 2
    assert index.parameters["pos.weight"].role == "frozen"
    # Only a job that cuts its parameters lets one tell buffers from them.
    assert index.parameters["seen"].role == ("frozen" if layout == "ddp" else "buffer")
    assert index.parameters["embed.weight"].aliases == (("head.weight",) if spec.tied else ())
    groups = [{key: list(v) if isinstance(v, tuple) else v for key, v in g.hyper.items()} for g in index.groups]
    assert groups == result.report["groups"]
    assert index.extras.trees[".metadata"]["train_state"] == {"step": 2}


@pytest.mark.parametrize("world, layout", [(1, "plain"), (2, "fsdp2"), (4, "fsdp2"), (4, "hsdp"), (2, "ddp")], ids=str)
def test_fsdp2_goes_on_in_another_world(
    torch_trainer: TorchTrainer, trained: TorchResult, tmp_path: Path, world: int, layout: str
) -> None:
    """Loaded into other weights, everything is as it was saved, and the next loss is that of the uninterrupted run."""
    ucp.convert(trained.out / "saved", tmp_path / "converted", to="dcp", dp=3)
    spec = replace(FP32, seed=99)
    job = TorchJob(world, layout, str(tmp_path / "job"), spec, 1, 2, load=str(tmp_path / "converted"))
    result = torch_trainer.run(job)
    assert different(trained.state(), result.state("loaded")) == []
    assert result.report["loaded_groups"] == trained.report["groups"]
    before, after = trained.report["losses_after"]["2"], result.report["losses"]["2"]
    if (world, layout) == (2, "fsdp2"):
        assert after == before
    assert float.fromhex(after) == pytest.approx(float.fromhex(before), rel=1e-5)


@pytest.mark.parametrize("style", STYLES)
def test_keys_are_built_as_in_another_checkpoint(
    torch_trainer: TorchTrainer, trained: TorchResult, tmp_path: Path, style: str
) -> None:
    fresh = TorchJob(2, "fsdp2", str(tmp_path / "fresh"), FP32, 1, save=str(tmp_path / "like"), **STYLES[style])
    torch_trainer.run(fresh)
    ucp.convert(trained.out / "saved", tmp_path / "converted", to="dcp", like=tmp_path / "like")
    spec = replace(FP32, seed=99)
    load = TorchJob(4, "fsdp2", str(tmp_path / "job"), spec, load=str(tmp_path / "converted"), **STYLES[style])
    result = torch_trainer.run(load)
    assert different(trained.state(), result.state("loaded")) == []


DEEPSPEED = {
    "zero 1, bf16": (2, Spec(zero=1)),
    "zero 2, fp32, three groups": (3, Spec(zero=2, dtype="fp32", groups=3)),
    "zero 3, frozen": (2, Spec(zero=3, frozen=("pos",))),
    "zero 0": (2, Spec(zero=0, dtype="fp32")),
    "sgd": (2, Spec(zero=1, optimizer="sgd")),
    "amsgrad": (2, Spec(zero=1, optimizer="amsgrad")),
    "adagrad": (2, Spec(zero=0, dtype="fp32", optimizer="adagrad")),
}


@pytest.mark.parametrize("source", DEEPSPEED)
def test_deepspeed_goes_on_in_fsdp2(trainer: Trainer, torch_trainer: TorchTrainer, tmp_path: Path, source: str) -> None:
    """DeepSpeed's masters are the weights of an FSDP2 job, with every state of the optimizer."""
    world, spec = DEEPSPEED[source]
    before = trainer.run_job(world, spec, 2, tmp_path / "ds", save_dir=tmp_path / "saved")
    ucp.convert(tmp_path / "saved", tmp_path / "converted", to="dcp", dp=2)
    expected = masters_as_weights(before.state(0))
    for ranks in (2, 4):
        job = TorchJob(
            ranks, "fsdp2", str(tmp_path / f"job{ranks}"), replace(spec, seed=99), load=str(tmp_path / "converted")
        )
        result = torch_trainer.run(job)
        assert different(expected, result.state("loaded")) == []
        groups = [
            {key: value for key, value in group.items() if key in saved}
            for group, saved in zip(result.report["loaded_groups"], before.ranks[0]["final"]["groups"], strict=True)
        ]
        assert groups == before.ranks[0]["final"]["groups"]


def masters_as_weights(live: Mapping[str, Any]) -> dict[str, Any]:
    """What a DeepSpeed engine held, as an FSDP2 job in fp32 holds it: the masters are the weights."""
    import torch

    state = {key: value for key, value in live.items() if not key.endswith("|fp32")}
    for key, value in live.items():
        name, _, kind = key.rpartition("|")
        if kind == "fp32":
            state[f"{name}|weight"] = value
    # Frozen parameters and float buffers have no master: the job's own fp32 tensors take the 16-bit values.
    return {
        key: value.float() if key.endswith("|weight") and value.dtype in (torch.bfloat16, torch.float16) else value
        for key, value in state.items()
    }


def test_weights_alone_in_bf16(torch_trainer: TorchTrainer, trained: TorchResult, tmp_path: Path) -> None:
    """`--dtype` rounds the weights as torch rounds them; buffers and moments keep their types."""
    import torch

    del torch_trainer
    ucp.convert(trained.out / "saved", tmp_path / "converted", to="dcp", dtype="bf16")
    got, expected = read_all(tmp_path / "converted"), trained.state()
    for key, value in expected.items():
        rounds = key.endswith("|weight") and value.dtype == torch.float32 and not key.startswith("seen")
        assert torch.equal(got[key], value.to(torch.bfloat16) if rounds else value), key


@pytest.mark.parametrize("zero, dtype", [(2, "bf16"), (1, "fp32"), (3, "bf16")])
def test_fsdp2_goes_on_in_deepspeed(
    trainer: Trainer, trained: TorchResult, tmp_path: Path, zero: int, dtype: str
) -> None:
    """Weights of an FSDP2 job are the masters of a DeepSpeed engine that loads them with plain `load_checkpoint`."""
    import torch

    ucp.convert(trained.out / "saved", tmp_path / "converted", to="deepspeed", dp=3, zero=zero, dtype=dtype)
    spec = replace(FP32, zero=zero, dtype=dtype, seed=99)
    after = trainer.run_job(3, spec, 1, tmp_path / "ds", load_dir=tmp_path / "converted")
    # The job's own StepLR, which stands under a key of its choice, is the engine's.
    schedule = after.ranks[0]["loaded"]["scheduler"]
    assert (schedule["last_epoch"], schedule["_step_count"]) == (2, 3)
    assert schedule["_last_lr"] == [group["lr"] for group in trained.report["groups"]]
    assert after.ranks[0]["loaded_client_state"]["train_state"] == {"step": 2}
    got = after.state(0, "loaded")
    expected = trained.state()
    for key, value in expected.items():
        name, _, kind = key.rpartition("|")
        if kind == "weight" and f"{name}|fp32" in got:
            assert torch.equal(got[f"{name}|fp32"], value), key
        elif kind != "weight":
            assert torch.equal(got[key], value), key
        else:
            assert torch.equal(got[key].to(value.dtype), value.to(got[key].dtype).to(value.dtype)), key
    assert any(key.endswith("|fp32") for key in got) or dtype == "fp32"
