"""A folder of atoms to damage."""

from __future__ import annotations

from pathlib import Path

from tests.checks.sharded_checkpoint import make
from ucp.engine.plan import Plan
from ucp.formats.registry import WriteOptions, make_writer


def write(folder: Path, *, link: bool) -> Path:
    writer = make_writer("atoms", make(folder / "made"), WriteOptions(link=link))
    path = folder / "atoms"
    Plan(writer.source, writer, writer.target(), path).run(jobs=1)  # type: ignore[attr-defined]
    return path


ATOM = "atoms/layer.weight.safetensors"
