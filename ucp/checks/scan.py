"""The deep pass: every byte of every file once, and while it is hot: checksum, NaN, negative moments, padding."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from ucp import tunables
from ucp.checks.filemap import FileMap
from ucp.checks.findings import Finding
from ucp.checks.registry import BY_ID
from ucp.checks.spans import Span, manifest_spans, torch_spans
from ucp.checks.tasks import Context, Meter, Task, failure
from ucp.checks.values import SECOND_MOMENTS, bits_of, negative, not_finite, scannable
from ucp.engine.casting import RawArray
from ucp.errors import UcpError
from ucp.files.local import SourceFiles
from ucp.model.checkpoint import MASTER, WEIGHT

_ALIGN: Final = 16  # blocks are multiples of the largest element, so that none is cut in two
_NAMED: Final = 3  # parameters that a message names


def look(context: Context) -> Iterator[Finding | Task]:
    """One task a span of every file of the checkpoint."""
    checkpoint = context.checkpoint
    held = FileMap(context)
    # ZeRO rounds a flat buffer up to a multiple of two elements a rank, and may align each parameter to 16 bytes.
    # Universal folders keep whole tensors; what is left out of those are rows beyond the vocabulary.
    padding = 0 if checkpoint.format == "deepspeed-universal" else max(2 * checkpoint.mesh.dp, 16)
    if checkpoint.format == "atoms":
        for part in manifest_spans(checkpoint.root, held):
            yield task(context.files, part)
    for file in dict.fromkeys((*checkpoint.sizes, *held.files)):
        try:
            for span in torch_spans(checkpoint.root, file, held, padding):
                yield task(context.files, span) if isinstance(span, Span) else span
        except UcpError as error:
            yield failure("zip-crc", error)


def task(files: SourceFiles, span: Span) -> Task:
    """The task that scans a span."""
    return Task(span.check, span.nbytes, partial(scan, files, span))


@dataclass(slots=True)
class _Tally:
    """What was found in one held range."""

    count: int = 0
    first: int = 0  # byte of the file

    def take(self, count: int, first: int) -> None:
        if count and not self.count:
            self.first = first
        self.count += count


def scan(files: SourceFiles, span: Span, meter: Meter) -> Iterator[Finding]:
    """Read one span once and say everything that is wrong with it."""
    digest = span.digest()
    buffer = memoryview(bytearray(min(max(tunables.SLAB_BYTES // _ALIGN, 1) * _ALIGN, span.nbytes)))
    block: RawArray = np.frombuffer(buffer, np.uint8)
    scratch = np.empty_like(block)
    infinite: dict[int, _Tally] = {}
    below: dict[int, _Tally] = {}
    padding = _Tally()
    gaps = _gaps(span)
    starts = [held.start for held in span.held]
    longest = max((held.stop - held.start for held in span.held), default=0)
    for at in range(span.start, span.stop, len(block)):
        data = block[: min(len(block), span.stop - at)]
        files.read_into(span.file, at, buffer[: len(data)])
        digest.update(buffer[: len(data)])
        meter.read(len(data))
        end = at + len(data)
        for number in range(bisect_right(starts, at - longest - 1), bisect_right(starts, end - 1)):
            held = span.held[number]
            lo, hi = max(held.start, at), min(held.stop, end)
            # Buffers hold what they like: masks are made of infinities.
            if lo >= hi or held.role == "buffer" or not scannable(held.dtype):
                continue
            size = held.dtype.itemsize
            bits = bits_of(_aligned(data[lo - at : hi - at], size), held.dtype)
            count, first = not_finite(bits, held.dtype, scratch)
            infinite.setdefault(number, _Tally()).take(count, lo + first * size)
            if held.kind in SECOND_MOMENTS:
                count, first = negative(bits, held.dtype)
                below.setdefault(number, _Tally()).take(count, lo + first * size)
        for start, stop in gaps:
            lo, hi = max(start, at), min(stop, end)
            if lo < hi and data[lo - at : hi - at].any():
                bad = data[lo - at : hi - at] != 0
                padding.take(int(np.count_nonzero(bad)), lo + int(np.argmax(bad)))
    if span.expected is not None and digest.hexdigest() != span.expected:
        yield _damaged(span, digest.hexdigest())
    yield from _values("finite", "NaN or infinite", span, infinite, "training that goes on from here will not recover")
    yield from _values("second-moments", "below zero", span, below, "a sum of squares cannot be: the bytes are damaged")
    if padding.count:
        yield Finding(
            "padding",
            "warning",
            f"{span.file}, {span.title}: {padding.count} bytes of padding are not zero, the first at {padding.first}",
            span.file,
            byte_range=(padding.first, padding.first + 1),
            hint="padding never gets a gradient: the file was damaged or the layout is not what ucp takes it for",
        )


def _aligned(data: RawArray, size: int) -> RawArray:
    """Whole elements only, at an address that numpy can view them at."""
    data = data[: len(data) // size * size]
    return data if data.ctypes.data % size == 0 else data.copy()


def _gaps(span: Span) -> list[tuple[int, int]]:
    """What no parameter holds of a storage of optimizer states, which start at zero and get no gradient there.

    (The padding of ZeRO-3's masters is whatever was in memory. A longer gap is something that the index left out.)
    """
    if not span.padding or not span.held or any(held.kind in (WEIGHT, MASTER) for held in span.held):
        return []
    longest = span.padding * span.held[0].dtype.itemsize
    gaps: list[tuple[int, int]] = []
    at = span.start
    for held in span.held:
        if held.start > at:
            gaps.append((at, held.start))
        at = max(at, held.stop)
    if at < span.stop:
        gaps.append((at, span.stop))
    return [(start, stop) for start, stop in gaps if stop - start <= longest]


def _damaged(span: Span, found: str) -> Finding:
    names = list(dict.fromkeys(f"{held.parameter}, {held.kind}" for held in span.held))
    hit = "; ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
    one = span.held[0] if len(names) == 1 else None
    return Finding(
        span.check,
        "error",
        f"{span.file}, {span.title}: checksum {found} where {span.expected} is recorded"
        + (f" (holds {hit})" if hit else ""),
        span.file,
        span.held[0].rank if span.held else None,
        one.parameter if one else None,
        one.kind if one else None,
        (span.start, span.stop),
        hint="bytes of the file were changed: restore it from a copy",
        exit_code=BY_ID[span.check].exit_code,
    )


def _values(check: str, what: str, span: Span, tallies: dict[int, _Tally], hint: str) -> Iterator[Finding]:
    for number, tally in tallies.items():
        if tally.count:
            held = span.held[number]
            size = held.dtype.itemsize
            yield Finding(
                check,
                "warning",
                f"parameter {held.parameter}, {held.kind}: {tally.count} of {(held.stop - held.start) // size} elements"
                f" on {held.rank} ({span.file}) are {what}, the first at byte {tally.first}",
                span.file,
                held.rank,
                held.parameter,
                held.kind,
                (tally.first, tally.first + size),
                hint=hint,
            )
