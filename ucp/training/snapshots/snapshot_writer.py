"""Writing snapshots: the files are laid out once, and then written again and again with what is new in each.

Snapshots into a mapped store: every rank writes its share of the slot, rank 0 flips.

Where snapshots are kept: a folder with a folder for each, or a mapped store.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ucp.core.checkpoint import Checkpoint
from ucp.core.region import Region
from ucp.core.target import Target
from ucp.engine.staging import Staging, discard_partial_output
from ucp.errors import StorageError, UcpError, UsageError
from ucp.formats.atoms.manifest import plan_extras
from ucp.formats.atoms.writer import AtomsWriter
from ucp.formats.registry import WriteOptions
from ucp.formats.store.reader import EXTRA, generation_notes, schema_of
from ucp.formats.store.store_layout import StoreEntry, StoreSchema
from ucp.storage.local import sync
from ucp.training.collect import LiveFragment
from ucp.training.collectives import all_gather, gather_to_first, raise_on_all, rank_and_size, scatter_from_first
from ucp.training.live_job import LiveJob, dtype_of
from ucp.training.save import RankSaver, write_candidates
from ucp.training.saved_index import RankSummary, build_index
from ucp.training.snapshots.snapshot_layout import JobView, SnapshotBlueprint, SnapshotLayout, bytes_by_parameter
from ucp.training.store.writer import Store
from ucp.training.write_assignment import WriteAssignment, WriteCandidate, write_elements


class SnapshotSaver(RankSaver):
    """One rank's part of writing a snapshot as a folder of atoms."""

    def __init__(self, path: Path, group: Any, durable: bool) -> None:
        super().__init__(path)
        self.group, self.durable = group, durable

    def lay_out(self, source: Checkpoint, gathered: Sequence[RankSummary]) -> tuple[Any, list[Any]]:
        """What `settle` needs of it, and for each rank (tasks, sealings, files). Parameters only. On rank 0."""
        files = AtomsWriter(source, WriteOptions()).target().files[: len(source.parameters)]
        offers = write_candidates(gathered)
        shares = WriteAssignment.for_ranks(len(gathered))
        for number, file in enumerate(files):
            for item in file.items:
                atom = item.atom
                held = offers.get((atom.name, atom.kind), [])
                shares.deal(str(atom), atom.shape, atom.dtype.itemsize, number, item.offset, held)
        paths = [file.path for file in files]
        return files, [(tasks, seals, paths) for tasks, seals in zip(shares.tasks, shares.sealings, strict=True)]

    def settle(self, source: Checkpoint, tensors: dict[str, Any], static: Any) -> None:
        """Make the files, with the extras that there are this time. On rank 0."""
        self.writer = AtomsWriter(source, WriteOptions())
        self.target = Target((*static, *plan_extras(source)))
        offers = self.offer_extras(tensors)
        shares = WriteAssignment.for_ranks(1)
        for number, file in enumerate(self.target.files):
            for item in file.items if number >= len(static) else ():
                atom = item.atom
                shares.deal(str(atom), atom.shape, atom.dtype.itemsize, number, item.offset, [offers[atom.name]])
        self.tasks += shares.tasks[0]
        self.sealings += shares.sealings[0]
        self.files = [file.path for file in self.target.files]
        self.staging = Staging(self.path, self.target, uuid.uuid4().hex, resume=False, restart=True)

    def offer_extras(self, tensors: dict[str, Any]) -> dict[str, WriteCandidate]:
        """Tensors inside the extras become pieces of rank 0."""
        offers = {}
        for name, tensor in tensors.items():
            shape = tuple(tensor.shape)
            flat = tensor.detach().cpu().contiguous().view(-1)
            self.pieces.append(LiveFragment(name, "extra", shape, dtype_of(flat), Region.all_of(shape), flat))
            offers[name] = WriteCandidate(0, len(self.pieces) - 1, Region.all_of(shape))
        return offers


