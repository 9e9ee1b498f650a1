"""What the snapshots of a job contain, and how they are written: as folders of atoms, or into a mapped store.

The first snapshot computes with all ranks which fragments each rank has, which of them it writes, and where. Later ones
only check that the job's tensors are still the same, which takes a few microseconds per tensor; computing the layout
takes a hundred times as long.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ucp.core.checkpoint import Checkpoint, Parameter
from ucp.core.target import Target
from ucp.engine.staging import StagingFolder, discard_partial_output
from ucp.errors import StorageError, UcpError, UsageError
from ucp.formats.atoms.manifest import plan_extras
from ucp.formats.atoms.writer import AtomsWriter
from ucp.formats.registry import WriteOptions
from ucp.formats.sharded.rule_files import load_rule_book
from ucp.formats.store.reader import EXTRA, generation_notes, schema_of
from ucp.formats.store.store_layout import StoreEntry, StoreSchema
from ucp.storage.local import sync
from ucp.training.adapters import describe_job
from ucp.training.collect import LiveFragment, StateCollector, TensorParallelRules
from ucp.training.collectives import all_gather, fail_together, gather_to_first, rank_and_size, scatter_from_first
from ucp.training.live_job import LiveJob, storage_of
from ucp.training.save import DigestRange, RankSaver, RankWrite, WriteAssignment, write_candidates, write_elements
from ucp.training.saved_index import (
    RankSummary,
    build_index,
    collect_training_state,
    group_hyper_parameters,
    summarize_rank,
)
from ucp.training.snapshots.background_copy import UpdateOwners
from ucp.training.store import Store

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class JobView:
    """The tensors of the job on one rank, at one moment."""

    job: LiveJob
    tp_rules: TensorParallelRules
    memory: list[Any]  # addresses and shapes of all tensors: if equal, the fragments are still valid
    fragments: list[LiveFragment]
    summary: RankSummary  # without training state
    numbers: list[tuple[int, torch.Tensor, Any]]  # fragments of Python numbers: (fragment, optimizer tensor, state key)
    in_place: bool  # all other fragments are views of the job's own memory
    update_owners: UpdateOwners | None = None
    owners: dict[int, tuple[bool, frozenset[int] | None]] = field(default_factory=dict)  # fragment → `UpdateOwners.of`

    def owner_of(self, number: int) -> tuple[bool, frozenset[int] | None]:
        """`UpdateOwners.of` a fragment, cached."""
        if number not in self.owners:
            self.update_owners = self.update_owners or UpdateOwners(self.job)
            self.owners[number] = self.update_owners.of(self.fragments[number].tensor)
        return self.owners[number]


@dataclass(slots=True)
class SnapshotLayout:
    """What one rank writes, and where."""

    writes: list[RankWrite]
    digest_ranges: list[DigestRange]
    files: list[str]
    wanted: list[int]  # numbers of the fragments that this rank writes
    summaries: list[RankSummary]  # of all ranks, on rank 0
    parameters: dict[str, Parameter]  # on rank 0
    static: Any  # on rank 0: what the saver needs to write another snapshot of the same layout
    loads: list[Mapping[str, int]] = field(default_factory=list)  # by rank: bytes that it copies of each parameter
    parts: dict[int, dict[str, int]] = field(default_factory=dict)  # count → parameter → part


def view_job(job: LiveJob, tp_rules: TensorParallelRules, before: JobView | None = None) -> JobView:
    """Find this rank's fragments, or reuse those of `before` if no tensor has moved since."""
    import torch

    memory = _memory(job)
    if before is not None and before.in_place and before.memory == memory:
        before.job = job
        for number, key, name in before.numbers:  # Python numbers are not views of the job's memory
            fragment = before.fragments[number]
            value = torch.tensor([job.optimizer.state[key][name]], dtype=getattr(torch, fragment.dtype.name))
            before.fragments[number] = replace(fragment, tensor=value)
        return before
    if before is not None:  # keep the rules that all ranks have agreed on
        tp_rules = before.tp_rules
        tp_rules.job = job
    collector = StateCollector(job, tp_rules)
    collector.collect()
    fragments = collector.fragments
    summary = summarize_rank(job, collector, {})
    numbers = _numbers(job, fragments)
    plain = {number for number, _, _ in numbers}
    storages = {storage_of(tensor) for tensor in _tensors(job)}
    in_place = all(n in plain or storage_of(fragment.tensor) in storages for n, fragment in enumerate(fragments))
    return JobView(job, tp_rules, memory, fragments, summary, numbers, in_place)


