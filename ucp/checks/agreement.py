"""Forms of one tensor that must agree: a master and its weight, a state and its copies. Each byte is read once.

Where the forms are cut alike, which is so wherever one layout wrote them, they are read side by side as they lie in
their files (see lanes). Where not, slabs of the whole are put together and compared.

Lanes: several stored forms of one tensor, read side by side, each byte once.

A master and its weight, or a state and its copies, are cut by the same boxes wherever one layout wrote them: what one
rank holds of one is, element by element, what a rank holds of the other. Then no geometry is needed to compare them:
both are flat, and the same interval of each is contiguous in a file.

The master rounded to the weight's dtype is the saved weight, bit for bit.

This one check exposes swapped ranks, files of different steps and layouts that were read wrong.

Replicas: every copy of a state (tensor-parallel, tied, pipeline) equals the one that is taken, bit for bit.
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
from ucp.checks.findings import Finding, Severity, place
from ucp.checks.raw_values import ElementMismatches, RoundingComparison, all_valid, bits_of, scannable, unequal
from ucp.checks.read_blocks import ReadBlock, aligned, block_bytes
from ucp.checks.spans import state_bytes
from ucp.checks.tasks import CheckContext, CheckTask, ReadMeter
from ucp.core.box import Box, slabs
from ucp.core.checkpoint import MASTER, STEP, WEIGHT, Atom, Fragment, Parameter, Role
from ucp.read.atom_reader import AtomReader
from ucp.read.casting import RawArray, can_cast, cast, raw_dtype
from ucp.read.verbatim import can_flatten
from ucp.storage.local import SourceFiles


@dataclass(slots=True)
class AlignedForms:
    """Lanes that are read side by side. `mains` are one state, or a weight and its master; `copies` say of which."""

    parameter: Parameter
    mains: list[CoverRuns]
    copies: list[tuple[int, CoverRuns, ElementMismatches]] = field(default_factory=list)
    rounding: ElementMismatches | None = None

    @property
    def lanes(self) -> list[CoverRuns]:
        return [*self.mains, *(lane for _, lane, _ in self.copies)]

    @property
    def differences(self) -> list[ElementMismatches]:
        return [*([] if self.rounding is None else [self.rounding]), *(found for _, _, found in self.copies)]

    @property
    def check(self) -> str:
        return "master-matches-weight" if self.rounding is not None else "replicas"


def look(context: CheckContext) -> Iterator[Finding | CheckTask]:
    """The tasks that read side by side, those that must put slabs together, and last what it all comes to."""
    bundles: list[AlignedForms] = []
    for parameter in context.checkpoint.parameters.values():
        if all(map(context.is_sound, parameter.atoms.values())):
            found = list(_bundles(parameter))
            bundles += [item for item in found if isinstance(item, AlignedForms)]
            for atoms in (item for item in found if not isinstance(item, AlignedForms)):
                yield from _slow(context, parameter, atoms)
    # The digests of atoms and stores go front to back: their files are not read by two threads at once.
    whole = context.checkpoint.format in ("atoms", "store") and not context.checkpoint.details.get("virtual")
    for bundle in bundles:
        context.shared.extend(bundle.differences)
        if context.deep is not None:
            context.deep.elsewhere.update((lane.atom.name, lane.atom.kind) for lane in bundle.lanes)
        for nbytes, spaces in _portions(bundle, whole):
            run = partial(_walk, context.files, context.deep, bundle, spaces)
            yield CheckTask(bundle.check, nbytes, run, bundle.parameter.name, bundle.mains[-1].atom.kind)
    if bundles:
        yield CheckTask("replicas", 0, partial(_conclude, bundles), turn=1)


def _bundles(parameter: Parameter) -> Iterator[AlignedForms | tuple[Atom, ...]]:
    """What has to be compared of a parameter: as bundles, or as atoms (two: a master with its weight) where it is not
    cut alike."""
    pairs = list(master_pairs(parameter))
    paired: set[str] = set()
    for weight, master in pairs:
        lanes = cover_runs(weight, 0), cover_runs(master, 0)
        if lanes[0] is None or lanes[1] is None or not fits(lanes[0], lanes[1], partly=False):
            yield weight, master
            continue
        bundle = AlignedForms(parameter, [lanes[0], lanes[1]], rounding=ElementMismatches(weight.shape))
        for number, atom in enumerate((parameter.atoms[weight.kind], parameter.atoms[master.kind])):
            if _is_copied(atom) and _take_copies(bundle, number, atom):
                paired.add(atom.kind)
        yield bundle
    for atom in parameter.atoms.values():
        if _is_copied(atom) and atom.kind not in paired:
            lane = cover_runs(atom, 0)
            bundle = AlignedForms(parameter, [] if lane is None else [lane])
            yield bundle if lane is not None and _take_copies(bundle, 0, atom) else (atom,)


def _is_copied(atom: Atom) -> bool:
    """Steps have a check of their own; averaged parameters differ by design."""
    return bool(atom.replicas) and atom.combine == "copy" and atom.kind != STEP


def _take_copies(bundle: AlignedForms, number: int, atom: Atom) -> bool:
    """Add the copies of a main lane's atom to the bundle, if all of them are cut as it is."""
    copies = [cover_runs(atom, cover) for cover in range(1, 1 + len(atom.replicas))]
    taken = [lane for lane in copies if lane is not None and fits(bundle.mains[number], lane, partly=True)]
    if len(taken) == len(copies):
        bundle.copies += [(number, lane, ElementMismatches(atom.shape)) for lane in taken]
    return len(taken) == len(copies)