def make_layout(saver: SnapshotSaver, sight: JobView, state: dict[str, Any], *, spreads: bool) -> SnapshotLayout:
    """Tell rank 0 what there is, and get this rank's share of the work. Collective."""
    gathered = gather_to_first(replace(sight.gathered, state=state))
    shares: list[Any] | None = None
    blueprint: SnapshotBlueprint | None = None
    error: BaseException | None = None
    if gathered is not None:
        try:
            source, _ = build_index(sight.job, gathered, saver.path)
            static, shares = saver.lay_out(source, gathered)
            blueprint = SnapshotBlueprint([replace(told, state={}) for told in gathered], source.parameters, static)
        except Exception as caught:  # noqa: BLE001 - told to the other ranks, then raised
            error = caught
    raise_on_all(error)
    tasks, sealings, files = scatter_from_first(shares)
    wanted = sorted({task.piece for task in tasks})
    return SnapshotLayout(
        tasks,
        sealings,
        files,
        wanted,
        blueprint,
        all_gather(bytes_by_parameter(sight, wanted)) if spreads else [],
        parts={},
    )


def prepare_write(
    saver: SnapshotSaver,
    layout: SnapshotLayout,
    job: LiveJob,
    pieces: list[LiveFragment],
    told: tuple[Any, dict[str, Any]],
    step: int | None,
    steps: dict[str, int],
) -> None:
    """Get ready to write these pieces, with the groups and the state that each rank tells. Collective, in its group.

    `step` is that of the snapshot, `steps` those of parameters that are of others.
    """
    saver.pieces, saver.tasks, saver.sealings = pieces, list(layout.tasks), list(layout.sealings)
    saver.files = layout.files
    everyone = gather_to_first(told, saver.group)
    error: BaseException | None = None
    if everyone is not None:
        try:
            known = layout.blueprint
            assert known is not None
            gathered = [
                replace(rank, groups=groups, state=state)
                for rank, (groups, state) in zip(known.gathered, everyone, strict=True)
            ]
            source, tensors = build_index(job, gathered, saver.path, known.parameters)
            trained = {name for name, parameter in known.parameters.items() if parameter.role == "trained"}
            source.step, source.steps = step, {name: of for name, of in steps.items() if name in trained}
            saver.settle(source, tensors, known.static)
        except Exception as caught:  # noqa: BLE001
            error = caught
    try:
        raise_on_all(error, saver.group)
    except BaseException:
        if saver.staging is not None:
            saver.staging.discard()
        raise


STORE_SUFFIX: Final = ".ucpstore"


def replacement_path(path: Path) -> Path:
    """Where the store is filled that is going to take the place of the one at `path`."""
    return path.with_name(f".{path.name}.next")


def discard_replacement(path: Path) -> None:
    """Remove what a killed job has left there; `UcpError` where a living one writes it."""
    left = replacement_path(path)
    if left.exists():
        with Store.open(left):  # which only one process can
            left.unlink()


class StoreSnapshotSaver(SnapshotSaver):
    """One rank's part of a snapshot into the store at `path`, which is made where there is none.

    The places of a store are fixed. Where the job has other states than its last snapshot had (an optimizer makes some
    with the first gradient of a parameter), a new store is filled beside it and takes its place.
    """

    notes: dict[str, Any]
    step: int
    steps: dict[str, int]
    schema: StoreSchema

    def __init__(self, path: Path, group: Any, durable: bool, written: set[Path]) -> None:
        """`written` are stores that this job has put snapshots into; a store of another job is left alone."""
        super().__init__(path, group, durable)
        self._written = written
        self._next = replacement_path(path)

    def lay_out(self, source: Checkpoint, gathered: Sequence[RankSummary]) -> tuple[Any, list[Any]]:
        schema = schema_of(source)
        offsets = self._places(schema)
        offers = write_candidates(gathered)
        shares = WriteAssignment.for_ranks(len(gathered))
        for entry in schema.entries:
            if entry.kind != EXTRA:
                key = (entry.name, entry.kind)
                shares.deal(str(entry), entry.shape, entry.dtype.itemsize, 0, offsets[key], offers.get(key, []))
        names = [self.path.name]
        return (schema, offsets), [(tasks, [], names) for tasks in shares.tasks]

    def _places(self, schema: StoreSchema) -> dict[tuple[str, str], int]:
        """Where each atom lies in a slot."""
        if not self.path.exists():
            Store.create(self.path, schema).close()
        with self._open(schema) as store:
            return {key: store.place(*key) for key in ((e.name, e.kind) for e in schema.entries)}

    def _open(self, schema: StoreSchema) -> Store:
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
        extras = tuple(StoreEntry(atom.name, atom.kind, atom.shape, atom.dtype) for atom in atoms.values())
        if extras != tuple(entry for entry in schema.entries if entry.kind == EXTRA):
            raise self._other_schema()
        if not self.path.exists():
            Store.create(self.path, schema).close()
        self.step, self.steps, self.schema = source.step or 0, source.steps, schema
        offers = self.offer_extras(tensors)
        shares = WriteAssignment.for_ranks(1)
        for entry in extras:
            at = offsets[entry.name, entry.kind]
            shares.deal(str(entry), entry.shape, entry.dtype.itemsize, 0, at, [offers[entry.name]])
        self.tasks += shares.tasks[0]

    def _write(self) -> None:
        error: BaseException | None = None
        store: Store | None = None
        if rank_and_size()[0] == 0:
            try:
                store = self._open(self.schema)
                store.begin(self.step, wait=60.0)
            except Exception as caught:  # noqa: BLE001 - told to the other ranks, then raised
                error = caught
        try:
            raise_on_all(error, self.group)
            begin, name = all_gather(None if store is None else (store.slot_start, store.path.name), self.group)[0]
            file = self.path.with_name(name)
            try:
                for task in self.tasks:
                    piece = self.pieces[task.piece]
                    placed = replace(task, offset=begin + task.offset)
                    write_elements(file, placed, piece.region, piece.tensor)
                self._sync(file)
            except Exception as caught:  # noqa: BLE001
                error = caught
            raise_on_all(error, self.group)
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
            raise_on_all(error, self.group)
        finally:
            if store is not None:
                store.close()

    def _sync(self, file: Path) -> None:
        """What this rank wrote becomes durable before rank 0 vouches for it."""
        try:
            sync(file)
        except OSError as error:
            raise StorageError(f"{file}: cannot be made durable: {error.strerror}") from error