def same_layout(now: JobView, before: JobView) -> bool:
    """Whether the layout that was computed for `before` is valid for `now`."""
    if now is before:
        return True
    new, old = now.summary, before.summary
    names = [[names for _, names in summary.groups] for summary in (new, old)]
    same = new.fragments == old.fragments and new.parameters == old.parameters and new.rank == old.rank
    return same and names[0] == names[1]


def current_groups(view: JobView) -> list[tuple[dict[str, Any], list[str]]]:
    """The param groups with their current hyper-parameters."""
    names = [names for _, names in view.summary.groups]
    return list(zip(group_hyper_parameters(view.job.groups), names, strict=True))


def bytes_by_parameter(view: JobView, wanted: Sequence[int]) -> dict[str, int]:
    """Bytes of each parameter (not of buffers) that this rank copies."""
    buffers = {parameter.name for parameter in view.summary.parameters if parameter.role == "buffer"}
    found: dict[str, int] = {}
    for number in wanted:
        fragment = view.fragments[number]
        if fragment.name not in buffers:
            found[fragment.name] = found.get(fragment.name, 0) + fragment.tensor.numel() * fragment.dtype.itemsize
    return found


def _numbers(job: LiveJob, fragments: Sequence[LiveFragment]) -> list[tuple[int, torch.Tensor, Any]]:
    import torch

    index = {(fragment.name, fragment.kind): number for number, fragment in enumerate(fragments)}
    found = []
    for stepped in job.stepped:
        for name, value in job.optimizer.state.get(stepped.key, {}).items():
            if not isinstance(value, torch.Tensor):
                owners = (job.logical_name(owner) for owner in stepped.names)
                found += [(index[owner, str(name)], stepped.key, name) for owner in owners]
    return found


def _memory(job: LiveJob) -> list[Any]:
    """Names, shapes and addresses of all tensors of the job."""
    import torch

    found: list[Any] = [job.mesh, job.rank, job.shapes, job.aliases, job.checkpoint_names]
    for stepped in job.stepped:
        states = job.optimizer.state.get(stepped.key, {})
        kinds = [(k, _address(v) if isinstance(v, torch.Tensor) else type(v)) for k, v in states.items()]
        found.append((id(stepped.key), _address(stepped.key), stepped.names, stepped.slices, stepped.group, kinds))
    found += [(live.slice, _address(live.tensor)) for live in (*job.weights, *job.frozen, *job.buffers)]
    return found


def _address(tensor: Any) -> tuple[Any, ...]:
    local = getattr(tensor, "_local_tensor", tensor)
    return local.data_ptr(), local.dtype, local.shape, local.stride()


def _tensors(job: LiveJob) -> list[Any]:
    found = [live.tensor for live in (*job.weights, *job.frozen, *job.buffers)]
    for stepped in job.stepped:
        states = job.optimizer.state.get(stepped.key, {}).values()
        found += [stepped.key, *(value for value in states if hasattr(value, "untyped_storage"))]
    return found


ClientState = dict[str, Any] | Callable[[], dict[str, Any]] | None


