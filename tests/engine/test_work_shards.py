"""Work shards: every file is written by exactly one shard, and together they write what one process writes."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ucp
from tests.paths import FIXTURES
from tests.trees import contents
from ucp.core.target import OutputFile, Target
from ucp.engine.journal import journal_name, journalled_shards
from ucp.engine.staging import staging_folder
from ucp.engine.work_shard import WorkShard
from ucp.errors import StorageError, UsageError

SOURCE = FIXTURES / "z1_bf16_dp2"
LAYOUT: dict[str, Any] = {"to": "deepspeed", "dp": 3}


@given(sizes=st.lists(st.integers(0, 1000), max_size=30), count=st.integers(1, 6))
def test_shards_have_every_file_once_and_about_equal_bytes(sizes: list[int], count: int) -> None:
    target = Target(tuple(OutputFile(str(n), size) for n, size in enumerate(sizes)))
    shares = [WorkShard(number, count).files(target) for number in range(count)]
    assert sorted(n for share in shares for n in share) == list(range(len(sizes)))
    loads = [sum(sizes[n] for n in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "out"
    ucp.convert(SOURCE, path, **LAYOUT)
    return path


@pytest.mark.parametrize("order", list(permutations((1, 2, 3))))
def test_shards_in_any_order_write_what_one_process_writes(tmp_path: Path, whole: Path, order: tuple[int, ...]) -> None:
    for number in order:
        ucp.convert(SOURCE, tmp_path / "out", shard=(number, 3), **LAYOUT)
        assert not (tmp_path / "out").exists()
    ucp.convert(SOURCE, tmp_path / "out", finish=True, **LAYOUT)
    assert contents(tmp_path / "out") == contents(whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_atoms_in_shards(tmp_path: Path) -> None:
    ucp.convert(SOURCE, tmp_path / "whole")
    for number in (1, 2):
        ucp.convert(SOURCE, tmp_path / "parts", shard=(number, 2))
    ucp.convert(SOURCE, tmp_path / "parts", finish=True)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_missing_shards_are_named(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with pytest.raises(UsageError, match="no shard of this target"):
        ucp.convert(SOURCE, path, finish=True, **LAYOUT)
    ucp.convert(SOURCE, path, shard=(2, 3), **LAYOUT)
    with pytest.raises(UsageError, match="shard 1/3 was not started; shard 3/3 was not started"):
        ucp.convert(SOURCE, path, finish=True, **LAYOUT)
    assert [str(share) for share in journalled_shards(staging_folder(path))] == ["shard 2/3"]


def test_an_unfinished_shard_resumes(tmp_path: Path, whole: Path) -> None:
    path = tmp_path / "out"
    for number in (1, 2):
        ucp.convert(SOURCE, path, shard=(number, 2), **LAYOUT)
    journal = staging_folder(path) / journal_name(WorkShard(1, 2))
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:-2]) + lines[-2][:20])  # as a kill leaves it
    with pytest.raises(UsageError, match="shard 2/2 did not finish"):
        ucp.convert(SOURCE, path, finish=True, **LAYOUT)
    ucp.convert(SOURCE, path, shard=(2, 2), **LAYOUT)
    assert journal.read_bytes().startswith(b"".join(lines[:-2]))
    assert len(journal.read_bytes().splitlines()) == len(lines)
    ucp.convert(SOURCE, path, finish=True, **LAYOUT)
    assert contents(path) == contents(whole)


def test_a_shard_killed_before_its_first_line_starts_over(tmp_path: Path, whole: Path) -> None:
    path = tmp_path / "out"
    ucp.convert(SOURCE, path, shard=(1, 2), **LAYOUT)
    (staging_folder(path) / journal_name(WorkShard(1, 2))).write_bytes(b'{"ucp":"jour')
    ucp.convert(SOURCE, path, shard=(2, 2), **LAYOUT)
    ucp.convert(SOURCE, path, finish=True, **LAYOUT)
    assert contents(path) == contents(whole)


def test_a_damaged_shard_is_written_again(tmp_path: Path, whole: Path) -> None:
    path = tmp_path / "out"
    for number in (1, 2):
        ucp.convert(SOURCE, path, shard=(number, 2), **LAYOUT)
    largest = max((p for p in staging_folder(path).rglob("*.pt")), key=lambda p: p.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    for number in (1, 2):
        ucp.convert(SOURCE, path, shard=(number, 2), **LAYOUT)
    ucp.convert(SOURCE, path, finish=True, **LAYOUT)
    assert contents(path) == contents(whole)


def test_a_file_that_this_machine_does_not_see(tmp_path: Path) -> None:
    path = tmp_path / "out"
    for number in (1, 2):
        ucp.convert(SOURCE, path, shard=(number, 2), **LAYOUT)
    next(staging_folder(path).rglob("*.pt")).unlink()
    with pytest.raises(StorageError, match="not all of it was written"):
        ucp.convert(SOURCE, path, finish=True, **LAYOUT)


def test_sharded_and_whole_runs_are_not_mixed(tmp_path: Path, whole: Path) -> None:
    path = tmp_path / "out"
    ucp.convert(SOURCE, path, shard=(1, 2), **LAYOUT)
    with pytest.raises(UsageError, match="written in 2 shards"):
        ucp.convert(SOURCE, path, shard=(1, 3), **LAYOUT)
    with pytest.raises(UsageError, match="written in 2 shards"):
        ucp.convert(SOURCE, path, resume=True, **LAYOUT)
    with pytest.raises(UsageError, match="belongs to another source, target or version"):
        ucp.convert(SOURCE, path, shard=(1, 2), to="deepspeed", dp=4)
    ucp.convert(SOURCE, path, restart=True, **LAYOUT)
    assert contents(path) == contents(whole)


@pytest.mark.parametrize("number, count", [(0, 3), (4, 3), (1, 0)])
def test_shards_that_do_not_exist(number: int, count: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        ucp.convert(SOURCE, tmp_path / "out", shard=(number, count))
