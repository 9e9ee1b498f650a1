"""The mapped store in a job: write generations in place (`Store`), and load one without copying (`load_store`).

The order within a generation; each arrow waits until the bytes are durable:
slot header erased → data → slot header → the older superblock, which then names the slot.

On persistent memory with DAX, the kernel accepts `MAP_SYNC`, and libpmem, if installed, flushes CPU caches without a
system call. Everywhere else `msync` writes the pages of the given ranges. docs/spec/atoms.md specifies the file;
`ucp.formats.store` has its layout, and reads stores as checkpoints.
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
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import xxhash

from ucp import settings
from ucp.errors import IntegrityError, StorageError, UsageError
from ucp.formats.store.generations import (
    GenerationLease,
    StoreBusyError,
    StoreFile,
    find_generations,
    lock_for_writing,
    notes_of,
    positional_reader,
    read_store_file,
    take_lease,
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
from ucp.training.live_job import local_tensor

if TYPE_CHECKING:
    import torch

_MAP_SHARED_VALIDATE: Final = 0x03
_MAP_SYNC: Final = 0x80000
_MS_SYNC: Final = 4


class Store:
    """A store that this process writes: `begin`, `write` every atom, `commit`; then the next generation."""

    def __init__(self, medium: DurableMemory, file: StoreFile, fd: int | None = None) -> None:
        """Use `create` or `open` instead. `fd` is the open file for locks; None uses no locks."""
        self.path = file.path
        self.schema = file.layout.schema
        self.slots = file.layout.slots
        self._file = file
        self._layout = file.layout
        self._medium = medium
        self._fd = fd
        self._closed = False
        self._slot: int | None = None  # the slot being written
        self._step = 0
        self._written: dict[int, AtomRecord] = {}  # an empty digest marks a view, digested by `commit`
        found = find_generations(lambda at, size: bytes(medium.view[at : at + size]), file)
        self._sequence = found.sequence
        self._root = NO_SLOT if found.root is None else found.root.slot
        self._superblock = 0 if found.root_superblock is None else found.root_superblock
        self._held = {header.slot: header.sequence for header in found.generations}
        for slot in found.uncommitted:  # complete, but without superblock: a later one must not make it valid
            self._invalidate(slot)

    # opening ----------------------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, path: str | os.PathLike[str], schema: StoreSchema, *, slots: int = 2) -> Store:
        """Create a store of `slots` generations with all its disk blocks reserved, and open it."""
        path = Path(path)
        if path.exists():
            raise UsageError(f"{path}: exists already", hint="continue with Store.open, or give another path")
        data = schema.dump()
        layout = StoreLayout(schema, slots, len(data))
        head = StoreHead(uuid.uuid4().bytes, xxhash.xxh3_128_digest(data), layout.numbers(), time.time_ns())
        nothing = Superblock(0, NO_SLOT, 0, head.created_ns, 0).pack(head.id)
        staged = path.with_name(f".{path.name}.{head.id.hex()[:8]}")
        try:
            fd = os.open(staged, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                # Writing to an unreserved block of a mapped file kills the process if the disk is full.
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
                f"{path}: cannot be created: {error.strerror}",
                hint=f"a store of these atoms in {slots} slots needs {layout.file_bytes:,} bytes",
            ) from error
        return cls.open(path)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Store:
        """Open an existing store, and discard what a crash left unfinished. The newest complete generation stays."""
        path = Path(path)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(f"{path}: cannot be opened: {error.strerror}") from error
        try:
            file = read_store_file(positional_reader(fd, path), os.fstat(fd).st_size, path)
            lock_for_writing(fd, path)
            return cls(MappedFile(fd, file.layout.file_bytes, path), file, fd)
        except BaseException:
            os.close(fd)
            raise

    # one generation ---------------------------------------------------------------------------------------------------

    def begin(self, step: int, *, wait: float = 0.0) -> None:
        """Start the generation of `step` in the slot of the oldest generation that no reader has leased.

        If readers hold every slot but the newest, waits up to `wait` seconds, then raises `StoreBusyError`.
        """
        if self._closed:
            raise UsageError(f"{self.path}: the store is closed")
        if self._slot is not None:
            raise UsageError(
                f"{self.path}: the generation of step {self._step} is not committed", hint="commit or abort it first"
            )
        until = time.monotonic() + wait
        while (slot := self._free_slot()) is None:
            if time.monotonic() >= until:
                raise StoreBusyError(
                    f"{self.path}: readers hold every slot of {self._layout.slots} but that of the newest generation",
                    hint="wait for them, or create the store with more slots",
                )
            time.sleep(0.002)
        self._slot, self._step = slot, step
        self._written = {}
        self._held.pop(slot, None)
        self._invalidate(slot)

    def write(self, name: str, kind: str, tensor: Any, *, step: int | None = None) -> None:
        """Copy one atom (a tensor, a numpy array or bytes) to its place. `step` defaults to the generation's."""
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
        """The bytes of one atom of this generation, to be filled before `commit`."""
        number, _ = self._find(name, kind)
        self._written[number] = AtomRecord(b"", self._step if step is None else step)
        return self._bytes(number)

    def commit(self, notes: Mapping[str, Any] | None = None) -> int:
        """Make the generation durable, then the newest one. `notes` are JSON values. Returns its sequence number."""
        slot = self._current_slot()
        layout, entries = self._layout, self.schema.entries
        if len(self._written) < len(entries):
            missing = [str(entry) for number, entry in enumerate(entries) if number not in self._written]
            raise UsageError(
                f"{self.path}: {len(missing)} of {len(entries)} atoms were not written in the generation of step"
                f" {self._step}: {', '.join(missing[:3])}{', …' if len(missing) > 3 else ''}",
                hint="write all of them: the slot still has the bytes of an older generation",
            )
        data = json.dumps(dict(notes or {}), separators=(",", ":")).encode()
        if len(data) > self.schema.notes_bytes:
            raise UsageError(
                f"{self.path}: the notes have {len(data):,} bytes, but only {self.schema.notes_bytes:,} are reserved",
                hint="create the store with a larger notes_bytes",
            )
        records = tuple(
            record if record.digest else AtomRecord(xxhash.xxh3_128_digest(self._bytes(number).data), record.step)
            for number, record in sorted(self._written.items())
        )
        begin = layout.slot_at(slot)
        self._medium.persist([(begin + layout.header_bytes, begin + layout.slot_bytes)])
        now, sequence = time.time_ns(), self._sequence + 1
        header = SlotHeader(sequence, slot, self._step, now, records, data).pack(self._file.head.id)
        # The part with the checksum comes last, for readers at this very moment.
        self._put(begin + HEADER_FIXED, header[HEADER_FIXED:])
        self._put(begin, header[:HEADER_FIXED])
        self._medium.persist([(begin, begin + len(header))])
        older = 1 - self._superblock
        at = SUPERBLOCKS_AT[older]
        root = Superblock(sequence, slot, self._step, now, seal_of(header)).pack(self._file.head.id)
        self._put(at, root)
        self._medium.persist([(at, at + len(root))])
        self._superblock, self._root, self._sequence = older, slot, sequence
        self._held[slot] = sequence
        self._end()
        return sequence

    def abort(self) -> None:
        """Discard the generation that was started. The newest complete one stays."""
        if self._slot is not None:
            self._end()

    # ------------------------------------------------------------------------------------------------------------------

    @property
    def sequence(self) -> int:
        """Number of the newest generation; 0 if there is none."""
        return self._sequence

    @property
    def slot_start(self) -> int:
        """Offset of the slot being written, for other processes that write to the file themselves."""
        return self._layout.slot_at(self._current_slot())

    def place(self, name: str, kind: str) -> int:
        """Offset of an atom, relative to its slot."""
        return self._layout.offsets[self._layout.number[name, kind]]

    @property
    def durability(self) -> str:
        """How bytes are made durable: `pmem_persist`, `msync on DAX` or `msync`."""
        return str(getattr(self._medium, "durability", type(self._medium).__name__))

    def close(self) -> None:
        """Close the store, and discard a generation that is not committed."""
        self.abort()
        self._closed = True
        if self._fd is not None:
            unlock_for_writing(self._fd)
            os.close(self._fd)
            self._fd = None
        self._medium.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _free_slot(self) -> int | None:
        """The slot of the oldest generation that no reader has leased; never that of the newest one."""
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

    def _current_slot(self) -> int:
        if self._slot is None:
            raise UsageError(f"{self.path}: no generation was started", hint="call begin(step) first")
        return self._slot

    def _find(self, name: str, kind: str) -> tuple[int, StoreEntry]:
        self._current_slot()
        number = self._layout.number.get((name, kind))
        if number is None:
            kinds = [known for owner, known in self._layout.number if owner == name]
            raise UsageError(
                f"{self.path}: its schema does not contain {name}, {kind}",
                hint=f"states of {name}: {', '.join(kinds)}" if kinds else "the schema has no parameter of that name",
            )
        return number, self.schema.entries[number]

    def _bytes(self, number: int) -> ByteArray:
        at = self._layout.atom_at(self._current_slot(), number)
        nbytes = self.schema.entries[number].nbytes
        return np.frombuffer(self._medium.view, np.uint8, nbytes, at) if nbytes else np.empty(0, np.uint8)


