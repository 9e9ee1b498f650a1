"""The rank grid: every rank's files are there, and none that belongs to no rank.

A reader refuses a grid with holes before there is an index to check; `missing` then says which files those are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

from ucp.checks.companions import lost_companions
from ucp.checks.findings import Finding
from ucp.checks.megatron_ranks import exchanged_ranks
from ucp.checks.strays import strays
from ucp.checks.tasks import CheckContext
from ucp.core.checkpoint import WEIGHT, Checkpoint
from ucp.core.mesh import Rank
from ucp.errors import UcpError
from ucp.formats.deepspeed.folder import StepFolder, find
from ucp.formats.deepspeed.read.rank_files import RankFiles
from ucp.formats.deepspeed.read.save_consistency import find_grid, select_model_files, without_stale_model_files
from ucp.formats.deepspeed.step_files import (
    StepFiles,
    classify_files,
    is_state_file,
    layer_file_name,
    model_file_name,
    names_tp_rank,
    optimizer_file_name,
    sharded_model_file_name,
)
from ucp.formats.megatron.folder import OPTIMIZER_FILE, OPTIMIZER_MISSING
from ucp.formats.sharded.shard_table import Problems

_SHORT: Final = 1_000_000  # bytes of a metadata.json that is looked into


def run_check(context: CheckContext) -> Iterator[Finding]:
    """Files that belong to no rank or that nothing points at, and optimizer files that are all gone."""
    checkpoint = context.checkpoint
    if checkpoint.format == "megatron":
        yield from exchanged_ranks(checkpoint)
        yield from _without_buffers(checkpoint)
    if checkpoint.format == "dcp":
        yield from _without_common(checkpoint)
    yield from strays(context)
    yield from lost_companions(checkpoint)
    if checkpoint.format != "deepspeed":
        return
    paths = [PurePosixPath(file) for file in checkpoint.sizes]
    folders = {path.parent for path in paths if is_state_file(path.name)}
    found = {
        folder: classify_files([path.name for path in paths if path.parent == folder]) for folder in sorted(folders)
    }
    zero = checkpoint.details.get("zero")
    stage = zero.get("configured_stage") if isinstance(zero, dict) else None
    has_states = any(kind != WEIGHT for parameter in checkpoint.parameters.values() for kind in parameter.atoms)
    if stage and not has_states and not any(files.optim for files in found.values()):
        yield Finding(
            "grid",
            "error",
            f"saved with ZeRO stage {stage}, but no rank's optimizer file is here: only weights could be read",
            hint="restore the *_optim_states.pt files; without them training cannot go on from here",
        )
    for folder, files in found.items():
        for name in (*files.other, *select_model_files(files, sharded=checkpoint.mesh.zero == 3).foreign):
            if name.endswith(".pt"):
                file = (folder / name).as_posix()
                yield Finding(
                    "grid",
                    "warning",
                    f"{file}: belongs to no rank of {checkpoint.mesh}",
                    file,
                    hint="left from another save or renamed? Keep it elsewhere, or under the name of its rank",
                )


def _without_buffers(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Megatron's distributed optimizer keeps its states in files of their own, which may be all gone."""
    if any(note.id == OPTIMIZER_MISSING for note in checkpoint.notes):
        yield Finding(
            "grid",
            "error",
            f"saved with the distributed optimizer, but no rank's {OPTIMIZER_FILE} is here: only weights could be read",
            hint=f"restore the {OPTIMIZER_FILE} files; without them training cannot go on from here",
        )


def _without_common(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Megatron's folders hold a file that all ranks share; without it they look like any folder of torch's."""
    note = checkpoint.root / "metadata.json"
    if "metadata.json" not in checkpoint.sizes or "common.pt" in checkpoint.sizes:
        return
    try:
        told = json.loads(note.read_bytes()) if note.stat().st_size < _SHORT else None
    except (OSError, ValueError, RecursionError):
        return
    if isinstance(told, dict) and "sharded_backend" in told:
        yield Finding(
            "grid",
            "error",
            f"{checkpoint.root / 'common.pt'}: is missing, but metadata.json says that Megatron wrote this folder",
            "common.pt",
            hint="copy it from where the checkpoint is whole: iteration, arguments and scheduler are in it",
        )


def missing(path: Path, tag: str | None) -> Iterator[Finding]:
    """Holes in the grid of a DeepSpeed step folder that could not be indexed. Their files are relative to `path`."""
    try:
        place = find(path, tag)
        files = classify_files([entry.name for entry in place.step.iterdir() if entry.is_file()])
        opened = RankFiles(place.root)
        files = without_stale_model_files(files, opened, place.prefix)
        grid = find_grid(files, opened, place.prefix, Problems(""))
    except (UcpError, OSError):
        return
    base = path if path.is_dir() else path.parent
    for mp in range(grid.mp):
        rank = Rank(mp // grid.tp, mp % grid.tp)
        if not grid.sharded_model and mp not in files.model:
            yield _hole(base, place, model_file_name(mp), rank)
        for dp in range(grid.dp):
            rank = Rank(mp // grid.tp, mp % grid.tp, dp)
            if grid.sharded_model and (dp, mp) not in files.sharded_model:
                yield _hole(base, place, sharded_model_file_name(dp, mp), rank)
            if (files.optim or grid.sharded_model) and (dp, mp) not in files.optim:
                yield _hole(base, place, optimizer_file_name(dp, mp, next(iter(files.optim.values()), None)), rank)
    yield from _missing_layers(base, place, files, grid.tp)


def _missing_layers(base: Path, place: StepFolder, files: StepFiles, tp: int) -> Iterator[Finding]:
    """A pipeline layer has a file of each tensor-parallel rank. (Layers that are plain functions have none at all.)"""
    for layer in sorted({layer for layer, _ in files.layers}):
        for rank in range(tp):
            if (layer, rank) not in files.layers:
                has_tp_rank = names_tp_rank(next(iter(files.layers.values())))
                yield _hole(base, place, layer_file_name(layer, rank, has_tp_rank=has_tp_rank), Rank(tp=rank))


def _hole(base: Path, place: StepFolder, name: str, rank: Rank) -> Finding:
    lost = place.root / f"{place.prefix}{name}"
    return Finding(
        "grid",
        "error",
        f"{lost}: is missing ({rank})",
        (lost.relative_to(base) if lost.is_relative_to(base) else lost).as_posix(),
        rank,
        hint="copy the file from the node that wrote it; without it the checkpoint is not whole",
    )
