"""Replicas: every copy of a state (tensor-parallel, tied, pipeline) equals the one that is taken, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ucp import tunables
from ucp.checks.differences import Differences
from ucp.checks.findings import Finding, Severity, place
from ucp.checks.tasks import Meter
from ucp.engine.casting import raw_dtype
from ucp.engine.reading import AtomReader, can_flatten
from ucp.files.local import SourceFiles
from ucp.model.checkpoint import Atom, Fragment
from ucp.model.slabs import slabs


def compare(files: SourceFiles, atom: Atom, severity: Severity, meter: Meter) -> Iterator[Finding]:
    """Put slabs of every copy together and compare them, however each is cut."""
    copies = [replace(atom, fragments=cover, replicas=()) for cover in atom.replicas]
    flat = can_flatten(atom) and all(map(can_flatten, copies))
    reader = AtomReader(files, atom, flat=flat)
    others = [AtomReader(files, copy, flat=flat) for copy in copies]
    found = [Differences(atom.shape) for _ in copies]
    limit = max(1, tunables.SLAB_BYTES // atom.dtype.itemsize)
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
            yield finding(atom, cover, differences, severity)


def finding(atom: Atom, cover: Sequence[Fragment], differences: Differences, severity: Severity) -> Finding:
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
