"""The generations of a store, and leases on them. Both work at any time, also while a job writes.

A lease is a lock with which a reader keeps a slot from being overwritten; the writer has one against other writers.
Locks end with their process. They belong to an open file (`F_OFD_SETLK`), so that threads and libraries of one process
do not release each other's.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import xxhash

from ucp import settings
from ucp.errors import IntegrityError, NotUnderstoodError, StorageError, UcpError, UsageError
from ucp.formats.store.store_layout import (
    HEAD_AT,
    MAGIC,
    NO_SLOT,
    PAGE,
    SCHEMA_AT,
    SUPERBLOCKS_AT,
    DamagedBlockError,
    SlotHeader,
    StoreHead,
    StoreLayout,
    StoreSchema,
    Superblock,
)
from ucp.storage.local import open_binary, read_at

ReadAt = Callable[[int, int], bytes]  # (offset, size) → bytes, fewer at the end of the file

_RESTORE: Final = "restore the store from a copy, or create a new one"
_FLOCK: Final = struct.Struct("hhqqi4x")  # type, whence, start, length, pid: `struct flock` of 64-bit Linux
_NO_LOCKS: Final = {errno.ENOLCK, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}  # on this file system
_WRITER_AT: Final = 0  # the byte whose lock marks the writer
_MAX_ATTEMPTS: Final = 100


@dataclass(frozen=True, slots=True)
class StoreFile:
    """The parts of a store that never change."""

    path: Path
    head: StoreHead
    layout: StoreLayout


@dataclass(slots=True)
class Generations:
    """The complete generations of a store, newest first; the first is the root.

    `torn` lists superblocks with a wrong checksum, as a crash leaves them. `broken` lists superblocks whose slot header
    is invalid although it was durable before them: a crash does not cause that.
    """

    generations: list[SlotHeader] = field(default_factory=list)
    root_superblock: int | None = None
    torn: list[int] = field(default_factory=list)
    broken: list[Superblock] = field(default_factory=list)
    uncommitted: list[int] = field(default_factory=list)  # slots with a header newer than the root
    sequence: int = 0  # of the newest superblock

    @property
    def root(self) -> SlotHeader | None:
        return self.generations[0] if self.generations else None


def is_store(path: Path) -> bool:
    """Whether a file starts like a store."""
    try:
        with open_binary(path) as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def positional_reader(fd: int, path: Path) -> ReadAt:
    """Positional reads of an open file."""

    def read(offset: int, size: int) -> bytes:
        try:
            return read_at(fd, offset, size)
        except OSError as error:
            raise StorageError(f"{path}: cannot read bytes at {offset}: {error.strerror}") from error

    return read


def read_store_file(read: ReadAt, size: int, path: Path) -> StoreFile:
    """Head and schema of a store of `size` bytes."""
    block = read(HEAD_AT, PAGE)
    if block[: len(MAGIC)] != MAGIC:
        raise NotUnderstoodError(f"{path}: is not a store")
    try:
        head = StoreHead.parse(block)
    except DamagedBlockError as error:
        if str(error).startswith("version"):
            raise NotUnderstoodError(f"{path}: {error} of the store format is not known", hint="upgrade ucp") from None
        raise IntegrityError(f"{path}: its head (bytes [0, {PAGE})) is damaged: {error}", hint=_RESTORE) from None
    slots, schema_bytes, *_, file_bytes = head.numbers
    if size != file_bytes:
        raise IntegrityError(f"{path}: has {size:,} bytes instead of {file_bytes:,}", hint=_RESTORE)
    if schema_bytes > min(size, settings.MAX_STORE_SCHEMA_BYTES):
        raise IntegrityError(f"{path}: the size of its schema ({schema_bytes:,} bytes) is invalid", hint=_RESTORE)
    data = read(SCHEMA_AT, schema_bytes)
    if xxhash.xxh3_128_digest(data) != head.schema_digest:
        where = f"bytes [{SCHEMA_AT}, {SCHEMA_AT + schema_bytes})"
        raise IntegrityError(f"{path}: its schema ({where}) is damaged", hint=_RESTORE)
    layout = StoreLayout(StoreSchema.parse(data, str(path)), slots, schema_bytes)
    if layout.numbers() != head.numbers:
        raise IntegrityError(f"{path}: the sizes in its head do not match its schema", hint=_RESTORE)
    return StoreFile(path, head, layout)


def find_generations(read: ReadAt, store: StoreFile) -> Generations:
    """Read the superblocks and slot headers."""
    found = Generations()
    identity, layout = store.head.id, store.layout
    roots: list[tuple[Superblock, int]] = []
    for number, at in enumerate(SUPERBLOCKS_AT):
        try:
            roots.append((Superblock.parse(read(at, PAGE), identity, layout.slots), number))
        except DamagedBlockError:
            found.torn.append(number)
    roots.sort(key=lambda root: -root[0].sequence)
    headers: dict[int, SlotHeader] = {}
    for slot in range(layout.slots):
        with suppress(DamagedBlockError):
            data = read(layout.slot_at(slot), layout.header_bytes)
            headers[slot] = SlotHeader.parse(data, identity, slot, layout)
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
            found.uncommitted.append(slot)
        elif header is not root:
            found.generations.append(header)
    found.generations.sort(key=lambda header: -header.sequence)
    return found


def notes_of(header: SlotHeader, path: Path) -> dict[str, Any]:
    """The notes of a generation."""
    try:
        notes = json.loads(header.notes or b"{}")
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{path}: the notes of generation {header.sequence} are not valid JSON: {error}") from None
    if not isinstance(notes, dict):
        raise IntegrityError(f"{path}: the notes of generation {header.sequence} are not a JSON object")
    return notes


class StoreBusyError(UcpError):
    """Readers hold every slot that could be overwritten, or another process is writing."""


def try_lock(fd: int, at: int, kind: int) -> bool:
    """Try to lock the byte `at` (`F_RDLCK`, `F_WRLCK`, `F_UNLCK`). True also if the file system has no locks."""
    command = getattr(fcntl, "F_OFD_SETLK", None)
    if command is None:
        return True
    try:
        fcntl.fcntl(fd, command, _FLOCK.pack(kind, os.SEEK_SET, at, 1, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        if error.errno in _NO_LOCKS:
            return True
        raise
    return True


def lock_for_writing(fd: int, path: Path) -> None:
    """Become the only writer of a store."""
    if not try_lock(fd, _WRITER_AT, fcntl.F_WRLCK):
        raise StoreBusyError(
            f"{path}: another process is writing to this store", hint="one job per store: stop the other one first"
        )


def unlock_for_writing(fd: int) -> None:
    """Let another process write. (Closing `fd` is not enough, because a memory map keeps the file open.)"""
    try_lock(fd, _WRITER_AT, fcntl.F_UNLCK)


class GenerationLease:
    """Keeps a generation from being overwritten while this object exists, or until `close`."""

    def __init__(self, fd: int, store: StoreFile, found: Generations, header: SlotHeader) -> None:
        self.fd = fd
        self.store = store
        self.generations = found
        self.header = header

    def close(self) -> None:
        """Release the slot."""
        if self.fd >= 0:
            try_lock(self.fd, self.store.layout.slot_at(self.header.slot), fcntl.F_UNLCK)
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()


def take_lease(path: Path, step: int | None = None) -> GenerationLease:
    """Lease the newest complete generation of a store, or that of a step."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(f"{path}: cannot be opened: {error.strerror}") from error
    try:
        read = positional_reader(fd, path)
        store = read_store_file(read, os.fstat(fd).st_size, path)
        for _ in range(_MAX_ATTEMPTS):
            found = find_generations(read, store)
            header = choose_generation(found, path, step)
            at = store.layout.slot_at(header.slot)
            if try_lock(fd, at, fcntl.F_RDLCK):
                # The writer may have continued between reading and locking: read again.
                again = find_generations(read, store)
                if any(same.sequence == header.sequence and same.slot == header.slot for same in again.generations):
                    return GenerationLease(fd, store, again, header)
                try_lock(fd, at, fcntl.F_UNLCK)
            time.sleep(0.001)
        raise StoreBusyError(f"{path}: generations are replaced faster than they can be leased", hint="try again")
    except BaseException:
        os.close(fd)
        raise


def choose_generation(found: Generations, path: Path, step: int | None) -> SlotHeader:
    """The generation of `step`, or the newest."""
    if step is not None:
        for header in found.generations:
            if header.step == step:
                return header
        steps = ", ".join(str(header.step) for header in found.generations) or "none"
        raise UsageError(f"{path}: has no generation of step {step}", hint=f"available steps: {steps}")
    if found.root is not None:
        return found.root
    if found.root_superblock is not None and not found.broken:
        raise IntegrityError(f"{path}: has no generation yet", hint="wait until the job commits the first one")
    raise IntegrityError(
        f"{path}: has no complete generation: "
        + (f"the header of slot {found.broken[0].slot} is damaged" if found.broken else "both superblocks are damaged"),
        hint="restore the store from a copy",
    )
