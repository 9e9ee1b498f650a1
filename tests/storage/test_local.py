"""Local files: descriptors that threads share, and blocks that are reserved in advance."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from ucp import settings
from ucp.errors import IntegrityError, StorageError
from ucp.storage import local
from ucp.storage.local import LocalReader, SourceFiles, make_file, write_all


def test_a_file_in_use_is_not_closed_for_another(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(name.encode())
    with closing(LocalReader(tmp_path, 1)) as files:
        first = files._acquire("a")
        second = files._acquire("b")  # too many are open, and both are in use
        assert os.pread(first.fd, 1, 0) == b"a"
        assert os.pread(second.fd, 1, 0) == b"b"
        files._release(first)
        files._release(second)


@pytest.mark.parametrize("most", [1, 3, 1 << 20])
def test_short_reads_fill_all_targets(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(5000)
    (tmp_path / "file").write_bytes(data)
    real = os.preadv

    def short(fd: int, targets: Sequence[memoryview], offset: int) -> int:
        return real(fd, [targets[0][:most]] if most < len(targets[0]) else targets, offset)

    monkeypatch.setattr(os, "preadv", short)
    out = bytearray(2 * 4900)
    views = [memoryview(out)[at : at + size] for at, size in zip(range(0, 2 * 4900, 4), [2] * 2450, strict=True)]
    with SourceFiles(tmp_path) as files:
        files.scatter("file", 100, views, sum(map(len, views)))  # more than the system takes in one call
        assert b"".join(views) == data[100:]
        with pytest.raises(IntegrityError, match="file: ends at byte 5000"):
            files.scatter("file", 101, views, sum(map(len, views)))


def test_a_large_file_gets_its_blocks_at_once(tmp_path: Path) -> None:
    path = tmp_path / "file"
    make_file(path, settings.PREALLOCATE_FILE_BYTES)
    assert path.stat().st_size == settings.PREALLOCATE_FILE_BYTES
    assert 512 * path.stat().st_blocks >= settings.PREALLOCATE_FILE_BYTES


def test_a_file_system_without_reservation_is_supported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        ctypes.set_errno(errno.EOPNOTSUPP)
        return -1

    monkeypatch.setattr(local, "_libc", lambda: type("Libc", (), {"fallocate64": staticmethod(refuse)}))
    path = tmp_path / "file"
    make_file(path, settings.PREALLOCATE_FILE_BYTES)
    assert path.stat().st_size == settings.PREALLOCATE_FILE_BYTES


def test_missing_space_is_reported_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        ctypes.set_errno(errno.ENOSPC)
        return -1

    monkeypatch.setattr(local, "_libc", lambda: type("Libc", (), {"fallocate64": staticmethod(full)}))
    with pytest.raises(StorageError, match="No space left"):
        make_file(tmp_path / "file", settings.PREALLOCATE_FILE_BYTES)


@pytest.mark.parametrize("offset", [0, 1, 7, 8, 13])
def test_long_data_is_written_up_to_aligned_offsets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: int
) -> None:
    monkeypatch.setattr(settings, "WRITE_BYTES", 8)
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
