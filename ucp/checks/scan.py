"""The deep pass: read every byte that no other check has read; compare checksums, and scan values and padding."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Final

import numpy as np

from ucp import settings
from ucp.checks.catalogue import BY_ID
from ucp.checks.deep_state import DeepState, ReadRecorder, SpanChecksum
from ucp.checks.raw_values import ReadBlock, aligned, block_bytes
from ucp.checks.spans import ChecksumSpan, FileMap, TorchArchive, checksum_spans, plain_spans, torch_spans
from ucp.checks.tasks import CheckContext, CheckTask, failure_finding
from ucp.checks.zip_structure import structure_bytes, structure_defects
from ucp.core.checkpoint import MASTER, WEIGHT, Checkpoint
from ucp.core.findings import Finding
from ucp.core.optimizers import NONZERO_PADDING, fills_padding
from ucp.engine.pool import Meter
from ucp.errors import IntegrityError, UcpError, first_few
from ucp.formats.registry import checks_of_format
from ucp.storage.local import SourceFiles

_LARGEST_ELEMENT: Final = 16  # bytes; blocks are multiples of it, so that no element is split


def run_check(context: CheckContext) -> Iterator[Finding | CheckTask]:
    """Tasks that read what no other check reads, and then compare all checksums."""
    checkpoint = context.checkpoint
    assert context.deep is not None
    file_map = FileMap(context)
    found: list[Finding | ChecksumSpan | TorchArchive] = []
    hooks = checks_of_format(checkpoint.format)
    padding = _largest_padding(checkpoint) if hooks.has_flat_buffers else 0
    found.extend(checksum_spans(hooks.checksums(checkpoint), file_map))
    for file in dict.fromkeys((*checkpoint.sizes, *file_map.files)):
        try:
            found.extend(torch_spans(checkpoint.root, file, file_map, padding))
        except UcpError as error:
            found.append(failure_finding("zip-crc", error))
    with_checksums = {item.file for item in found if isinstance(item, ChecksumSpan)}
    for file in file_map.files:
        if file not in with_checksums:
            found.extend(plain_spans(checkpoint.root, file, file_map))
    yield from scan_tasks(context.files, context.deep, found)


def _largest_padding(checkpoint: Checkpoint) -> int:
    """Most elements of padding in one place of a flat buffer; 0 if padding is not checked, because it is not zero."""
    # ZeRO-3 pads masters with whatever was in memory, and weight decay carries it into the states.
    if checkpoint.mesh.zero == 3:
        return 0
    if any(fills_padding(group.hyper) for group in checkpoint.groups):
        return 0
    # ZeRO rounds a flat buffer up to two elements per rank, and may align each parameter to 16 bytes.
    return max(2 * checkpoint.mesh.dp, 16)


def scan_tasks(
    files: SourceFiles, deep: DeepState, found: Iterable[Finding | ChecksumSpan | TorchArchive]
) -> Iterator[Finding | CheckTask]:
    """Tasks that scan the spans and check the zip structure of the archives; findings are passed on."""
    checksums: list[SpanChecksum] = []
    for item in found:
        if isinstance(item, ChecksumSpan):
            checksums.append(deep.checksums.add(item))
        elif isinstance(item, TorchArchive):
            nbytes = structure_bytes(item.index, item.start, item.stop)
            yield CheckTask("zip-structure", nbytes, partial(_check_structure, files, item))
        else:
            yield item
    deep.checksums.seal()
    for checksum in checksums:
        yield from _span_tasks(files, deep, checksum)
    yield CheckTask("finite", 0, lambda _: deep.values.findings(), phase=2)


def _span_tasks(files: SourceFiles, deep: DeepState, checksum: SpanChecksum) -> Iterator[CheckTask]:
    """One task per span; several for a long one; one for the rest of a span that other checks also read."""
    span = checksum.span
    finish = partial(_finish_span, files, deep, checksum)
    elsewhere = sum(
        state.stop - state.start for state in span.states if (state.parameter, state.kind) in deep.already_read
    )
    if elsewhere:
        yield CheckTask(span.check, max(0, span.nbytes - elsewhere), finish, phase=1)
    elif checksum.is_sequential or span.nbytes <= settings.COPY_TASK_BYTES:
        yield CheckTask(span.check, span.nbytes, finish)
    else:
        step = max(_LARGEST_ELEMENT, settings.COPY_TASK_BYTES // _LARGEST_ELEMENT * _LARGEST_ELEMENT)
        for start in range(span.start, span.stop, step):
            stop = min(start + step, span.stop)
            yield CheckTask(span.check, stop - start, partial(_scan, files, deep, span, [(start, stop)]))
        yield CheckTask(span.check, 0, finish, phase=1)


def _check_structure(files: SourceFiles, archive: TorchArchive, meter: Meter) -> Iterator[Finding]:
    def read(offset: int, size: int) -> bytes:
        meter.advance(size)
        return files.read(archive.file, offset, size)

    for start, stop, what in structure_defects(read, archive.index, archive.start, archive.stop):
        yield Finding(
            "zip-structure",
            "error",
            f"{archive.file}: {what} (bytes [{start}, {stop})) contradicts the rest of the archive",
            archive.file,
            byte_range=(start, stop),
            subject=what,
            hint="bytes that no loader reads were changed: restore the file from a copy",
            exit_code=IntegrityError.exit_code,
        )


def _finish_span(files: SourceFiles, deep: DeepState, checksum: SpanChecksum, meter: Meter) -> Iterator[Finding]:
    """Read the unread rest of a span, and compare its checksum."""
    span = checksum.span
    _scan(files, deep, span, list(checksum.unread()), meter)
    if span.expected is not None and checksum.value() != span.expected:
        yield _checksum_finding(span, checksum.value())


def _scan(
    files: SourceFiles, deep: DeepState, span: ChecksumSpan, ranges: Sequence[tuple[int, int]], meter: Meter
) -> tuple[Finding, ...]:
    """Read ranges of a span block by block, and scan values and padding. No range starts inside an element."""
    recorder = ReadRecorder(deep.checksums)
    size = max(block_bytes() // _LARGEST_ELEMENT, 1) * _LARGEST_ELEMENT
    size = min(size, max((stop - start for start, stop in ranges), default=0))
    block = ReadBlock(1, size)  # the one that masters are read into, which has the same size
    padding = _padding_ranges(span)
    starts = [state.start for state in span.states]
    longest = max((state.stop - state.start for state in span.states), default=0)
    for at, limit in ((at, stop) for start, stop in ranges for at in range(start, stop, size)):
        data = block.for_range(at, min(size, limit - at))
        files.read_into(span.file, at, data.data)
        meter.advance(len(data))
        recorder.record(span.file, at, data.data)
        end = at + len(data)
        for number in range(bisect_right(starts, at - longest - 1), bisect_right(starts, end - 1)):
            state = span.states[number]
            lo, hi = max(state.start, at), min(state.stop, end)
            if lo < hi:
                deep.values.scan(span.file, state, aligned(data[lo - at : hi - at], state.dtype.itemsize), lo)
        for first, last in padding:
            lo, hi = max(first, at), min(last, end)
            if lo < hi and data[lo - at : hi - at].any():
                bad = data[lo - at : hi - at] != 0
                deep.values.add_padding(span.file, span.title, int(np.count_nonzero(bad)), lo + int(np.argmax(bad)))
    recorder.close()
    return ()


def _padding_ranges(span: ChecksumSpan) -> list[tuple[int, int]]:
    """Gaps between the states of a flat buffer that must be zero: they start at zero and get no gradient.

    A gap longer than the padding of this checkpoint is something that the index left out.
    """
    unchecked = {WEIGHT, MASTER, *NONZERO_PADDING}
    if not span.padding or not span.states or any(state.kind in unchecked for state in span.states):
        return []
    longest = span.padding * span.states[0].dtype.itemsize
    gaps: list[tuple[int, int]] = []
    at = span.start
    for state in span.states:
        if state.start > at:
            gaps.append((at, state.start))
        at = max(at, state.stop)
    if at < span.stop:
        gaps.append((at, span.stop))
    return [(start, stop) for start, stop in gaps if stop - start <= longest]


def _checksum_finding(span: ChecksumSpan, actual: str) -> Finding:
    names = list(dict.fromkeys(f"{state.parameter}, {state.kind}" for state in span.states))
    only = span.states[0] if len(names) == 1 else None
    return Finding(
        span.check,
        "error",
        f"{span.file}, {span.title}: checksum {actual}, but {span.expected} is recorded"
        + (f" (contains {first_few(names, separator='; ')})" if names else ""),
        span.file,
        span.states[0].rank if span.states else None,
        only.parameter if only else None,
        only.kind if only else None,
        (span.start, span.stop),
        hint="bytes of the file were changed: restore it from a copy",
        exit_code=BY_ID[span.check].exit_code,
        subject=span.title,
    )
