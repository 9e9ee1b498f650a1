"""Addresses of shadows in place of a path: recognised by every command, for every transport."""

from __future__ import annotations

from pathlib import Path

import pytest

import ucp
from ucp.errors import StorageError
from ucp.storage.paths import is_shadow, is_url
from ucp.training.shadow.protocol import parse_address


@pytest.mark.parametrize("address", ["shadow://127.0.0.1:7007", "gloo://127.0.0.1:7007", "shm://run"])
def test_an_address_is_not_an_object_store(address: str, tmp_path: Path) -> None:
    """`gloo://` used to be looked up among the file systems of fsspec."""
    assert str(parse_address(address)) == address
    assert is_shadow(address)
    assert is_shadow(Path(address))  # which has lost a slash
    assert not is_url(address)
    with pytest.raises(StorageError, match="convert the shadow"):
        ucp.report(address, tmp_path / "page.html")


@pytest.mark.parametrize("name", ["shadow", "shm/run", "./gloo:/folder", "s3://gloo/shadow"])
def test_other_names_are_not_addresses(name: str) -> None:
    assert not is_shadow(name)
