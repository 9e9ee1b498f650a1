"""Writing a store from a job: tensors go straight to their place, and a generation counts when all of it is durable.

The order of a generation, each arrow a wait for the medium:
the slot made invalid → data → slot header → the older superblock, which names the slot as root.

The memory of a store: a file mapped once, and how what was written into it becomes durable.

On persistent memory with DAX the kernel accepts `MAP_SYNC`, and libpmem, where it is installed, flushes caches without
a system call. Everywhere else `msync` writes the pages of the given ranges.

The bytes of what a job gives to a store, whatever holds them: tensors of torch, numpy arrays, plain bytes.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import fcntl
import json
import mmap
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol

import numpy as np
import xxhash

from ucp import settings
from ucp.errors import StorageError, UsageError
from ucp.formats.store.generations import (
    StoreBusyError,
    StoreFile,
    find_generations,
    lock_for_writing,
    positional_reader,
    read_store_file,
    try_lock,
    unlock_for_writing,
)
from ucp.formats.store.store_layout import (
    HEAD_AT,
    HEADER_FIXED,
    NO_SLOT,
    SCHEMA_AT,
    SUPERBLOCKS_AT,
    AtomRecord,
    SlotHeader,
    StoreEntry,
    StoreHead,
    StoreLayout,
    StoreSchema,
    Superblock,
    blank_header,
    coalesce_ranges,
    seal_of,
)
from ucp.storage.local import sync, write_all


class Store:
    """A store that this process writes. `begin`, `write` every atom, `commit`; then the next generation."""

    def __init__(self, medium: DurableMemory, shape: StoreFile, fd: int | None = None) -> None:
        """Use `create` or `open`. `fd` is the open file that locks are taken with; None takes none."""
        self.path = shape.path
        self.schema = shape.layout.schema
        self.slots = shape.layout.slots
        self._shape = shape
        self._layout = shape.layout
        self._medium = medium
        self._fd = fd
        self._closed = False
        self._slot: int | None = None  # that is being written
        self._step = 0
        self._written: dict[int, AtomRecord] = {}  # without a digest: given out as a view
        found = find_generations(lambda at, size: bytes(medium.view[at : at + size]), shape)
        self._sequence = found.sequence
        self._root = NO_SLOT if found.root is None else found.root.slot
        self._superblock = 0 if found.root_superblock is None else found.root_superblock
        self._held = {header.slot: header.sequence for header in found.generations}
        for slot in found.beyond:  # complete, but its superblock never came: a later one must not bring it back
            self._invalidate(slot)

    # ------------------------------------------------------------------------------------------------------------------
    # Opening

    @classmethod
    def create(cls, path: str | os.PathLike[str], schema: StoreSchema, *, slots: int = 2) -> Store:
        """Make a new store with room for `slots` generations, all its blocks reserved, and open it."""
        path = Path(path)
        if path.exists():
            raise UsageError(f"{path}: exists already", hint="Store.open goes on with it; or give another path")
        data = schema.dump()
        layout = StoreLayout(schema, slots, len(data))
        head = StoreHead(uuid.uuid4().bytes, xxhash.xxh3_128_digest(data), layout.numbers(), time.time_ns())
        nothing = Superblock(0, NO_SLOT, 0, head.created_ns, 0).pack(head.id)
        staged = path.with_name(f".{path.name}.{head.id.hex()[:8]}")
        try:
            fd = os.open(staged, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                # A mapped file with holes kills its process when the disk is full: all blocks are reserved now.
                os.posix_fallocate(fd, 0, layout.file_bytes)
                for at, block in ((SCHEMA_AT, data), *((at, nothing) for at in SUPERBLOCKS_AT), (HEAD_AT, head.pack())):
                    write_all(fd, at, block)
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(staged, path)
            sync(path.parent)
        except OSError as error:
            staged.unlink(missing_ok=True)
            raise StorageError(
                f"{path}: cannot be made: {error.strerror}",
                hint=f"a store of these atoms in {slots} slots needs {layout.file_bytes:,} bytes, all of them at once",
            ) from error
        return cls.open(path)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Store:
        """Go on with a store. What a crash left behind is put right; the newest whole generation stays."""
        path = Path(path)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(f"{path}: cannot be opened: {error.strerror}") from error
        try:
            shape = read_store_file(positional_reader(fd, path), os.fstat(fd).st_size, path)
            lock_for_writing(fd, path)
            return cls(MappedFile(fd, shape.layout.file_bytes, path), shape, fd)
        except BaseException:
            os.close(fd)
            raise

    # ------------------------------------------------------------------------------------------------------------------
    # A generation

    def begin(self, step: int, *, wait: float = 0.0) -> None:
        """Begin the generation of `step`, in the slot that is longest out of date and that no reader holds.

        Where readers hold all but the root, waits up to `wait` seconds and then raises `BusyError`.
        """
        if self._closed:
            raise UsageError(f"{self.path}: the store was closed")
        if self._slot is not None:
            raise UsageError(f"{self.path}: the generation of step {self._step} is not committed", hint="or abort it")
        until = time.monotonic() + wait
        while (slot := self._free_slot()) is None:
            if time.monotonic() >= until:
                raise StoreBusyError(
                    f"{self.path}: readers hold all of its {self._layout.slots} slots but the newest generation's",
                    hint="wait for them, or make the store with more slots",
                )
            time.sleep(0.002)
        self._slot, self._step = slot, step
        self._written = {}
        self._held.pop(slot, None)
        self._invalidate(slot)

    def write(self, name: str, kind: str, tensor: Any, *, step: int | None = None) -> None:
        """Put one atom in its place: a tensor, a numpy array or bytes. `step` where it is not the generation's."""
        number, entry = self._find(name, kind)
        target = self._bytes(number)
        digest = xxhash.xxh3_128()
        at = 0
        for block in tensor_blocks(tensor, entry):
            np.copyto(target[at : at + len(block)], block)
            digest.update(target[at : at + len(block)].data)
            at += len(block)
        self._written[number] = AtomRecord(digest.digest(), self._step if step is None else step)

    def view(self, name: str, kind: str, *, step: int | None = None) -> ByteArray:
        """The bytes of one atom in the generation that is being written, to be filled before `commit`."""
        number, _ = self._find(name, kind)
        self._written[number] = AtomRecord(b"", self._step if step is None else step)
        return self._bytes(number)

    def commit(self, notes: Mapping[str, Any] | None = None) -> int:
        """Make the generation durable, then the newest. `notes` are JSON values. Gives its sequence number."""
        slot = self._must_have_begun()
        layout, entries = self._layout, self.schema.entries
        if len(self._written) < len(entries):
            missing = [str(entry) for number, entry in enumerate(entries) if number not in self._written]
            raise UsageError(
                f"{self.path}: {len(missing)} of {len(entries)} atoms were not written in the generation of step"
                f" {self._step}: {', '.join(missing[:3])}{', …' if len(missing) > 3 else ''}",
                hint="what is in their place is of an older generation: write all of them",
            )
        told = json.dumps(dict(notes or {}), separators=(",", ":")).encode()
        if len(told) > self.schema.notes_bytes:
            raise UsageError(
                f"{self.path}: the notes have {len(told):,} bytes, there is room for {self.schema.notes_bytes:,}",
                hint="make the store with a larger notes_bytes",
            )
        records = tuple(
            record if record.digest else AtomRecord(xxhash.xxh3_128_digest(self._bytes(number).data), record.step)
            for number, record in sorted(self._written.items())
        )
        begin = layout.slot_at(slot)
        self._medium.persist([(begin + layout.header_bytes, begin + layout.slot_bytes)])
        now, sequence = time.time_ns(), self._sequence + 1
        header = SlotHeader(sequence, slot, self._step, now, records, told).pack(self._shape.head.id)
        # The seal comes last, for a reader that looks at this very moment.
        self._put(begin + HEADER_FIXED, header[HEADER_FIXED:])
        self._put(begin, header[:HEADER_FIXED])
        self._medium.persist([(begin, begin + len(header))])
        older = 1 - self._superblock
        at = SUPERBLOCKS_AT[older]
        root = Superblock(sequence, slot, self._step, now, seal_of(header)).pack(self._shape.head.id)
        self._put(at, root)
        self._medium.persist([(at, at + len(root))])
        self._superblock, self._root, self._sequence = older, slot, sequence
        self._held[slot] = sequence
        self._end()
        return sequence

    def abort(self) -> None:
        """Give the generation up that was begun. The newest whole one stays."""
        if self._slot is not None:
            self._end()

    # ------------------------------------------------------------------------------------------------------------------

    @property
    def sequence(self) -> int:
        """Number of the newest generation; 0 where there is none."""
        return self._sequence

    @property
    def slot_start(self) -> int:
        """Where the slot begins that is being written, for other processes that fill it through the file."""
        return self._layout.slot_at(self._must_have_begun())

    def place(self, name: str, kind: str) -> int:
        """Where the bytes of an atom are, from the start of every slot."""
        return self._layout.offsets[self._layout.number[name, kind]]

    @property
    def way(self) -> str:
        """How bytes are made durable here."""
        return str(getattr(self._medium, "way", type(self._medium).__name__))

    def close(self) -> None:
        """Let the store go. A generation that was begun is given up."""
        self.abort()
        self._closed = True
        if self._fd is not None:
            unlock_for_writing(self._fd)
            os.close(self._fd)
            self._fd = None
        self._medium.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _free_slot(self) -> int | None:
        """The slot that holds the oldest generation, or none; never the root, and none that a reader holds."""
        others = (slot for slot in range(self._layout.slots) if slot != self._root)
        for slot in sorted(others, key=lambda slot: self._held.get(slot, 0)):
            if self._fd is None or try_lock(self._fd, self._layout.slot_at(slot), fcntl.F_WRLCK):
                return slot
        return None

    def _end(self) -> None:
        assert self._slot is not None
        if self._fd is not None:
            try_lock(self._fd, self._layout.slot_at(self._slot), fcntl.F_UNLCK)
        self._slot = None

    def _invalidate(self, slot: int) -> None:
        at = self._layout.slot_at(slot)
        self._put(at, blank_header())
        self._medium.persist([(at, at + HEADER_FIXED)])

    def _put(self, at: int, data: bytes) -> None:
        self._medium.view[at : at + len(data)] = data

    def _must_have_begun(self) -> int:
        if self._slot is None:
            raise UsageError(f"{self.path}: no generation was begun", hint="call begin(step) first")
        return self._slot

    def _find(self, name: str, kind: str) -> tuple[int, StoreEntry]:
        self._must_have_begun()
        number = self._layout.number.get((name, kind))
        if number is None:
            kinds = [known for owner, known in self._layout.number if owner == name]
            raise UsageError(
                f"{self.path}: has no room for {name}, {kind}",
                hint=f"of {name} it has {', '.join(kinds)}" if kinds else "its schema does not name the parameter",
            )
        return number, self.schema.entries[number]

    def _bytes(self, number: int) -> ByteArray:
        at = self._layout.atom_at(self._must_have_begun(), number)
        nbytes = self.schema.entries[number].nbytes
        return np.frombuffer(self._medium.view, np.uint8, nbytes, at) if nbytes else np.empty(0, np.uint8)


