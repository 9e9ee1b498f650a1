"""A checkpoint of what a shadow holds, taken by the shadow itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ucp.conversion import Conversion
from ucp.errors import InconsistentError
from ucp.formats.registry import ReadOptions, WriteOptions, make_writer, open_checkpoint
from ucp.shadow.assembling import HeldFiles, assemble
from ucp.shadow.following import Shadow


def save(shadow: Shadow, folder: Path, options: ReadOptions) -> tuple[Path, bool]:
    """Write the newest complete step to `folder/step-N` as atoms, while the shadow goes on.

    Gives the path, and whether it is new: one that is there already holds that step.
    """
    snapshot = shadow.snapshot()
    try:
        base = open_checkpoint(Path(snapshot.told["base"]), replace(options, spread=True))
        held = assemble(base, snapshot.told, HeldFiles(snapshot))
        if held.step is None:
            raise InconsistentError("the shadow cannot tell which step it holds")
        path = folder / f"step-{held.step}"
        if path.exists():
            return path, False
        folder.mkdir(parents=True, exist_ok=True)
        writer = make_writer("atoms", held, WriteOptions())
        Conversion(held, writer, writer.target(), path).run(jobs=1, restart=True, durable=True)
        return path, True
    finally:
        snapshot.close()
