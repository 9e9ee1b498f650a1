"""Stores other than S3, each with a client of its own.

`UCP_TEST_STORES` names those to try, as URLs of a bucket or container that may be written to: emulators (Azurite,
gcp-storage-emulator) or real ones. docs/large-checkpoints.md says how to start them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import ucp
from tests.remote.uploads import SOURCE, here, seen
from ucp import settings
from ucp.settings import KIB
from ucp.storage.object_store import ObjectStore

fsspec = pytest.importorskip("fsspec")
memory = pytest.importorskip("fsspec.implementations.memory")
STORES = os.environ.get("UCP_TEST_STORES", "").split()


class PickyFileSystem(memory.MemoryFileSystem):  # type: ignore[misc]
    """A store whose client accepts no upload options, like that of Azure."""

    protocol = "picky"

    def put_file(self, lpath: str, rpath: str, **kwargs: Any) -> None:
        assert not kwargs
        super().put_file(lpath, rpath)


def test_a_client_gets_no_options_that_it_does_not_know(tmp_path: Path) -> None:
    fsspec.register_implementation("picky", PickyFileSystem, clobber=True)
    file = tmp_path / "file"
    file.write_bytes(b"some bytes")
    assert ObjectStore("picky://bucket").upload(file, "picky://bucket/file", streams=4).size == 10


@pytest.mark.skipif(
    not STORES, reason="UCP_TEST_STORES is not set: URLs of folders that may be written, separated by spaces"
)
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("to", ["atoms", "deepspeed"])
def test_a_store_is_source_and_target(store: str, to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "REMOTE_SPOOL_BYTES", 64 * KIB)
    url = f"{store}/{uuid4().hex}"
    ucp.convert(SOURCE, tmp_path / "out", to=to)
    ucp.convert(SOURCE, url, to=to)
    assert seen(url) == here(tmp_path / "out")
    assert ucp.verify(url, level="deep").ok
    ucp.convert(url, tmp_path / "back")
    assert ucp.diff(SOURCE, tmp_path / "back").identical
