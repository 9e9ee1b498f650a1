"""Saving a live job into a mapped store: every rank writes its share of the slot, rank 0 flips."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ucp.errors import StorageError, UsageError
from ucp.formats.store.description import generation_notes, schema_of
from ucp.model.checkpoint import Checkpoint
from ucp.model.region import Region
from ucp.store.writer import Store
from ucp.train.live import dtype_of
from ucp.train.pieces import Piece
from ucp.train.saved_index import Gathered
from ucp.train.saving import Saver
from ucp.train.shared_write import Offer, Shares, write_task
from ucp.train.talk import agree, gather, world

SUFFIX: Final = ".ucpstore"


@dataclass(slots=True)
class StoreSaver(Saver):
    """One rank's part of a save into the store at `path`, which is made where there is none."""

    notes: dict[str, Any] = field(default_factory=dict)
    step: int = 0

    def _lay_out(self, source: Checkpoint, gathered: Sequence[Gathered], tensors: dict[str, Any]) -> list[Any]:
        schema = schema_of(source)
        if not self.path.exists():
            Store.create(self.path, schema).close()
        with Store.open(self.path) as store:
            if store.schema.entries != schema.entries:
                raise UsageError(
                    f"{self.path}: was made for other parameters or states than the job has now",
                    hint="give another path",
                )
            offsets = {key: store.place(*key) for key in ((e.name, e.kind) for e in schema.entries)}
        self.notes, _ = generation_notes(source)
        self.step = source.step or 0
        offers: dict[tuple[str, str], list[Offer]] = {}
        for rank, told in enumerate(gathered):
            for number, (name, kind, _, _, region) in enumerate(told.pieces):
                offers.setdefault((name, kind), []).append(Offer(rank, number, region))
        for name, tensor in tensors.items():
            shape = tuple(tensor.shape)
            flat = tensor.detach().cpu().contiguous().view(-1)
            self.pieces.append(Piece(name, "extra", shape, dtype_of(flat), Region.all_of(shape), flat))
            offers[name, "extra"] = [Offer(0, len(self.pieces) - 1, Region.all_of(shape))]
        shares = Shares.for_ranks(len(gathered))
        for entry in schema.entries:
            key = (entry.name, entry.kind)
            shares.deal(str(entry), entry.shape, entry.dtype.itemsize, 0, offsets[key], offers.get(key, []))
        return [(tasks, [], [self.path.name]) for tasks in shares.tasks]

    def _write(self) -> None:
        error: BaseException | None = None
        store: Store | None = None
        if world()[0] == 0:
            try:
                store = Store.open(self.path)
                store.begin(self.step, wait=60.0)
            except Exception as caught:  # noqa: BLE001 - told to the other ranks, then raised
                error = caught
        try:
            agree(error, self.group)
            begin = gather(None if store is None else store.slot_start, self.group)[0]
            try:
                for task in self.tasks:
                    piece = self.pieces[task.piece]
                    placed = replace(task, offset=begin + task.offset)
                    write_task(self.path, placed, piece.region, piece.tensor)
                self._sync()
            except Exception as caught:  # noqa: BLE001
                error = caught
            agree(error, self.group)
            try:
                if store is not None:
                    for entry in store.schema.entries:
                        store.view(entry.name, entry.kind)
                    store.commit(self.notes)
            except Exception as caught:  # noqa: BLE001
                error = caught
            agree(error, self.group)
        finally:
            if store is not None:
                store.close()

    def _sync(self) -> None:
        """What this rank wrote becomes durable before rank 0 vouches for it."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fdatasync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be made durable: {error.strerror}") from error