SCHEDULE_FILE: Final = "schedule.json"
_NAME: Final = re.compile(r"step-(\d+)(?:-\d+)?")


class SnapshotFolder:
    """The place at `path`; of folders, the newest `keep` stay (None: all)."""

    def __init__(self, path: Path, keep: int | None) -> None:
        self.path, self.keep = path, keep
        self.is_store = path.suffix == STORE_SUFFIX
        self._written: set[Path] = set()  # stores that hold snapshots of this job

    def make(self) -> None:
        """A folder must be there; a store is made with the first snapshot. What a killed job left half done goes."""
        if self.is_store:
            with contextlib.suppress(OSError, UcpError):
                discard_replacement(self.path)
            return
        self.path.mkdir(parents=True, exist_ok=True)
        for left in self.path.glob(".step-*.ucp-partial"):
            target = self.path / left.name[1:].removesuffix(".ucp-partial")
            if _NAME.fullmatch(target.name):
                with contextlib.suppress(OSError, UcpError):  # another job is at it
                    discard_partial_output(target)

    def free_name(self, step: int) -> str:
        """A name for the snapshot of a step that no folder has yet, as rank 0 sees it."""
        name = f"step-{step:08d}"
        number = 2
        found = name
        while rank_and_size()[0] == 0 and (self.path / found).exists():
            found = f"{name}-{number}"
            number += 1
        return found

    def saver(self, name: str, group: Any, durable: bool) -> SnapshotSaver:
        """What writes the next one."""
        if self.is_store:
            return StoreSnapshotSaver(self.path, group, durable, self._written)
        return SnapshotSaver(self.path / name, group, durable)

    def tell(self, schedule: dict[str, Any]) -> None:
        """Put down when the tensors of the newest snapshot were copied."""
        folder = self.path.parent if self.is_store else self.path
        name = f"{self.path.stem}.{SCHEDULE_FILE}" if self.is_store else SCHEDULE_FILE
        with contextlib.suppress(OSError):  # for people only
            (folder / name).write_text(json.dumps(schedule), encoding="utf-8")

    def drop_old(self, step: int) -> None:
        """Remove folders that are too many. Those of later steps than `step` are of another job, which went further."""
        if self.keep is None or self.is_store:
            return
        with contextlib.suppress(OSError):  # what is superfluous does no harm
            named = [(folder, _NAME.fullmatch(folder.name)) for folder in self.path.iterdir()]
            folders = [folder for folder, match in named if match is not None and int(match[1]) <= step]
            folders.sort(key=lambda folder: folder.stat().st_mtime_ns)
            for folder in folders[: -self.keep]:
                shutil.rmtree(folder, ignore_errors=True)
