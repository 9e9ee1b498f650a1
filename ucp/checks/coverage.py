"""Coverage: every element of every atom is stored exactly once. Gaps and overlaps are named with ranks and files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Final

from ucp.checks.findings import Finding, place
from ucp.checks.tasks import Context, failure
from ucp.errors import UcpError
from ucp.model.box import Box, Shape, flat_index
from ucp.model.checkpoint import Atom, Fragment
from ucp.model.coverage import Gap, Overlap, coverage

_SHOWN: Final = 3  # defects of one atom that are spelled out

_HINT_GAP: Final = "a rank's file is missing or from another layout; `ucp inspect SRC --param NAME` shows the ranks"
_HINT_OVERLAP: Final = "is the rule right that cuts it? `ucp inspect SRC --param NAME` shows it, --rules overrides it"


def look(context: Context) -> Iterator[Finding]:
    """One finding an atom that has a gap or an overlap, and one a replica that overlaps itself."""
    for atom in context.checkpoint.atoms():
        try:
            yield from _atom(atom)
        except UcpError as error:
            context.broken.add((atom.name, atom.kind))
            yield failure("readable", error, atom.name, atom.kind)


def _atom(atom: Atom) -> Iterator[Finding]:
    yield from _cover(atom, atom.fragments, complete=True)
    for cover in atom.replicas:
        # With an average every cover is a whole of its own; a copy may be of a part.
        yield from _cover(atom, cover, complete=atom.combine == "average")


def _cover(atom: Atom, fragments: Sequence[Fragment], *, complete: bool) -> Iterator[Finding]:
    if _tiles(atom, fragments):
        return
    boxes, owners = _boxes(fragments)
    defects = list(coverage(atom.shape, boxes))
    gaps = [defect.box for defect in defects if isinstance(defect, Gap)]
    overlaps = [defect for defect in defects if isinstance(defect, Overlap)]
    if gaps and complete:
        missing = sum(box.numel for box in gaps)
        near = _neighbour(gaps[0], boxes, owners, atom.shape)
        yield Finding(
            "coverage",
            "error",
            f"parameter {atom.name}, {atom.kind}: {missing} of {atom.numel} elements are stored nowhere:"
            f" {_listed(gaps)}" + (f", after what {place(near)} holds" if near is not None else ""),
            near.file if near is not None else None,
            near.rank if near is not None else None,
            atom.name,
            atom.kind,
            hint=_HINT_GAP,
        )
    if overlaps:
        first = overlaps[0]
        holders = [owners[owner] for owner in first.owners]
        yield Finding(
            "coverage",
            "error",
            f"parameter {atom.name}, {atom.kind}: {_listed([o.box for o in overlaps])} is held more than once, by "
            + " and ".join(dict.fromkeys(place(holder) for holder in holders)),
            holders[0].file,
            holders[0].rank,
            atom.name,
            atom.kind,
            hint=_HINT_OVERLAP,
        )


def _tiles(atom: Atom, fragments: Sequence[Fragment]) -> bool:
    """Quick yes for the common case: each region an interval of the flattened atom, laid end to end."""
    shape = atom.shape
    intervals: list[tuple[int, int]] = []
    for fragment in fragments:
        region = fragment.region
        if len(region.boxes) != 1:
            return False
        box = region.boxes[0]
        # Whole below the first dimension, and inside the shape: an interval of the box is one of the atom.
        if box.shape[1:] != shape[1:] or (shape and box.start[0] + box.shape[0] > shape[0]):
            return False
        base = box.start[0] * prod(shape[1:]) if shape else 0
        intervals.append((base + region.start, base + region.stop))
    intervals.sort()
    at = 0
    for start, stop in intervals:
        if start != at:
            return False
        at = stop
    return at == atom.numel


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
