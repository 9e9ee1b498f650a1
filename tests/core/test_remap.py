"""Remapping against numpy: the location of every element of a rearranged parameter, and round trips."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.shards import cuts, regions
from ucp.core.box import Box, Shape, strides_of, whole
from ucp.core.checkpoint import Atom, Fragment
from ucp.core.dtypes import BFLOAT16, FLOAT32
from ucp.core.region import Region
from ucp.core.remap import BlockMap, remapped_atom
from ucp.errors import InconsistentError

Places = np.ndarray[Any, np.dtype[np.int64]]
FILE = 1 << 40  # bytes of a file, more than any test has


def places(atom: Atom) -> Places:
    """The byte of every element, with files one after the other; -1 if it is stored nowhere."""
    found = np.full(atom.shape, -1, np.int64)
    for fragment in atom.fragments:
        for piece in fragment.region.pieces():
            steps = fragment.strides or strides_of(piece.box.shape)
            first = int(fragment.file) * FILE + fragment.offset + piece.offset * 4
            index = np.indices(piece.box.shape).reshape(len(piece.box.shape), piece.box.numel)
            where = tuple(index[d] + piece.box.start[d] for d in range(len(steps)))
            assert (found[where] == -1).all(), "an element lies twice"
            found[where] = first + sum(index[d] * step * 4 for d, step in enumerate(steps))
    return found


@st.composite
def sources(draw: st.DrawFn, name: str, shape: Shape) -> Atom:
    """An atom of any layout: some files, each with the region of one rank."""
    held = regions(draw(cuts(shape)), shape)
    fragments = []
    for number, region in enumerate(held):
        offset = 4 * draw(st.integers(0, 9))
        fragments.append(Fragment(region, str(hash_of(name) * 100 + number), offset, FLOAT32))
    return Atom(name, "exp_avg", shape, FLOAT32, tuple(fragments))


def hash_of(name: str) -> int:
    return ord(name[0])


@st.composite
def mosaics(draw: st.DrawFn) -> tuple[dict[str, Atom], list[BlockMap], Shape]:
    """Separate parts, and how their rows are combined into one tensor, transposed or not."""
    groups = draw(st.integers(1, 3))
    columns = draw(st.integers(1, 4))
    rows = [groups * draw(st.integers(1, 3)) for _ in range(draw(st.integers(1, 3)))]
    transposed = draw(st.booleans())
    atoms = {}
    tiles: list[BlockMap] = []
    at = 0
    for group in range(groups):
        for part, count in enumerate(rows):
            share = count // groups
            source = Box((group * share, 0), (share, columns))
            target = Box((0, at), (columns, share)) if transposed else Box((at, 0), (share, columns))
            tiles.append(BlockMap("qkv"[part], source, target, transposed))
            at += share
    for part, count in enumerate(rows):
        atoms["qkv"[part]] = draw(sources("qkv"[part], (count, columns)))
    return atoms, tiles, (columns, at) if transposed else (at, columns)


@given(mosaics())
def test_remapping_moves_every_element_to_its_place(made: tuple[dict[str, Atom], list[BlockMap], Shape]) -> None:
    atoms, tiles, shape = made
    fused = remapped_atom("fused", tiles, shape, atoms)
    assert (fused.name, fused.kind, fused.shape, fused.dtype) == ("fused", "exp_avg", shape, FLOAT32)
    expected = np.full(shape, -1, np.int64)
    for tile in tiles:
        block = places(atoms[tile.name])[slices(tile.source)]
        expected[slices(tile.target)] = block.T if tile.transposed else block
    assert (places(fused) == expected).all()
    assert sum(f.region.numel for f in fused.fragments) == prod(shape)


@given(mosaics())
def test_remapping_there_and_back_is_the_identity(made: tuple[dict[str, Atom], list[BlockMap], Shape]) -> None:
    atoms, tiles, shape = made
    fused = remapped_atom("fused", tiles, shape, atoms)
    for name, atom in atoms.items():
        back = [BlockMap("fused", tile.target, tile.source, tile.transposed) for tile in tiles if tile.name == name]
        again = remapped_atom(name, back, atom.shape, {"fused": fused})
        assert (places(again) == places(atom)).all()
        in_one = len(atom.fragments) == 1 and len(atom.fragments[0].region.boxes) == 1
        if in_one and all(f.strides is None for f in fused.fragments):
            assert tuple(again.fragments) == atom.fragments  # adjacent fragments were joined again


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))


def test_a_parameter_that_is_only_renamed_keeps_its_padding() -> None:
    held = Fragment(Region.all_of((8, 2)), "1", 0, FLOAT32)
    atom = Atom("old", "weight", (5, 2), FLOAT32, (held,), ((held,),))
    new = remapped_atom("new", [BlockMap("old", whole((5, 2)), whole((5, 2)))], (5, 2), {"old": atom})
    assert new.name == "new"
    assert (new.fragments, new.replicas) == (atom.fragments, atom.replicas)


def test_a_stacked_axis_can_be_removed_and_restored() -> None:
    stacked = Atom("all", "weight", (3, 4, 2), FLOAT32, (Fragment(Region.all_of((3, 4, 2)), "1", 8, FLOAT32),))
    one = remapped_atom("one", [BlockMap("all", Box((1, 2, 0), (1, 2, 2)), whole((2, 2)))], (2, 2), {"all": stacked})
    assert (places(one) == places(stacked)[1, 2:]).all()
    tiles = [BlockMap("all", Box((i, 0, 0), (1, 4, 2)), Box((i, 0, 0), (1, 4, 2))) for i in range(3)]
    again = remapped_atom("again", tiles, (3, 4, 2), {"all": stacked})
    assert tuple(again.fragments) == stacked.fragments


def test_copies_of_parts_stay_copies() -> None:
    def atom(name: str, file: int, copies: int) -> Atom:
        covers = [(Fragment(Region.all_of((2, 2)), str(file + i), 0, FLOAT32),) for i in range(copies + 1)]
        return Atom(name, "weight", (2, 2), FLOAT32, covers[0], tuple(covers[1:]))

    tiles = [BlockMap("a", whole((2, 2)), whole((2, 2))), BlockMap("b", whole((2, 2)), Box((2, 0), (2, 2)))]
    made = remapped_atom("ab", tiles, (4, 2), {"a": atom("a", 1, 0), "b": atom("b", 3, 2)})
    assert [[f.file for f in cover] for cover in (made.fragments, *made.replicas)] == [["1", "3"], ["4"], ["5"]]
    assert [f.region.boxes[0].start for cover in made.replicas for f in cover] == [(2, 0), (2, 0)]


def test_parts_of_different_dtypes_are_refused() -> None:
    fragment = Fragment(Region.all_of((2,)), "1", 0, FLOAT32)
    atoms = {
        "a": Atom("a", "weight", (2,), FLOAT32, (fragment,)),
        "b": Atom("b", "weight", (2,), BFLOAT16, (fragment,)),
    }
    tiles = [BlockMap("a", whole((2,)), whole((2,))), BlockMap("b", whole((2,)), Box((2,), (2,)))]
    with pytest.raises(InconsistentError, match="its part b has 'weight' as bfloat16"):
        remapped_atom("ab", tiles, (4,), atoms)
