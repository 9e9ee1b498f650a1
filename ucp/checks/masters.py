"""The master rounded to the weight's dtype is the saved weight, bit for bit.

This one check exposes swapped ranks, files of different steps and layouts that were read wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ucp import tunables
from ucp.checks.differences import Differences
from ucp.checks.findings import Finding, place
from ucp.checks.replicas import holder_of
from ucp.checks.tasks import Meter
from ucp.engine.casting import cast, castable, raw_dtype
from ucp.engine.reading import AtomReader, can_flatten
from ucp.files.local import SourceFiles
from ucp.model.checkpoint import MASTER, WEIGHT, Atom, Parameter
from ucp.model.slabs import slabs


def pairs(parameter: Parameter) -> Iterator[tuple[Atom, Atom]]:
    """Weights with their masters, as stored; where the ranks average, each rank's own pair."""
    weight, master = parameter.atoms.get(WEIGHT), parameter.atoms.get(MASTER)
    if weight is None or master is None or weight.shape != master.shape or weight.dtype.family != "float":
        return
    if weight.dtype.itemsize > master.dtype.itemsize or not castable(master.dtype, weight.dtype):
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


def compare(files: SourceFiles, weight: Atom, master: Atom, meter: Meter) -> Iterator[Finding]:
    """Put slabs of both together and compare them, however each is cut."""
    flat = can_flatten(weight) and can_flatten(master)
    weights, masters = AtomReader(files, weight, flat=flat), AtomReader(files, master, flat=flat)
    found = Differences(weight.shape)
    limit = max(1, tunables.SLAB_BYTES // master.dtype.itemsize)
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
        yield finding(weight, master, found)


def finding(weight: Atom, master: Atom, found: Differences) -> Finding:
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
