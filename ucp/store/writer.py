"""Writing a store from a job: tensors go straight to their place, and a generation counts when all of it is durable.

The order of a generation, each arrow a wait for the medium:
the slot made invalid → data → slot header → the older superblock, which names the slot as root.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import xxhash

from ucp.errors import StorageError, UsageError
from ucp.files.local import sync, write_all
from ucp.store.blocks import NO_SLOT, AtomRecord, Head, SlotHeader, Superblock, no_header, seal_of
from ucp.store.layout import HEAD_AT, HEADER_FIXED, SCHEMA_AT, SUPERBLOCKS_AT, Entry, Layout, Schema
from ucp.store.leases import BusyError, become_writer, lock, stop_writing
from ucp.store.medium import MappedFile, Medium
from ucp.store.survey import Shape, read_shape, reader_of, survey
from ucp.store.tensor_bytes import Bytes, blocks_of


class Store:
    """A store that this process writes. `begin`, `write` every atom, `commit`; then the next generation."""

    def __init__(self, medium: Medium, shape: Shape, fd: int | None = None) -> None:
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
        found = survey(lambda at, size: bytes(medium.view[at : at + size]), shape)
        self._sequence = found.sequence
        self._root = NO_SLOT if found.root is None else found.root.slot
        self._superblock = 0 if found.root_superblock is None else found.root_superblock
        self._held = {header.slot: header.sequence for header in found.generations}
        for slot in found.beyond:  # complete, but its superblock never came: a later one must not bring it back
            self._invalidate(slot)

    # ------------------------------------------------------------------------------------------------------------------
    # Opening

    @classmethod
    def create(cls, path: str | os.PathLike[str], schema: Schema, *, slots: int = 2) -> Store:
        """Make a new store with room for `slots` generations, all its blocks reserved, and open it."""
        path = Path(path)
        if path.exists():
            raise UsageError(f"{path}: exists already", hint="Store.open goes on with it; or give another path")
        data = schema.dump()
        layout = Layout(schema, slots, len(data))
        head = Head(uuid.uuid4().bytes, xxhash.xxh3_128_digest(data), layout.numbers(), time.time_ns())
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
            shape = read_shape(reader_of(fd, path), os.fstat(fd).st_size, path)
            become_writer(fd, path)
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
                raise BusyError(
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
        for block in blocks_of(tensor, entry):
            np.copyto(target[at : at + len(block)], block)
            digest.update(target[at : at + len(block)].data)
            at += len(block)
        self._written[number] = AtomRecord(digest.digest(), self._step if step is None else step)

    def view(self, name: str, kind: str, *, step: int | None = None) -> Bytes:
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
            stop_writing(self._fd)
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
            if self._fd is None or lock(self._fd, self._layout.slot_at(slot), fcntl.F_WRLCK):
                return slot
        return None

    def _end(self) -> None:
        assert self._slot is not None
        if self._fd is not None:
            lock(self._fd, self._layout.slot_at(self._slot), fcntl.F_UNLCK)
        self._slot = None

    def _invalidate(self, slot: int) -> None:
        at = self._layout.slot_at(slot)
        self._put(at, no_header())
        self._medium.persist([(at, at + HEADER_FIXED)])

    def _put(self, at: int, data: bytes) -> None:
        self._medium.view[at : at + len(data)] = data

    def _must_have_begun(self) -> int:
        if self._slot is None:
            raise UsageError(f"{self.path}: no generation was begun", hint="call begin(step) first")
        return self._slot

    def _find(self, name: str, kind: str) -> tuple[int, Entry]:
        self._must_have_begun()
        number = self._layout.number.get((name, kind))
        if number is None:
            kinds = [known for owner, known in self._layout.number if owner == name]
            raise UsageError(
                f"{self.path}: has no room for {name}, {kind}",
                hint=f"of {name} it has {', '.join(kinds)}" if kinds else "its schema does not name the parameter",
            )
        return number, self.schema.entries[number]

    def _bytes(self, number: int) -> Bytes:
        at = self._layout.atom_at(self._must_have_begun(), number)
        nbytes = self.schema.entries[number].nbytes
        return np.frombuffer(self._medium.view, np.uint8, nbytes, at) if nbytes else np.empty(0, np.uint8)
