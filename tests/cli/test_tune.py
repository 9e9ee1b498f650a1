"""`ucp tune` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.command import ucp
from tests.log.small_logs import small_manifest
from ucp.log.epoch_manifest import write_manifest
from ucp.log.payloads import StepRecord
from ucp.log.reader import epoch_folder, stream_folder
from ucp.log.segment_writer import SegmentWriter, append_step

GIVEN = ("--mtbf", "6h", "--step-time", "2", "--base-stall", "4", "--replay-time", "40ms", "--restart-time", "60")


def test_costs_from_options(tmp_path: Path) -> None:
    done = ucp("tune", *GIVEN, "--sync-stall", "0.1", "--json", "--plot", tmp_path / "waste.svg")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    best = (2 * 4 * 21600 / (0.04 * 2)) ** 0.5
    assert abs(told["base_every"] - best) <= 1
    assert abs(told["batch_steps"] - (2 * 0.1 * 21600) ** 0.5 / 2) <= 1
    assert told["waste"]["total"] < told["without_log"]["waste"]
    assert (tmp_path / "waste.svg").exists()
    shown = ucp("tune", *GIVEN)
    assert f"base every         {told['base_every']} steps" in shown.stdout


def test_missing_costs_are_reported() -> None:
    done = ucp("tune", "--mtbf", "6h", "--base-stall", "4")
    assert done.returncode == 2
    assert "--step-time, --replay-time" in done.stderr
    assert ucp("tune", "--mtbf", "soon").returncode == 2


def test_costs_measured_in_a_log(tmp_path: Path) -> None:
    manifest = small_manifest()
    folder = epoch_folder(tmp_path / "log", 0)
    write_manifest(folder, manifest)
    schema = manifest.streams[0]
    appender = SegmentWriter(stream_folder(folder, 0), 0, 0, schema.hash())
    for step in range(1, 11):
        costs = {"steps": step, "record_seconds": 0.01 * step, "bases": 2, "base_seconds": 6.0, "syncs": 5}
        told = StepRecord(time_ns=step * 500_000_000)
        append_step(appender, step, told, aux={"costs": {**costs, "stall_seconds": 1.0}})
    appender.close_segment()
    done = ucp("tune", tmp_path, "--mtbf", "1d", "--replay-time", "0.1", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["costs"]
    assert abs(found["step"] - 0.49) < 1e-9
    assert (found["base_stall"], found["sync_stall"], found["replay"]) == (3.0, 0.2, 0.1)
    assert abs(found["record"] - 0.01) < 1e-9
