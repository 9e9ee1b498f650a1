"""Sealing: the last bytes of a file that carries CRC-32s of the others, put together from those of its parts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator, Sequence

from ucp.engine.plan import Part, literal_parts
from ucp.engine.worker import Written
from ucp.files.crc import crc32_combine
from ucp.model.target import Target


def sealing_parts(target: Target, written: Iterable[Written], only: Container[int]) -> Iterator[Part]:
    """What is left to write of the files `only` when everything else of them is on disk, as `written` says."""
    sealed: dict[int, list[Written]] = {
        n: [] for n, file in enumerate(target.files) if file.seal is not None and n in only
    }
    for extent in written:
        if extent.file in sealed:
            sealed[extent.file].append(extent)
    for number, extents in sealed.items():
        extents.sort(key=_place)
        file = target.files[number]
        assert file.seal is not None
        crcs = [_crc_of_span(extents, offset, nbytes, file.path) for offset, nbytes in file.seal.spans]
        yield from literal_parts(number, file.seal.close(crcs))


def _place(extent: Written) -> tuple[int, int]:
    return extent.offset, extent.nbytes


def _crc_of_span(extents: Sequence[Written], offset: int, nbytes: int, path: str) -> int:
    """The CRC-32 of bytes `[offset, offset + nbytes)`, which some of the extents (sorted) must tile."""
    crc, at, stop = 0, offset, offset + nbytes
    index = bisect_left(extents, (offset, 0), key=_place)
    while at < stop:
        extent = extents[index] if index < len(extents) else None
        if extent is None or extent.offset != at or extent.offset + extent.nbytes > stop or extent.crc is None:
            raise AssertionError(f"{path}: bytes [{offset}, {stop}) are not tiled by extents with a CRC-32 at {at}")
        crc = crc32_combine(crc, extent.crc, extent.nbytes)
        at += extent.nbytes
        index += 1
    return crc
