"""Checks by worker processes: the same report as from threads, and no process is left."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import ucp
from tests.checks.forking import SIZES, said
from tests.engine.forking import wait_until_gone, workers
from tests.paths import variants
from ucp import settings
from ucp.checks.runner import verify
from ucp.containers.torch_file import TorchFile

FIXTURE = "z1_bf16_dp2"
DAMAGED = (FIXTURE, "z1_bf16_tp2_dp2", "z3_fp32_dp3", "pp2_z1_bf16_tied_dp2")


def run(what: str, sources: list[Path], project: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.checks.forking", what, *map(str, sources)],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        start_new_session=True,  # a process group of its own, which may be interrupted
    )
    return done.stdout + done.stderr


def by_processes(what: str, sources: list[Path], project: Path) -> list[dict[str, Any]]:
    """The reports, all of them made by forks."""
    text = run(what, sources, project)
    lines = text.splitlines()
    forks = [int(line.split()[1]) for line in lines if line.startswith("forked ")]
    assert len(forks) == len(sources), text
    assert min(forks) > 1
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks and blocks of the sizes that the forks use."""
    for name, size in SIZES.items():
        monkeypatch.setattr(settings, name, size)


def damaged(source: Path, target: Path) -> Path:
    """A copy of a checkpoint with wrong bytes of every kind in its storages, the same ones every time."""
    shutil.copytree(source, target)
    chance = random.Random(source.name)
    for path in sorted(target.rglob("*.pt")):
        archive = TorchFile(path)
        data = bytearray(path.read_bytes())
        for name, entry in sorted(archive.entries.items()):
            if "/data/" in name and entry.size >= 64 and chance.random() < 0.5:
                start = archive.payload(entry)
                for _ in range(3):
                    at = start + 4 * chance.randrange(entry.size // 4)
                    wrong = chance.choice([b"\xff" * 4, b"\x80\x7f" * 2, b"\x01\x00\x80\xbf", chance.randbytes(4)])
                    data[at : at + 4] = wrong
                data[start + entry.size - 1] ^= 0x40  # padding is possible here
        path.write_bytes(data)
    return target


@pytest.mark.usefixtures("small")
def test_processes_and_threads_report_the_same(project: Path, tmp_path: Path) -> None:
    sources = [project / "fixtures" / name for name in ("z1_bf16_moe4_ep2_dp4", "universal_z1_bf16_tp2")]
    sources += [damaged(project / "fixtures" / name, tmp_path / name) for name in DAMAGED]
    for name, link in (("atoms", False), ("view", True)):
        ucp.convert(project / "fixtures" / FIXTURE, tmp_path / name, link=link)
    sources += [tmp_path / "atoms", tmp_path / "view"]
    found = by_processes("deep", sources, project)
    for source, told in zip(sources, found, strict=True):
        for jobs in (1, 3):
            assert told == said(verify(source, "deep", jobs=jobs)), f"{source.name}, {jobs} threads"
    checks = {finding["check"] for told in found for finding in told["report"]["findings"]}
    assert {"zip-crc", "finite", "second-moments", "padding", "replicas", "master-matches-weight"} <= checks


@pytest.mark.usefixtures("small")
def test_damaged_atoms_and_the_default_level_too(project: Path, tmp_path: Path) -> None:
    sources = [damaged(project / "fixtures" / "z1_bf16_tp2_dp2", tmp_path / "source"), tmp_path / "atoms"]
    ucp.convert(sources[0], sources[1])
    for path in sources[1].rglob("exp_avg*"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    for level in ("default", "deep"):
        for source, told in zip(sources, by_processes(level, sources, project), strict=True):
            assert told["report"]["level"] == level
            assert told == said(verify(source, level, jobs=2))


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_processes_and_threads_report_the_same_of_every_format(project: Path) -> None:
    families = ("megatron_deepspeed", "dcp", "megatron")
    sources = [source for family in families for source in variants(family)[::12]]
    text = run("deep", sources, project)
    told = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert len(told) == len(sources) > 4, text
    for source, by_forks in zip(sources, told, strict=True):
        assert by_forks == said(verify(source, "deep", jobs=1)), source.name


def test_the_command_forks(project: Path) -> None:
    text = run("command", [project / "fixtures" / FIXTURE], project)
    assert "forked 2" in text
    assert "checks (deep)" in text


@pytest.mark.usefixtures("small")
def test_a_process_with_threads_does_not(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise AssertionError

    monkeypatch.setattr(os, "fork", refuse)
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        assert verify(project / "fixtures" / FIXTURE, "deep", jobs=2, processes=True).ok
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize(
    "what, told",
    [
        ("kill a worker", "ended StorageError a worker process"),
        ("interrupt", "ended KeyboardInterrupt"),
        ("break a worker", "ended RuntimeError in a worker process:"),
    ],
)
def test_the_failure_of_one_worker_ends_all(project: Path, what: str, told: str) -> None:
    text = run(what, [project / "fixtures" / FIXTURE], project)
    assert told in text
    assert ("ZeroDivisionError" in text) == (what == "break a worker")
    wait_until_gone(workers(text))


def test_only_the_parent_handles_an_interrupt(project: Path) -> None:
    (told,) = by_processes("interrupt a worker", [project / "fixtures" / FIXTURE], project)
    assert told["report"]["ok"]


def test_workers_end_with_their_parent(project: Path) -> None:
    text = run("kill all", [project / "fixtures" / FIXTURE], project)
    assert "ended" not in text
    found = workers(text)
    assert len(found) > 1
    wait_until_gone(found)


def test_a_file_that_is_cut_short_while_it_is_read_is_a_finding(project: Path, tmp_path: Path) -> None:
    shutil.copytree(project / "fixtures" / FIXTURE, tmp_path / "source")
    (told,) = by_processes("truncate a file", [tmp_path / "source"], project)
    assert told["report"]["exit_code"] == 4
    assert any("ends at byte" in finding["message"] for finding in told["report"]["findings"])