def _slow(context: CheckContext, parameter: Parameter, atoms: tuple[Atom, ...]) -> Iterator[CheckTask]:
    nbytes = sum(f.nbytes for atom in atoms for cover in (atom.fragments, *atom.replicas) for f in cover)
    if len(atoms) == 2:
        run = partial(compare_master, context.files, *atoms)
        yield CheckTask("master-matches-weight", nbytes, run, parameter.name, MASTER)
    else:
        run = partial(compare_replicas, context.files, atoms[0], _severity(parameter.role))
        yield CheckTask("replicas", nbytes, run, parameter.name, atoms[0].kind)


def _severity(role: Role) -> Severity:
    """Nothing keeps buffers equal over ranks: each may count for itself, and the first one's is taken."""
    return "warning" if role == "buffer" else "error"


def _portions(bundle: AlignedForms, whole: bool) -> Iterator[tuple[int, list[tuple[Boxes, int, int]]]]:
    """Bytes and intervals of spaces for each task: about a part's worth, or all of it."""
    portion: list[tuple[Boxes, int, int]] = []
    nbytes = 0
    for boxes, runs in bundle.mains[0].spaces.items():
        counts = [(lane.spaces.get(boxes, ()), lane.atom.dtype.itemsize) for lane in bundle.lanes]
        first, last = runs[0].start, runs[-1].stop
        total = sum((run.stop - run.start) * size for held, size in counts for run in held)
        cuts = 1 if whole else -(-total // settings.COPY_TASK_BYTES)
        step = -(-(last - first) // cuts)
        for start in range(first, last, step):
            portion.append((boxes, start, min(start + step, last)))
            nbytes += sum(
                max(0, min(run.stop, start + step) - max(run.start, start)) * size
                for held, size in counts
                for run in held
            )
            if nbytes >= settings.COPY_TASK_BYTES and not whole:
                yield nbytes, portion
                portion, nbytes = [], 0
    if portion:
        yield nbytes, portion


def _walk(
    files: SourceFiles,
    deep: DeepState | None,
    bundle: AlignedForms,
    spaces: Sequence[tuple[Boxes, int, int]],
    meter: ReadMeter,
) -> Iterator[Finding]:
    """Read all lanes over these intervals and compare. What is found goes to the bundle's differences."""
    limit = max(1, block_bytes() // max(lane.atom.dtype.itemsize for lane in bundle.lanes))
    limit = min(limit, max(stop - start for _, start, stop in spaces))
    reader = _CoverReader(files, deep, bundle.parameter, meter)
    sizes = [limit * lane.atom.dtype.itemsize for lane in bundle.mains]
    blocks = [ReadBlock(number, size) for number, size in enumerate(sizes)]
    others = [ReadBlock(number, size) for number, size in enumerate(sizes, len(sizes))] if bundle.copies else []
    rounding = (
        RoundingComparison(bundle.mains[1].atom.dtype, bundle.mains[0].atom.dtype, limit) if bundle.rounding else None
    )
    lanes = bundle.lanes
    for boxes, first, last in spaces:
        for start, stop, runs in common_intervals([lane.spaces.get(boxes, ()) for lane in lanes], (first, last), limit):
            mains: list[RawArray] = []
            finite = True
            for lane, run, block in zip(bundle.mains, runs, blocks, strict=False):
                assert run is not None
                main, finite = reader.read(lane, run, start, stop, block)
                mains.append(main)
            if rounding is not None and bundle.rounding is not None:
                found = rounding.wrong(mains[1], mains[0], finite and _is_finite(mains[1], bundle.mains[1].atom, deep))
                if found.size:
                    bundle.rounding.take(boxes, found + start)
            for (number, lane, differences), run in zip(bundle.copies, runs[len(mains) :], strict=True):
                if run is not None:
                    copy, _ = reader.read(lane, run, start, stop, others[number])
                    found = unequal(mains[number], copy)
                    if found.size:
                        differences.take(boxes, found + start)
    reader.close()
    return iter(())


def _is_finite(main: RawArray, atom: Atom, deep: DeepState | None) -> bool:
    """In a deep pass the reader has looked already."""
    return deep is not None or (scannable(atom.dtype) and all_valid(bits_of(main, atom.dtype), atom.dtype, False))


class _CoverReader:
    """Reads blocks of lanes; in a deep pass each goes to the ledger and is looked at for NaN."""

    def __init__(self, files: SourceFiles, deep: DeepState | None, parameter: Parameter, meter: ReadMeter) -> None:
        self._files = files
        self._deep = deep
        self._parameter = parameter
        self._meter = meter
        self._notebook = None if deep is None else ReadRecorder(deep.ledger)

    def read(self, lane: CoverRuns, run: ElementRun, start: int, stop: int, block: ReadBlock) -> tuple[RawArray, bool]:
        """Raw elements `[start, stop)` of a run's space, and whether all of them are numbers that should be there."""
        fragment = run.fragment
        dtype = fragment.dtype
        at = run.byte(start)
        data = block.place(at, (stop - start) * dtype.itemsize)
        self._files.read_into(fragment.file, at, data.data)
        self._meter.read(data.size)
        right = True
        if self._deep is not None and self._notebook is not None:
            self._notebook.take(fragment.file, at, data.data)
        raw = aligned(data, dtype.itemsize).view(raw_dtype(dtype))
        if self._deep is not None:
            right = self._deep.tallies.look(fragment.file, state_bytes(fragment, lane.atom, self._parameter), raw, at)
        return raw, right

    def close(self) -> None:
        if self._notebook is not None:
            self._notebook.close()


def _conclude(bundles: Sequence[AlignedForms], meter: ReadMeter) -> Iterator[Finding]:
    del meter
    for bundle in bundles:
        if bundle.rounding is not None and bundle.rounding.count:
            weight, master = bundle.mains
            yield master_finding(weight.atom, master.atom, bundle.rounding)
        for number, lane, differences in bundle.copies:
            if differences.count:
                cover = lane.atom.replicas[lane.cover - 1]
                yield replica_finding(bundle.mains[number].atom, cover, differences, _severity(bundle.parameter.role))


Boxes = tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class ElementRun:
    """Elements `[start, stop)` of the flat space of some boxes: contiguous in the fragment's file."""

    start: int
    stop: int
    fragment: Fragment

    def byte(self, element: int) -> int:
        """Where an element of the space lies in the file."""
        return self.fragment.offset + (element - self.start) * self.fragment.dtype.itemsize


@dataclass(slots=True)
class CoverRuns:
    """One cover of an atom (0: its fragments, then its replicas) as runs in the flat spaces of its boxes."""

    atom: Atom
    cover: int
    spaces: dict[Boxes, list[ElementRun]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        elements = sum(run.stop - run.start for runs in self.spaces.values() for run in runs)
        return elements * self.atom.dtype.itemsize


def cover_runs(atom: Atom, cover: int) -> CoverRuns | None:
    """A cover as a lane; None where its bytes are not simply elements side by side, in order and once each."""
    lane = CoverRuns(atom, cover)
    for fragment in atom.fragments if cover == 0 else atom.replicas[cover - 1]:
        region = fragment.region
        if fragment.strides is not None or fragment.inline is not None or fragment.scale != 1.0:
            return None
        if fragment.dtype != atom.dtype:
            return None
        if region.numel:
            lane.spaces.setdefault(region.boxes, []).append(ElementRun(region.start, region.stop, fragment))
    for runs in lane.spaces.values():
        runs.sort(key=lambda run: run.start)
        if any(one.stop > other.start for one, other in pairwise(runs)):
            return None
    return lane


def fits(lane: CoverRuns, other: CoverRuns, *, partly: bool) -> bool:
    """Does `other` hold the same elements of the same spaces as `lane`, or (with `partly`) none beyond them?"""
    if other.spaces.keys() - lane.spaces.keys():
        return False
    if partly:
        return all(_within(runs, lane.spaces[boxes]) for boxes, runs in other.spaces.items())
    if lane.spaces.keys() - other.spaces.keys():
        return False
    return all(_joined(runs) == _joined(other.spaces[boxes]) for boxes, runs in lane.spaces.items())


def _within(runs: Sequence[ElementRun], others: Sequence[ElementRun]) -> bool:
    """Is every element of `runs` one of `others`?"""
    joined = _joined(others)
    starts = [start for start, _ in joined]
    for start, stop in _joined(runs):
        number = bisect_right(starts, start) - 1
        if number < 0 or stop > joined[number][1]:
            return False
    return True


def _joined(runs: Sequence[ElementRun]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for run in runs:
        if joined and joined[-1][1] == run.start:
            joined[-1] = (joined[-1][0], run.stop)
        else:
            joined.append((run.start, run.stop))
    return joined


def common_intervals(
    lanes: Sequence[Sequence[ElementRun]], within: tuple[int, int], limit: int
) -> Iterator[tuple[int, int, list[ElementRun | None]]]:
    """Intervals of at most `limit` elements of a space, in order, with the run of each lane that holds all of it.

    A lane that does not reach there has None. The first lane says where there is something; `within` cuts the space.
    """
    at = [0] * len(lanes)
    for first in lanes[0]:
        start, end = max(first.start, within[0]), min(first.stop, within[1])
        while start < end:
            stop = min(end, start + limit)
            found: list[ElementRun | None] = []
            for number, runs in enumerate(lanes):
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


def master_pairs(parameter: Parameter) -> Iterator[tuple[Atom, Atom]]:
    """Weights with their masters, as stored; where the ranks average, each rank's own pair."""
    weight, master = parameter.atoms.get(WEIGHT), parameter.atoms.get(MASTER)
    if weight is None or master is None or weight.shape != master.shape or weight.dtype.family != "float":
        return
    if weight.dtype.itemsize > master.dtype.itemsize or not can_cast(master.dtype, weight.dtype):
        return
    yield _plain(weight, 0), _plain(master, 0)
    if weight.combine == "average" and len(weight.replicas) == len(master.replicas):
        for number in range(1, 1 + len(weight.replicas)):
            yield _plain(weight, number), _plain(master, number)


def _plain(atom: Atom, cover: int) -> Atom:
    """One cover of an atom as stored: no average and no scale, which would round a second time."""
    fragments = atom.fragments if cover == 0 else atom.replicas[cover - 1]
    if any(fragment.scale != 1.0 for fragment in fragments):
        fragments = tuple(fragment._replace(scale=1.0) for fragment in fragments)
    return replace(atom, fragments=fragments, replicas=(), combine="copy")


def compare_master(files: SourceFiles, weight: Atom, master: Atom, meter: ReadMeter) -> Iterator[Finding]:
    """Put slabs of both together and compare them, however each is cut."""
    flat = can_flatten(weight) and can_flatten(master)
    weights, masters = AtomReader(files, weight, flat=flat), AtomReader(files, master, flat=flat)
    found = ElementMismatches(weight.shape)
    limit = max(1, settings.SLAB_BYTES // master.dtype.itemsize)
    saved_block = np.empty(min(limit, weight.numel), raw_dtype(weight.dtype))
    precise_block = np.empty(min(limit, weight.numel), raw_dtype(master.dtype))
    for slab in slabs(weights.shape, limit):
        saved = saved_block[: slab.numel].reshape(slab.shape)
        precise = precise_block[: slab.numel].reshape(slab.shape)
        weights.read(slab, saved)
        masters.read(slab, precise)
        meter.read(saved.nbytes + precise.nbytes)
        found.compare(slab, saved, cast(precise, master.dtype, weight.dtype), weights.shape, weight.dtype)
    if found.count:
        yield master_finding(weight, master, found)


def master_finding(weight: Atom, master: Atom, found: ElementMismatches) -> Finding:
    """What is said of a pair that differs."""
    assert found.first is not None
    one, other = holder_of(weight, weight.fragments, found.first), holder_of(master, master.fragments, found.first)
    return Finding(
        "master-matches-weight",
        "error",
        f"parameter {weight.name}: {found.count} of {weight.numel} elements of the {master.dtype} master on"
        f" {place(other)} do not round to the {weight.dtype} weight on {place(one)}, the first at {found.where}",
        other.file,
        other.rank,
        weight.name,
        MASTER,
        hint="files of different steps or swapped ranks are mixed, or the weights were changed after the save",
    )


def compare_replicas(files: SourceFiles, atom: Atom, severity: Severity, meter: ReadMeter) -> Iterator[Finding]:
    """Put slabs of every copy together and compare them, however each is cut."""
    copies = [replace(atom, fragments=cover, replicas=()) for cover in atom.replicas]
    flat = can_flatten(atom) and all(map(can_flatten, copies))
    reader = AtomReader(files, atom, flat=flat)
    others = [AtomReader(files, copy, flat=flat) for copy in copies]
    found = [ElementMismatches(atom.shape) for _ in copies]
    limit = max(1, settings.SLAB_BYTES // atom.dtype.itemsize)
    our_block = np.empty(min(limit, atom.numel), raw_dtype(atom.dtype))
    their_block = np.empty_like(our_block)
    for slab in slabs(reader.shape, limit):
        ours = our_block[: slab.numel].reshape(slab.shape)
        theirs = their_block[: slab.numel].reshape(slab.shape)
        reader.read(slab, ours)
        meter.read(ours.nbytes)
        for other, differences in zip(others, found, strict=True):
            np.copyto(theirs, ours)  # what a partial copy does not hold cannot differ
            filled = other.overlay(slab, theirs)
            meter.read(filled * atom.dtype.itemsize)
            differences.compare(slab, ours, theirs, reader.shape)
    for cover, differences in zip(atom.replicas, found, strict=True):
        if differences.count:
            yield replica_finding(atom, cover, differences, severity)


def replica_finding(
    atom: Atom, cover: Sequence[Fragment], differences: ElementMismatches, severity: Severity
) -> Finding:
    """What is said of a copy that differs."""
    assert differences.first is not None
    one, other = holder_of(atom, atom.fragments, differences.first), holder_of(atom, cover, differences.first)
    return Finding(
        "replicas",
        severity,
        f"parameter {atom.name}, {atom.kind}: {differences.count} of {atom.numel} elements differ between"
        f" {place(one)} and {place(other)}, the first at {differences.where}",
        other.file,
        other.rank,
        atom.name,
        atom.kind,
        _bytes_of(other),
        hint="copies drifted apart in training, or one file is from another save; `ucp convert` takes the first",
    )


def holder_of(atom: Atom, cover: Sequence[Fragment], element: int) -> Fragment:
    """The fragment of a cover that holds the element at this row-major position."""
    for fragment in cover:
        boxes = [piece.box for piece in fragment.region.pieces()]
        for box in boxes:
            rest, inside = element, True
            for n, start, length in zip(reversed(atom.shape), reversed(box.start), reversed(box.shape), strict=True):
                rest, index = divmod(rest, n)
                inside = inside and start <= index < start + length
            if inside:
                return fragment
    raise AssertionError(f"{atom}: no fragment holds element {element}")


def _bytes_of(fragment: Fragment) -> tuple[int, int] | None:
    """Where a fragment lies in its file; None where it is a number of the pickle or strided."""
    if fragment.inline is not None or fragment.strides is not None:
        return None
    return fragment.offset, fragment.offset + fragment.nbytes
