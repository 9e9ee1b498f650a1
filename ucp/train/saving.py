"""`ucp.save`: a folder of atoms straight from a live job, every rank writing what it holds."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ucp.engine.place import staging_folder
from ucp.engine.staging import Staging
from ucp.engine.worker import Written
from ucp.errors import StorageError
from ucp.files.local import write_all
from ucp.files.paths import local_path
from ucp.formats.atoms.writer import Writer
from ucp.formats.registry import WriteOptions
from ucp.formats.rulefiles import rule_book
from ucp.model.checkpoint import Atom, Checkpoint
from ucp.model.region import Region
from ucp.model.rules import RuleBook
from ucp.model.target import Target
from ucp.train.describe import describe
from ucp.train.live import dtype_of
from ucp.train.pieces import Collector, Holdings, Piece, SliceRules, numbers_of
from ucp.train.saved_index import Gathered, build_index
from ucp.train.saved_state import collect_state
from ucp.train.shared_write import Offer, Sealing, Shares, Task, digest_literal, seal, write_task
from ucp.train.talk import agree, background_group, from_first, to_first


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
    model: Any,
    optimizer: Any = None,
    path: str | os.PathLike[str] | None = None,
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
    if path is None:
        if not isinstance(optimizer, (str, os.PathLike)):
            raise TypeError("save needs the path of a new folder")
        optimizer, path = None, optimizer
    for earlier in _running:
        earlier.wait()
    _running.clear()
    saver = Saver(local_path(path, "jobs save"))
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
class Saver:
    """One rank's part of a save."""

    path: Path
    pieces: list[Piece] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)
    sealings: list[Sealing] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    staging: Staging | None = None  # on rank 0
    writer: Writer | None = None
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
        holdings, state, job = Holdings(), {}, None
        error: BaseException | None = None
        book: RuleBook | None = None
        slices: SliceRules | None = None
        try:
            book = rule_book(rules, preset)
            job = describe(model, optimizer)
            slices = SliceRules(job, book, client_state)
        except Exception as caught:  # noqa: BLE001 - told to the other ranks, then raised
            error = caught
        agree(error)
        assert job is not None
        assert slices is not None
        slices.agree_on_defaults()
        try:
            holdings = Collector(job, slices).collect()
            state = collect_state(job, client_state)
        except Exception as caught:  # noqa: BLE001
            error = caught
        agree(error)
        self.pieces = holdings.pieces
        told = [(p.name, p.kind, p.dtype.name, p.shape, p.region) for p in holdings.pieces]
        names = [[job.logical_name(name) for name in group] for group in job.names_by_group()]
        groups = list(zip(group_hyper(job.groups), names, strict=True))
        numbers = numbers_of(holdings.pieces)
        gathered = to_first(Gathered(told, list(holdings.notes.values()), groups, job.rank, state, numbers))
        shares: list[Any] | None = None
        if gathered is not None:
            try:
                source, tensors = build_index(job, gathered, self.path)
                shares = self._lay_out(source, gathered, tensors)
            except Exception as caught:  # noqa: BLE001
                error = caught
        agree(error)
        self.tasks, self.sealings, self.files = from_first(shares)

    def _lay_out(self, source: Checkpoint, gathered: Sequence[Gathered], tensors: dict[str, Any]) -> list[Any]:
        """The files of the target, made empty, and every rank's share of them. On rank 0."""
        self.writer = Writer(source, WriteOptions())
        self.target = self.writer.target()
        offers = offers_of(gathered)
        for name, tensor in tensors.items():  # tensors inside the extras: rank 0 has them
            shape = tuple(tensor.shape)
            flat = tensor.detach().cpu().contiguous().view(-1)
            self.pieces.append(Piece(name, "extra", shape, dtype_of(flat), Region.all_of(shape), flat))
            offers[name, "extra"] = [Offer(0, len(self.pieces) - 1, Region.all_of(shape))]
        shares = Shares.for_ranks(len(gathered))
        for number, file in enumerate(self.target.files):
            for hole in file.holes:
                atom: Atom = hole.atom
                held = offers.get((atom.name, atom.kind), [])
                shares.deal(str(atom), atom.shape, atom.dtype.itemsize, number, hole.offset, held)
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
        written: list[Written] = []
        error: BaseException | None = None
        try:
            written.extend(self._write_literals())
            for task in self.tasks:
                piece = self.pieces[task.piece]
                written.extend(write_task(self.folder / self.files[task.file], task, piece.region, piece.tensor))
        except Exception as caught:  # noqa: BLE001 - told to the other ranks, then raised
            error = caught
        agree(error, self.group)  # sealing reads what all ranks have written
        try:
            written.extend(seal(self.folder / self.files[s.file], s) for s in self.sealings)
        except Exception as caught:  # noqa: BLE001
            error = caught
        agree(error, self.group)
        everything = to_first(written, self.group)
        if everything is not None:
            try:
                self._publish([w for rank in everything for w in rank])
            except Exception as caught:  # noqa: BLE001
                error = caught
        agree(error, self.group)

    def _write_literals(self) -> list[Written]:
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
                written.append(Written(number, literal.offset, len(literal.data), digest_literal(literal.data)))
        return written

    def _publish(self, written: list[Written]) -> None:
        assert self.staging is not None
        assert self.writer is not None
        assert self.target is not None
        for each in written:
            self.staging.record([each])
        self.staging.publish(self.writer.last(self.target, self.staging.digests()), durable=self.durable)


def group_hyper(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Hyper-parameters without parameters; one-element tensors as numbers."""
    return [{str(key): _as_number(value) for key, value in group.items() if key != "params"} for group in groups]


def _as_number(value: Any) -> Any:
    if isinstance(value, (list, tuple)) and any(hasattr(item, "item") for item in value):  # betas that are tensors
        return type(value)(map(_as_number, value))
    return value.item() if hasattr(value, "item") and getattr(value, "numel", lambda: value.size)() == 1 else value


def offers_of(gathered: Sequence[Gathered]) -> dict[tuple[str, str], list[Offer]]:
    """Which ranks hold what of each atom. Ranks may have different values in a buffer: the first rank's count."""
    offers: dict[tuple[str, str], list[Offer]] = {}
    buffers = {note.name for told in gathered for note in told.notes if note.role == "buffer"}
    for rank, told in enumerate(gathered):
        for number, (name, kind, _, _, region) in enumerate(told.pieces):
            held = offers.setdefault((name, kind), [])
            if name not in buffers or all(other.region != region for other in held):
                held.append(Offer(rank, number, region))
    return offers
