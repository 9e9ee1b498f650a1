"""Which generations a store holds: read from its blocks alone, at any instant, also while a job writes into it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from ucp import tunables
from ucp.errors import IntegrityError, NotUnderstoodError, StorageError
from ucp.files.local import read_at
from ucp.store.blocks import MAGIC, NO_SLOT, DamagedError, Head, SlotHeader, Superblock
from ucp.store.layout import HEAD_AT, PAGE, SCHEMA_AT, SUPERBLOCKS_AT, Layout, Schema

Read = Callable[[int, int], bytes]  # (offset, size) → bytes, fewer at the end of the file

_RESTORE = "restore the store from a copy, or make a new one"


@dataclass(frozen=True, slots=True)
class Shape:
    """What never changes of a store."""

    path: Path
    head: Head
    layout: Layout


@dataclass(slots=True)
class Survey:
    """The whole generations of a store, newest first; the first is the root. `torn` has superblocks that do not parse.

    `broken` is a superblock whose slot header does not verify, though it was durable before: no crash does that.
    """

    generations: list[SlotHeader] = field(default_factory=list)
    root_superblock: int | None = None
    torn: list[int] = field(default_factory=list)
    broken: list[Superblock] = field(default_factory=list)
    beyond: list[int] = field(default_factory=list)  # slots with a header newer than the root: never committed
    sequence: int = 0  # of the newest superblock

    @property
    def root(self) -> SlotHeader | None:
        return self.generations[0] if self.generations else None


def is_store(path: Path) -> bool:
    """Whether a file begins like a store."""
    try:
        with path.open("rb", buffering=0) as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def reader_of(fd: int, path: Path) -> Read:
    """Positional reads of an open file."""

    def read(offset: int, size: int) -> bytes:
        try:
            return read_at(fd, offset, size)
        except OSError as error:
            raise StorageError(f"{path}: cannot read bytes at {offset}: {error.strerror}") from error

    return read


def read_shape(read: Read, size: int, path: Path) -> Shape:
    """Head and schema of a store of `size` bytes."""
    block = read(HEAD_AT, PAGE)
    if block[: len(MAGIC)] != MAGIC:
        raise NotUnderstoodError(f"{path}: is no store")
    try:
        head = Head.parse(block)
    except DamagedError as error:
        if str(error).startswith("version"):
            raise NotUnderstoodError(f"{path}: {error} of the store format is not known", hint="upgrade ucp") from None
        raise IntegrityError(f"{path}: its head (bytes [0, {PAGE})) is damaged: {error}", hint=_RESTORE) from None
    slots, schema_bytes, *_, file_bytes = head.numbers
    if size != file_bytes:
        raise IntegrityError(f"{path}: has {size:,} bytes, not {file_bytes:,}", hint=_RESTORE)
    if schema_bytes > min(size, tunables.MAX_STORE_SCHEMA_BYTES):
        raise IntegrityError(f"{path}: says that its schema has {schema_bytes:,} bytes", hint=_RESTORE)
    data = read(SCHEMA_AT, schema_bytes)
    if xxhash.xxh3_128_digest(data) != head.schema_digest:
        where = f"bytes [{SCHEMA_AT}, {SCHEMA_AT + schema_bytes})"
        raise IntegrityError(f"{path}: its schema ({where}) is damaged", hint=_RESTORE)
    layout = Layout(Schema.parse(data, str(path)), slots, schema_bytes)
    if layout.numbers() != head.numbers:
        raise IntegrityError(f"{path}: its schema does not make the sizes that its head says", hint=_RESTORE)
    return Shape(path, head, layout)


def survey(read: Read, shape: Shape) -> Survey:
    """Look at superblocks and slot headers."""
    found = Survey()
    identity, layout = shape.head.id, shape.layout
    roots: list[tuple[Superblock, int]] = []
    for number, at in enumerate(SUPERBLOCKS_AT):
        try:
            roots.append((Superblock.parse(read(at, PAGE), identity, layout.slots), number))
        except DamagedError:
            found.torn.append(number)
    roots.sort(key=lambda root: -root[0].sequence)
    headers = {slot: header for slot in range(layout.slots) if (header := _header(read, shape, slot)) is not None}
    if roots:
        found.sequence = roots[0][0].sequence
    for superblock, number in roots:
        header = headers.get(superblock.slot)
        if superblock.slot == NO_SLOT:
            found.root_superblock = number
            break
        if header is not None and (header.sequence, header.seal) == (superblock.sequence, superblock.header_seal):
            found.root_superblock = number
            found.generations.append(header)
            break
        if superblock.sequence == found.sequence:
            found.broken.append(superblock)
    root = found.root
    last = 0 if root is None else root.sequence
    for slot, header in headers.items():
        if header.sequence > last:
            found.beyond.append(slot)
        elif header is not root:
            found.generations.append(header)
    found.generations.sort(key=lambda header: -header.sequence)
    return found


def _header(read: Read, shape: Shape, slot: int) -> SlotHeader | None:
    layout = shape.layout
    try:
        return SlotHeader.parse(read(layout.slot_at(slot), layout.header_bytes), shape.head.id, slot, layout)
    except DamagedError:
        return None


def notes_of(header: SlotHeader, path: Path) -> dict[str, Any]:
    """The notes of a generation."""
    try:
        notes = json.loads(header.notes or b"{}")
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{path}: the notes of generation {header.sequence} are no JSON: {error}") from None
    if not isinstance(notes, dict):
        raise IntegrityError(f"{path}: the notes of generation {header.sequence} are no JSON object")
    return notes
