"""What one of several shadows holds: a stretch of every stream, so that all of them together hold everything once.

The cuts follow from the manifest and the number of shadows alone, so that they need not talk to each other.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from ucp import tunables
from ucp.engine.shares import Share
from ucp.log.manifest import Manifest
from ucp.log.schema import Block, StreamSchema
from ucp.model.dtypes import BY_NAME

WHOLE: Final = Share(0, 1)

Place = tuple[int, int]  # optimizer tensor, element
_Cut = tuple[int, int, int]  # index of the stream, optimizer tensor, element
_NEAR: Final = 0.1  # of a share: a tensor that ends so near to a cut is not cut


@dataclass(frozen=True, slots=True)
class Portion:
    """The elements of a stream from `first` on and before `stop`, tensor by tensor."""

    first: Place
    stop: Place

    def of_tensor(self, index: int, numel: int) -> tuple[int, int]:
        """The elements `[start, stop)` of an optimizer tensor that are in it."""
        start = numel if index < self.first[0] else self.first[1] if index == self.first[0] else 0
        stop = 0 if index > self.stop[0] else self.stop[1] if index == self.stop[0] else numel
        return start, max(start, min(stop, numel))

    def has(self, block: Block) -> bool:
        """Are elements of a block in it?"""
        return (block.tensor, block.offset) < self.stop and self.first < (block.tensor, block.offset + block.count)

    def to_json(self) -> list[int]:
        return [*self.first, *self.stop]

    @staticmethod
    def from_json(data: Any) -> Portion:
        a, b, c, d = map(int, data)
        return Portion((a, b), (c, d))


def portions(manifest: Manifest, share: Share) -> dict[int, Portion]:
    """What a share has of each stream."""
    cuts = _cuts(manifest, share.count)
    low, high = cuts[share.number], cuts[share.number + 1]
    found = {}
    for index, schema in enumerate(manifest.streams):
        end = len(schema.tensors), 0
        first = (0, 0) if low[0] < index else low[1:] if low[0] == index else end
        stop = end if high[0] > index else high[1:] if high[0] == index else (0, 0)
        found[schema.stream] = Portion(first, stop)
    return found


def _cuts(manifest: Manifest, count: int) -> list[_Cut]:
    """Where shares begin, and where the last ends: between stretches, and between tensors where those are near."""
    ends = [(0, (0, 0, 0), True), *_stretches(manifest.streams)]
    bytes_before = [end[0] for end in ends]
    total = bytes_before[-1]
    cuts: list[_Cut] = [(0, 0, 0)]
    for number in range(1, count):
        wanted, near = total * number / count, _NEAR * total / count
        low, high = bisect_left(bytes_before, wanted - near), bisect_right(bytes_before, wanted + near)
        tensors = [end for end in ends[low:high] if end[2]]
        after = bisect_left(bytes_before, wanted)
        nearest = tensors or ends[max(after - 1, 0) : after + 1]
        cuts.append(max(cuts[-1], min(nearest, key=lambda end: abs(end[0] - wanted))[1]))
    return [*cuts, (len(manifest.streams), 0, 0)]


def _stretches(streams: list[StreamSchema]) -> Iterator[tuple[int, _Cut, bool]]:
    """(Bytes up to here, where the next stretch begins, whether a tensor ends here) for every stretch."""
    done = 0
    for index, schema in enumerate(streams):
        for number, tensor in enumerate(schema.tensors):
            size = BY_NAME[tensor.dtype].itemsize
            for start in range(0, tensor.numel, tunables.LOG_BLOCK_ELEMENTS):
                stop = min(start + tunables.LOG_BLOCK_ELEMENTS, tensor.numel)
                done += (stop - start) * size
                is_end = stop == tensor.numel
                yield done, (index, number + 1, 0) if is_end else (index, number, stop), is_end
