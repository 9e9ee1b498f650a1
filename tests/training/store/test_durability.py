"""How a store is made durable, depending on the kernel and the installed libraries.

No machine of a test has persistent memory: that the kernel takes `MAP_SYNC` is pretended, all behind it is real.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ucp.training import store
from ucp.training.store import MappedFile

SIZE = 1 << 16


@pytest.fixture
def on_dax(monkeypatch: pytest.MonkeyPatch) -> None:
    real = store._map
    monkeypatch.setattr(store, "_map", lambda fd, size, path: (real(fd, size, path)[0], True))


def mapped(path: Path) -> MappedFile:
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        os.ftruncate(fd, SIZE)
        return MappedFile(fd, SIZE, path)
    finally:
        os.close(fd)


def is_persisted(path: Path) -> bool:
    """Write and persist ranges that begin and end anywhere; returns whether the file contains them."""
    made = mapped(path)
    ranges = [(100, 110), (4090, 4100), (SIZE - 3, SIZE)]
    for start, stop in ranges:
        made.view[start:stop] = bytes(range(1, stop - start + 1))
    made.persist(ranges)
    made.close()
    data = path.read_bytes()
    return all(data[start:stop] == bytes(range(1, stop - start + 1)) for start, stop in ranges)


def test_shared_memory_is_synced() -> None:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        pytest.skip("/dev/shm does not exist: mount a tmpfs there")
    path = folder / f"ucp-test-medium-{os.getpid()}"
    try:
        made = mapped(path)
        assert made.durability == "msync"
        made.close()
    finally:
        path.unlink(missing_ok=True)


def test_msync_of_ranges_that_are_not_page_aligned(tmp_path: Path) -> None:
    assert is_persisted(tmp_path / "store")


@pytest.mark.usefixtures("on_dax")
def test_persistent_memory_without_its_library_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_libpmem", lambda: None)
    made = mapped(tmp_path / "store")
    assert made.durability == "msync on DAX"
    made.close()
    assert is_persisted(tmp_path / "store")


@pytest.mark.usefixtures("on_dax")
@pytest.mark.skipif(store._libpmem() is None, reason="libpmem is not installed (apt install libpmem1)")
def test_persistent_memory_is_flushed_by_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_libc", lambda: pytest.fail("a system call"))
    made = mapped(tmp_path / "store")
    assert made.durability == "pmem_persist"
    made.close()
    assert is_persisted(tmp_path / "store")
