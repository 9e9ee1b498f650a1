"""Snapshots into a mapped store: every rank writes its share of the slot, rank 0 flips."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ucp.errors import StorageError, UsageError
from ucp.files.local import sync
from ucp.formats.store.description import EXTRA, generation_notes, schema_of
from ucp.model.checkpoint import Checkpoint
from ucp.store.layout import Entry, Schema
from ucp.store.writer import Store
from ucp.train.saved_index import Gathered
from ucp.train.saving import offers_of
from ucp.train.shared_write import Shares, write_task
from ucp.train.snapshots.saving import SnapshotSaver
from ucp.train.talk import agree, gather, world

SUFFIX: Final = ".ucpstore"


def next_of(path: Path) -> Path:
    """Where the store is filled that is going to take the place of the one at `path`."""
    return path.with_name(f".{path.name}.next")


def discard_next(path: Path) -> None:
    """Remove what a killed job has left there; `UcpError` where a living one writes it."""
    left = next_of(path)
    if left.exists():
        with Store.open(left):  # which only one process can
            left.unlink()


class StoreSaver(SnapshotSaver):
    """One rank's part of a snapshot into the store at `path`, which is made where there is none.

    The places of a store are fixed. Where the job has other states than its last snapshot had (an optimizer makes some
    with the first gradient of a parameter), a new store is filled beside it and takes its place.
    """

    notes: dict[str, Any]
    step: int
    steps: dict[str, int]
    schema: Schema

    def __init__(self, path: Path, group: Any, durable: bool, written: set[Path]) -> None:
        """`written` are stores that this job has put snapshots into; a store of another job is left alone."""
        super().__init__(path, group, durable)
        self._written = written
        self._next = next_of(path)

    def lay_out(self, source: Checkpoint, gathered: Sequence[Gathered]) -> tuple[Any, list[Any]]:
        schema = schema_of(source)
        offsets = self._places(schema)
        offers = offers_of(gathered)
        shares = Shares.for_ranks(len(gathered))
        for entry in schema.entries:
            if entry.kind != EXTRA:
                key = (entry.name, entry.kind)
                shares.deal(str(entry), entry.shape, entry.dtype.itemsize, 0, offsets[key], offers.get(key, []))
        names = [self.path.name]
        return (schema, offsets), [(tasks, [], names) for tasks in shares.tasks]

    def _places(self, schema: Schema) -> dict[tuple[str, str], int]:
        """Where each atom lies in a slot."""
        if not self.path.exists():
            Store.create(self.path, schema).close()
        with self._open(schema) as store:
            return {key: store.place(*key) for key in ((e.name, e.kind) for e in schema.entries)}

    def _open(self, schema: Schema) -> Store:
        """The store that has these places: that of the path, or the one that is going to take its place."""
        store = Store.open(self.path)
        if store.schema.entries == schema.entries:
            return store
        slots = store.slots
        store.close()
        if self.path not in self._written:
            raise self._other_schema()
        self._next.unlink(missing_ok=True)
        return Store.create(self._next, schema, slots=slots)

    def _other_schema(self) -> UsageError:
        return UsageError(
            f"{self.path}: was made for other parameters or states than the job has now",
            hint="give another path",
        )

    def settle(self, source: Checkpoint, tensors: dict[str, Any], static: Any) -> None:
        schema, offsets = static
        self.notes, atoms = generation_notes(source)
        extras = tuple(Entry(atom.name, atom.kind, atom.shape, atom.dtype) for atom in atoms.values())
        if extras != tuple(entry for entry in schema.entries if entry.kind == EXTRA):
            raise self._other_schema()
        if not self.path.exists():
            Store.create(self.path, schema).close()
        self.step, self.steps, self.schema = source.step or 0, source.steps, schema
        offers = self.offer_extras(tensors)
        shares = Shares.for_ranks(1)
        for entry in extras:
            at = offsets[entry.name, entry.kind]
            shares.deal(str(entry), entry.shape, entry.dtype.itemsize, 0, at, [offers[entry.name]])
        self.tasks += shares.tasks[0]

    def _write(self) -> None:
        error: BaseException | None = None
        store: Store | None = None
        if world()[0] == 0:
            try:
                store = self._open(self.schema)
                store.begin(self.step, wait=60.0)
            except Exception as caught:  # noqa: BLE001 - told to the other ranks, then raised
                error = caught
        try:
            agree(error, self.group)
            begin, name = gather(None if store is None else (store.slot_start, store.path.name), self.group)[0]
            file = self.path.with_name(name)
            try:
                for task in self.tasks:
                    piece = self.pieces[task.piece]
                    placed = replace(task, offset=begin + task.offset)
                    write_task(file, placed, piece.region, piece.tensor)
                self._sync(file)
            except Exception as caught:  # noqa: BLE001
                error = caught
            agree(error, self.group)
            try:
                if store is not None:
                    for entry in store.schema.entries:
                        of = self.step if entry.kind == EXTRA else self.steps.get(entry.name, self.step)
                        store.view(entry.name, entry.kind, step=of)
                    store.commit(self.notes)
                    if file != self.path:
                        os.replace(file, self.path)
                        self._sync(self.path.parent)
                    self._written.add(self.path)
            except Exception as caught:  # noqa: BLE001
                error = caught
            agree(error, self.group)
        finally:
            if store is not None:
                store.close()

    def _sync(self, file: Path) -> None:
        """What this rank wrote becomes durable before rank 0 vouches for it."""
        try:
            sync(file)
        except OSError as error:
            raise StorageError(f"{file}: cannot be made durable: {error.strerror}") from error
