"""`ucp.save`: write a folder of atoms straight from a running job, every rank writing the elements it holds.

Rank 0 assigns the writes from the summaries of all ranks; regions that several ranks hold are divided among them.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from ucp import settings
from ucp.core.box import Box, Shape, flat_index, intersect, whole
from ucp.core.checkpoint import Checkpoint
from ucp.core.region import Region
from ucp.core.target import OutputFile, Target
from ucp.engine.staging import StagingFolder, digest_range, staging_folder
from ucp.engine.worker import WrittenRange
from ucp.errors import InconsistentError, StorageError
from ucp.formats.atoms.writer import AtomsWriter
from ucp.formats.registry import WriteOptions
from ucp.formats.sharded.rule_files import load_rule_book
from ucp.read.verbatim import pieces_are_intervals
from ucp.storage.local import write_all
from ucp.storage.paths import local_path
from ucp.training.adapters import describe_job
from ucp.training.collect import LiveFragment, StateCollector, TensorParallelRules, numbers_of
from ucp.training.collectives import background_group, fail_together, gather_to_first, scatter_from_first
from ucp.training.live_job import dtype_of
from ucp.training.saved_index import RankSummary, build_index, collect_training_state, summarize_rank

if TYPE_CHECKING:
    import torch


class SaveHandle:
    """A save in progress. Call `wait` on every rank; after that the folder is complete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._work: Future[None] | None = None

    @property
    def done(self) -> bool:
        """Whether this rank has finished. (The folder appears when all ranks have.)"""
        return self._work is None or self._work.done()

    def wait(self) -> Path:
        """Wait until the folder is published; a failure is raised on every rank."""
        if self._work is not None:
            self._work.result()
        return self.path


def run_in_background(work: Callable[[], None], name: str) -> Future[None]:
    """Run `work` in a thread of its own; the future keeps its exception."""
    executor = ThreadPoolExecutor(1, name)
    future = executor.submit(work)
    executor.shutdown(wait=False)
    return future


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
        for number in {write.fragment for write in saver.writes}:
            fragment = saver.fragments[number]
            fragment.tensor = fragment.tensor.detach().cpu().clone()
        handle._work = run_in_background(saver.write, "ucp-save")
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
            collector = StateCollector(job, tp_rules)
            collector.collect()
            training_state = collect_training_state(job, client_state)
        self.fragments = collector.fragments
        ranks = gather_to_first(summarize_rank(job, collector, training_state, numbers_of(self.fragments)))
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
            assignment.add_file(number, file, candidates)
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
            for number, file in enumerate(() if self.target is None else self.target.files):
                for literal in file.literals:  # headers and JSON, which only rank 0 has
                    with _opened(self.folder / file.path) as fd:
                        write_all(fd, literal.offset, literal.data)
                    digest = xxhash.xxh3_128_hexdigest(literal.data)
                    written.append(WrittenRange(number, literal.offset, len(literal.data), digest))
            for write in self.writes:
                fragment = self.fragments[write.fragment]
                path = self.folder / self.files[write.file]
                written.extend(write_elements(path, write, fragment.region, fragment.tensor))
        with fail_together(self.group):
            written.extend(digest_written_range(self.folder / self.files[r.file], r) for r in self.digest_ranges)
        by_rank = gather_to_first(written, self.group)
        with fail_together(self.group):
            if by_rank is not None:
                assert self.staging is not None
                assert self.writer is not None
                assert self.target is not None
                writer, target = self.writer, self.target
                for ranges in by_rank:
                    for each in ranges:
                        self.staging.record([each])
                self.staging.commit(lambda digests: writer.last(target, digests), durable=self.durable)


# Which rank writes what -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WriteCandidate:
    """A fragment that could be written by its rank: number `fragment` in that rank's own list."""

    rank: int
    fragment: int
    region: Region


@dataclass(frozen=True, slots=True)
class RankWrite:
    """Write elements `[start, stop)` of one of the rank's fragments to the atom at byte `offset` of a file."""

    fragment: int
    start: int
    stop: int
    file: int
    offset: int
    shape: Shape
    digested: bool  # the elements are contiguous in the file, so their digest is computed while writing


@dataclass(frozen=True, slots=True)
class DigestRange:
    """A byte range with rows of several ranks; its digest is computed from the file when all ranks have written."""

    file: int
    offset: int
    nbytes: int


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


