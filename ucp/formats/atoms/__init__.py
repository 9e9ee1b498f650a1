"""Atoms: one safetensors file per parameter, a manifest, extras without pickle. Specified in docs/spec/atoms.md."""

from __future__ import annotations

from pathlib import Path
from typing import Final

MANIFEST: Final = "ucp.json"


def recognises(path: Path) -> bool:
    """Whether `path` is a folder with a manifest of ours."""
    return (path / MANIFEST).is_file()
