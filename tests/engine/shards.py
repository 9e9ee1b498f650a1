"""Handmade sources: a known array that a rule and ZeRO intervals split into flat files."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ucp.core.box import Box, Shape
from ucp.core.checkpoint import Atom, Fragment
from ucp.core.dtypes import BY_NAME, DType
from ucp.core.region import Region
from ucp.core.rules import Rule, slice_pieces
from ucp.read.casting import raw_dtype


@dataclass(frozen=True)
class Cut:
    """A layout over ranks: a rule over `tp`, then `dp` flat intervals at `marks` (fractions of 1000)."""

    rule: Rule
    tp: int
    marks: tuple[int, ...]


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    return tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))


@st.composite
def cuts(draw: st.DrawFn, shape: Shape) -> Cut:
    """Any rule that fits the shape, any tensor-parallel degree, any ZeRO intervals."""
    marks = tuple(sorted(draw(st.lists(st.integers(0, 1000), max_size=3))))
    dim = draw(st.integers(0, len(shape) - 1))
    size = shape[dim]
    tp = draw(st.sampled_from([t for t in range(1, 5) if size % t == 0]))
    if tp == 1 and draw(st.booleans()):
        return Cut(Rule("replicated"), 1, marks)
    parts = None
    if size >= 2 * tp and draw(st.booleans()):
        unit = size // tp
        first = draw(st.integers(1, unit - 1)) * tp
        parts = (first, size - first)
    return Cut(Rule("split", dim=dim, parts=parts), tp, marks)


def regions(cut: Cut, shape: Shape) -> list[Region]:
    """The region of each rank, in order."""
    out: list[Region] = []
    for rank in range(cut.tp):
        held = Region.of(piece.box for piece in slice_pieces(cut.rule, shape, cut.tp, rank, "p"))
        edges = [0, *(mark * held.numel // 1000 for mark in cut.marks), held.numel]
        out.extend(held.cut(a, b) for a, b in pairwise(edges) if b > a)
    return out


def pick(values: np.ndarray[Any, Any], region: Region) -> np.ndarray[Any, Any]:
    """The region's elements by plain indexing, independent of `Region.pieces`."""
    return np.concatenate([values[index_of(box)].reshape(-1) for box in region.boxes])[region.start : region.stop]


def index_of(box: Box) -> tuple[slice, ...]:
    """The box as an index of a numpy array."""
    return tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))


def values_of(shape: Shape, dtype: DType, seed: int = 0) -> np.ndarray[Any, Any]:
    """Random raw elements."""
    kind = raw_dtype(dtype)
    data = np.random.default_rng(seed).integers(0, 256, int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    if dtype.name == "bool":
        data &= 1
    return data.view(kind).reshape(shape)


def write_shards(
    folder: Path, values: np.ndarray[Any, Any], dtype: DType, cut: Cut, *, name: str = "p", kind: str = "weight"
) -> Atom:
    """Write one file per rank, with junk around the payload; returns the atom that refers to all of them."""
    fragments = []
    for number, region in enumerate(regions(cut, values.shape)):
        file = f"{name}.{kind}.{number}"
        junk = b"\xa5" * (3 * number + 1)
        (folder / file).write_bytes(junk + pick(values, region).tobytes() + junk)
        fragments.append(Fragment(region, file, len(junk), dtype))
    return Atom(name, kind, values.shape, dtype, tuple(fragments))


DTYPES = [BY_NAME[name] for name in ("float32", "bfloat16", "uint8", "int64", "bool")]
