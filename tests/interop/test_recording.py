"""`ucp.record` on real engines and torch jobs: what is logged, times its factor, is what the optimizer was given."""

from __future__ import annotations

from dataclasses import asdict, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ucp
from tests.interop.deepspeed_jobs import BF16_OPTIMIZER, state, unequal, zero
from tests.interop.spec import Spec
from tests.training.worlds import Worlds
from ucp.log.base_folders import list_bases, usable_bases
from ucp.log.codecs import Encoding
from ucp.log.payloads import GradientStage
from ucp.log.reader import Log

pytestmark = [pytest.mark.slow, pytest.mark.interop]

RANKS = "tests.training.recording_ranks:"


def assert_is_what_was_consumed(out: Path, results: list[Any]) -> Log:
    """Every recorded block, scaled, has the bits that the inner optimizer of its rank saw; all elements are there."""
    from safetensors.torch import load_file

    log = Log.open(out / "run", "strict")
    epoch = log.epochs[-1]
    covered: dict[str, np.ndarray] = {p.name: np.zeros(prod(p.shape), int) for p in epoch.manifest.parameters}
    for result in results:
        rank = result["rank"]
        witness = load_file(out / f"witness{rank:02d}.safetensors")
        stream = epoch.streams[rank]
        consumed = {
            (step, place[0]): (witness[f"{step}/{number}/grad"].float().numpy(), place, witness[f"{step}/{number}/lr"])
            for step in stream.steps
            for number, places in enumerate(result["places"])
            for place in places
            if f"{step}/{number}/grad" in witness
        }
        for step in epoch.steps:
            record = stream.record(step)
            assert record.skipped == (step in result["skipped"])
            for block in stream.schema.blocks:
                name = epoch.manifest.parameters[block.parameter].name
                stored = stream.read_block(step, block.id)
                if record.skipped:
                    assert stored is None
                    continue
                given, (_, start, first, _), lr = consumed[step, name]
                assert stored is not None
                values = stored.float32()
                if record.scale is not None:
                    values = values * record.scale
                at = block.offset
                assert np.array_equal(values.view("u4"), given[at : at + block.count].view("u4")), (step, name)
                tensor = stream.schema.tensors[block.tensor]
                assert record.group(tensor.group).lr == float(lr)
                if step == epoch.steps.start and len(block.region.boxes) == 1:
                    box = block.region.boxes[0]
                    if prod(box.shape) == len(covered[name]):
                        covered[name][block.region.start : block.region.stop] += 1
                        assert block.region.start - first == at - start
    log.covered = covered  # type: ignore[attr-defined]
    return log


def assert_everything_once(log: Log) -> None:
    covered = log.covered  # type: ignore[attr-defined]
    assert covered
    assert all(np.all(counts == 1) for counts in covered.values())


