"""Coverage: every element of every atom is stored exactly once, and in one dtype. Defects are named by rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Final

from ucp import settings
from ucp.checks.findings import Finding, Level, place
from ucp.checks.tasks import CheckContext, failure_finding
from ucp.core.box import Box, Shape, flat_index
from ucp.core.checkpoint import Atom, Fragment
from ucp.core.coverage import Gap, Overlap, coverage
from ucp.core.dtypes import DType
from ucp.errors import UcpError

_SHOWN: Final = 3  # defects of one atom that are spelled out

_HINT_GAP: Final = "a rank's file is missing or from another layout; `ucp inspect SRC --param NAME` shows the ranks"
_HINT_OVERLAP: Final = "is the rule right that cuts it? `ucp inspect SRC --param NAME` shows it, --rules overrides it"


def look(context: CheckContext) -> Iterator[Finding]:
    """One finding an atom that has a gap or an overlap, and one a replica that overlaps itself.

    This is the one check that looks at every fragment at any level, so dtypes are compared here too.
    """
    located: set[int] = set()
    many: list[tuple[Atom, Sequence[Fragment], bool]] = []
    for atom in context.checkpoint.atoms():
        try:
            for number, cover in enumerate((atom.fragments, *atom.replicas)):
                # With an average every cover is a whole of its own; a copy may be of a part.
                complete = number == 0 or atom.combine == "average"
                if context.level is not Level.QUICK:
                    yield from _cover(atom, cover, complete=complete)
                elif not _is_right_in_outline(atom, cover, complete, located):
                    many.append((atom, cover, complete))
        except UcpError as error:
            yield _broken(context, atom, error)
    yield from _sample(context, many)


def _sample(context: CheckContext, many: Sequence[tuple[Atom, Sequence[Fragment], bool]]) -> Iterator[Finding]:
    """What a quick look can do where every fragment has to be looked at: all of them if they are not too many."""
    total = sum(len(cover) for _, cover, _ in many)
    step = max(1, -(-total // settings.QUICK_FRAGMENTS))
    if step > 1:
        yield Finding(
            "coverage",
            "note",
            f"{total:,} fragments of {len(many)} atoms are too many for a quick look: one atom in {step} was checked",
            hint="verify without --quick to check all of them",
        )
    for number, (atom, cover, complete) in enumerate(many):
        if number % step == number // step % step:  # another kind of another parameter each time
            try:
                yield from _cover(atom, cover, complete=complete)
            except UcpError as error:
                yield _broken(context, atom, error)


def _broken(context: CheckContext, atom: Atom, error: UcpError) -> Finding:
    context.broken.add((atom.name, atom.kind))
    return failure_finding("readable", error, atom.name, atom.kind)


def _is_right_in_outline(atom: Atom, cover: Sequence[Fragment], complete: bool, located: set[int]) -> bool:
    """Is it certain that a cover is right, before ZeRO cuts it over a thousand ranks? A reader may know its outline."""
    outline = getattr(cover, "outline", None)
    uncut: Sequence[Fragment] | None = None if outline is None else outline(located)
    if uncut is None:
        return False
    return not list(_cover(atom, list(uncut), complete=complete))


def _cover(atom: Atom, fragments: Sequence[Fragment], *, complete: bool) -> Iterator[Finding]:
    intervals, dtypes = _intervals(atom, fragments)
    if len(dtypes) > 1:
        yield _mixed_dtypes(atom, fragments)
    if intervals is not None and _tiles(intervals, atom.numel):
        return
    boxes, owners = _boxes(fragments)
    defects = list(coverage(atom.shape, boxes))
    gaps = [defect.box for defect in defects if isinstance(defect, Gap)]
    overlaps = [defect for defect in defects if isinstance(defect, Overlap)]
    if gaps and complete:
        yield _missing(atom, gaps, _neighbour(gaps[0], boxes, owners, atom.shape))
    if overlaps:
        yield _doubled(atom, overlaps, [owners[owner] for owner in overlaps[0].owners])


def _missing(atom: Atom, gaps: Sequence[Box], near: Fragment | None) -> Finding:
    return Finding(
        "coverage",
        "error",
        f"parameter {atom.name}, {atom.kind}: {sum(box.numel for box in gaps)} of {atom.numel} elements are stored"
        f" nowhere: {_listed(gaps)}" + (f", after what {place(near)} holds" if near is not None else ""),
        near.file if near is not None else None,
        near.rank if near is not None else None,
        atom.name,
        atom.kind,
        hint=_HINT_GAP,
    )


def _doubled(atom: Atom, overlaps: Sequence[Overlap], holders: Sequence[Fragment]) -> Finding:
    return Finding(
        "coverage",
        "error",
        f"parameter {atom.name}, {atom.kind}: {_listed([overlap.box for overlap in overlaps])} is held more than once,"
        " by " + " and ".join(dict.fromkeys(map(place, holders))),
        holders[0].file,
        holders[0].rank,
        atom.name,
        atom.kind,
        hint=_HINT_OVERLAP,
    )


def _mixed_dtypes(atom: Atom, fragments: Sequence[Fragment]) -> Finding:
    first = next(iter(fragments))
    other = next(fragment for fragment in fragments if fragment.dtype != first.dtype)
    return Finding(
        "dtypes",
        "error",
        f"parameter {atom.name}, {atom.kind}: {other.dtype} on {place(other)}, but {first.dtype} on {place(first)}",
        other.file,
        other.rank,
        atom.name,
        atom.kind,
        hint="ranks of one run save in one dtype: is one of the files from another run?",
    )


def _intervals(atom: Atom, fragments: Sequence[Fragment]) -> tuple[list[tuple[int, int]] | None, set[DType]]:
    """Regions as intervals of the flattened atom (None unless all are, which is the common case), and all dtypes."""
    shape = atom.shape
    row = prod(shape[1:])
    intervals: list[tuple[int, int]] | None = []
    dtypes: set[DType] = set()
    for fragment in fragments:
        region = fragment.region
        dtypes.add(fragment.dtype)
        if intervals is None:
            continue
        box = region.boxes[0] if len(region.boxes) == 1 else None
        # Whole below the first dimension, and inside the shape: an interval of the box is one of the atom.
        if box is None or box.shape[1:] != shape[1:] or (shape and box.start[0] + box.shape[0] > shape[0]):
            intervals = None
            continue
        base = box.start[0] * row if shape else 0
        intervals.append((base + region.start, base + region.stop))
    return intervals, dtypes


def _tiles(intervals: list[tuple[int, int]], numel: int) -> bool:
    """Do intervals, laid end to end, make `[0, numel)`?"""
    intervals.sort()
    at = 0
    for start, stop in intervals:
        if start != at:
            return False
        at = stop
    return at == numel


def _boxes(fragments: Sequence[Fragment]) -> tuple[list[Box], list[Fragment]]:
    """The boxes that fragments hold, and for each the fragment."""
    boxes: list[Box] = []
    owners: list[Fragment] = []
    for fragment in fragments:
        for piece in fragment.region.pieces():
            boxes.append(piece.box)
            owners.append(fragment)
    return boxes, owners


def _neighbour(gap: Box, boxes: Sequence[Box], owners: Sequence[Fragment], shape: Shape) -> Fragment | None:
    """Who holds what comes last before the gap, in row-major order."""
    at = flat_index(gap.start, shape)
    before = [
        (flat_index(box.start, shape), number) for number, box in enumerate(boxes) if flat_index(box.start, shape) < at
    ]
    return owners[max(before)[1]] if before else None


def _listed(boxes: Sequence[Box]) -> str:
    text = ", ".join(map(str, boxes[:_SHOWN]))
    return text if len(boxes) <= _SHOWN else f"{text} and {len(boxes) - _SHOWN} more blocks"
