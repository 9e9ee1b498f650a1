"""Stored forms of one tensor that must agree: a master and its weight, a state and its replicas.

Two checks read them. `replicas`: every copy of a state (tensor-parallel, tied, pipeline) equals the first, bit for bit.
`master-matches-weight`: the master, rounded to the weight's dtype, is the saved weight. The latter alone exposes
swapped ranks, files of different steps, and layouts that were read wrong.

If one layout wrote both forms, they are split by the same boxes: each fragment of one has the same elements, in the
same order, as fragments of the other. Then both are flat, and the same interval of each is contiguous in a file, so
they are compared as they are stored, without geometry. Otherwise slabs of both are assembled and compared. Either way
each byte is read once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import numpy as np

from ucp import settings
from ucp.checks.deep_state import DeepState, ReadRecorder
from ucp.checks.raw_values import (
    ElementMismatches,
    ReadBlock,
    RoundingComparison,
    aligned,
    all_valid,
    bits_of,
    block_bytes,
    can_scan,
    unequal,
)
from ucp.checks.spans import StateBytes
from ucp.checks.tasks import CheckContext, CheckTask
from ucp.core.box import Box, index_at, intersect, slabs
from ucp.core.checkpoint import MASTER, STEP, WEIGHT, Atom, Fragment, Parameter, Role
from ucp.core.findings import Finding, Severity, describe_fragment, location_of
from ucp.engine.pool import Meter
from ucp.formats.registry import checks_of_format
from ucp.read.atom_reader import AtomReader
from ucp.read.casting import RawArray, can_cast, cast, raw_dtype
from ucp.read.verbatim import can_flatten
from ucp.storage.local import SourceFiles

Boxes = tuple[Box, ...]


def run_check(context: CheckContext) -> Iterator[Finding | CheckTask]:
    """Tasks that compare aligned forms, tasks that have to assemble slabs, and a last one that reports mismatches."""
    aligned_forms: list[AlignedForms] = []
    for parameter in context.checkpoint.parameters.values():
        if all(map(context.is_sound, parameter.atoms.values())):
            for item in _comparisons(parameter):
                if isinstance(item, AlignedForms):
                    aligned_forms.append(item)
                    continue
                nbytes = sum(f.nbytes for atom in item for cover in (atom.fragments, *atom.replicas) for f in cover)
                if len(item) == 2:
                    compare = partial(_compare_master, context.files, *item)
                    yield CheckTask("master-matches-weight", nbytes, compare, parameter.name, MASTER)
                else:
                    compare = partial(_compare_replicas, context.files, item[0], _severity(parameter.role))
                    yield CheckTask("replicas", nbytes, compare, parameter.name, item[0].kind)
    # The digests of atom files and stores are sequential: two threads must not read parts of the same file.
    whole = checks_of_format(context.checkpoint.format).reads_in_order(context.checkpoint)
    for forms in aligned_forms:
        context.shared.extend(forms.mismatches)
        if context.deep is not None:
            context.deep.already_read.update((cover.atom.name, cover.atom.kind) for cover in forms.covers)
        for nbytes, intervals in _split_work(forms, whole):
            run = partial(_compare_aligned, context.files, context.deep, forms, intervals)
            yield CheckTask(forms.check, nbytes, run, forms.parameter.name, forms.mains[-1].atom.kind)
    if aligned_forms:
        yield CheckTask("replicas", 0, partial(_report_mismatches, aligned_forms), phase=1)


# Which atoms are compared, and whether they are aligned.


@dataclass(frozen=True, slots=True)
class ElementRun:
    """Elements `[start, stop)` of the flat space of some boxes, contiguous in the file of a fragment."""

    start: int
    stop: int
    fragment: Fragment

    def byte(self, element: int) -> int:
        """Offset of an element in the file."""
        return self.fragment.offset + (element - self.start) * self.fragment.dtype.itemsize


@dataclass(slots=True)
class CoverRuns:
    """One cover of an atom (0: its fragments, from 1: its replicas) as sorted runs, by the boxes they are in."""

    atom: Atom
    cover: int
    runs: dict[Boxes, list[ElementRun]] = field(default_factory=dict)

    def elements(self) -> dict[Boxes, list[tuple[int, int]]]:
        """Intervals of the flat space of boxes, adjacent runs joined."""
        return {boxes: _joined(runs) for boxes, runs in self.runs.items()}


@dataclass(slots=True)
class AlignedForms:
    """Covers that are read together. `mains` is one state, or a weight and its master.

    `replicas` are covers to compare with one of the mains, given by number.
    """

    parameter: Parameter
    mains: list[CoverRuns]
    replicas: list[tuple[int, CoverRuns, ElementMismatches]] = field(default_factory=list)
    rounding: ElementMismatches | None = None  # of a master and its weight

    @property
    def covers(self) -> list[CoverRuns]:
        return [*self.mains, *(cover for _, cover, _ in self.replicas)]

    @property
    def mismatches(self) -> list[ElementMismatches]:
        return [*([] if self.rounding is None else [self.rounding]), *(found for _, _, found in self.replicas)]

    @property
    def check(self) -> str:
        return "master-matches-weight" if self.rounding is not None else "replicas"


def _comparisons(parameter: Parameter) -> Iterator[AlignedForms | tuple[Atom, ...]]:
    """What to compare of a parameter: aligned forms, or atoms that are not aligned (a weight and its master, or one
    atom with its replicas)."""
    compared: set[str] = set()
    for weight, master in _master_pairs(parameter):
        one, other = cover_runs(weight, 0), cover_runs(master, 0)
        if one is None or other is None or one.elements() != other.elements():
            yield weight, master
            continue
        forms = AlignedForms(parameter, [one, other], rounding=ElementMismatches(weight.shape))
        for number, atom in enumerate((parameter.atoms[weight.kind], parameter.atoms[master.kind])):
            if _must_agree(atom) and _add_replicas(forms, number, atom):
                compared.add(atom.kind)
        yield forms
    for atom in parameter.atoms.values():
        if _must_agree(atom) and atom.kind not in compared:
            cover = cover_runs(atom, 0)
            forms = AlignedForms(parameter, [] if cover is None else [cover])
            yield forms if cover is not None and _add_replicas(forms, 0, atom) else (atom,)


def _master_pairs(parameter: Parameter) -> Iterator[tuple[Atom, Atom]]:
    """Weights with their masters, as stored; if ranks are averaged, the pair of each rank."""
    weight, master = parameter.atoms.get(WEIGHT), parameter.atoms.get(MASTER)
    if weight is None or master is None or weight.shape != master.shape or weight.dtype.family != "float":
        return
    if weight.dtype.itemsize > master.dtype.itemsize or not can_cast(master.dtype, weight.dtype):
        return
    yield _as_stored(weight, 0), _as_stored(master, 0)
    if weight.combine == "average" and len(weight.replicas) == len(master.replicas):
        for number in range(1, 1 + len(weight.replicas)):
            yield _as_stored(weight, number), _as_stored(master, number)


def _as_stored(atom: Atom, cover: int) -> Atom:
    """One cover of an atom without average and scale, which would round a second time."""
    fragments = atom.fragments if cover == 0 else atom.replicas[cover - 1]
    if any(fragment.scale != 1.0 for fragment in fragments):
        fragments = tuple(fragment._replace(scale=1.0) for fragment in fragments)
    return replace(atom, fragments=fragments, replicas=(), combine="copy")


def _must_agree(atom: Atom) -> bool:
    """Whether replicas must be equal. Steps have a check of their own; averaged parameters differ by design."""
    return bool(atom.replicas) and atom.combine == "copy" and atom.kind != STEP


def _add_replicas(forms: AlignedForms, number: int, atom: Atom) -> bool:
    """Add the replicas of the atom of main `number`, if all of them are aligned with it."""
    covers = [cover_runs(atom, cover) for cover in range(1, 1 + len(atom.replicas))]
    within = [cover for cover in covers if cover is not None and _is_within(cover, forms.mains[number])]
    if len(within) < len(covers):
        return False
    forms.replicas += [(number, cover, ElementMismatches(atom.shape)) for cover in within]
    return True


def cover_runs(atom: Atom, cover: int) -> CoverRuns | None:
    """A cover as runs; None if its bytes are not just the elements of the atom, in order and once each."""
    result = CoverRuns(atom, cover)
    for fragment in atom.fragments if cover == 0 else atom.replicas[cover - 1]:
        region = fragment.region
        if fragment.strides is not None or fragment.inline is not None or fragment.scale != 1.0:
            return None
        if fragment.dtype != atom.dtype:
            return None
        if region.numel:
            result.runs.setdefault(region.boxes, []).append(ElementRun(region.start, region.stop, fragment))
    for runs in result.runs.values():
        runs.sort(key=lambda run: run.start)
        if any(one.stop > other.start for one, other in pairwise(runs)):
            return None
    return result


def _is_within(replica: CoverRuns, main: CoverRuns) -> bool:
    """Whether every element of a replica, which may be partial, is in the same boxes of the main cover."""
    elements = main.elements()
    for boxes, intervals in replica.elements().items():
        joined = elements.get(boxes, [])
        starts = [start for start, _ in joined]
        for start, stop in intervals:
            number = bisect_right(starts, start) - 1
            if number < 0 or stop > joined[number][1]:
                return False
    return True


def _joined(runs: Sequence[ElementRun]) -> list[tuple[int, int]]:
    """Intervals of sorted runs, adjacent ones joined."""
    joined: list[tuple[int, int]] = []
    for run in runs:
        if joined and joined[-1][1] == run.start:
            joined[-1] = (joined[-1][0], run.stop)
        else:
            joined.append((run.start, run.stop))
    return joined


# Aligned forms: compared as they are stored.


def _split_work(forms: AlignedForms, whole: bool) -> Iterator[tuple[int, list[tuple[Boxes, int, int]]]]:
    """Bytes and intervals of boxes for each task: about `COPY_TASK_BYTES` each, or everything in one task."""
    intervals: list[tuple[Boxes, int, int]] = []
    nbytes = 0
    for boxes, runs in forms.mains[0].runs.items():
        stored = [(run, cover.atom.dtype.itemsize) for cover in forms.covers for run in cover.runs.get(boxes, ())]
        first, last = runs[0].start, runs[-1].stop
        total = sum((run.stop - run.start) * size for run, size in stored)
        count = 1 if whole else -(-total // settings.COPY_TASK_BYTES)
        step = -(-(last - first) // count)
        for start in range(first, last, step):
            intervals.append((boxes, start, min(start + step, last)))
            nbytes += sum(max(0, min(run.stop, start + step) - max(run.start, start)) * size for run, size in stored)
            if nbytes >= settings.COPY_TASK_BYTES and not whole:
                yield nbytes, intervals
                intervals, nbytes = [], 0
    if intervals:
        yield nbytes, intervals


def _compare_aligned(
    files: SourceFiles,
    deep: DeepState | None,
    forms: AlignedForms,
    intervals: Sequence[tuple[Boxes, int, int]],
    meter: Meter,
) -> Iterator[Finding]:
    """Read all covers over these intervals and compare. The result is in the mismatches of `forms`."""
    limit = max(1, block_bytes() // max(cover.atom.dtype.itemsize for cover in forms.covers))
    limit = min(limit, max(stop - start for _, start, stop in intervals))
    recorder = None if deep is None else ReadRecorder(deep.checksums)

    def read(cover: CoverRuns, run: ElementRun, start: int, stop: int, block: ReadBlock) -> tuple[RawArray, bool]:
        """Raw elements `[start, stop)`; whether all are valid (True if not scanned). A deep pass records them."""
        fragment = run.fragment
        dtype = fragment.dtype
        at = run.byte(start)
        data = block.for_range(at, (stop - start) * dtype.itemsize)
        files.read_into(fragment.file, at, data.data)
        meter.advance(data.size)
        raw = aligned(data, dtype.itemsize).view(raw_dtype(dtype))
        if deep is None or recorder is None:
            return raw, True
        recorder.record(fragment.file, at, data.data)
        return raw, deep.values.scan(fragment.file, StateBytes.of(fragment, cover.atom, forms.parameter), raw, at)

    sizes = [limit * cover.atom.dtype.itemsize for cover in forms.mains]
    main_blocks = [ReadBlock(number, size) for number, size in enumerate(sizes)]
    replica_blocks = (
        [ReadBlock(number, size) for number, size in enumerate(sizes, len(sizes))] if forms.replicas else []
    )
    rounding = (
        RoundingComparison(forms.mains[1].atom.dtype, forms.mains[0].atom.dtype, limit) if forms.rounding else None
    )
    for boxes, first, last in intervals:
        runs_of_covers = [cover.runs.get(boxes, ()) for cover in forms.covers]
        for start, stop, runs in common_intervals(runs_of_covers, (first, last), limit):
            mains: list[RawArray] = []
            finite = True
            for cover, run, block in zip(forms.mains, runs, main_blocks, strict=False):
                assert run is not None
                main, finite = read(cover, run, start, stop, block)
                mains.append(main)
            if rounding is not None and forms.rounding is not None:
                if deep is None:
                    dtype = forms.mains[1].atom.dtype
                    finite = can_scan(dtype) and all_valid(bits_of(mains[1], dtype), dtype, False)
                positions = rounding.mismatches(mains[1], mains[0], finite)
                if positions.size:
                    forms.rounding.add(boxes, positions + start)
            for (number, cover, mismatches), run in zip(forms.replicas, runs[len(mains) :], strict=True):
                if run is not None:
                    replica, _ = read(cover, run, start, stop, replica_blocks[number])
                    positions = unequal(mains[number], replica)
                    if positions.size:
                        mismatches.add(boxes, positions + start)
    if recorder is not None:
        recorder.close()
    return iter(())


def common_intervals(
    covers: Sequence[Sequence[ElementRun]], within: tuple[int, int], limit: int
) -> Iterator[tuple[int, int, list[ElementRun | None]]]:
    """Split the runs of the first cover into intervals of at most `limit` elements that no run of any cover splits.

    Yields start, stop, and the run of each cover that has the interval; None for covers that do not. `within` limits
    the elements.
    """
    at = [0] * len(covers)
    for first in covers[0]:
        start, end = max(first.start, within[0]), min(first.stop, within[1])
        while start < end:
            stop = min(end, start + limit)
            found: list[ElementRun | None] = []
            for number, runs in enumerate(covers):
                while at[number] < len(runs) and runs[at[number]].stop <= start:
                    at[number] += 1
                run = runs[at[number]] if at[number] < len(runs) else None
                if run is not None and run.start > start:
                    stop = min(stop, run.start)
                    run = None
                elif run is not None:
                    stop = min(stop, run.stop)
                found.append(run)
            yield start, stop, found
            start = stop


def _report_mismatches(aligned_forms: Sequence[AlignedForms], meter: Meter) -> Iterator[Finding]:
    del meter
    for forms in aligned_forms:
        if forms.rounding is not None and forms.rounding.count:
            weight, master = forms.mains
            yield _master_finding(weight.atom, master.atom, forms.rounding)
        for number, cover, mismatches in forms.replicas:
            if mismatches.count:
                replica = cover.atom.replicas[cover.cover - 1]
                yield _replica_finding(forms.mains[number].atom, replica, mismatches, _severity(forms.parameter.role))


# Forms that are not aligned: compared by slabs.


def _compare_master(files: SourceFiles, weight: Atom, master: Atom, meter: Meter) -> Iterator[Finding]:
    flat = can_flatten(weight) and can_flatten(master)
    weights, masters = AtomReader(files, weight, flat=flat), AtomReader(files, master, flat=flat)
    mismatches = ElementMismatches(weight.shape)
    limit = max(1, settings.SLAB_BYTES // master.dtype.itemsize)
    weight_block = np.empty(min(limit, weight.numel), raw_dtype(weight.dtype))
    master_block = np.empty(min(limit, weight.numel), raw_dtype(master.dtype))
    for slab in slabs(weights.shape, limit):
        saved = weight_block[: slab.numel].reshape(slab.shape)
        precise = master_block[: slab.numel].reshape(slab.shape)
        weights.read(slab, saved)
        masters.read(slab, precise)
        meter.advance(saved.nbytes + precise.nbytes)
        mismatches.compare(slab, saved, cast(precise, master.dtype, weight.dtype), weights.shape, weight.dtype)
    if mismatches.count:
        yield _master_finding(weight, master, mismatches)


def _compare_replicas(files: SourceFiles, atom: Atom, severity: Severity, meter: Meter) -> Iterator[Finding]:
    replicas = [replace(atom, fragments=cover, replicas=()) for cover in atom.replicas]
    flat = can_flatten(atom) and all(map(can_flatten, replicas))
    reader = AtomReader(files, atom, flat=flat)
    others = [AtomReader(files, replica, flat=flat) for replica in replicas]
    found = [ElementMismatches(atom.shape) for _ in replicas]
    limit = max(1, settings.SLAB_BYTES // atom.dtype.itemsize)
    our_block = np.empty(min(limit, atom.numel), raw_dtype(atom.dtype))
    their_block = np.empty_like(our_block)
    for slab in slabs(reader.shape, limit):
        ours = our_block[: slab.numel].reshape(slab.shape)
        theirs = their_block[: slab.numel].reshape(slab.shape)
        reader.read(slab, ours)
        meter.advance(ours.nbytes)
        for other, mismatches in zip(others, found, strict=True):
            np.copyto(theirs, ours)  # elements that a partial replica does not have cannot differ
            filled = other.overlay(slab, theirs)
            meter.advance(filled * atom.dtype.itemsize)
            mismatches.compare(slab, ours, theirs, reader.shape)
    for cover, mismatches in zip(atom.replicas, found, strict=True):
        if mismatches.count:
            yield _replica_finding(atom, cover, mismatches, severity)


# Findings


def _severity(role: Role) -> Severity:
    """Buffers of ranks may differ: nothing synchronizes them, and the first one is used."""
    return "warning" if role == "buffer" else "error"


def _master_finding(weight: Atom, master: Atom, mismatches: ElementMismatches) -> Finding:
    assert mismatches.first is not None
    in_weight = _fragment_at(weight, weight.fragments, mismatches.first)
    in_master = _fragment_at(master, master.fragments, mismatches.first)
    return Finding(
        "master-matches-weight",
        "error",
        f"parameter {weight.name}: {mismatches.count} of {weight.numel} elements of the {master.dtype} master on"
        f" {describe_fragment(in_master)} do not round to the {weight.dtype} weight on {describe_fragment(in_weight)},"
        f" the first at {mismatches.first_index}",
        *location_of(in_master, master),
        hint="files of different steps or swapped ranks are mixed, or the weights were changed after the save",
    )


def _replica_finding(
    atom: Atom, cover: Sequence[Fragment], mismatches: ElementMismatches, severity: Severity
) -> Finding:
    assert mismatches.first is not None
    one = _fragment_at(atom, atom.fragments, mismatches.first)
    other = _fragment_at(atom, cover, mismatches.first)
    has_range = other.inline is None and other.strides is None
    return Finding(
        "replicas",
        severity,
        f"parameter {atom.name}, {atom.kind}: {mismatches.count} of {atom.numel} elements differ between"
        f" {describe_fragment(one)} and {describe_fragment(other)}, the first at {mismatches.first_index}",
        *location_of(other, atom),
        (other.offset, other.offset + other.nbytes) if has_range else None,
        hint="copies drifted apart in training, or one file is from another save; `ucp convert` takes the first",
    )


def _fragment_at(atom: Atom, cover: Sequence[Fragment], element: int) -> Fragment:
    """The fragment of a cover that contains the element at this row-major position."""
    wanted = Box(index_at(element, atom.shape), (1,) * len(atom.shape))
    for fragment in cover:
        if any(intersect(piece.box, wanted) is not None for piece in fragment.region.pieces()):
            return fragment
    raise AssertionError(f"{atom}: no fragment contains element {element}")
