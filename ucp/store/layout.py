"""Where everything in a store lies: arithmetic from the list of atoms alone. Knows integers only.

Head, two superblocks, the schema; then slots of equal size. A slot is a header, and behind it every atom at a place
that never changes. All offsets are in bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final

from ucp import tunables
from ucp.errors import IntegrityError, UsageError
from ucp.model.box import Shape
from ucp.model.dtypes import BY_NAME, DType

PAGE: Final = 4096  # blocks, headers, and atoms of at least this size start at multiples of it
GRAIN: Final = 64  # smaller atoms start at multiples of this
HEAD_AT: Final = 0
SUPERBLOCKS_AT: Final = (PAGE, 2 * PAGE)
SCHEMA_AT: Final = 3 * PAGE
HEADER_FIXED: Final = 128
HEADER_ENTRY: Final = 32


@dataclass(frozen=True, slots=True)
class Entry:
    """One atom of a store."""

    name: str
    kind: str
    shape: Shape
    dtype: DType

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name}|{self.kind}"


@dataclass(frozen=True, slots=True)
class Schema:
    """What a store has room for: its atoms in order, what is known of them (JSON), and bytes for a generation's notes.

    `about` never changes; notes are JSON that every generation has its own of (hyper-parameters, counters, extras).
    """

    entries: tuple[Entry, ...]
    about: Mapping[str, Any] = field(default_factory=dict)
    notes_bytes: int = 64 * tunables.KIB

    @staticmethod
    def of(tensors: Mapping[str, Mapping[str, Any]], **options: Any) -> Schema:
        """The schema of tensors or arrays by parameter and kind: `{"w": {"weight": w, "exp_avg": m}}`."""
        entries = [
            Entry(name, kind, tuple(int(n) for n in tensor.shape), _dtype_of(tensor, name, kind))
            for name, states in tensors.items()
            for kind, tensor in states.items()
        ]
        return Schema(tuple(entries), **options)

    def dump(self) -> bytes:
        """The schema's bytes."""
        told = {
            "entries": [[e.name, e.kind, list(e.shape), e.dtype.name] for e in self.entries],
            "about": self.about,
            "notes_bytes": self.notes_bytes,
        }
        return json.dumps(told, separators=(",", ":")).encode()

    @staticmethod
    def parse(data: bytes, where: str) -> Schema:
        """What `dump` wrote; `where` names the file in errors."""
        try:
            told = json.loads(data)
            entries = tuple(
                Entry(str(name), str(kind), _shape(shape), BY_NAME[dtype])
                for name, kind, shape, dtype in told["entries"]
            )
            schema = Schema(entries, dict(told["about"]), int(told["notes_bytes"]))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise IntegrityError(f"{where}: its schema cannot be understood: {error!r}") from None
        if schema.notes_bytes < 0 or len({(e.name, e.kind) for e in entries}) != len(entries):
            raise IntegrityError(f"{where}: its schema contradicts itself")
        return schema


def _shape(shape: Sequence[Any]) -> Shape:
    if len(shape) > tunables.MAX_DIMENSIONS or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"{shape!r:.80} is no shape")
    return tuple(shape)


def _dtype_of(tensor: Any, name: str, kind: str) -> DType:
    word = str(tensor.dtype).removeprefix("torch.")
    if word not in BY_NAME:
        raise UsageError(f"parameter {name}, {kind}: no checkpoint holds elements of type {word}")
    return BY_NAME[word]


def rounded(value: int, unit: int) -> int:
    """`value` rounded up to a multiple of `unit`."""
    return -(-value // unit) * unit


class Layout:
    """Offsets of everything in a store with this schema (of `schema_bytes` bytes) and number of slots."""

    def __init__(self, schema: Schema, slots: int, schema_bytes: int) -> None:
        if slots < 2:
            raise UsageError(f"a store needs at least 2 slots, not {slots}", hint="one is always whole")
        self.schema = schema
        self.slots = slots
        self.schema_bytes = schema_bytes
        self.header_bytes = rounded(HEADER_FIXED + HEADER_ENTRY * len(schema.entries) + schema.notes_bytes, PAGE)
        self.offsets: list[int] = []  # of every atom, from the start of its slot
        at = self.header_bytes
        for entry in schema.entries:
            at = rounded(at, PAGE if entry.nbytes >= PAGE else GRAIN)
            self.offsets.append(at)
            at += entry.nbytes
        self.slot_bytes = rounded(at, PAGE)
        self.first_slot = rounded(SCHEMA_AT + schema_bytes, PAGE)
        self.file_bytes = self.first_slot + slots * self.slot_bytes
        self.number = {(entry.name, entry.kind): i for i, entry in enumerate(schema.entries)}

    def slot_at(self, slot: int) -> int:
        """Where a slot begins."""
        return self.first_slot + slot * self.slot_bytes

    def atom_at(self, slot: int, number: int) -> int:
        """Where the bytes of atom `number` begin in a slot."""
        return self.slot_at(slot) + self.offsets[number]

    def numbers(self) -> tuple[int, ...]:
        """What the head repeats, so that a reader that computes otherwise notices."""
        return self.slots, self.schema_bytes, self.first_slot, self.slot_bytes, self.header_bytes, self.file_bytes


def joined(ranges: Iterable[tuple[int, int]], unit: int) -> list[tuple[int, int]]:
    """Half-open ranges widened to multiples of `unit` (bytes), sorted, those that touch made one."""
    made: list[tuple[int, int]] = []
    for start, stop in sorted((start // unit * unit, rounded(stop, unit)) for start, stop in ranges if start < stop):
        if made and start <= made[-1][1]:
            made[-1] = (made[-1][0], max(stop, made[-1][1]))
        else:
            made.append((start, stop))
    return made
