"""The flat buffer of a ZeRO-1, ZeRO-2 or BF16_Optimizer group: where each parameter is, and how ranks partition it.

Parameters are laid end to end in the order of `param_shapes`, each followed by its alignment padding. The whole is
padded to a multiple of twice the number of ranks, and every rank has one equal partition. All numbers are elements.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ucp.core.box import Shape


@dataclass(frozen=True, slots=True)
class FlatEntry:
    """A parameter in a flat buffer: elements `[begin, begin + numel)`."""

    name: str
    shape: Shape
    begin: int
    numel: int


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """A flat buffer of `content` elements, padded and divided into `ranks` partitions of `per` elements."""

    entries: tuple[FlatEntry, ...]
    content: int
    ranks: int
    per: int

    def padding(self, index: int) -> int:
        """Padding elements at the end of partition `index`; possibly the whole partition."""
        return min(self.per, max(0, (index + 1) * self.per - self.content))

    def lengths(self, index: int) -> tuple[int, ...]:
        """Lengths that a flat tensor of partition `index` may have in a file: with or without its padding."""
        without = self.per - self.padding(index)
        return (self.per,) if without == self.per else (self.per, without)

    def overlaps(self, index: int) -> Iterator[tuple[str, int, int]]:
        """Yield (name, start in the partition, length) of every parameter with elements in partition `index`."""
        low, high = index * self.per, (index + 1) * self.per
        for number in self.overlapping(low, high):
            entry = self.entries[number]
            start, stop = max(entry.begin, low), min(entry.begin + entry.numel, high)
            yield entry.name, start - low, stop - start

    def whole(self, index: int) -> int:
        """Total elements of the parameters that have any in partition `index`."""
        return sum(self.entries[number].numel for number in self.overlapping(index * self.per, (index + 1) * self.per))

    def whole_places(self, entry: FlatEntry) -> Iterator[tuple[int, int]]:
        """Yield (partition, offset of the parameter) for buffers of whole parameters, as `whole` counts them."""
        if not entry.numel:
            return
        for index in range(entry.begin // self.per, (entry.begin + entry.numel - 1) // self.per + 1):
            first = next(self.overlapping(index * self.per, (index + 1) * self.per))
            before = self.entries[first : self.entries.index(entry)]
            yield index, sum(other.numel for other in before)

    def overlapping(self, low: int, high: int) -> Iterator[int]:
        """Yield the positions of the entries that have elements in `[low, high)`, in order."""
        at = bisect_right(self.entries, low, key=lambda entry: entry.begin + entry.numel)  # the first that ends after
        while at < len(self.entries) and self.entries[at].begin < high:
            if self.entries[at].numel and low < high:
                yield at
            at += 1


def flat_layout_of(shapes: Mapping[str, Shape], paddings: Sequence[int] | None, ranks: int) -> FlatLayout:
    """Lay out a group from its shapes in flat order and the padding after each parameter (None: no padding)."""
    entries: list[FlatEntry] = []
    at = 0
    for i, (name, shape) in enumerate(shapes.items()):
        numel = prod(shape)
        entries.append(FlatEntry(name, shape, at, numel))
        at += numel + (paddings[i] if paddings is not None else 0)
    return FlatLayout(tuple(entries), at, ranks, -(-at // (2 * ranks)) * 2)


def with_oldest_alignment(layout: FlatLayout) -> FlatLayout:
    """The same buffer padded only to a multiple of the number of ranks, as the oldest releases did."""
    return FlatLayout(layout.entries, layout.content, layout.ranks, -(-layout.content // layout.ranks))
