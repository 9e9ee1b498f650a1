"""The rank grid: every rank's files are there, and none that belongs to no rank.

A reader refuses a grid with holes before there is an index to check. `missing` then says from file names alone which
ranks are gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ucp.checks.findings import Finding
from ucp.checks.tasks import Context
from ucp.errors import UcpError
from ucp.formats.deepspeed.folder import Place, find
from ucp.formats.deepspeed.names import (
    SWAP_FOLDER,
    StepFiles,
    layer_name,
    model_name,
    optim_name,
    sharded_model_name,
    sort_names,
)
from ucp.model.layout import Rank

_MIXED = "keep files that are not of this save in another folder; loaders pick up files by name"
_RESTORE = "copy the file from the node that wrote it; without it the checkpoint is not whole"


def look(context: Context) -> Iterator[Finding]:
    """Files in a DeepSpeed step folder that the index does not use."""
    checkpoint = context.checkpoint
    if checkpoint.format != "deepspeed":
        return
    used = set(checkpoint.sizes)
    folders = {(checkpoint.root / file).parent for file in used if file.endswith("_states.pt")}
    for folder in sorted(folders):
        if SWAP_FOLDER in folder.parts:
            continue
        for path in sorted(folder.iterdir()):
            file = path.relative_to(checkpoint.root).as_posix()
            if path.is_dir() or file in used:
                continue
            yield Finding(
                "grid",
                "warning" if path.suffix == ".pt" else "note",
                f"{file}: belongs to no rank of {checkpoint.mesh}",
                file,
                hint=_MIXED,
            )


def missing(path: Path, tag: str | None) -> Iterator[Finding]:
    """Holes in the grid of a DeepSpeed step folder that could not be indexed, by the names of its files."""
    try:
        place = find(path, tag)
        files = sort_names([entry.name for entry in place.step.iterdir() if entry.is_file()])
    except (UcpError, OSError):
        return
    yield from _holes(place, files)


def _holes(place: Place, files: StepFiles) -> Iterator[Finding]:
    ranks = [*files.optim, *files.sharded_model]
    dps = range(max((dp for dp, _ in ranks), default=-1) + 1)
    mps = range(max([mp for _, mp in ranks] + list(files.model), default=-1) + 1)
    if files.optim:
        like = next(iter(files.optim.values()))
        for dp in dps:
            for mp in mps:
                if (dp, mp) not in files.optim:
                    yield _hole(place, optim_name(dp, mp, like), f"dp {dp} mp {mp}", dp)
    if files.sharded_model:
        for dp in dps:
            for mp in mps:
                if (dp, mp) not in files.sharded_model:
                    yield _hole(place, sharded_model_name(dp, mp), f"dp {dp} mp {mp}", dp)
    else:
        for mp in mps:
            if mp not in files.model:
                yield _hole(place, model_name(mp), f"mp {mp}", 0)
    if files.layers:
        like = next(iter(files.layers.values()))
        tps = range(max(tp for _, tp in files.layers) + 1)
        for layer in sorted({layer for layer, _ in files.layers}):
            for tp in tps:
                if (layer, tp) not in files.layers:
                    yield _hole(place, layer_name(layer, tp, like), f"layer {layer} tp {tp}", 0)


def _hole(place: Place, name: str, whose: str, dp: int) -> Finding:
    file = f"{place.prefix}{name}"
    return Finding("grid", "error", f"{place.root / file}: is missing ({whose})", file, Rank(dp=dp), hint=_RESTORE)
