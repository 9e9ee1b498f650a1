"""Evidence that a rank file is in the place of another rank's file.

The rank files of a job have the same structure, so one that was renamed, exchanged or copied over another can be read
without any error, and the result is wrong. What distinguishes ranks:

* the name of the archive: `torch.save` records the name of the file that it writes, and DeepSpeed's names contain the
  rank;
* the global rank of the process that wrote it, which Megatron saves with its arguments: `misplaced_ranks`;
* the content: `find_copies` finds files that have equal tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, permutations
from typing import Any, Final, NamedTuple, Protocol

from ucp.containers.inert import TensorRef
from ucp.containers.tree import walk
from ucp.storage.local import SourceFiles

GridPosition = tuple[int, ...]
"""The numbers in the name of a rank's folder: tensor-parallel, then pipeline and expert-parallel rank."""

TRUST_HINT: Final = (
    "restore the files of one save, under the names that they were saved under; if they were renamed on purpose,"
    " --trust-recorded-ranks reads each file as the rank that wrote it, --trust-file-names as the rank in its name"
)
COPY_HINT: Final = "restore the file that was overwritten; if ranks are equal on purpose, add --trust-file-names"
_COMPARED_BYTES: Final = 1 << 16  # of each tensor


class IndexedFile(Protocol):
    """A torch file of which the zip directory is known."""

    def crc(self, ref: TensorRef) -> int:
        """The recorded CRC-32 of a tensor's storage; 0 if none was computed."""

    def position(self, ref: TensorRef) -> int:
        """Byte offset of a tensor's first element."""


class RankContent(NamedTuple):
    """The tensors of a rank file that must differ from those of other ranks."""

    name: str
    file: IndexedFile
    tensors: Sequence[TensorRef]


def rank_tensors(tree: Any) -> list[TensorRef]:
    """The tensors below `tree` that can tell ranks apart, the largest first."""
    refs = {ref.storage.key: ref for ref in walk(tree) if isinstance(ref, TensorRef) and ref.is_contiguous}
    return sorted((ref for ref in refs.values() if ref.numel), key=lambda ref: (-ref.numel, ref.storage.key))


def find_copies(contents: Iterable[RankContent], source: SourceFiles) -> Iterator[tuple[str, str]]:
    """Names of files with the same tensors, each with the first file that has them.

    Recorded checksums select the candidates; then the beginnings of all tensors are compared. Tensors of one
    repeated value, such as states before the first step, prove nothing.
    """
    groups: dict[tuple[tuple[int, int], ...], list[RankContent]] = {}
    for content in contents:
        signature = tuple((ref.numel, content.file.crc(ref)) for ref in content.tensors)
        if signature:
            groups.setdefault(signature, []).append(content)
    for first, *others in groups.values():
        if not others:
            continue
        heads = [_head(first, number, source) for number in range(len(first.tensors))]
        telling = {number: head for number, head in enumerate(heads) if head != _repeated(head)}
        for other in others if telling else ():
            if all(_head(other, number, source) == head for number, head in telling.items()):
                yield other.name, first.name


def _head(content: RankContent, number: int, source: SourceFiles) -> bytes:
    ref = content.tensors[number]
    data = bytearray(min(ref.numel * ref.dtype.itemsize, _COMPARED_BYTES))
    source.read_into(content.name, content.file.position(ref), memoryview(data))
    return bytes(data)


def _repeated(data: bytes) -> bytes:
    """As many bytes, of the first 8 repeated: the same bytes if the tensor has one value only."""
    return (data[:8] * (len(data) // 8 + 1))[: len(data)]


def misplaced_ranks(writers: Mapping[GridPosition, int]) -> Iterator[tuple[GridPosition, int]]:
    """Positions whose file another rank wrote, each with the global rank that belongs there.

    `writers` has the global rank that wrote the file of each position. Along every axis of the grid these increase.
    Which axis varies fastest depends on the job, so the order that the fewest files contradict is assumed.
    """
    if all(writers[one] < writers[other] for line in _lines(writers) for one, other in pairwise(line)):
        return
    orders = permutations(range(_axis_count(writers)))
    yield from min((_misplaced(writers, order) for order in orders), key=len)


def _lines(writers: Mapping[GridPosition, int]) -> Iterator[list[GridPosition]]:
    """Positions that differ on one axis only, in increasing order."""
    for axis in range(_axis_count(writers)):
        lines: dict[GridPosition, list[GridPosition]] = {}
        for position in sorted(position for position in writers if len(position) > axis):
            lines.setdefault((*position[:axis], -1, *position[axis + 1 :]), []).append(position)
        yield from lines.values()


def _misplaced(writers: Mapping[GridPosition, int], order: Sequence[int]) -> list[tuple[GridPosition, int]]:
    """The misplaced files if the axes are significant in this order."""
    positions = sorted(writers, key=lambda position: [position[axis] for axis in order if axis < len(position)])
    expected = zip(positions, sorted(writers.values()), strict=True)
    return [(position, rank) for position, rank in expected if writers[position] != rank]


def _axis_count(writers: Mapping[GridPosition, int]) -> int:
    return max(map(len, writers), default=0)
