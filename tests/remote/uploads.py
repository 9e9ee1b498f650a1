"""A source, and where its conversions go in an object store."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.paths import FIXTURES

fsspec = pytest.importorskip("fsspec")


SOURCE = FIXTURES / "z1_bf16_dp2"


def here(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def there(url: str) -> dict[str, bytes]:
    """Every object below a URL, including ucp's notes."""
    fs, path = fsspec.core.url_to_fs(url)
    fs.invalidate_cache()
    return {name[len(path) + 1 :]: fs.cat_file(name) for name in fs.find(path)}


def seen(url: str) -> dict[str, bytes]:
    return {name: data for name, data in there(url).items() if not name.startswith(".ucp-")}