# loading --------------------------------------------------------------------------------------------------------------


class _LeasedMap(mmap.mmap):
    """A map with the lease of its generation: the slot is released when the last array on the map is gone."""

    lease: GenerationLease


def load_store(path: str | os.PathLike[str], *, step: int | None = None) -> LoadedGeneration:
    """Map the newest complete generation of a store, or that of `step`. Data is read when it is accessed."""
    return LoadedGeneration(take_lease(Path(path), step))


class LoadedGeneration(Mapping[tuple[str, str], "np.ndarray[Any, Any]"]):
    """A generation: a mapping from (parameter, kind) to arrays. Writing to one changes this process's copy only."""

    def __init__(self, lease: GenerationLease) -> None:
        file = lease.store
        self.path = file.path
        self.step = lease.header.step
        self.sequence = lease.header.sequence
        self.notes: dict[str, Any] = notes_of(lease.header, file.path)
        self._layout = file.layout
        self._header = lease.header
        try:
            # Private pages: torch needs writable tensors, and the file must not change.
            self._map = _LeasedMap(lease.fd, file.layout.file_bytes, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be mapped: {error.strerror}") from error
        self._map.lease = lease

    def __getitem__(self, key: tuple[str, str]) -> np.ndarray[Any, Any]:
        return self.array(*key)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._layout.number)

    def __len__(self) -> int:
        return len(self._layout.number)

    def array(self, name: str, kind: str) -> np.ndarray[Any, Any]:
        """One atom as a numpy array on the map; as unsigned integers if numpy lacks the type (bfloat16)."""
        raw, entry = self._raw(name, kind)
        try:
            dtype = np.dtype(entry.dtype.name)
        except TypeError:
            dtype = np.dtype(f"u{entry.dtype.itemsize}")
        return raw.view(dtype).reshape(entry.shape)

    def tensor(self, name: str, kind: str) -> torch.Tensor:
        """One atom as a torch tensor on the map."""
        import torch

        raw, entry = self._raw(name, kind)
        dtype = getattr(torch, entry.dtype.name)
        return (
            torch.from_numpy(raw).view(dtype).view(entry.shape) if len(raw) else torch.empty(entry.shape, dtype=dtype)
        )

    def atom_step(self, name: str, kind: str) -> int:
        """The step of one atom."""
        return self._header.atoms[self._number(name, kind)].step

    def check(self) -> None:
        """Compare every atom with the checksum that its generation records."""
        for number, (entry, record) in enumerate(zip(self._layout.schema.entries, self._header.atoms, strict=True)):
            at = self._layout.atom_at(self._header.slot, number)
            if xxhash.xxh3_128_digest(memoryview(self._map)[at : at + entry.nbytes]) != record.digest:
                raise IntegrityError(
                    f"{self.path}: bytes [{at}, {at + entry.nbytes}) ({entry.name}, {entry.kind}) do not have the"
                    f" checksum of generation {self.sequence}",
                    hint="load an older generation (step=…), or restore the store from a copy",
                )

    def _number(self, name: str, kind: str) -> int:
        number = self._layout.number.get((name, kind))
        if number is None:
            raise UsageError(f"{self.path}: does not contain {name}, {kind}")
        return number

    def _raw(self, name: str, kind: str) -> tuple[ByteArray, StoreEntry]:
        number = self._number(name, kind)
        entry = self._layout.schema.entries[number]
        at = self._layout.atom_at(self._header.slot, number)
        # An empty array must not be on the map, whose end may be its offset.
        raw = np.frombuffer(self._map, np.uint8, entry.nbytes, at) if entry.nbytes else np.empty(0, np.uint8)
        return raw, entry


