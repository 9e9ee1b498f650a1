"""Checks that read: replicas, masters, steps. A flipped bit, a swapped rank, a stale step: each is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.checks.expected_findings import only
from tests.checks.sharded_checkpoint import flip, make, step
from ucp import settings
from ucp.checks.runner import verify
from ucp.checks.tasks import CheckTask, run_tasks
from ucp.core.checkpoint import Checkpoint
from ucp.engine.pool import Meter, StoppedError


@pytest.fixture(params=[1 << 20, 12], ids=["one slab", "many slabs"])
def checkpoint(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    monkeypatch.setattr(settings, "SLAB_BYTES", request.param)
    return make(tmp_path / "made")


def test_replicas_that_differ_are_named_with_both_locations(checkpoint: Checkpoint) -> None:
    file = "norm.weight.exp_avg.tp1.1"  # elements 4 to 9 of the second rank's copy
    flip(checkpoint.root / file, 16 + 4 * 2)
    flip(checkpoint.root / file, 16 + 4 * 5)
    finding = only(verify(checkpoint), "replicas")
    assert "2 of 10 elements differ" in finding.message
    assert "the first at [6]" in finding.message
    assert "norm.weight.exp_avg.tp0.1" in finding.message
    assert (finding.file, finding.parameter, finding.kind) == (file, "norm.weight", "exp_avg")
    assert finding.rank is not None
    assert (finding.rank.tp, finding.rank.dp) == (1, 1)
    assert finding.byte_range == (16, 16 + 6 * 4)
    assert verify(checkpoint).exit_code == 1
    assert verify(checkpoint, "quick").exit_code == 0


def test_a_partial_copy_is_compared(checkpoint: Checkpoint) -> None:
    atoms = checkpoint.parameters["norm.weight"].atoms
    (cover,) = atoms["exp_avg"].replicas
    atoms["exp_avg"] = replace(atoms["exp_avg"], replicas=(cover[1:],))
    flip(checkpoint.root / cover[1].file, 16)
    assert "1 of 10 elements differ" in only(verify(checkpoint), "replicas").message
    atoms["exp_avg"] = replace(atoms["exp_avg"], replicas=(cover[:1],))
    assert verify(checkpoint).findings == []


def test_buffers_may_differ_over_ranks(checkpoint: Checkpoint) -> None:
    checkpoint.parameters["norm.weight"].role = "buffer"
    flip(checkpoint.root / "norm.weight.exp_avg.tp1.1", 16)
    finding = only(verify(checkpoint), "replicas")
    assert finding.severity == "warning"


def test_averaged_parameters_differ_by_design(checkpoint: Checkpoint) -> None:
    atoms = checkpoint.parameters["norm.weight"].atoms
    for kind, atom in atoms.items():
        atoms[kind] = replace(atom, combine="average")
    flip(checkpoint.root / "norm.weight.exp_avg.tp1.1", 16)
    assert verify(checkpoint).findings == []
    flip(checkpoint.root / "norm.weight.master.tp1.1", 16 + 2)  # but each rank's master still rounds to its weight
    assert only(verify(checkpoint), "master-matches-weight").file == "norm.weight.master.tp1.1"


def test_a_master_that_does_not_round_to_the_weight(checkpoint: Checkpoint) -> None:
    flip(checkpoint.root / "layer.weight.master.tp0.3", 16 + 4 * 3 + 2)  # the low bits would be rounded away
    finding = only(verify(checkpoint), "master-matches-weight")
    assert "1 of 24 elements of the float32 master" in finding.message
    assert finding.file == "layer.weight.master.tp0.3"
    assert finding.parameter == "layer.weight"
    assert "layer.weight.weight.tp0.1" in finding.message


def test_swapped_ranks_do_not_round_to_the_weight(checkpoint: Checkpoint) -> None:
    a, b = (checkpoint.root / f"layer.weight.master.tp0.{rank}" for rank in (0, 2))
    data = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(data)
    assert "10 of 24 elements" in only(verify(checkpoint), "master-matches-weight").message


def test_nan_rounds_to_any_nan(checkpoint: Checkpoint) -> None:
    for file, bits in (("master.tp0.0", np.uint32(0x7F80_0001)), ("weight.tp0.0", np.uint16(0xFFC1))):
        path = checkpoint.root / f"layer.weight.{file}"
        data = bytearray(path.read_bytes())
        data[16 : 16 + bits.nbytes] = bits.tobytes()
        path.write_bytes(data)
    assert verify(checkpoint).findings == []


def test_steps_of_another_rank_are_found(checkpoint: Checkpoint) -> None:
    atoms = checkpoint.parameters["layer.weight"].atoms
    atoms["step"] = replace(atoms["step"], replicas=((step(1, 4),),))
    finding = only(verify(checkpoint), "steps")
    assert "4 steps on pp 0 tp 1 dp 0 (tp1), but 3 on pp 0 tp 0 dp 0 (tp0)" in finding.message


def test_steps_of_another_parameter_are_found(checkpoint: Checkpoint) -> None:
    atoms = checkpoint.parameters["layer.weight"].atoms
    atoms["step"] = replace(atoms["step"], fragments=(step(0, 2),), replicas=())
    report = verify(checkpoint)
    assert only(report, "steps").severity == "error"
    report = verify(replace(checkpoint, mesh=replace(checkpoint.mesh, zero=0)))
    assert only(report, "steps").severity == "warning"


def test_an_iteration_that_no_optimizer_has_reached_is_noted(checkpoint: Checkpoint) -> None:
    finding = only(verify(replace(checkpoint, step=9)), "steps")
    assert finding.severity == "note"
    assert "taken 3 steps" in finding.message


def test_a_file_that_became_shorter_keeps_its_exit_code(checkpoint: Checkpoint) -> None:
    path = checkpoint.root / "layer.weight.master.tp0.3"
    path.write_bytes(path.read_bytes()[:20])
    report = verify(checkpoint, jobs=2)
    finding = only(report, "master-matches-weight")
    assert path.name in finding.message
    assert report.exit_code == 4


def test_a_file_that_is_gone_is_a_finding_and_the_rest_is_still_checked(checkpoint: Checkpoint) -> None:
    (checkpoint.root / "layer.weight.master.tp0.3").unlink()
    flip(checkpoint.root / "norm.weight.exp_avg.tp1.1", 16)
    report = verify(checkpoint)
    assert [f.check for f in report.findings] == ["master-matches-weight", "replicas"]
    assert report.exit_code == 5


def test_a_bug_in_a_check_is_raised_and_stops_the_others() -> None:
    seen: list[str] = []

    def wait(meter: Meter) -> list[None]:
        try:
            while True:
                meter.advance(1)
        except StoppedError:
            seen.append("stopped")
            raise

    def broken(_: Meter) -> list[None]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_tasks([CheckTask("replicas", 2, wait), CheckTask("replicas", 1, broken)], 2, Meter(lambda _: None))  # type: ignore[arg-type]
    assert seen == ["stopped"]
