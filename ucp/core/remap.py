"""Tiles: a parameter that is made of blocks of others. Renamed, split, fused, transposed: no byte is computed.

A mapped checkpoint points at the same bytes as its source. The fragments of a new atom are pieces of the source's
fragments with new regions, so whatever has the parameter's shape (weight, master, moments) is mapped alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ucp.core.box import Box, Shape, intersect, strides_of, whole
from ucp.core.checkpoint import Atom, Fragment, LazyFragments
from ucp.core.region import Region
from ucp.errors import InconsistentError


@dataclass(frozen=True, slots=True)
class BlockMap:
    """The block `target` of a new parameter is the block `source` of the parameter `name`.

    Both have the same shape once dimensions of length 1 are left out; with `transposed`, those of a matrix and its
    transpose.
    """

    name: str
    source: Box
    target: Box
    transposed: bool = False

    def covers(self, source: Shape, target: Shape) -> bool:
        """Whether the tile makes all of one parameter all of another, in the same order."""
        return not self.transposed and source == target and self.source == whole(source) == self.target


def remapped_atom(name: str, tiles: Sequence[BlockMap], shape: Shape, sources: Mapping[str, Atom]) -> Atom:
    """The atom `name` of this shape that the tiles make of one state of the parameters in `sources`.

    Tiles cover the shape exactly once. Padding of a source is kept where the parameter is taken whole.
    """
    used = [sources[source] for source in dict.fromkeys(tile.name for tile in tiles)]
    first = used[0]
    for other in used[1:]:
        if other.dtype != first.dtype or other.combine != first.combine:
            raise InconsistentError(
                f"parameter {name}: its part {other.name} has '{other.kind}' as {other.dtype} ({other.combine}),"
                f" {first.name} as {first.dtype} ({first.combine})",
                hint="parts of one parameter are stored alike; map them apart with a table of your own (--names FILE)",
            )
    if len(tiles) == 1 and tiles[0].covers(first.shape, shape):
        return replace(first, name=name)
    covers: list[list[Sequence[Fragment]]] = [[atom.fragments for atom in used]]
    if first.combine == "average":
        depth = {len(atom.replicas) for atom in used}
        if len(depth) > 1:
            raise InconsistentError(f"parameter {name}: its parts are means of different numbers of copies")
        covers += [[atom.replicas[i] for atom in used] for i in range(depth.pop())]
    else:
        covers += [[copy if atom is owner else () for atom in used] for owner in used for copy in owner.replicas]
    names = list(dict.fromkeys(tile.name for tile in tiles))
    made = [LazyFragments(partial(_joined_tiles, tiles, dict(zip(names, cover, strict=True)))) for cover in covers]
    return replace(first, name=name, shape=shape, fragments=made[0], replicas=tuple(made[1:]))


def _joined_tiles(tiles: Sequence[BlockMap], cover: Mapping[str, Sequence[Fragment]]) -> tuple[Fragment, ...]:
    """The fragments that the tiles make; `cover` has the source fragments by the name of their parameter."""
    return _joined(piece for tile in tiles for piece in _retiled(cover[tile.name], tile))


def _retiled(fragments: Iterable[Fragment], tile: BlockMap) -> Iterator[Fragment]:
    """What the fragments hold of the tile's source, as fragments of its target."""
    for fragment in fragments:
        itemsize = fragment.dtype.itemsize
        for piece in fragment.region.pieces():
            common = intersect(piece.box, tile.source)
            if common is None:
                continue
            strides = fragment.strides or strides_of(piece.box.shape)
            first = piece.offset + sum(
                (a - b) * s for a, b, s in zip(common.start, piece.box.start, strides, strict=True)
            )
            box, steps = _moved(common, strides, tile)
            packed = all(n == 1 or s == m for n, s, m in zip(box.shape, steps, strides_of(box.shape), strict=True))
            inline = fragment.inline
            if inline is not None:
                assert packed, "numbers in a pickle are scalars"
                inline = inline[first * itemsize : (first + box.numel) * itemsize]
            yield fragment._replace(
                region=Region.of((box,)),
                offset=fragment.offset + first * itemsize,
                strides=None if packed else steps,
                inline=inline,
            )


def _moved(common: Box, strides: Shape, tile: BlockMap) -> tuple[Box, Shape]:
    """A block of the tile's source as a block of its target, and the strides (elements) that it has in the file."""
    wide = [d for d, n in enumerate(tile.source.shape) if n != 1]
    if tile.transposed:
        wide.reverse()
    start, shape, steps = list(tile.target.start), [1] * tile.target.ndim, [1] * tile.target.ndim
    for d, e in zip(wide, (e for e, n in enumerate(tile.target.shape) if n != 1), strict=True):
        start[e] += common.start[d] - tile.source.start[d]
        shape[e] = common.shape[d]
        steps[e] = strides[d]
    return Box(tuple(start), tuple(shape)), tuple(steps)


def _joined(fragments: Iterable[Fragment]) -> tuple[Fragment, ...]:
    """The same fragments, neighbours in a file made one."""
    made: list[Fragment] = []
    for fragment in sorted(fragments, key=lambda f: (f.file, f.offset)):
        last = made[-1] if made else None
        if last is not None and _touch(last, fragment):
            boxes = _stacked(last.region.boxes, fragment.region.boxes[0])
            made[-1] = last._replace(region=Region.of(boxes))
        else:
            made.append(fragment)
    return tuple(made)


def _touch(a: Fragment, b: Fragment) -> bool:
    return (
        a.inline is None
        and b.inline is None
        and a.strides is None
        and b.strides is None
        and (a.file, a.dtype, a.rank, a.scale) == (b.file, b.dtype, b.rank, b.scale)
        and a.offset + a.nbytes == b.offset
    )


def _stacked(boxes: tuple[Box, ...], box: Box) -> tuple[Box, ...]:
    """`boxes` with `box` after them: joined with the last one where the two make one box in row-major order."""
    last = boxes[-1]
    for d in range(box.ndim):
        same = last.start[d] == box.start[d] and last.shape[d] == box.shape[d]
        if same and box.shape[d] == 1:
            continue
        rest = last.start[d + 1 :] == box.start[d + 1 :] and last.shape[d + 1 :] == box.shape[d + 1 :]
        if rest and last.start[d] + last.shape[d] == box.start[d]:
            shape = (*last.shape[:d], last.shape[d] + box.shape[d], *last.shape[d + 1 :])
            return (*boxes[:-1], Box(last.start, shape))
        break
    return (*boxes, box)
