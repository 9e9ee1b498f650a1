"""The file layout of a mapped store: the offset of every part, and the blocks that determine which data is valid.

The file starts with a head, two superblocks and the schema. Slots of equal size follow. A slot consists of a header and
of all atoms, each at an offset that never changes. Offsets follow from the schema alone, and are in bytes. Head,
superblocks and slot headers each end with a checksum of their own.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final

import xxhash

from ucp import settings
from ucp.core.box import Shape
from ucp.core.dtypes import BY_NAME, DType
from ucp.errors import IntegrityError, UsageError

PAGE: Final = 4096  # blocks, headers, and atoms of at least this size start at multiples of it
GRAIN: Final = 64  # smaller atoms start at multiples of this
HEAD_AT: Final = 0
SUPERBLOCKS_AT: Final = (PAGE, 2 * PAGE)
SCHEMA_AT: Final = 3 * PAGE
HEADER_FIXED: Final = 128
HEADER_ENTRY: Final = 32


@dataclass(frozen=True, slots=True)
class StoreEntry:
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
class StoreSchema:
    """The atoms of a store in order, a description of them, and the bytes reserved for the notes of a generation.

    `about` is JSON that never changes. Notes are JSON of one generation: hyper-parameters, counters, extras.
    """

    entries: tuple[StoreEntry, ...]
    about: Mapping[str, Any] = field(default_factory=dict)
    notes_bytes: int = 64 * settings.KIB

    @staticmethod
    def of(tensors: Mapping[str, Mapping[str, Any]], **options: Any) -> StoreSchema:
        """The schema of tensors or arrays by parameter and kind: `{"w": {"weight": w, "exp_avg": m}}`."""
        entries = [
            StoreEntry(name, kind, tuple(int(n) for n in tensor.shape), _dtype_of(tensor, name, kind))
            for name, states in tensors.items()
            for kind, tensor in states.items()
        ]
        return StoreSchema(tuple(entries), **options)

    def dump(self) -> bytes:
        """The schema as stored in the file."""
        content = {
            "entries": [[e.name, e.kind, list(e.shape), e.dtype.name] for e in self.entries],
            "about": self.about,
            "notes_bytes": self.notes_bytes,
        }
        return json.dumps(content, separators=(",", ":")).encode()

    @staticmethod
    def parse(data: bytes, where: str) -> StoreSchema:
        """Read the result of `dump`; `where` names the file in errors."""
        try:
            content = json.loads(data)
            entries = tuple(
                StoreEntry(str(name), str(kind), _shape(shape), BY_NAME[dtype])
                for name, kind, shape, dtype in content["entries"]
            )
            schema = StoreSchema(entries, dict(content["about"]), int(content["notes_bytes"]))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise IntegrityError(f"{where}: its schema is invalid: {error!r}") from None
        if schema.notes_bytes < 0 or len({(e.name, e.kind) for e in entries}) != len(entries):
            raise IntegrityError(f"{where}: its schema contradicts itself")
        return schema


def _shape(shape: Sequence[Any]) -> Shape:
    if len(shape) > settings.MAX_DIMENSIONS or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"{shape!r:.80} is not a shape")
    return tuple(shape)


def _dtype_of(tensor: Any, name: str, kind: str) -> DType:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in BY_NAME:
        raise UsageError(f"parameter {name}, {kind}: elements of type {dtype} cannot be stored")
    return BY_NAME[dtype]


def round_up(value: int, unit: int) -> int:
    """`value` rounded up to a multiple of `unit`."""
    return -(-value // unit) * unit


class StoreLayout:
    """The offsets of a store with this schema, which takes `schema_bytes` bytes, and this number of slots."""

    def __init__(self, schema: StoreSchema, slots: int, schema_bytes: int) -> None:
        if slots < 2:
            raise UsageError(f"a store needs at least 2 slots, not {slots}", hint="one of them is always complete")
        self.schema = schema
        self.slots = slots
        self.schema_bytes = schema_bytes
        self.header_bytes = round_up(HEADER_FIXED + HEADER_ENTRY * len(schema.entries) + schema.notes_bytes, PAGE)
        self.offsets: list[int] = []  # of every atom, relative to its slot
        at = self.header_bytes
        for entry in schema.entries:
            at = round_up(at, PAGE if entry.nbytes >= PAGE else GRAIN)
            self.offsets.append(at)
            at += entry.nbytes
        self.slot_bytes = round_up(at, PAGE)
        self.first_slot = round_up(SCHEMA_AT + schema_bytes, PAGE)
        self.file_bytes = self.first_slot + slots * self.slot_bytes
        self.number = {(entry.name, entry.kind): i for i, entry in enumerate(schema.entries)}

    def slot_at(self, slot: int) -> int:
        """Offset of a slot."""
        return self.first_slot + slot * self.slot_bytes

    def atom_at(self, slot: int, number: int) -> int:
        """Offset of atom `number` in a slot."""
        return self.slot_at(slot) + self.offsets[number]

    def numbers(self) -> tuple[int, ...]:
        """The sizes that the head repeats, so that a reader notices if it computes others."""
        return self.slots, self.schema_bytes, self.first_slot, self.slot_bytes, self.header_bytes, self.file_bytes


def coalesce_ranges(ranges: Iterable[tuple[int, int]], unit: int) -> list[tuple[int, int]]:
    """Half-open ranges, widened to multiples of `unit` bytes, sorted, and merged where they touch."""
    made: list[tuple[int, int]] = []
    for start, stop in sorted((start // unit * unit, round_up(stop, unit)) for start, stop in ranges if start < stop):
        if made and start <= made[-1][1]:
            made[-1] = (made[-1][0], max(stop, made[-1][1]))
        else:
            made.append((start, stop))
    return made


VERSION: Final = 1  # docs/spec/atoms.md describes what a reader may rely on
MAGIC: Final = b"UCPSTORE"
_ROOT_MAGIC: Final = b"UCPROOT1"
_SLOT_MAGIC: Final = b"UCPSLOT1"

# Everything is little endian. The last 8 bytes of a block are the XXH3-64 of those before them.
_HEAD: Final = struct.Struct("<8sII16s16sQQQQQQ")
_ROOT: Final = struct.Struct("<8s16sQiIqQQ")
_SLOT: Final = struct.Struct("<8s16sQqQIIQ16s")
_ENTRY: Final = struct.Struct("<16sqQ")
_SEAL: Final = struct.Struct("<Q")
assert _ENTRY.size == HEADER_ENTRY

NO_SLOT: Final = -1


class DamagedBlockError(ValueError):
    """A block with a wrong checksum, position or number. The caller decides whether that is an error."""


@dataclass(frozen=True, slots=True)
class StoreHead:
    """The first block, which never changes."""

    id: bytes  # 16 random bytes; blocks of another store do not parse
    schema_digest: bytes
    numbers: tuple[int, ...]  # of `StoreLayout.numbers`
    created_ns: int

    def pack(self) -> bytes:
        slots, schema_bytes, first_slot, slot_bytes, header_bytes, file_bytes = self.numbers
        fixed = _HEAD.pack(
            *(MAGIC, VERSION, slots, self.id, self.schema_digest),
            *(schema_bytes, first_slot, slot_bytes, header_bytes, file_bytes, self.created_ns),
        )
        return _sealed(fixed, PAGE)

    @staticmethod
    def parse(block: bytes) -> StoreHead:
        _check_seal(block)
        magic, version, slots, identity, digest, *sizes, created = _HEAD.unpack_from(block)
        if magic != MAGIC or version != VERSION:
            raise DamagedBlockError(f"version {version}")
        return StoreHead(identity, digest, (slots, *sizes), created)


@dataclass(frozen=True, slots=True)
class Superblock:
    """Names the slot of the newest generation. The newer of the two valid superblocks is used.

    Before the first generation, the slot is -1.
    """

    sequence: int
    slot: int
    step: int
    time_ns: int
    header_seal: int  # checksum of that slot's header

    def pack(self, identity: bytes) -> bytes:
        fixed = _ROOT.pack(
            *(_ROOT_MAGIC, identity, self.sequence, self.slot, 0, self.step, self.time_ns, self.header_seal)
        )
        return _sealed(fixed, PAGE)

    @staticmethod
    def parse(block: bytes, identity: bytes, slots: int) -> Superblock:
        _check_seal(block)
        magic, owner, sequence, slot, _, step, time_ns, seal = _ROOT.unpack_from(block)
        if magic != _ROOT_MAGIC or owner != identity or not -1 <= slot < slots or (slot == NO_SLOT) != (sequence == 0):
            raise DamagedBlockError("is not a superblock of this store")
        return Superblock(sequence, slot, step, time_ns, seal)


@dataclass(frozen=True, slots=True)
class AtomRecord:
    """One atom of a generation: XXH3-128 of its bytes, and its step."""

    digest: bytes
    step: int


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """The content of a slot. Valid only while all bytes of the slot are of one generation."""

    sequence: int
    slot: int
    step: int
    time_ns: int
    atoms: tuple[AtomRecord, ...]
    notes: bytes
    seal: int = 0  # the stored checksum; computed by `pack`

    def pack(self, identity: bytes) -> bytes:
        body = b"".join(_ENTRY.pack(atom.digest, atom.step, 0) for atom in self.atoms) + self.notes
        fixed = _SLOT.pack(
            *(_SLOT_MAGIC, identity, self.sequence, self.step, self.time_ns, self.slot, len(self.atoms)),
            *(len(self.notes), xxhash.xxh3_128_digest(body)),
        )
        return _sealed(fixed, HEADER_FIXED) + body

    @staticmethod
    def parse(block: bytes, identity: bytes, slot: int, layout: StoreLayout) -> SlotHeader:
        """Read the complete header of slot `slot`."""
        seal = _check_seal(block[:HEADER_FIXED])
        magic, owner, sequence, step, time_ns, number, count, length, digest = _SLOT.unpack_from(block)
        if magic != _SLOT_MAGIC or owner != identity or number != slot or count != len(layout.schema.entries):
            raise DamagedBlockError("is not a header of this slot")
        notes_at = HEADER_FIXED + HEADER_ENTRY * count
        if length > layout.schema.notes_bytes or len(block) < notes_at + length:
            raise DamagedBlockError("its notes are longer than the reserved space")
        body = block[HEADER_FIXED : notes_at + length]
        if xxhash.xxh3_128_digest(body) != digest:
            raise DamagedBlockError("its checksum does not match its content")
        atoms = tuple(AtomRecord(*fields[:2]) for fields in _ENTRY.iter_unpack(body[: HEADER_ENTRY * count]))
        return SlotHeader(sequence, slot, step, time_ns, atoms, body[HEADER_ENTRY * count :], seal)


def seal_of(header: bytes) -> int:
    """The checksum in a packed slot header."""
    seal: int = _SEAL.unpack_from(header, HEADER_FIXED - _SEAL.size)[0]
    return seal


def blank_header() -> bytes:
    """The bytes that make a slot invalid, before any other byte of it changes."""
    return bytes(HEADER_FIXED)


def _sealed(fixed: bytes, size: int) -> bytes:
    body = fixed.ljust(size - _SEAL.size, b"\0")
    return body + _SEAL.pack(xxhash.xxh3_64_intdigest(body))


def _check_seal(block: bytes) -> int:
    body, seal = block[: -_SEAL.size], block[-_SEAL.size :]
    if len(seal) < _SEAL.size or xxhash.xxh3_64_intdigest(body) != _SEAL.unpack(seal)[0]:
        raise DamagedBlockError("its checksum does not match its content")
    found: int = _SEAL.unpack(seal)[0]
    return found
