"""Files that look like a part of the checkpoint and are none: left from another save, or misnamed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Final

from ucp.checks.findings import Finding
from ucp.checks.tasks import CheckContext
from ucp.containers.distcp import read_dcp_folder
from ucp.core.checkpoint import Fragment
from ucp.storage.paths import scan_folder

_DATA: Final = ".distcp"
_RANK_FOLDER: Final = re.compile(r"mp_rank_\d{2,}(?:_\d{3,})*")
_SHARD: Final = re.compile(r"(.+)-\d{5}-of-\d{5}(\.safetensors|\.bin)")


def strays(context: CheckContext) -> Iterator[Finding]:
    """A warning for every such file of a Megatron, torch.distributed or Hugging Face folder."""
    looks = {"dcp": _unlisted, "torch-dist": _unlisted_of_megatron, "megatron": _ranks, "safetensors": _shards}
    look = looks.get(context.checkpoint.format)
    for file, belongs in look(context) if look is not None else ():
        yield Finding(
            "grid",
            "warning",
            f"{file}: {belongs}",
            file,
            hint="left from another save? Keep it elsewhere; it is of no use here",
        )


def _unlisted(context: CheckContext) -> Iterator[tuple[str, str]]:
    """Data files that no `.metadata` names; the index has only those that one does.

    A rank that has nothing to write leaves an empty file.
    """
    checkpoint = context.checkpoint
    for folder in sorted({PurePosixPath(file).parent for file in checkpoint.sizes if file.endswith(_DATA)}):
        with scan_folder(checkpoint.root / folder) as entries:
            names = sorted(entry.name for entry in entries if entry.name.endswith(_DATA) and entry.stat().st_size)
        for name in names:
            file = (folder / name).as_posix()
            if file not in checkpoint.sizes:
                yield file, "is not named in .metadata"


def _unlisted_of_megatron(context: CheckContext) -> Iterator[tuple[str, str]]:
    """The same where the index has all files of the folder. Most hold parameters: metadata are read for the rest."""
    checkpoint = context.checkpoint
    held = _holding(context)
    unknown = [file for file, size in checkpoint.sizes.items() if size and file.endswith(_DATA) and file not in held]
    listed = read_dcp_folder(checkpoint.root).files if unknown else {}
    return ((file, "is not named in .metadata") for file in unknown if file not in listed)


def _ranks(context: CheckContext) -> Iterator[tuple[str, str]]:
    """Rank folders of Megatron's legacy layout beyond the ranks that the job had."""
    mesh = context.checkpoint.mesh
    inside = {
        PurePosixPath(fragment.file).parts[0]
        for fragment in _fragments(context)
        if fragment.rank.tp < mesh.tp and fragment.rank.pp < mesh.pp and (fragment.rank.ep or 0) < mesh.ep
    }
    for file in context.checkpoint.sizes:
        folder, *below = PurePosixPath(file).parts
        if below and _RANK_FOLDER.fullmatch(folder) and folder not in inside:
            yield file, f"belongs to no rank of {mesh}"


def _shards(context: CheckContext) -> Iterator[tuple[str, str]]:
    """Shards that the index of a Hugging Face folder does not name, called as those that it does."""
    held = _holding(context)
    families = {match.groups() for file in held if (match := _SHARD.fullmatch(file))}
    for file in context.checkpoint.sizes:
        match = _SHARD.fullmatch(file)
        if match is not None and match.groups() in families and file not in held:
            yield file, "is not named in the index of the shards"


def _holding(context: CheckContext) -> set[str]:
    """The files that hold a part of an atom."""
    return {fragment.file for fragment in _fragments(context)}


def _fragments(context: CheckContext) -> Iterator[Fragment]:
    covers = (cover for atom in context.atoms() for cover in (atom.fragments, *atom.replicas))
    return (fragment for cover in covers for fragment in cover)
