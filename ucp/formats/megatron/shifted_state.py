"""Finds optimizer state that Megatron's bug shifted; refuses to hand it out, or puts it right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from ucp.errors import InconsistentError, NotUnderstoodError
from ucp.files.local import SourceFiles
from ucp.formats.megatron.arguments import Arguments
from ucp.formats.megatron.local_module import Whole
from ucp.formats.megatron.repair import BufferRepair
from ucp.formats.megatron.sharded import Pieces
from ucp.formats.megatron.shifts import ShiftedBuffer, disagree, shifted_buffers
from ucp.model.checkpoint import MASTER, WEIGHT, Fragment, Note

_SHOWN: Final = 8
_WHY: Final = (
    "releases of Megatron up to 0.19.0 shift this state when a buffer has several buckets (tied embeddings with"
    " pipeline stages, or overlapped gradient reduction)"
)

Table = dict[str, dict[str, Pieces]]


def treat_shifts(
    root: Path, model: Mapping[str, Whole], pieces: Table, arguments: Arguments, *, repair: bool
) -> list[Note]:
    """Look whether the state of buffers with several buckets is shifted; `pieces` then refuse, or give it repaired."""
    try:
        buffers = list(shifted_buffers(model, arguments))
    except NotUnderstoodError as error:
        return [Note("buckets-unknown", f"whether optimizer state is shifted cannot be told: {error.what}")]
    suspects = [name for buffer in buffers for name in _moved(buffer) if MASTER in pieces[name]]
    names = list(dict.fromkeys(suspects))
    with SourceFiles(root) as files:
        damaged = any(
            disagree(files, list(pieces[name][WEIGHT].fragments()), list(pieces[name][MASTER].fragments()))
            for name in names
        )
    if not damaged:
        return []
    if repair:
        return _repair(buffers, names, pieces)
    for name in names:
        for kind in pieces[name]:
            if kind != WEIGHT:
                pieces[name][kind].replace(_Refusal(root, name, kind), 1)
    return [
        Note(
            "optimizer-state-shifted",
            f"masters and moments of {len(names)} of {len(pieces)} parameters are damaged ({_some(names)}): {_WHY};"
            " weights are intact",
        )
    ]


class _Refusal:
    """Stands for the fragments of a damaged state."""

    def __init__(self, root: Path, name: str, kind: str) -> None:
        self._root = root
        self._name = name
        self._kind = kind

    def __call__(self) -> Iterator[Fragment]:
        raise InconsistentError(
            f"{self._root}: {self._name}|{self._kind} holds numbers of its neighbours: {_WHY}",
            hint="put it right with --repair, or take the weights alone with --only weights",
        )


def _moved(buffer: ShiftedBuffer) -> Iterator[str]:
    for tenancy in buffer.tenancies:
        if tenancy.shift and not tenancy.tensor.copy:
            yield from (lodger.name for lodger in tenancy.tensor.lodgers)


def _repair(buffers: list[ShiftedBuffer], names: list[str], pieces: Table) -> list[Note]:
    repairs = [BufferRepair(buffer) for buffer in buffers]
    involved = {name for repair in repairs for name in repair.names}
    kinds = list(dict.fromkeys(kind for name in names for kind in pieces[name] if kind != WEIGHT))
    lost: dict[str, int] = {}
    made: dict[tuple[str, str], list[Fragment]] = {}
    for kind in kinds:
        stored = {name: list(pieces[name][kind].fragments()) for name in involved if kind in pieces[name]}
        for repair in repairs:
            for name in (name for name in names if name in repair.names):
                weight = list(pieces[name][WEIGHT].fragments())
                found, gone = repair.fragments(name, kind, stored, weight, pieces[name][kind].dtype)
                made.setdefault((name, kind), []).extend(found)
                if kind != MASTER and gone:
                    lost[name] = max(lost.get(name, 0), gone)
    for (name, kind), fragments in made.items():
        pieces[name][kind].replace(partial(iter, fragments), len(fragments))
    notes = [Note("optimizer-state-repaired", f"masters and moments of {len(names)} parameters were put right: {_WHY}")]
    if lost:
        listed = ", ".join(f"{name} {count}" for name, count in lost.items())
        notes.append(
            Note(
                "optimizer-state-lost",
                f"elements that no file holds, by parameter: {listed}; masters were taken from the weights there,"
                " moments are zero",
            )
        )
    return notes


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