# memory ---------------------------------------------------------------------------------------------------------------


class DurableMemory(Protocol):
    """Memory that can be written in place and made durable range by range."""

    view: memoryview

    def persist(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Return when bytes `[start, stop)` of every range are durable."""

    def close(self) -> None: ...


class MappedFile:
    """A file mapped for writing. `durability` is `pmem_persist`, `msync on DAX` or `msync`."""

    def __init__(self, fd: int, size: int, path: Path) -> None:
        self._path = path
        self._map, is_dax = _map(fd, size, path)
        self.view = memoryview(self._map)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._pmem = _libpmem() if is_dax else None
        self.durability = "pmem_persist" if self._pmem is not None else "msync on DAX" if is_dax else "msync"

    def persist(self, ranges: Iterable[tuple[int, int]]) -> None:
        if self._pmem is not None:
            for start, stop in ranges:
                self._pmem.pmem_persist(ctypes.c_void_p(self._address + start), ctypes.c_size_t(stop - start))
            return
        # ctypes releases the GIL; `mmap.flush` does not in every version of Python.
        for start, stop in coalesce_ranges(ranges, mmap.PAGESIZE):
            length = min(stop, len(self.view)) - start
            if _libc().msync(ctypes.c_void_p(self._address + start), ctypes.c_size_t(length), _MS_SYNC) != 0:
                what = os.strerror(ctypes.get_errno())
                raise StorageError(f"{self._path}: bytes [{start}, {stop}) cannot be made durable: {what}")

    def close(self) -> None:
        """Release the map; it is removed when the last array on it is gone."""
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
    """The bytes of an atom, row-major, in blocks that stay in the CPU cache until they are digested.

    `tensor` is a torch tensor, a numpy array, or bytes. Raises `UsageError` if it does not match the schema.
    """
    if isinstance(tensor, (bytes, bytearray, memoryview)):
        flat: Any = np.frombuffer(tensor, np.uint8)
        fits = len(flat) == entry.nbytes
    else:
        name = str(tensor.dtype).removeprefix("torch.")
        fits = tuple(tensor.shape) == entry.shape and name == entry.dtype.name
        flat = tensor.reshape(-1) if isinstance(tensor, np.ndarray) else local_tensor(tensor).reshape(-1)
    if not fits:
        given = f"{tensor.dtype} {list(tensor.shape)}" if hasattr(tensor, "dtype") else f"{len(flat)} bytes"
        raise UsageError(
            f"parameter {entry.name}, {entry.kind}: is {given}, but the schema has {entry.dtype} {list(entry.shape)}"
        )
    itemsize = entry.dtype.itemsize if hasattr(tensor, "dtype") else 1
    count = max(1, settings.SLAB_BYTES // itemsize)
    for start in range(0, len(flat), count):
        yield _as_bytes(flat[start : start + count])


def _as_bytes(block: Any) -> ByteArray:
    if isinstance(block, np.ndarray):
        return np.ascontiguousarray(block).view(np.uint8)
    import torch

    made: ByteArray = block.cpu().contiguous().view(torch.uint8).numpy()
    return made