ENGINES: dict[str, tuple[int, Spec, GradientStage, set[str]]] = {
    "zero 0, fp32": (2, Spec(zero=0, dtype="fp32"), GradientStage.CONSUMED, {"float32"}),
    "zero 0, bf16": (2, Spec(zero=0, groups=3), GradientStage.REDUCED, {"bfloat16"}),
    "zero 1": (2, Spec(zero=1, gas=2), GradientStage.REDUCED, {"bfloat16"}),
    "zero 2, round robin, 3 ranks": (
        *(3, Spec(zero=2, groups=3, frozen=("pos",), config=zero(2, round_robin_gradients=True))),
        *(GradientStage.REDUCED, {"bfloat16"}),
    ),
    "zero 3, small sub-groups": (
        2,
        Spec(zero=3, config=zero(3, sub_group_size=700)),
        GradientStage.REDUCED,
        {"bfloat16"},
    ),
    "bf16 optimizer": (2, Spec(config=BF16_OPTIMIZER), GradientStage.REDUCED, {"float32"}),
    "zero 2, offload": (
        *(2, Spec(zero=2, config=zero(2, offload_optimizer={"device": "cpu"}))),
        *(GradientStage.REDUCED, {"float32"}),
    ),
    "zero 3, offload": (
        *(2, Spec(zero=3, config=zero(3, offload_optimizer={"device": "cpu"}))),
        *(GradientStage.REDUCED, {"float32"}),
    ),
    "zero 2, accumulated in fp32": (
        *(2, Spec(zero=2, gas=2, config={**zero(2), "data_types": {"grad_accum_dtype": "fp32"}})),
        *(GradientStage.REDUCED, {"float32"}),
    ),
    "zero 0, fp16": (2, Spec(zero=0, dtype="fp16"), GradientStage.REDUCED, {"float16"}),
    "tp 2 × dp 2": (4, Spec(tp=2), GradientStage.REDUCED, {"bfloat16"}),
    "zero 1, early": (2, Spec(zero=1, gas=2), GradientStage.REDUCED, {"bfloat16"}),
    "zero 2, early": (2, Spec(zero=2, groups=3), GradientStage.REDUCED, {"bfloat16"}),
    "zero 3, early": (2, Spec(zero=3, gas=2, config=zero(3, sub_group_size=700)), GradientStage.REDUCED, {"bfloat16"}),
    "pp 2 × dp 1": (2, Spec(pp=2, gas=2), GradientStage.REDUCED, {"bfloat16"}),
}


@pytest.mark.parametrize("name", ENGINES)
def test_what_is_recorded_is_what_was_consumed(worlds: Worlds, tmp_path: Path, name: str) -> None:
    world, spec, stage, dtypes = ENGINES[name]
    spec = replace(spec, config={**spec.config, "gradient_clipping": 0.05})  # so that every step is clipped
    options: dict[str, Any] = {"base_every": 3, "early": name.endswith("early")}
    if spec.tp > 1 or spec.pp > 1:
        from tests.interop import model as gpt

        options["client_state"] = {"universal_checkpoint_info": gpt.universal_info(spec)}
    changed = {"doubled_at": 3} if name.endswith("early") else {}  # after the backward pass: to be taken again
    results = worlds.run(world, RANKS + "engine", tmp_path, spec=asdict(spec), steps=5, options=options, **changed)
    log = assert_is_what_was_consumed(tmp_path, results)
    epoch = log.epochs[0]
    assert epoch.steps == range(1, 6)
    for result, schema in zip(results, epoch.manifest.streams, strict=True):
        assert result["stats"]["early"] == (4 * len(schema.tensors) if name.endswith("early") else 0)
    assert all(stream.record(2).stage == stage for stream in epoch.streams.values())
    assert {tensor.grad_dtype for s in epoch.manifest.streams for tensor in s.tensors} == dtypes
    if spec.tp == 1:
        assert_everything_once(log)
    assert epoch.streams[0].aux(4)["lr_scheduler"]["last_epoch"] == 4
    assert [base.step for base in list_bases(tmp_path / "run")] == [0, 3]
    assert [base.step for base in usable_bases(log)] == [0, 3]
    if stage == GradientStage.REDUCED:
        assert all(stream.record(step).scale != 1 for stream in epoch.streams.values() for step in epoch.steps)
        sizes = {block.data.nbytes / block.count for block in stored_blocks(log)}
        narrow = "accumulated in fp32" not in name
        assert sizes == {2.0} if narrow else 4.0 in sizes, "two bytes an element, also where its container has four"


def stored_blocks(log: Log) -> list[Any]:
    epoch = log.epochs[0]
    found = [s.read_block(2, block.id) for s in epoch.streams.values() for block in s.schema.blocks]
    return [block for block in found if block is not None and block.data.nbytes]