_MAP_SHARED_VALIDATE: Final = 0x03
_MAP_SYNC: Final = 0x80000
_MS_SYNC: Final = 4


class DurableMemory(Protocol):
    """Bytes that can be written in place, and made durable range by range."""

    view: memoryview

    def persist(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Return when bytes `[start, stop)` of every range are durable."""

    def close(self) -> None: ...


class MappedFile:
    """A file mapped for writing. `way` says how it is made durable: `pmem_persist`, `msync on DAX` or `msync`."""

    def __init__(self, fd: int, size: int, path: Path) -> None:
        self._path = path
        self._map, is_dax = _map(fd, size, path)
        self.view = memoryview(self._map)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._pmem = _libpmem() if is_dax else None
        self.way = "pmem_persist" if self._pmem is not None else "msync on DAX" if is_dax else "msync"

    def persist(self, ranges: Iterable[tuple[int, int]]) -> None:
        if self._pmem is not None:
            for start, stop in ranges:
                self._pmem.pmem_persist(ctypes.c_void_p(self._address + start), ctypes.c_size_t(stop - start))
            return
        # Through ctypes, which lets other threads run meanwhile; `mmap.flush` does not in every version.
        for start, stop in coalesce_ranges(ranges, mmap.PAGESIZE):
            length = min(stop, len(self.view)) - start
            if _libc().msync(ctypes.c_void_p(self._address + start), ctypes.c_size_t(length), _MS_SYNC) != 0:
                what = os.strerror(ctypes.get_errno())
                raise StorageError(f"{self._path}: bytes [{start}, {stop}) cannot be made durable: {what}")

    def close(self) -> None:
        """Let go of the map; it ends with the last array that lies on it."""
        self.view = memoryview(b"")
        del self._map


def _map(fd: int, size: int, path: Path) -> tuple[mmap.mmap, bool]:
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    try:
        try:
            return mmap.mmap(fd, size, _MAP_SHARED_VALIDATE | _MAP_SYNC, protection), True
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            return mmap.mmap(fd, size, mmap.MAP_SHARED, protection), False
    except OSError as error:
        raise StorageError(f"{path}: cannot be mapped: {error.strerror}") from error


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


@cache
def _libpmem() -> Any:
    name = ctypes.util.find_library("pmem")
    try:
        return None if name is None else ctypes.CDLL(name)
    except OSError:
        return None


ByteArray = np.ndarray[Any, np.dtype[np.uint8]]


def tensor_blocks(tensor: Any, entry: StoreEntry) -> Iterator[ByteArray]:
    """The bytes of an atom, row-major, in blocks that stay in the CPU's cache until they are digested.

    `tensor` is a tensor, a numpy array, or bytes as they are to be stored. `UsageError` where it is not what the store
    has room for.
    """
    if isinstance(tensor, (bytes, bytearray, memoryview)):
        flat: Any = np.frombuffer(tensor, np.uint8)
        fits = len(flat) == entry.nbytes
    else:
        name = str(tensor.dtype).removeprefix("torch.")
        fits = tuple(tensor.shape) == entry.shape and name == entry.dtype.name
        flat = tensor.reshape(-1) if isinstance(tensor, np.ndarray) else _flat(tensor)
    if not fits:
        given = f"{tensor.dtype} {list(tensor.shape)}" if hasattr(tensor, "dtype") else f"{len(flat)} bytes"
        raise UsageError(
            f"parameter {entry.name}, {entry.kind}: {given} was given, the store has room for"
            f" {entry.dtype} {list(entry.shape)}"
        )
    itemsize = entry.dtype.itemsize if hasattr(tensor, "dtype") else 1
    count = max(1, settings.SLAB_BYTES // itemsize)
    for start in range(0, len(flat), count):
        yield _as_bytes(flat[start : start + count])


def _flat(tensor: Any) -> Any:
    local = tensor.detach()
    return getattr(local, "_local_tensor", local).reshape(-1)


def _as_bytes(block: Any) -> ByteArray:
    if isinstance(block, np.ndarray):
        return np.ascontiguousarray(block).view(np.uint8)
    import torch

    made: ByteArray = block.cpu().contiguous().view(torch.uint8).numpy()
    return made
