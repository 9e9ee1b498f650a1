"""Remapping: parameters composed of blocks of other parameters (renamed, split, fused, transposed).

No byte is computed: a remapped checkpoint points at the same bytes as its source. The fragments of a new atom are
pieces of the source's fragments with new regions, so every state with the parameter's shape (weight, master, moments)
is remapped in the same way.
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
    """Maps the block `source` of the parameter `name` to the block `target` of a new parameter.

    Both blocks have the same shape when dimensions of length 1 are ignored; with `transposed`, they are a matrix and
    its transpose.
    """

    name: str
    source: Box
    target: Box
    transposed: bool = False

    def covers(self, source: Shape, target: Shape) -> bool:
        """Whether this maps the whole of one parameter to the whole of another, in the same element order."""
        return not self.transposed and source == target and self.source == whole(source) == self.target


def remapped_atom(name: str, tiles: Sequence[BlockMap], shape: Shape, sources: Mapping[str, Atom]) -> Atom:
    """The atom `name` of this shape, composed by `tiles` from one state of the parameters in `sources`.

    The tiles cover the shape exactly once. Padding of a source is kept if the parameter is taken as a whole.
    """
    names = list(dict.fromkeys(tile.name for tile in tiles))
    used = [sources[source] for source in names]
    first = used[0]
    for other in used[1:]:
        if other.dtype != first.dtype or other.combine != first.combine:
            raise InconsistentError(
                f"parameter {name}: its part {other.name} has '{other.kind}' as {other.dtype} ({other.combine}),"
                f" {first.name} as {first.dtype} ({first.combine})",
                hint="parts of one parameter must be stored alike; keep them apart with a custom table (--names FILE)",
            )
    if len(tiles) == 1 and tiles[0].covers(first.shape, shape):
        return replace(first, name=name)
    covers: list[list[Sequence[Fragment]]] = [[atom.fragments for atom in used]]
    if first.combine == "average":
        depth = {len(atom.replicas) for atom in used}
        if len(depth) > 1:
            raise InconsistentError(f"parameter {name}: its parts are averages of different numbers of copies")
        covers += [[atom.replicas[i] for atom in used] for i in range(depth.pop())]
    else:
        covers += [[copy if atom is owner else () for atom in used] for owner in used for copy in owner.replicas]
    remapped = [LazyFragments(partial(_remap, tiles, dict(zip(names, cover, strict=True)))) for cover in covers]
    return replace(first, name=name, shape=shape, fragments=remapped[0], replicas=tuple(remapped[1:]))


def _remap(tiles: Sequence[BlockMap], cover: Mapping[str, Sequence[Fragment]]) -> list[Fragment]:
    """The fragments of the new atom, those that are adjacent in a file joined.

    `cover` maps the name of a source parameter to its fragments.
    """
    fragments = [fragment for tile in tiles for fragment in _remap_tile(cover[tile.name], tile)]
    joined: list[Fragment] = []
    for fragment in sorted(fragments, key=lambda f: (f.file, f.offset)):
        last = joined[-1] if joined else None
        if last is not None and _are_adjacent(last, fragment):
            boxes = _append_box(last.region.boxes, fragment.region.boxes[0])
            joined[-1] = last._replace(region=Region.of(boxes))
        else:
            joined.append(fragment)
    return joined


def _remap_tile(fragments: Iterable[Fragment], tile: BlockMap) -> Iterator[Fragment]:
    """The parts of the fragments inside the tile's source block, as fragments of its target block."""
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
            box, steps = _move(common, strides, tile)
            packed = all(n == 1 or s == m for n, s, m in zip(box.shape, steps, strides_of(box.shape), strict=True))
            inline = fragment.inline
            if inline is not None:
                assert packed, "inline values are scalars"
                inline = inline[first * itemsize : (first + box.numel) * itemsize]
            yield fragment._replace(
                region=Region.of((box,)),
                offset=fragment.offset + first * itemsize,
                strides=None if packed else steps,
                inline=inline,
            )


def _move(common: Box, strides: Shape, tile: BlockMap) -> tuple[Box, Shape]:
    """Translate a block of the tile's source to its target; returns it with its strides (elements) in the file."""
    wide = [d for d, n in enumerate(tile.source.shape) if n != 1]
    if tile.transposed:
        wide.reverse()
    start, shape, steps = list(tile.target.start), [1] * tile.target.ndim, [1] * tile.target.ndim
    for d, e in zip(wide, (e for e, n in enumerate(tile.target.shape) if n != 1), strict=True):
        start[e] += common.start[d] - tile.source.start[d]
        shape[e] = common.shape[d]
        steps[e] = strides[d]
    return Box(tuple(start), tuple(shape)), tuple(steps)


def _are_adjacent(a: Fragment, b: Fragment) -> bool:
    is_plain = a.inline is None and b.inline is None and a.strides is None and b.strides is None
    same = (a.file, a.dtype, a.rank, a.scale) == (b.file, b.dtype, b.rank, b.scale)
    return is_plain and same and a.offset + a.nbytes == b.offset


def _append_box(boxes: tuple[Box, ...], box: Box) -> tuple[Box, ...]:
    """`boxes` followed by `box`, which is merged into the last one if the two form one box in row-major order."""
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
