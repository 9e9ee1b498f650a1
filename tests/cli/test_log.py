"""`ucp log` on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import ucp
from tests.log.small_logs import segments, small_manifest, write_log
from ucp.log.base_folders import BaseCheckpoint, base_folder, write_base
from ucp.log.epoch_manifest import ParentEpoch
from ucp.log.reader import Log


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two epochs; the second continues from step 5 of the first with two ranks; two bases."""
    write_log(tmp_path, range(1, 8), small_manifest(), skipped=(3,), per_segment=2)
    write_log(tmp_path, range(6, 12), small_manifest(2, epoch=1, start=5, parent=ParentEpoch(0, 5)), per_segment=4)
    for number, (step, epoch) in enumerate([(0, 0), (7, 0), (5, 1), (8, 1)]):
        write_base(BaseCheckpoint(base_folder(tmp_path, number), number, step, epoch))
    return tmp_path


def told(*arguments: object) -> dict[str, Any]:
    done = ucp("log", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    value: dict[str, Any] = json.loads(done.stdout)
    assert value["schema"] == 1
    return value


def test_ls_shows_epochs_and_bases(run: Path) -> None:
    shown = ucp("log", "ls", run)
    assert shown.returncode == 0, shown.stderr
    assert "torch.adamw.single" in shown.stdout
    assert "last complete step: 11" in shown.stderr
    listing = told("ls", run)
    assert [(e["first_step"], e["last_step"], e["streams"]) for e in listing["epochs"]] == [(1, 7, 1), (6, 11, 2)]
    assert listing["epochs"][1]["parent"] == {"epoch": 0, "step": 5}
    # The base of step 7 lies on the branch that was left at step 5.
    assert [(b["step"], b["usable"]) for b in listing["bases"]] == [(0, True), (7, False), (5, True), (8, True)]


def test_stat_shows_the_size_of_a_step(run: Path) -> None:
    first, second = told("stat", run)["epochs"]
    assert first["skipped"] == [3]
    assert first["elements"] == second["elements"] == 60
    assert first["encodings"] == {"raw": 4}
    assert len(second["streams"]) == 2
    size = sum(path.stat().st_size - 4096 for path in segments(run))
    assert abs(first["bytes_per_step"] * 7 + 256 - size) <= 64  # and a digest and the end
    assert "bytes per element" in ucp("log", "stat", run).stdout
    step = told("stat", run, "--step", 4)
    assert (step["epoch"], step["groups"][0]["lr"], step["groups"][0]["momentum"]) == (0, 0.1 / 4, None)
    assert told("stat", run, "--step", 3)["skipped"]
    assert ucp("log", "stat", run, "--step", 99).returncode == 2


def test_verify_distinguishes_a_torn_end_from_damage(run: Path) -> None:
    assert ucp("log", "verify", run).returncode == 0
    last = segments(run, 1, 1)[-1]
    good = last.read_bytes()
    last.write_bytes(good[:-300])
    verified = told("verify", run)
    assert (verified["verdict"], verified["recoverable_step"]) == ("whole", 10)
    assert verified["defects"][0]["kind"] in ("torn", "incomplete")
    last.write_bytes(good)
    first = segments(run, 0, 1)[0]
    data = bytearray(first.read_bytes())
    data[5000] ^= 1
    first.write_bytes(data)
    done = ucp("log", "verify", run)
    assert done.returncode == 4
    assert f"{first}: byte" in done.stdout
    assert "damaged" in done.stdout


def test_verify_reports_missing_files_of_a_rank(run: Path) -> None:
    for path in segments(run, 1, 1):
        path.unlink()
    done = ucp("log", "verify", run)
    assert done.returncode == 1
    assert "epoch 1: stream 1 has no files" in done.stdout


def test_truncate_cuts_and_refuses_damage(run: Path) -> None:
    last = segments(run, 1, 1)[-1]
    last.write_bytes(last.read_bytes()[:-300])
    before = {path: path.stat().st_size for path in run.rglob("*.ugl")}
    planned = told("truncate", run, "--dry-run")
    assert not planned["done"]
    assert {path: path.stat().st_size for path in run.rglob("*.ugl")} == before
    assert told("truncate", run, "--keep-tail")["files"] == planned["files"]
    assert Log.open(run, "strict").recoverable_step == 10
    assert list(run.rglob("*.tail"))
    data = bytearray(segments(run, 0, 1)[0].read_bytes())
    data[5000] ^= 1
    segments(run, 0, 1)[0].write_bytes(data)
    refused = ucp("log", "truncate", run)
    assert refused.returncode == 4
    assert "--step" in refused.stderr


def test_compact_keeps_what_the_second_newest_base_needs(run: Path) -> None:
    freed = told("compact", run)
    assert freed["bytes"] > 0
    log = Log.open(run, "strict")
    assert [(s.epoch.number, s.first, s.last) for s in log.spans()] == [(1, 6, 11)]
    assert not (run / "log" / "epoch-000000").exists()


def test_a_folder_that_is_not_a_log(tmp_path: Path) -> None:
    done = ucp("log", "ls", tmp_path)
    assert done.returncode == 3
    assert "contains no log" in done.stderr
