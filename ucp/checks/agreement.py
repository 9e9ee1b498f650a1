"""Forms of one tensor that must agree: a master and its weight, a state and its copies. Each byte is read once.

Where the forms are cut alike, which is so wherever one layout wrote them, they are read side by side as they lie in
their files (see lanes). Where not, slabs of the whole are put together and compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from ucp import tunables
from ucp.checks import masters, replicas
from ucp.checks.blocks import Block, aligned, block_bytes
from ucp.checks.deep import Deep
from ucp.checks.differences import Differences, Rounding, unequal
from ucp.checks.filemap import held_by
from ucp.checks.findings import Finding, Severity
from ucp.checks.lanes import Boxes, Lane, Run, fits, lane_of, steps
from ucp.checks.ledger import Notebook
from ucp.checks.tasks import Context, Meter, Task
from ucp.checks.values import bits_of, quite_right, scannable
from ucp.engine.casting import RawArray, raw_dtype
from ucp.files.local import SourceFiles
from ucp.model.checkpoint import MASTER, STEP, Atom, Parameter, Role


@dataclass(slots=True)
class Bundle:
    """Lanes that are read side by side. `mains` are one state, or a weight and its master; `copies` say of which."""

    parameter: Parameter
    mains: list[Lane]
    copies: list[tuple[int, Lane, Differences]] = field(default_factory=list)
    rounding: Differences | None = None

    @property
    def lanes(self) -> list[Lane]:
        return [*self.mains, *(lane for _, lane, _ in self.copies)]

    @property
    def differences(self) -> list[Differences]:
        return [*([] if self.rounding is None else [self.rounding]), *(found for _, _, found in self.copies)]

    @property
    def check(self) -> str:
        return "master-matches-weight" if self.rounding is not None else "replicas"


def look(context: Context) -> Iterator[Finding | Task]:
    """The tasks that read side by side, those that must put slabs together, and last what it all comes to."""
    bundles: list[Bundle] = []
    for parameter in context.checkpoint.parameters.values():
        if all(map(context.is_sound, parameter.atoms.values())):
            found = list(_bundles(parameter))
            bundles += [item for item in found if isinstance(item, Bundle)]
            for atoms in (item for item in found if not isinstance(item, Bundle)):
                yield from _slow(context, parameter, atoms)
    # The digests of atoms and stores go front to back: their files are not read by two threads at once.
    whole = context.checkpoint.format in ("atoms", "store") and not context.checkpoint.details.get("virtual")
    for bundle in bundles:
        context.shared.extend(bundle.differences)
        if context.deep is not None:
            context.deep.elsewhere.update((lane.atom.name, lane.atom.kind) for lane in bundle.lanes)
        for nbytes, spaces in _portions(bundle, whole):
            run = partial(_walk, context.files, context.deep, bundle, spaces)
            yield Task(bundle.check, nbytes, run, bundle.parameter.name, bundle.mains[-1].atom.kind)
    if bundles:
        yield Task("replicas", 0, partial(_conclude, bundles), turn=1)


def _bundles(parameter: Parameter) -> Iterator[Bundle | tuple[Atom, ...]]:
    """What has to be compared of a parameter: as bundles, or as atoms (two: a master with its weight) where it is not
    cut alike."""
    pairs = list(masters.pairs(parameter))
    paired: set[str] = set()
    for weight, master in pairs:
        lanes = lane_of(weight, 0), lane_of(master, 0)
        if lanes[0] is None or lanes[1] is None or not fits(lanes[0], lanes[1], partly=False):
            yield weight, master
            continue
        bundle = Bundle(parameter, [lanes[0], lanes[1]], rounding=Differences(weight.shape))
        for number, atom in enumerate((parameter.atoms[weight.kind], parameter.atoms[master.kind])):
            if _is_copied(atom) and _take_copies(bundle, number, atom):
                paired.add(atom.kind)
        yield bundle
    for atom in parameter.atoms.values():
        if _is_copied(atom) and atom.kind not in paired:
            lane = lane_of(atom, 0)
            bundle = Bundle(parameter, [] if lane is None else [lane])
            yield bundle if lane is not None and _take_copies(bundle, 0, atom) else (atom,)


def _is_copied(atom: Atom) -> bool:
    """Steps have a check of their own; averaged parameters differ by design."""
    return bool(atom.replicas) and atom.combine == "copy" and atom.kind != STEP


def _take_copies(bundle: Bundle, number: int, atom: Atom) -> bool:
    """Add the copies of a main lane's atom to the bundle, if all of them are cut as it is."""
    copies = [lane_of(atom, cover) for cover in range(1, 1 + len(atom.replicas))]
    taken = [lane for lane in copies if lane is not None and fits(bundle.mains[number], lane, partly=True)]
    if len(taken) == len(copies):
        bundle.copies += [(number, lane, Differences(atom.shape)) for lane in taken]
    return len(taken) == len(copies)