@dataclass(slots=True)
class WriteAssignment:
    """The writes and digest ranges of every rank, by rank."""

    writes: list[list[RankWrite]]
    digest_ranges: list[list[DigestRange]]
    _next: int = 0

    @staticmethod
    def for_ranks(count: int) -> WriteAssignment:
        return WriteAssignment([[] for _ in range(count)], [[] for _ in range(count)])

    def by_rank(self, files: list[str]) -> list[tuple[list[RankWrite], list[DigestRange], list[str]]]:
        """(writes, digest ranges, names of all files) of every rank."""
        return [(writes, ranges, files) for writes, ranges in zip(self.writes, self.digest_ranges, strict=True)]

    def add(
        self, name: str, shape: Shape, itemsize: int, file: int, offset: int, candidates: Sequence[WriteCandidate]
    ) -> None:
        """Assign the writes of one atom: owners of equal regions divide them, so that every byte is written once."""
        owners: dict[Region, list[WriteCandidate]] = {}
        for candidate in candidates:
            owners.setdefault(candidate.region, []).append(candidate)
        pieces = (piece for region in owners for piece in region.pieces())
        inside = (intersect(piece.box, whole(shape)) for piece in pieces)  # the rest is padding and is not written
        covered = sum(box.numel for box in inside if box is not None)
        if covered != prod(shape):
            raise InconsistentError(
                f"parameter {name}: the ranks hold {covered} of {prod(shape)} elements",
                hint="call save on all ranks of the job",
            )
        flat = all(pieces_are_intervals(region.pieces(), shape) for region in owners)
        for region, equal in owners.items():
            for candidate, start, stop in self._divide(region, equal, itemsize):
                write = RankWrite(candidate.fragment, start, stop, file, offset, shape, flat)
                self.writes[candidate.rank].append(write)
        if not flat:
            nbytes = prod(shape) * itemsize
            for at in range(0, nbytes, settings.COPY_TASK_BYTES):
                self._next = (self._next + 1) % len(self.digest_ranges)
                length = min(settings.COPY_TASK_BYTES, nbytes - at)
                self.digest_ranges[self._next].append(DigestRange(file, offset + at, length))

    def add_file(self, number: int, file: OutputFile, candidates: Candidates) -> None:
        """Assign the writes of all atoms of one file, `number` in the target."""
        for item in file.items:
            atom = item.atom
            known = candidates.get((atom.name, atom.kind), [])
            self.add(str(atom), atom.shape, atom.dtype.itemsize, number, item.offset, known)

    def _divide(
        self, region: Region, equal: Sequence[WriteCandidate], itemsize: int
    ) -> Iterator[tuple[WriteCandidate, int, int]]:
        """Equal intervals for all owners, or everything for one of them, in turn, if the region is small."""
        if region.numel * itemsize < settings.SLAB_BYTES:
            self._next += 1
            yield equal[self._next % len(equal)], 0, region.numel
            return
        for i, candidate in enumerate(equal):
            start, stop = (region.numel * edge // len(equal) for edge in (i, i + 1))
            if start < stop:
                yield candidate, start, stop


def write_elements(path: Path, write: RankWrite, region: Region, tensor: torch.Tensor) -> list[WrittenRange]:
    """Write elements of `tensor` (flat, in the order of `region`); returns the ranges digested while writing."""
    written: list[WrittenRange] = []
    itemsize = tensor.element_size()
    part = region.cut(write.start, write.stop)
    data = tensor.narrow(0, write.start, part.numel)
    with _opened(path) as fd:
        for first, start, length in _runs(part, write.shape):
            at = write.offset + first * itemsize
            digest = _write(fd, at, data.narrow(0, start, length), digested=write.digested)
            if write.digested:
                written.append(WrittenRange(write.file, at, length * itemsize, digest))
    return written


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """An existing file, open for writing; errors name it."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error


def _runs(region: Region, shape: Shape) -> Iterator[tuple[int, int, int]]:
    """(position in the atom, position in the region, length) of every run that is contiguous in both."""
    last: tuple[int, int, int] | None = None
    for piece in region.pieces():
        real = intersect(piece.box, whole(shape))
        if real is None:
            continue
        for box in _contiguous(real, shape):
            inner = tuple(a - b for a, b in zip(box.start, piece.box.start, strict=True))
            at, start = flat_index(box.start, shape), piece.offset + flat_index(inner, piece.box.shape)
            if last is not None and (last[0] + last[2], last[1] + last[2]) == (at, start):
                last = (last[0], last[1], last[2] + box.numel)
                continue
            if last is not None:
                yield last
            last = (at, start, box.numel)
    if last is not None:
        yield last


def _contiguous(box: Box, shape: Shape) -> Iterator[Box]:
    """Split `box` along leading dimensions into blocks that are contiguous in a tensor of `shape`."""
    lead = next((dim for dim in reversed(range(box.ndim)) if box.shape[dim] != shape[dim]), 0)
    for index in product(*map(range, box.start[:lead], box.stop[:lead])):
        yield Box((*index, *box.start[lead:]), (*(1 for _ in index), *box.shape[lead:]))


def _write(fd: int, offset: int, flat: torch.Tensor, *, digested: bool) -> str:
    """Write a flat tensor at a byte offset through a bounded buffer; returns its digest if `digested`."""
    import torch

    digest = xxhash.xxh3_128()
    step = max(1, (settings.SLAB_BYTES if flat.device.type == "cpu" else settings.BOUNCE_BYTES) // flat.element_size())
    for start in range(0, flat.numel(), step):
        block: Any = flat.narrow(0, start, min(step, flat.numel() - start)).cpu().view(torch.uint8).numpy().data
        if digested:
            digest.update(block)
        write_all(fd, offset, block)
        offset += len(block)
    return digest.hexdigest()


def digest_written_range(path: Path, wanted: DigestRange) -> WrittenRange:
    """Compute the digest of a range that several ranks have written."""
    digest = digest_range(path, wanted.offset, wanted.nbytes, xxhash.xxh3_128())
    if digest is None:
        raise StorageError(f"{path}: ends before byte {wanted.offset + wanted.nbytes}")
    return WrittenRange(wanted.file, wanted.offset, wanted.nbytes, digest)
