"""Coverage: every element of every atom is stored exactly once, and in one dtype. Defects are reported by rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Final

from ucp import settings
from ucp.checks.tasks import CheckContext, failure_finding
from ucp.core.box import Box, Gap, Overlap, coverage, flat_index
from ucp.core.checkpoint import Atom, Fragment
from ucp.core.dtypes import DType
from ucp.core.findings import Finding, Level, describe_fragment, location_of
from ucp.errors import UcpError

_MAX_BOXES: Final = 3  # listed in a message

_HINT_GAP: Final = "a rank's file is missing or from another layout; `ucp inspect SRC --param NAME` shows the ranks"
_HINT_OVERLAP: Final = "is its sharding rule right? `ucp inspect SRC --param NAME` shows it, --rules overrides it"


def run_check(context: CheckContext) -> Iterator[Finding]:
    """One finding per atom that has a gap or an overlap, and one per replica that overlaps itself.

    This is the only check that visits every fragment at every level, so it compares dtypes too. Atoms that cannot be
    located are added to `context.broken`.
    """
    located: set[int] = set()
    unproven: list[tuple[Atom, Sequence[Fragment], bool]] = []
    for atom in context.checkpoint.atoms():
        try:
            for number, cover in enumerate((atom.fragments, *atom.replicas)):
                # Covers that are averaged must all be complete; a replica may cover a part of the atom.
                complete = number == 0 or atom.combine == "average"
                if context.level is not Level.QUICK:
                    yield from _check_cover(atom, cover, complete=complete)
                elif not _outline_is_covered(atom, cover, complete, located):
                    unproven.append((atom, cover, complete))
        except UcpError as error:
            yield _mark_broken(context, atom, error)
    yield from _check_sample(context, unproven)


def _check_sample(context: CheckContext, covers: Sequence[tuple[Atom, Sequence[Fragment], bool]]) -> Iterator[Finding]:
    """For `--quick`: check covers fragment by fragment, all of them or, if there are too many fragments, a sample."""
    total = sum(len(cover) for _, cover, _ in covers)
    step = max(1, -(-total // settings.QUICK_FRAGMENTS))
    if step > 1:
        yield Finding(
            "coverage",
            "note",
            f"{total:,} fragments of {len(covers)} atoms are too many for --quick: one atom in {step} was checked",
            hint="verify without --quick to check all of them",
        )
    for number, (atom, cover, complete) in enumerate(covers):
        # Not simply every step-th: atoms of a parameter follow each other, and the sample would have one kind only.
        if number % step == number // step % step:
            try:
                yield from _check_cover(atom, cover, complete=complete)
            except UcpError as error:
                yield _mark_broken(context, atom, error)


def _mark_broken(context: CheckContext, atom: Atom, error: UcpError) -> Finding:
    context.broken.add((atom.name, atom.kind))
    return failure_finding("readable", error, atom.name, atom.kind)


def _outline_is_covered(atom: Atom, cover: Sequence[Fragment], complete: bool, located: set[int]) -> bool:
    """Whether a cover is known to be right from its outline: the fragments before ZeRO splits them over ranks.

    Some readers provide one, which saves building a thousand fragments per atom.
    """
    outline = getattr(cover, "outline", None)
    unsplit: Sequence[Fragment] | None = None if outline is None else outline(located)
    if unsplit is None:
        return False
    return not list(_check_cover(atom, list(unsplit), complete=complete))


def _check_cover(atom: Atom, fragments: Sequence[Fragment], *, complete: bool) -> Iterator[Finding]:
    intervals, dtypes = _intervals(atom, fragments)
    if len(dtypes) > 1:
        first = next(iter(fragments))
        other = next(fragment for fragment in fragments if fragment.dtype != first.dtype)
        yield Finding(
            "dtypes",
            "error",
            f"parameter {atom.name}, {atom.kind}: {other.dtype} on {describe_fragment(other)},"
            f" but {first.dtype} on {describe_fragment(first)}",
            *location_of(other, atom),
            hint="ranks of one run save in one dtype: is one of the files from another run?",
        )
    if intervals is not None:
        intervals.sort()
        if [start for start, _ in intervals] + [atom.numel] == [0] + [stop for _, stop in intervals]:
            return
    stored = [(piece.box, fragment) for fragment in fragments for piece in fragment.region.pieces()]
    defects = list(coverage(atom.shape, [box for box, _ in stored]))
    gaps = [defect.box for defect in defects if isinstance(defect, Gap)]
    overlaps = [defect for defect in defects if isinstance(defect, Overlap)]
    if gaps and complete:
        at = flat_index(gaps[0].start, atom.shape)
        starts = [flat_index(box.start, atom.shape) for box, _ in stored]
        earlier = [(start, number) for number, start in enumerate(starts) if start < at]
        before = stored[max(earlier)[1]][1] if earlier else None  # with the last box before the gap
        yield Finding(
            "coverage",
            "error",
            f"parameter {atom.name}, {atom.kind}: {sum(box.numel for box in gaps)} of {atom.numel} elements are stored"
            f" nowhere: {_list_boxes(gaps)}" + (f", after the part of {describe_fragment(before)}" if before else ""),
            *location_of(before, atom),
            hint=_HINT_GAP,
        )
    if overlaps:
        owners = [stored[owner][1] for owner in overlaps[0].owners]
        yield Finding(
            "coverage",
            "error",
            f"parameter {atom.name}, {atom.kind}: {_list_boxes([overlap.box for overlap in overlaps])} is stored more"
            f" than once, by {' and '.join(dict.fromkeys(map(describe_fragment, owners)))}",
            *location_of(owners[0], atom),
            hint=_HINT_OVERLAP,
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
        # If the box is complete in all dimensions but the first, an interval of the box is one of the atom.
        if box is None or box.shape[1:] != shape[1:] or (shape and box.start[0] + box.shape[0] > shape[0]):
            intervals = None
            continue
        base = box.start[0] * row if shape else 0
        intervals.append((base + region.start, base + region.stop))
    return intervals, dtypes


def _list_boxes(boxes: Sequence[Box]) -> str:
    text = ", ".join(map(str, boxes[:_MAX_BOXES]))
    return text if len(boxes) <= _MAX_BOXES else f"{text} and {len(boxes) - _MAX_BOXES} more blocks"