def _slow(context: Context, parameter: Parameter, atoms: tuple[Atom, ...]) -> Iterator[Task]:
    nbytes = sum(f.nbytes for atom in atoms for cover in (atom.fragments, *atom.replicas) for f in cover)
    if len(atoms) == 2:
        run = partial(masters.compare, context.files, *atoms)
        yield Task("master-matches-weight", nbytes, run, parameter.name, MASTER)
    else:
        run = partial(replicas.compare, context.files, atoms[0], _severity(parameter.role))
        yield Task("replicas", nbytes, run, parameter.name, atoms[0].kind)


def _severity(role: Role) -> Severity:
    """Nothing keeps buffers equal over ranks: each may count for itself, and the first one's is taken."""
    return "warning" if role == "buffer" else "error"


def _portions(bundle: Bundle, whole: bool) -> Iterator[tuple[int, list[tuple[Boxes, int, int]]]]:
    """Bytes and intervals of spaces for each task: about a part's worth, or all of it."""
    portion: list[tuple[Boxes, int, int]] = []
    nbytes = 0
    for boxes, runs in bundle.mains[0].spaces.items():
        counts = [(lane.spaces.get(boxes, ()), lane.atom.dtype.itemsize) for lane in bundle.lanes]
        first, last = runs[0].start, runs[-1].stop
        total = sum((run.stop - run.start) * size for held, size in counts for run in held)
        cuts = 1 if whole else -(-total // tunables.PART_BYTES)
        step = -(-(last - first) // cuts)
        for start in range(first, last, step):
            portion.append((boxes, start, min(start + step, last)))
            nbytes += sum(
                max(0, min(run.stop, start + step) - max(run.start, start)) * size
                for held, size in counts
                for run in held
            )
            if nbytes >= tunables.PART_BYTES and not whole:
                yield nbytes, portion
                portion, nbytes = [], 0
    if portion:
        yield nbytes, portion


def _walk(
    files: SourceFiles, deep: Deep | None, bundle: Bundle, spaces: Sequence[tuple[Boxes, int, int]], meter: Meter
) -> Iterator[Finding]:
    """Read all lanes over these intervals and compare. What is found goes to the bundle's differences."""
    limit = max(1, block_bytes() // max(lane.atom.dtype.itemsize for lane in bundle.lanes))
    limit = min(limit, max(stop - start for _, start, stop in spaces))
    reader = _Reader(files, deep, bundle.parameter, meter)
    sizes = [limit * lane.atom.dtype.itemsize for lane in bundle.mains]
    blocks = [Block(number, size) for number, size in enumerate(sizes)]
    others = [Block(number, size) for number, size in enumerate(sizes, len(sizes))] if bundle.copies else []
    rounding = Rounding(bundle.mains[1].atom.dtype, bundle.mains[0].atom.dtype, limit) if bundle.rounding else None
    lanes = bundle.lanes
    for boxes, first, last in spaces:
        for start, stop, runs in steps([lane.spaces.get(boxes, ()) for lane in lanes], (first, last), limit):
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


def _is_finite(main: RawArray, atom: Atom, deep: Deep | None) -> bool:
    """In a deep pass the reader has looked already."""
    return deep is not None or (scannable(atom.dtype) and quite_right(bits_of(main, atom.dtype), atom.dtype, False))


class _Reader:
    """Reads blocks of lanes; in a deep pass each goes to the ledger and is looked at for NaN."""

    def __init__(self, files: SourceFiles, deep: Deep | None, parameter: Parameter, meter: Meter) -> None:
        self._files = files
        self._deep = deep
        self._parameter = parameter
        self._meter = meter
        self._notebook = None if deep is None else Notebook(deep.ledger)

    def read(self, lane: Lane, run: Run, start: int, stop: int, block: Block) -> tuple[RawArray, bool]:
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
            right = self._deep.tallies.look(fragment.file, held_by(fragment, lane.atom, self._parameter), raw, at)
        return raw, right

    def close(self) -> None:
        if self._notebook is not None:
            self._notebook.close()


def _conclude(bundles: Sequence[Bundle], meter: Meter) -> Iterator[Finding]:
    del meter
    for bundle in bundles:
        if bundle.rounding is not None and bundle.rounding.count:
            weight, master = bundle.mains
            yield masters.finding(weight.atom, master.atom, bundle.rounding)
        for number, lane, differences in bundle.copies:
            if differences.count:
                cover = lane.atom.replicas[lane.cover - 1]
                yield replicas.finding(bundle.mains[number].atom, cover, differences, _severity(bundle.parameter.role))