@pytest.mark.parametrize("stage", [1, 3])
def test_skipped_steps_and_growing_scales(worlds: Worlds, tmp_path: Path, stage: int) -> None:
    """fp16 with a dynamic scale that grows and shrinks: the factor is the one of the step, not of the backward pass."""
    spec = Spec(zero=stage, dtype="fp16")
    results = worlds.run(2, RANKS + "engine", tmp_path, spec=asdict(spec), steps=8, overflow_at=4)
    assert all(4 in result["skipped"] for result in results)
    log = assert_is_what_was_consumed(tmp_path, results)
    stream = log.epochs[0].streams[0]
    assert {t.grad_dtype for t in stream.schema.tensors} == {"float16"}
    assert stream.aux(4)["counters"]["skipped_steps"] == len([s for s in results[0]["skipped"] if s <= 4])
    scales = [stream.aux(step)["scaler"]["cur_scale"] for step in stream.steps]
    assert len(set(scales)) > 2, "the loss scale has changed in between"


@pytest.mark.parametrize("kind, early", [("ddp", False), ("ddp", True), ("fsdp", True)])
def test_torch_jobs(worlds: Worlds, tmp_path: Path, kind: str, early: bool) -> None:
    job = {"spec": asdict(Spec(dtype="fp32")), "kind": kind, "steps": 4, "options": {"early": early}}
    results = worlds.run(2, RANKS + "module", tmp_path, **job)
    log = assert_is_what_was_consumed(tmp_path, results)
    epoch = log.epochs[0]
    assert epoch.steps == range(1, 5)
    if kind == "ddp":  # each rank logs its share
        assert_everything_once(log)
        loads = [schema.numel for schema in epoch.manifest.streams]
        assert min(loads) > 0.3 * max(loads)
    for result, schema in zip(results, epoch.manifest.streams, strict=True):
        taken = 3 * len(schema.tensors) if early else 0
        assert result["stats"]["early"] == taken, "in all steps but the first, of every tensor"


def test_compressed_gradients_are_logged_as_they_are_used(worlds: Worlds, tmp_path: Path) -> None:
    """Top-k with error feedback: sparse in training, sparse in the log; a resume from a base goes on in every bit."""
    job = {"spec": asdict(Spec(dtype="fp32")), "steps": 6}
    results = worlds.run(2, RANKS + "topk", tmp_path / "a", **job)
    log = assert_is_what_was_consumed(tmp_path / "a", results)
    assert_everything_once(log)
    epoch = log.epochs[0]
    stored = [
        (block.count, found)
        for stream in epoch.streams.values()
        for block in stream.schema.blocks
        if block.count > 500 and (found := stream.read_block(4, block.id)) is not None
    ]
    assert {found.encoding for _, found in stored} <= {Encoding.SPARSE, Encoding.ZERO}
    assert sum(found.data.nbytes for _, found in stored) < 0.5 * sum(count for count, _ in stored), "of four bytes each"
    run = tmp_path / "a" / "run"
    base = next(base for base in list_bases(run) if base.step == 3)
    worlds.run(2, RANKS + "topk", tmp_path / "b", base=base.folder, **job)
    worlds.run(2, RANKS + "topk", tmp_path / "c", base=base.folder, feedback=False, **job)
    for rank in range(2):
        assert unequal(state(tmp_path / "a", "end", rank), state(tmp_path / "b", "end", rank)) == []
        assert unequal(state(tmp_path / "a", "end", rank), state(tmp_path / "c", "end", rank)) != [], "it matters"
    merged = ucp.open(run, log=run, step=5, exact=True)
    assert merged.index.step == 5


def test_a_rank_that_stops_takes_the_others_along(worlds: Worlds, tmp_path: Path) -> None:
    """At the next base, which they would otherwise wait for together for ever."""
    results = worlds.run(2, RANKS + "failing", tmp_path, at=5, options={"base_every": 4})
    assert [each["stopped"] for each in results] == [8, 6]
    assert results[0]["error"] == "rank 1: the disk of this rank is full"
    assert results[1]["error"] == "the disk of this rank is full"
    with Log.open(tmp_path / "run", "inspect") as log:
        assert log.recoverable_step >= 4
