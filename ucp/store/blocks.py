"""The blocks that say what is valid: head, superblocks, slot headers. Each is sealed with a checksum of its own."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import xxhash

from ucp.store.layout import HEADER_ENTRY, HEADER_FIXED, PAGE, Layout

VERSION: Final = 1  # see docs/store.md for what a reader may rely on
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


class DamagedError(ValueError):
    """A block whose checksum, place or numbers are not right. What that means, the caller knows."""


@dataclass(frozen=True, slots=True)
class Head:
    """The first block: never changes."""

    id: bytes  # 16 random bytes; blocks of another store do not parse
    schema_digest: bytes
    numbers: tuple[int, ...]  # as `Layout.numbers`
    created_ns: int

    def pack(self) -> bytes:
        slots, schema_bytes, first_slot, slot_bytes, header_bytes, file_bytes = self.numbers
        fixed = _HEAD.pack(
            *(MAGIC, VERSION, slots, self.id, self.schema_digest),
            *(schema_bytes, first_slot, slot_bytes, header_bytes, file_bytes, self.created_ns),
        )
        return _sealed(fixed, PAGE)

    @staticmethod
    def parse(block: bytes) -> Head:
        _check_seal(block)
        magic, version, slots, identity, digest, *sizes, created = _HEAD.unpack_from(block)
        if magic != MAGIC or version != VERSION:
            raise DamagedError(f"version {version}")
        return Head(identity, digest, (slots, *sizes), created)


@dataclass(frozen=True, slots=True)
class Superblock:
    """Which slot is the root: the newest of the two that is whole counts. Slot -1: there is no generation yet."""

    sequence: int
    slot: int
    step: int
    time_ns: int
    header_seal: int  # of the slot header that it goes with

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
            raise DamagedError("is no superblock of this store")
        return Superblock(sequence, slot, step, time_ns, seal)


@dataclass(frozen=True, slots=True)
class AtomRecord:
    """What a generation says of one atom: XXH3-128 of its bytes, and the step that it is of."""

    digest: bytes
    step: int


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """What is in a slot. Valid only while all of the slot's bytes are those of one generation."""

    sequence: int
    slot: int
    step: int
    time_ns: int
    atoms: tuple[AtomRecord, ...]
    notes: bytes
    seal: int = 0  # as stored; made by `pack`

    def pack(self, identity: bytes) -> bytes:
        body = b"".join(_ENTRY.pack(atom.digest, atom.step, 0) for atom in self.atoms) + self.notes
        fixed = _SLOT.pack(
            *(_SLOT_MAGIC, identity, self.sequence, self.step, self.time_ns, self.slot, len(self.atoms)),
            *(len(self.notes), xxhash.xxh3_128_digest(body)),
        )
        return _sealed(fixed, HEADER_FIXED) + body

    @staticmethod
    def parse(block: bytes, identity: bytes, slot: int, layout: Layout) -> SlotHeader:
        """`block` is the whole header of slot `slot`."""
        seal = _check_seal(block[:HEADER_FIXED])
        magic, owner, sequence, step, time_ns, number, count, length, digest = _SLOT.unpack_from(block)
        if magic != _SLOT_MAGIC or owner != identity or number != slot or count != len(layout.schema.entries):
            raise DamagedError("is no header of this slot")
        notes_at = HEADER_FIXED + HEADER_ENTRY * count
        if length > layout.schema.notes_bytes or len(block) < notes_at + length:
            raise DamagedError("its notes are longer than there is room for")
        body = block[HEADER_FIXED : notes_at + length]
        if xxhash.xxh3_128_digest(body) != digest:
            raise DamagedError("its checksum does not fit its content")
        atoms = tuple(AtomRecord(*fields[:2]) for fields in _ENTRY.iter_unpack(body[: HEADER_ENTRY * count]))
        return SlotHeader(sequence, slot, step, time_ns, atoms, body[HEADER_ENTRY * count :], seal)


def seal_of(header: bytes) -> int:
    """The seal of a packed slot header."""
    seal: int = _SEAL.unpack_from(header, HEADER_FIXED - _SEAL.size)[0]
    return seal


def no_header() -> bytes:
    """What makes a slot invalid before anything in it changes."""
    return bytes(HEADER_FIXED)


def _sealed(fixed: bytes, size: int) -> bytes:
    body = fixed.ljust(size - _SEAL.size, b"\0")
    return body + _SEAL.pack(xxhash.xxh3_64_intdigest(body))


def _check_seal(block: bytes) -> int:
    body, seal = block[: -_SEAL.size], block[-_SEAL.size :]
    if len(seal) < _SEAL.size or xxhash.xxh3_64_intdigest(body) != _SEAL.unpack(seal)[0]:
        raise DamagedError("its checksum does not fit its content")
    found: int = _SEAL.unpack(seal)[0]
    return found
