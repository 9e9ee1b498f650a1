"""`ucp.save`: write a folder of atoms straight from a running job, every rank writing the elements it holds."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ucp.core.checkpoint import Checkpoint
from ucp.core.region import Region
from ucp.core.target import OutputFile, Target
from ucp.engine.staging import StagingFolder, staging_folder
from ucp.engine.worker import WrittenRange
from ucp.errors import StorageError
from ucp.formats.atoms.writer import AtomsWriter
from ucp.formats.registry import WriteOptions
from ucp.formats.sharded.rule_files import load_rule_book
from ucp.storage.local import write_all
from ucp.storage.paths import local_path
from ucp.training.adapters import describe_job
from ucp.training.collect import LiveFragment, StateCollector, TensorParallelRules, numbers_of
from ucp.training.collectives import background_group, fail_together, gather_to_first, scatter_from_first
from ucp.training.live_job import dtype_of
from ucp.training.saved_index import RankSummary, build_index, collect_training_state, summarize_rank
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
    """A save in progress. Call `wait` on every rank; after that the folder is complete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether this rank has finished. (The folder appears when all ranks have.)"""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until the folder is published; a failure is raised on every rank."""
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


_running: list[SaveHandle] = []  # at most one: the collectives of two saves would mix


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
    """Save a running job as a folder of atoms. Every rank must call it, between two steps, with the same new `path`.

    `model` is a DeepSpeed engine, or a torch module (plain, DDP, FSDP2) with its `optimizer`. With `asynchronous`, the
    state is copied to the CPU and a thread writes it while training continues; call `wait` of the returned handle.
    """
    for earlier in _running:
        earlier.wait()
    _running.clear()
    saver = RankSaver(local_path(path, "jobs save"))
    saver.prepare(model, optimizer, dict(client_state or {}), rules, preset)
    handle = SaveHandle(saver.path)
    if asynchronous:
        saver.group = background_group()
        saver.copy_to_cpu()
        handle._start(saver.write)
        _running.append(handle)
    else:
        saver.write()
    return handle


@dataclass(slots=True)
class RankSaver:
    """One rank's part of a save."""

    path: Path
    fragments: list[LiveFragment] = field(default_factory=list)
    writes: list[RankWrite] = field(default_factory=list)
    digest_ranges: list[DigestRange] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    staging: StagingFolder | None = None  # on rank 0
    writer: AtomsWriter | None = None  # on rank 0
    target: Target | None = None  # on rank 0
    group: Any = None  # process group of the collectives in `write`
    durable: bool = False  # sync files to disk before the folder appears

    @property
    def folder(self) -> Path:
        """The staging folder that all ranks write into."""
        return staging_folder(self.path)

    def prepare(
        self, model: Any, optimizer: Any, client_state: dict[str, Any], rules: str | Path | None, preset: str | None
    ) -> None:
        """Collect the job's state, report it to rank 0, receive this rank's writes. Collective.

        Afterwards the files exist, without data.
        """
        with fail_together():
            book = load_rule_book(rules, preset)
            job = describe_job(model, optimizer)
            tp_rules = TensorParallelRules(job, book, client_state)
        tp_rules.agree_on_defaults()
        with fail_together():
            state = StateCollector(job, tp_rules).collect()
            training_state = collect_training_state(job, client_state)
        self.fragments = state.fragments
        summary = summarize_rank(job, state, training_state, numbers_of(state.fragments))
        ranks = gather_to_first(summary)
        assignments: list[Any] | None = None
        with fail_together():
            if ranks is not None:
                source, tensors = build_index(job, ranks, self.path)
                assignments = self._assign(source, ranks, tensors)
        self.writes, self.digest_ranges, self.files = scatter_from_first(assignments)

    def _assign(self, source: Checkpoint, ranks: Sequence[RankSummary], tensors: dict[str, Any]) -> list[Any]:
        """Create the target's files, and return every rank's writes, digest ranges and file names. On rank 0."""
        self.writer = AtomsWriter(source, WriteOptions())
        self.target = self.writer.target()
        candidates = write_candidates(ranks)
        for name, candidate in self.add_extra_tensors(tensors).items():
            candidates[name, "extra"] = [candidate]
        assignment = WriteAssignment.for_ranks(len(ranks))
        for number, file in enumerate(self.target.files):
            add_file(assignment, number, file, candidates)
        staging = StagingFolder(self.path, self.target, uuid.uuid4().hex)
        staging.begin(resume=False, restart=True)
        self.staging = staging
        return assignment.by_rank([file.path for file in self.target.files])

    def add_extra_tensors(self, tensors: dict[str, Any]) -> dict[str, WriteCandidate]:
        """Make fragments of rank 0 from the tensors inside the extras."""
        candidates = {}
        for name, tensor in tensors.items():
            shape = tuple(tensor.shape)
            flat = tensor.detach().cpu().contiguous().view(-1)
            self.fragments.append(LiveFragment(name, "extra", shape, dtype_of(flat), Region.all_of(shape), flat))
            candidates[name] = WriteCandidate(0, len(self.fragments) - 1, Region.all_of(shape))
        return candidates

    def copy_to_cpu(self) -> None:
        """Copy everything that this rank will write, so that training may continue."""
        for number in {write.fragment for write in self.writes}:
            fragment = self.fragments[number]
            fragment.tensor = fragment.tensor.detach().cpu().clone()

    def write(self) -> None:
        """Write this rank's elements; rank 0 publishes the folder when all ranks are done. Collective, in `group`."""
        try:
            self._write()
        except BaseException:
            if self.staging is not None:
                self.staging.discard()
            raise

    def _write(self) -> None:
        written: list[WrittenRange] = []
        with fail_together(self.group):  # the digests below read what all ranks have written
            written.extend(self._write_literals())
            for write in self.writes:
                fragment = self.fragments[write.fragment]
                path = self.folder / self.files[write.file]
                written.extend(write_elements(path, write, fragment.region, fragment.tensor))
        with fail_together(self.group):
            written.extend(digest_written_range(self.folder / self.files[r.file], r) for r in self.digest_ranges)
        by_rank = gather_to_first(written, self.group)
        with fail_together(self.group):
            if by_rank is not None:
                self._publish([each for ranges in by_rank for each in ranges])

    def _write_literals(self) -> list[WrittenRange]:
        """Write headers and JSON, which only rank 0 has."""
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
        writer, target = self.writer, self.target
        for each in written:
            self.staging.record([each])
        self.staging.commit(lambda digests: writer.last(target, digests), durable=self.durable)


Candidates = dict[tuple[str, str], list[WriteCandidate]]  # (name, kind) of an atom → fragments that cover it


def write_candidates(ranks: Sequence[RankSummary]) -> Candidates:
    """The fragments of all ranks by atom. If ranks have different values in a buffer, those of the first rank count."""
    candidates: Candidates = {}
    buffers = {parameter.name for rank in ranks for parameter in rank.parameters if parameter.role == "buffer"}
    for number, rank in enumerate(ranks):
        for fragment, (name, kind, _, _, region) in enumerate(rank.fragments):
            known = candidates.setdefault((name, kind), [])
            if name not in buffers or all(other.region != region for other in known):
                known.append(WriteCandidate(number, fragment, region))
    return candidates


def add_file(assignment: WriteAssignment, number: int, file: OutputFile, candidates: Candidates) -> None:
    """Assign the writes of all atoms of one file, `number` in the target."""
    for item in file.items:
        atom = item.atom
        known = candidates.get((atom.name, atom.kind), [])
        assignment.add(str(atom), atom.shape, atom.dtype.itemsize, number, item.offset, known)
