"""Local files: descriptors that threads share, and blocks that are reserved before they are written."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

import pytest

from ucp import tunables
from ucp.files import local
from ucp.files.local import SourceFiles, allocate, write_all


def test_a_file_in_use_is_not_closed_for_another(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(name.encode())
    with SourceFiles(tmp_path, keep=1) as files:
        first = files._acquire("a")
        second = files._acquire("b")  # too many are open, and both are in use
        assert os.pread(first.fd, 1, 0) == b"a"
        assert os.pread(second.fd, 1, 0) == b"b"
        files._release(first)
        files._release(second)


def test_a_large_file_gets_its_blocks_at_once(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        allocate(file.fileno(), tunables.RESERVED_FILE_BYTES)
    assert path.stat().st_size == tunables.RESERVED_FILE_BYTES
    assert 512 * path.stat().st_blocks >= tunables.RESERVED_FILE_BYTES


def test_a_file_system_that_reserves_nothing_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        ctypes.set_errno(errno.EOPNOTSUPP)
        return -1

    monkeypatch.setattr(local, "_libc", lambda: type("Libc", (), {"fallocate64": staticmethod(refuse)}))
    path = tmp_path / "file"
    with path.open("wb") as file:
        allocate(file.fileno(), tunables.RESERVED_FILE_BYTES)
    assert path.stat().st_size == tunables.RESERVED_FILE_BYTES


def test_no_space_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        ctypes.set_errno(errno.ENOSPC)
        return -1

    monkeypatch.setattr(local, "_libc", lambda: type("Libc", (), {"fallocate64": staticmethod(full)}))
    with (tmp_path / "file").open("wb") as file, pytest.raises(OSError, match="No space left"):
        allocate(file.fileno(), tunables.RESERVED_FILE_BYTES)


@pytest.mark.parametrize("offset", [0, 1, 7, 8, 13])
def test_long_data_is_written_up_to_aligned_offsets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: int
) -> None:
    monkeypatch.setattr(tunables, "WRITE_BYTES", 8)
    ends: list[int] = []
    real = os.pwrite

    def noting(fd: int, data: memoryview, at: int) -> int:
        ends.append(at + len(data))
        return real(fd, data, at)

    monkeypatch.setattr(os, "pwrite", noting)
    data = bytes(range(40))
    with (tmp_path / "file").open("wb") as file:
        write_all(file.fileno(), offset, data)
    assert (tmp_path / "file").read_bytes() == bytes(offset) + data
    assert all(end % 8 == 0 for end in ends[:-1])