class JobInspector:
    """Looks at one job for snapshots: its tensors on this rank and its training state."""

    def __init__(
        self, model: Any, optimizer: Any, client_state: ClientState, rules: str | Path | None, preset: str | None
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._client_state, self._rules, self._preset = client_state, rules, preset

    def describe(self) -> LiveJob:
        return describe_job(self._model, self._optimizer)

    def update(self, before: JobView) -> JobView:
        """The current view of the job; reuses `before` as long as no tensor has moved."""
        return view_job(self.describe(), before.tp_rules, before)

    def inspect(self) -> JobView:
        """The first view of the job, with tensor-parallel rules that all ranks agree on. Collective."""
        with fail_together():
            job = self.describe()
            book = load_rule_book(self._rules, self._preset)
            tp_rules = TensorParallelRules(job, book, self._current_client_state())
        tp_rules.agree_on_defaults()
        with fail_together():
            view = view_job(job, tp_rules)
        return view  # noqa: RET504 - outside the block, which may raise for other ranks

    def training_state(self, view: JobView) -> dict[str, Any]:
        """Random generators, counters, scheduler and client state."""
        return collect_training_state(view.job, self._current_client_state())

    def _current_client_state(self) -> dict[str, Any]:
        state = self._client_state() if callable(self._client_state) else self._client_state
        return dict(state or {})


# Writing --------------------------------------------------------------------------------------------------------------


class SnapshotSaver(RankSaver):
    """One rank's part of writing a snapshot as a folder of atoms."""

    def __init__(self, path: Path, group: Any, durable: bool) -> None:
        super().__init__(path)
        self.group, self.durable = group, durable

    def assign_writes(self, source: Checkpoint, ranks: Sequence[RankSummary]) -> tuple[Any, list[Any]]:
        """Assign the writes of all parameters. On rank 0.

        Returns a value for `prepare_files`, and (writes, digest ranges, files) of every rank.
        """
        files = AtomsWriter(source, WriteOptions()).target().files[: len(source.parameters)]
        candidates = write_candidates(ranks)
        assignment = WriteAssignment.for_ranks(len(ranks))
        for number, file in enumerate(files):
            assignment.add_file(number, file, candidates)
        return files, assignment.by_rank([file.path for file in files])

    def prepare_files(self, source: Checkpoint, tensors: dict[str, Any], static: Any) -> None:
        """Create the files of this snapshot, including its extras. On rank 0."""
        self.writer = AtomsWriter(source, WriteOptions())
        self.target = Target((*static, *plan_extras(source)))
        candidates = {(name, "extra"): [each] for name, each in self.add_extra_tensors(tensors).items()}
        assignment = WriteAssignment.for_ranks(1)
        for number in range(len(static), len(self.target.files)):
            assignment.add_file(number, self.target.files[number], candidates)
        self.writes += assignment.writes[0]
        self.digest_ranges += assignment.digest_ranges[0]
        self.files = [file.path for file in self.target.files]
        staging = StagingFolder(self.path, self.target, uuid.uuid4().hex)
        staging.begin(resume=False, restart=True)
        self.staging = staging


def make_layout(saver: SnapshotSaver, view: JobView, state: dict[str, Any], *, spreads: bool) -> SnapshotLayout:
    """Compute the layout on rank 0 from the summaries of all ranks, and distribute it. Collective."""
    ranks = gather_to_first(replace(view.summary, state=state))
    assignments: list[Any] | None = None
    parameters: dict[str, Parameter] = {}
    static: Any = None
    with fail_together():
        if ranks is not None:
            source, _ = build_index(view.job, ranks, saver.path)
            parameters = source.parameters
            static, assignments = saver.assign_writes(source, ranks)
    writes, digest_ranges, files = scatter_from_first(assignments)
    wanted = sorted({write.fragment for write in writes})
    loads = all_gather(bytes_by_parameter(view, wanted)) if spreads else []
    summaries = [replace(rank, state={}) for rank in ranks or ()]
    return SnapshotLayout(writes, digest_ranges, files, wanted, summaries, parameters, static, loads)


def prepare_write(
    saver: SnapshotSaver,
    layout: SnapshotLayout,
    job: LiveJob,
    fragments: list[LiveFragment],
    state: tuple[Any, dict[str, Any]],
    step: int | None,
    steps: dict[str, int],
) -> None:
    """Prepare to write these fragments. Collective, in the saver's group.

    `state` are the param groups and the training state of this rank, `step` is the step of the snapshot, and `steps`
    are the steps of parameters that were copied after another one.
    """
    saver.fragments, saver.files = fragments, layout.files
    saver.writes, saver.digest_ranges = list(layout.writes), list(layout.digest_ranges)
    states = gather_to_first(state, saver.group)
    try:
        with fail_together(saver.group):
            if states is not None:
                ranks = [
                    replace(rank, groups=groups, state=training_state)
                    for rank, (groups, training_state) in zip(layout.summaries, states, strict=True)
                ]
                source, tensors = build_index(job, ranks, saver.path, layout.parameters)
                trained = {name for name, parameter in layout.parameters.items() if parameter.role == "trained"}
                source.step, source.steps = step, {name: of for name, of in steps.items() if name in trained}
                saver.prepare_files(source, tensors, layout.static)
    except BaseException:
        if saver.staging is not None:
            saver.staging.discard()
        raise


STORE_SUFFIX: Final = ".ucpstore"


class StoreSnapshotSaver(SnapshotSaver):
    """One rank's part of a snapshot into the store at `path`, which is created if it does not exist.

    The offsets in a store are fixed. If the job has other states than at its last snapshot (an optimizer creates states
    with the first gradient of a parameter), a new store is filled next to it and then replaces it.
    """

    notes: dict[str, Any]
    step: int
    steps: dict[str, int]
    schema: StoreSchema

    def __init__(self, path: Path, group: Any, durable: bool, written: set[Path]) -> None:
        """`written` are the stores with snapshots of this job; a store of another job is never replaced."""
        super().__init__(path, group, durable)
        self._written = written
        self._replacement = path.with_name(f".{path.name}.next")

    def assign_writes(self, source: Checkpoint, ranks: Sequence[RankSummary]) -> tuple[Any, list[Any]]:
        schema = schema_of(source)
        offsets = self._offsets(schema)
        candidates = write_candidates(ranks)
        assignment = WriteAssignment.for_ranks(len(ranks))
        for entry in schema.entries:
            if entry.kind != EXTRA:
                key = (entry.name, entry.kind)
                known = candidates.get(key, [])
                assignment.add(str(entry), entry.shape, entry.dtype.itemsize, 0, offsets[key], known)
        names = [self.path.name]
        return (schema, offsets), [(writes, [], names) for writes in assignment.writes]

    def _offsets(self, schema: StoreSchema) -> dict[tuple[str, str], int]:
        """The offset of each atom in a slot."""
        if not self.path.exists():
            Store.create(self.path, schema).close()
        with self._open(schema) as store:
            return {key: store.place(*key) for key in ((e.name, e.kind) for e in schema.entries)}

    def _open(self, schema: StoreSchema) -> Store:
        """Open the store at the path if it has this schema; otherwise create its replacement."""
        store = Store.open(self.path)
        if store.schema.entries == schema.entries:
            return store
        slots = store.slots
        store.close()
        if self.path not in self._written:
            raise self._other_schema()
        self._replacement.unlink(missing_ok=True)
        return Store.create(self._replacement, schema, slots=slots)

    def _other_schema(self) -> UsageError:
        return UsageError(
            f"{self.path}: the store was created for other parameters or states than the job has now",
            hint="use another path",
        )

    def prepare_files(self, source: Checkpoint, tensors: dict[str, Any], static: Any) -> None:
        schema, offsets = static
        self.notes, atoms = generation_notes(source)
        extras = tuple(StoreEntry(atom.name, atom.kind, atom.shape, atom.dtype) for atom in atoms.values())
        if extras != tuple(entry for entry in schema.entries if entry.kind == EXTRA):
            raise self._other_schema()
        if not self.path.exists():
            Store.create(self.path, schema).close()
        self.step, self.steps, self.schema = source.step or 0, source.steps, schema
        candidates = self.add_extra_tensors(tensors)
        assignment = WriteAssignment.for_ranks(1)
        for entry in extras:
            offset = offsets[entry.name, entry.kind]
            assignment.add(str(entry), entry.shape, entry.dtype.itemsize, 0, offset, [candidates[entry.name]])
        self.writes += assignment.writes[0]

    def _write(self) -> None:
        store: Store | None = None
        try:
            with fail_together(self.group):
                if rank_and_size()[0] == 0:
                    store = self._open(self.schema)
                    store.begin(self.step, wait=60.0)
            begin, name = all_gather(None if store is None else (store.slot_start, store.path.name), self.group)[0]
            file = self.path.with_name(name)
            with fail_together(self.group):
                for write in self.writes:
                    fragment = self.fragments[write.fragment]
                    placed = replace(write, offset=begin + write.offset)
                    write_elements(file, placed, fragment.region, fragment.tensor)
                self._sync(file)  # before rank 0 commits the generation
            with fail_together(self.group):
                if store is not None:
                    for entry in store.schema.entries:
                        of = self.step if entry.kind == EXTRA else self.steps.get(entry.name, self.step)
                        store.view(entry.name, entry.kind, step=of)
                    store.commit(self.notes)
                    if file != self.path:
                        os.replace(file, self.path)
                        self._sync(self.path.parent)
                    self._written.add(self.path)
        finally:
            if store is not None:
                store.close()

    def _sync(self, file: Path) -> None:
        try:
            sync(file)
        except OSError as error:
            raise StorageError(f"{file}: cannot be synced to disk: {error.strerror}") from error


SCHEDULE_FILE: Final = "schedule.json"
_NAME: Final = re.compile(r"step-(\d+)(?:-\d+)?")


class SnapshotFolder:
    """The folder or store of a job's snapshots; the newest `keep` folders are kept (None: all)."""

    def __init__(self, path: Path, keep: int | None) -> None:
        self.path, self.keep = path, keep
        self.is_store = path.suffix == STORE_SUFFIX
        self._written: set[Path] = set()  # stores with snapshots of this job

    def make(self) -> None:
        """Create the folder (a store is created by the first snapshot) and remove partial output of killed jobs."""
        if self.is_store:
            replacement = self.path.with_name(f".{self.path.name}.next")  # left by a killed job
            with (
                contextlib.suppress(OSError, UcpError),
                Store.open(replacement),
            ):  # fails if a running job is writing it
                replacement.unlink()
            return
        self.path.mkdir(parents=True, exist_ok=True)
        for partial in self.path.glob(".step-*.ucp-partial"):
            target = self.path / partial.name[1:].removesuffix(".ucp-partial")
            if _NAME.fullmatch(target.name):
                with contextlib.suppress(OSError, UcpError):  # another job may be writing it
                    discard_partial_output(target)

    def free_name(self, step: int) -> str:
        """An unused name for the snapshot of a step; only rank 0 looks at the folder."""
        name = found = f"step-{step:08d}"
        numbers = count(2)
        while rank_and_size()[0] == 0 and (self.path / found).exists():
            found = f"{name}-{next(numbers)}"
        return found

    def saver(self, name: str, group: Any, durable: bool) -> SnapshotSaver:
        """The saver of the next snapshot."""
        if self.is_store:
            return StoreSnapshotSaver(self.path, group, durable, self._written)
        return SnapshotSaver(self.path / name, group, durable)

    def write_schedule(self, schedule: dict[str, Any]) -> None:
        """Write the copy times of the newest snapshot, for `ucp snapshot plan`."""
        folder = self.path.parent if self.is_store else self.path
        name = f"{self.path.stem}.{SCHEDULE_FILE}" if self.is_store else SCHEDULE_FILE
        with contextlib.suppress(OSError):  # it is only informational
            (folder / name).write_text(json.dumps(schedule), encoding="utf-8")

    def drop_old(self, step: int) -> None:
        """Remove the oldest folders. Snapshots of steps after `step` belong to another job and are kept."""
        if self.keep is None or self.is_store:
            return
        with contextlib.suppress(OSError):  # a folder that remains does no harm
            named = [(folder, _NAME.fullmatch(folder.name)) for folder in self.path.iterdir()]
            folders = [folder for folder, match in named if match is not None and int(match[1]) <= step]
            folders.sort(key=lambda folder: folder.stat().st_mtime_ns)
            for folder in folders[: -self.keep]:
                shutil.rmtree(folder, ignore_errors=True)
