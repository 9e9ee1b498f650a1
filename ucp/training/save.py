"""`ucp.save`: a folder of atoms straight from a live job, every rank writing what it holds."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ucp.core.checkpoint import Atom, Checkpoint
from ucp.core.region import Region
from ucp.core.rules import RuleBook
from ucp.core.target import Target
from ucp.engine.staging import Staging, staging_folder
from ucp.engine.worker import WrittenRange
from ucp.errors import StorageError
from ucp.formats.atoms.writer import AtomsWriter
from ucp.formats.registry import WriteOptions
from ucp.formats.sharded.rule_files import load_rule_book
from ucp.storage.local import write_all
from ucp.storage.paths import local_path
from ucp.training.adapters import describe_job
from ucp.training.collect import LiveFragment, RankState, StateCollector, TensorParallelRules, numbers_of
from ucp.training.collectives import background_group, gather_to_first, raise_on_all, scatter_from_first
from ucp.training.live_job import dtype_of
from ucp.training.saved_index import RankSummary, build_index, collect_training_state
from ucp.training.write_assignment import (
    DigestRange,
    RankWrite,
    WriteAssignment,
    WriteCandidate,
    digest_literal,
    digest_written_range,
    write_elements,
)


class SaveHandle:
    """A save that is under way. `wait` on every rank; then the folder is there, whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Has this rank finished? (The folder appears when all have.)"""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until the folder is published; raise what went wrong, on every rank."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error
        return self.path

    def _start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised by `wait`
                self._error = error

        self._thread = threading.Thread(target=run, name="ucp-save")
        self._thread.start()


_running: list[SaveHandle] = []  # at most one: two at once would mix their messages


def save(
    path: str | os.PathLike[str],
    model: Any,
    optimizer: Any = None,
    *,
    client_state: dict[str, Any] | None = None,
    asynchronous: bool = False,
    rules: str | Path | None = None,
    preset: str | None = None,
) -> SaveHandle:
    """Save a live job as a folder of atoms. Every rank must call it, between two steps, with the same new `path`.

    `model` is a DeepSpeed engine, or a torch module (plain, DDP, FSDP2) with its `optimizer`. With `asynchronous`, the
    state is copied to the CPU first and written by a thread while training goes on; `wait` of the handle ends it.
    """
    for earlier in _running:
        earlier.wait()
    _running.clear()
    saver = RankSaver(local_path(path, "jobs save"))
    saver.prepare(model, optimizer, dict(client_state or {}), rules, preset)
    handle = SaveHandle(saver.path)
    if asynchronous:
        saver.group = background_group()
        saver.set_aside()
        handle._start(saver.write)
        _running.append(handle)
    else:
        saver.write()
    return handle


@dataclass(slots=True)
class RankSaver:
    """One rank's part of a save."""

    path: Path
    pieces: list[LiveFragment] = field(default_factory=list)
    tasks: list[RankWrite] = field(default_factory=list)
    sealings: list[DigestRange] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    staging: Staging | None = None  # on rank 0
    writer: AtomsWriter | None = None
    target: Target | None = None
    group: Any = None
    durable: bool = False  # wait for the disk before the folder appears

    @property
    def folder(self) -> Path:
        return staging_folder(self.path)

    def prepare(
        self, model: Any, optimizer: Any, client_state: dict[str, Any], rules: str | Path | None, preset: str | None
    ) -> None:
        """Look at the job, tell rank 0, get this rank's share of the work. The files exist then, empty. Collective."""
        holdings, state, job = RankState(), {}, None
        error: BaseException | None = None
        book: RuleBook | None = None
        slices: TensorParallelRules | None = None
        try:
            book = load_rule_book(rules, preset)
            job = describe_job(model, optimizer)
            slices = TensorParallelRules(job, book, client_state)
        except Exception as caught:  # noqa: BLE001 - told to the other ranks, then raised
            error = caught
        raise_on_all(error)
        assert job is not None
        assert slices is not None
        slices.agree_on_defaults()
        try:
            holdings = StateCollector(job, slices).collect()
            state = collect_training_state(job, client_state)
        except Exception as caught:  # noqa: BLE001
            error = caught
        raise_on_all(error)
        self.pieces = holdings.pieces
        told = [(p.name, p.kind, p.dtype.name, p.shape, p.region) for p in holdings.pieces]
        names = [[job.logical_name(name) for name in group] for group in job.names_by_group()]
        groups = list(zip(group_hyper_parameters(job.groups), names, strict=True))
        numbers = numbers_of(holdings.pieces)
        gathered = gather_to_first(RankSummary(told, list(holdings.notes.values()), groups, job.rank, state, numbers))
        shares: list[Any] | None = None
        if gathered is not None:
            try:
                source, tensors = build_index(job, gathered, self.path)
                shares = self._lay_out(source, gathered, tensors)
            except Exception as caught:  # noqa: BLE001
                error = caught
        raise_on_all(error)
        self.tasks, self.sealings, self.files = scatter_from_first(shares)

    def _lay_out(self, source: Checkpoint, gathered: Sequence[RankSummary], tensors: dict[str, Any]) -> list[Any]:
        """The files of the target, made empty, and every rank's share of them. On rank 0."""
        self.writer = AtomsWriter(source, WriteOptions())
        self.target = self.writer.target()
        offers = write_candidates(gathered)
        for name, tensor in tensors.items():  # tensors inside the extras: rank 0 has them
            shape = tuple(tensor.shape)
            flat = tensor.detach().cpu().contiguous().view(-1)
            self.pieces.append(LiveFragment(name, "extra", shape, dtype_of(flat), Region.all_of(shape), flat))
            offers[name, "extra"] = [WriteCandidate(0, len(self.pieces) - 1, Region.all_of(shape))]
        shares = WriteAssignment.for_ranks(len(gathered))
        for number, file in enumerate(self.target.files):
            for item in file.items:
                atom: Atom = item.atom
                held = offers.get((atom.name, atom.kind), [])
                shares.deal(str(atom), atom.shape, atom.dtype.itemsize, number, item.offset, held)
        self.staging = Staging(self.path, self.target, uuid.uuid4().hex, resume=False, restart=True)
        paths = [file.path for file in self.target.files]
        return [(tasks, seals, paths) for tasks, seals in zip(shares.tasks, shares.sealings, strict=True)]

    def set_aside(self) -> None:
        """Copy what this rank will write, so that training may go on."""
        wanted = {task.piece for task in self.tasks}
        for number, piece in enumerate(self.pieces):
            if number in wanted:
                piece.tensor = piece.tensor.detach().cpu().clone()

    def write(self) -> None:
        """Write this rank's share; rank 0 publishes when all are done. Collective, in `group`."""
        try:
            self._write()
        except BaseException:
            if self.staging is not None:
                self.staging.discard()
            raise

    def _write(self) -> None:
        written: list[WrittenRange] = []
        error: BaseException | None = None
        try:
            written.extend(self._write_literals())
            for task in self.tasks:
                piece = self.pieces[task.piece]
                written.extend(write_elements(self.folder / self.files[task.file], task, piece.region, piece.tensor))
        except Exception as caught:  # noqa: BLE001 - told to the other ranks, then raised
            error = caught
        raise_on_all(error, self.group)  # sealing reads what all ranks have written
        try:
            written.extend(digest_written_range(self.folder / self.files[s.file], s) for s in self.sealings)
        except Exception as caught:  # noqa: BLE001
            error = caught
        raise_on_all(error, self.group)
        everything = gather_to_first(written, self.group)
        if everything is not None:
            try:
                self._publish([w for rank in everything for w in rank])
            except Exception as caught:  # noqa: BLE001
                error = caught
        raise_on_all(error, self.group)

    def _write_literals(self) -> list[WrittenRange]:
        """Headers and JSON, which rank 0 knows."""
        if self.target is None:
            return []
        written = []
        for number, file in enumerate(self.target.files):
            for literal in file.literals:
                path = self.folder / file.path
                try:
                    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
                    try:
                        write_all(fd, literal.offset, literal.data)
                    finally:
                        os.close(fd)
                except OSError as error:
                    raise StorageError(f"{path}: cannot be written: {error.strerror}") from error
                written.append(WrittenRange(number, literal.offset, len(literal.data), digest_literal(literal.data)))
        return written

    def _publish(self, written: list[WrittenRange]) -> None:
        assert self.staging is not None
        assert self.writer is not None
        assert self.target is not None
        for each in written:
            self.staging.record([each])
        self.staging.publish(self.writer.last(self.target, self.staging.digests()), durable=self.durable)


def group_hyper_parameters(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Hyper-parameters without parameters; one-element tensors as numbers."""
    return [{str(key): _as_number(value) for key, value in group.items() if key != "params"} for group in groups]


def _as_number(value: Any) -> Any:
    if isinstance(value, (list, tuple)) and any(hasattr(item, "item") for item in value):  # betas that are tensors
        return type(value)(map(_as_number, value))
    return value.item() if hasattr(value, "item") and getattr(value, "numel", lambda: value.size)() == 1 else value


def write_candidates(gathered: Sequence[RankSummary]) -> dict[tuple[str, str], list[WriteCandidate]]:
    """Which ranks hold what of each atom. Ranks may have different values in a buffer: the first rank's count."""
    offers: dict[tuple[str, str], list[WriteCandidate]] = {}
    buffers = {note.name for told in gathered for note in told.notes if note.role == "buffer"}
    for rank, told in enumerate(gathered):
        for number, (name, kind, _, _, region) in enumerate(told.pieces):
            held = offers.setdefault((name, kind), [])
            if name not in buffers or all(other.region != region for other in held):
                held.append(WriteCandidate(rank, number, region))
    return offers
