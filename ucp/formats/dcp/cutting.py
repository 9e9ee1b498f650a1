"""How tensors are cut over data files: rows, evenly, as FSDP2 cuts them over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from ucp.model.box import Box, Shape, whole
from ucp.tunables import KIB, MIB

# A chunk costs about 1.5 KB of its own, so small tensors stay whole.
SMALLEST_CUT = 16 * KIB
# A loading rank reads every chunk that it touches as a whole, whatever it needs of it.
LARGEST_CHUNK = 256 * MIB


def cut(shape: Shape, itemsize: int, files: int) -> Iterator[tuple[int | None, Box]]:
    """Chunks of a tensor, each with the number of its file; None lets the caller choose one."""
    nbytes = prod(shape) * itemsize
    if not shape or nbytes < SMALLEST_CUT or shape[0] < 2:
        yield None, whole(shape)
        return
    row = nbytes // shape[0]
    rows = -(-shape[0] // files)
    for number in range(files):
        start, stop = min(number * rows, shape[0]), min((number + 1) * rows, shape[0])
        step = max(1, min(stop - start, LARGEST_CHUNK // row))
        for at in range(start, stop, step):
            yield number, Box((at, *(0,) * (len(shape) - 1)), (min(step, stop - at), *shape[1:]))
