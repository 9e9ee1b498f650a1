"""The deep pass: every byte of every file once, and while it is hot: checksum, NaN, negative moments, padding."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Final

import numpy as np

from ucp import settings
from ucp.checks.catalogue import BY_ID
from ucp.checks.deep_state import DeepState, ReadRecorder, SpanChecksum
from ucp.checks.findings import Finding
from ucp.checks.read_blocks import ReadBlock, aligned, block_bytes
from ucp.checks.spans import ChecksumSpan, FileMap, TorchArchive, manifest_spans, plain_spans, torch_spans
from ucp.checks.stores import store_spans
from ucp.checks.tasks import CheckContext, CheckTask, ReadMeter, failure_finding
from ucp.checks.zip_structure import frame_bytes, frame_defects
from ucp.core.checkpoint import MASTER, WEIGHT
from ucp.core.optimizers import NONZERO_PADDING, fills_padding
from ucp.errors import IntegrityError, UcpError
from ucp.storage.local import SourceFiles

_ALIGN: Final = 16  # blocks are multiples of the largest element, so that none is cut in two
_NAMED: Final = 3  # parameters that a message names


def look(context: CheckContext) -> Iterator[Finding | CheckTask]:
    """The tasks that read what no other check reads, and compare all checksums."""
    checkpoint = context.checkpoint
    assert context.deep is not None
    held = FileMap(context)
    # ZeRO rounds a flat buffer up to a multiple of two elements a rank, and may align each parameter to 16 bytes.
    # Universal folders keep whole tensors; what is left out of those are rows beyond the vocabulary. The padding of
    # ZeRO-3's masters is whatever was in memory, and weight decay takes it into the states.
    has_filled_padding = any(fills_padding(group.hyper) for group in checkpoint.groups)
    unpadded = checkpoint.format == "deepspeed-universal" or checkpoint.mesh.zero == 3 or has_filled_padding
    padding = 0 if unpadded else max(2 * checkpoint.mesh.dp, 16)
    found: list[Finding | ChecksumSpan | TorchArchive] = []
    if checkpoint.format == "atoms":
        found.extend(manifest_spans(checkpoint.root, held))
    if checkpoint.format == "store":
        found.extend(store_spans(checkpoint, held))
    for file in dict.fromkeys((*checkpoint.sizes, *held.files)):
        try:
            found.extend(torch_spans(checkpoint.root, file, held, padding))
        except UcpError as error:
            found.append(failure_finding("zip-crc", error))
    summed = {item.file for item in found if isinstance(item, ChecksumSpan)}
    for file in held.files:
        if file not in summed:
            found.extend(plain_spans(checkpoint.root, file, held))
    yield from tasks_of(context.files, context.deep, found)


def tasks_of(
    files: SourceFiles, deep: DeepState, found: Iterable[Finding | ChecksumSpan | TorchArchive]
) -> Iterator[Finding | CheckTask]:
    """Findings as they are, and the tasks that scan spans and look at the frames of archives."""
    tracks: list[SpanChecksum] = []
    for item in found:
        if isinstance(item, ChecksumSpan):
            tracks.append(deep.ledger.add(item))
        elif isinstance(item, TorchArchive):
            nbytes = frame_bytes(item.index, item.start, item.stop)
            yield CheckTask("zip-structure", nbytes, partial(_frame, files, item))
        else:
            yield item
    deep.ledger.close()
    for track in tracks:
        yield from _span_tasks(files, deep, track)
    yield CheckTask("finite", 0, lambda _: deep.tallies.findings(), turn=2)


def _span_tasks(files: SourceFiles, deep: DeepState, track: SpanChecksum) -> Iterator[CheckTask]:
    """One task for a span; parts of a long one for several threads; the rest of one that other checks read from."""
    span = track.span
    complete = partial(_complete, files, deep, track)
    elsewhere = sum(held.stop - held.start for held in span.held if (held.parameter, held.kind) in deep.elsewhere)
    if elsewhere:
        yield CheckTask(span.check, max(0, span.nbytes - elsewhere), complete, turn=1)
    elif track.is_sequential or span.nbytes <= settings.COPY_TASK_BYTES:
        yield CheckTask(span.check, span.nbytes, complete)
    else:
        step = max(_ALIGN, settings.COPY_TASK_BYTES // _ALIGN * _ALIGN)
        for start in range(span.start, span.stop, step):
            stop = min(start + step, span.stop)
            yield CheckTask(span.check, stop - start, partial(_some, files, deep, span, start, stop))
        yield CheckTask(span.check, 0, complete, turn=1)


def _frame(files: SourceFiles, archive: TorchArchive, meter: ReadMeter) -> Iterator[Finding]:
    def read(offset: int, size: int) -> bytes:
        meter.read(size)
        return files.read(archive.file, offset, size)

    for start, stop, what in frame_defects(read, archive.index, archive.start, archive.stop):
        yield Finding(
            "zip-structure",
            "error",
            f"{archive.file}: {what} (bytes [{start}, {stop})) contradicts the rest of the archive",
            archive.file,
            byte_range=(start, stop),
            subject=what,
            hint="bytes of the file were changed where no loader looks: restore it from a copy",
            exit_code=IntegrityError.exit_code,
        )


def _some(
    files: SourceFiles, deep: DeepState, span: ChecksumSpan, start: int, stop: int, meter: ReadMeter
) -> Iterator[Finding]:
    notebook = ReadRecorder(deep.ledger)
    _read(files, deep, span, start, stop, notebook, meter)
    notebook.close()
    return iter(())


def _complete(files: SourceFiles, deep: DeepState, track: SpanChecksum, meter: ReadMeter) -> Iterator[Finding]:
    """Read what nobody has read of a span, and compare its checksum."""
    span = track.span
    notebook = ReadRecorder(deep.ledger)
    for start, stop in list(track.rest()):
        _read(files, deep, span, start, stop, notebook, meter)
    notebook.close()
    if span.expected is not None:
        found = track.found()
        if found != span.expected:
            yield _damaged(span, found)


def _read(
    files: SourceFiles,
    deep: DeepState,
    span: ChecksumSpan,
    start: int,
    stop: int,
    notebook: ReadRecorder,
    meter: ReadMeter,
) -> None:
    """Bytes `[start, stop)` of a span, block by block; nothing in it is cut through by `start`."""
    size = min(max(block_bytes() // _ALIGN, 1) * _ALIGN, stop - start)
    block = ReadBlock(1, size)  # where masters are read into, which are as long
    gaps = _gaps(span)
    starts = [held.start for held in span.held]
    longest = max((held.stop - held.start for held in span.held), default=0)
    for at in range(start, stop, size):
        data = block.place(at, min(size, stop - at))
        files.read_into(span.file, at, data.data)
        meter.read(len(data))
        notebook.take(span.file, at, data.data)
        end = at + len(data)
        for number in range(bisect_right(starts, at - longest - 1), bisect_right(starts, end - 1)):
            held = span.held[number]
            lo, hi = max(held.start, at), min(held.stop, end)
            if lo < hi:
                deep.tallies.look(span.file, held, aligned(data[lo - at : hi - at], held.dtype.itemsize), lo)
        for first, last in gaps:
            lo, hi = max(first, at), min(last, end)
            if lo < hi and data[lo - at : hi - at].any():
                bad = data[lo - at : hi - at] != 0
                deep.tallies.pad(span.file, span.title, int(np.count_nonzero(bad)), lo + int(np.argmax(bad)))


def _gaps(span: ChecksumSpan) -> list[tuple[int, int]]:
    """What no parameter holds of a storage of optimizer states, which start at zero and get no gradient there.

    (A longer gap is something that the index left out.)
    """
    passed = {WEIGHT, MASTER, *NONZERO_PADDING}
    if not span.padding or not span.held or any(held.kind in passed for held in span.held):
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


def _damaged(span: ChecksumSpan, found: str) -> Finding:
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
        subject=span.title,
    )
