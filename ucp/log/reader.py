"""Reading a log: `Log.open(path)`.

    log = Log.open("run")                          # or run/log, or one epoch of it
    for span in log.spans(upto=1200):              # which epoch has which steps, oldest first
        for stream in span.epoch.streams.values():
            for block in stream.schema.blocks:     # where its elements belong: block.parameter, block.region
                record = stream.record(step)       # the scalars of a step
                if not record.skipped:
                    gradient = stream.read_block(step, block.id)   # None: the optimizer had no gradient for it
                    consumed = gradient.float32() * record.scale   # if record.scale is not None

A log may be read while it is being written: the result is what was complete when it was opened.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import numpy as np

from ucp.errors import InconsistentError, IntegrityError, NotUnderstoodError, StorageError, UsageError
from ucp.log.codecs import DTYPES, Bytes, EncodedBlock
from ucp.log.epoch_manifest import MANIFEST, EpochManifest, ParentEpoch, read_manifest
from ucp.log.frames import BadBytesError, FrameType, checksum
from ucp.log.payloads import (
    ENTRY,
    TABLE_HEAD,
    StateDigest,
    StepRecord,
    Table,
    table_bytes,
    table_size,
    unpack_digests,
    unpack_json,
    unpack_table,
)
from ucp.log.stream_recovery import FrameRef, LogDefect, LoggedStep, StreamScan, scan_stream
from ucp.log.stream_schema import StreamSchema
from ucp.storage.local import SourceFiles
from ucp.storage.paths import parse_path

Mode = Literal["point_in_time", "strict", "inspect"]
Check = Literal["all", "tail"]

EPOCH: Final = re.compile(r"epoch-(\d+)")


def epoch_folder(log: Path, number: int) -> Path:
    return log / f"epoch-{number:06d}"


def stream_folder(epoch: Path, number: int) -> Path:
    return epoch / f"stream-{number:05d}"


@dataclass(slots=True)
class Epoch:
    """A part of a run with one parallel layout and one optimizer, and its streams."""

    folder: Path
    manifest: EpochManifest
    streams: dict[int, LogStream] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)  # streams of the manifest that have no files at all

    @property
    def number(self) -> int:
        return self.manifest.epoch

    @property
    def steps(self) -> range:
        """The steps that are complete in every stream."""
        if self.missing or not self.streams or not all(stream.steps for stream in self.streams.values()):
            return range(0)
        ranges = [stream.steps for stream in self.streams.values()]
        return range(max(r.start for r in ranges), min(r.stop for r in ranges))

    @property
    def recoverable_step(self) -> int:
        """The last step that is complete in every stream; the epoch's start if there is none."""
        return self.steps.stop - 1 if self.steps else self.manifest.start

    @property
    def defects(self) -> list[LogDefect]:
        return [defect for stream in self.streams.values() for defect in stream.defects]


@dataclass(frozen=True, slots=True)
class EpochSpan:
    """The steps `first` to `last` (inclusive) of an epoch."""

    epoch: Epoch
    first: int
    last: int


class Log:
    """A log that is open for reading."""

    def __init__(self, root: Path, epochs: list[Epoch]) -> None:
        self.root = root  # the folder that contains the epochs
        self.epochs = epochs  # by number

    @staticmethod
    def open(path: str | Path, mode: Mode = "point_in_time", *, check: Check = "all") -> Log:
        """Open the log of a run: its folder, its `log` folder, or a single `epoch-…` folder.

        `point_in_time` uses what is whole: a prefix of whole steps of every stream. `strict` refuses a log with any
        defect. `inspect` also opens a log without anything whole. Files are never changed. With `check="tail"`, only
        blocks that may not have become durable are read now; the others are checked when they are read.
        """
        root, folders = _find_epochs(parse_path(path))
        epochs = [_open_epoch(folder, mode, check) for folder in folders]
        for epoch in epochs if mode == "strict" else ():
            if epoch.missing:
                raise InconsistentError(f"{epoch.folder}: streams {', '.join(map(str, epoch.missing))} have no files")
            if epoch.defects:
                more = f" (and {len(epoch.defects) - 1} more defects)" if len(epoch.defects) > 1 else ""
                raise IntegrityError(f"{epoch.defects[0]}{more}", hint="`ucp log verify` lists all of them")
        runs = {epoch.manifest.run for epoch in epochs}
        if len(runs) > 1 and mode != "inspect":
            raise InconsistentError(f"{root}: the epochs are of {len(runs)} different runs: {', '.join(sorted(runs))}")
        return Log(root, epochs)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for epoch in self.epochs:
            for stream in epoch.streams.values():
                stream.close()

    @property
    def run_folder(self) -> Path:
        """The folder that paths of bases are relative to."""
        return self.root.parent

    def epoch(self, number: int) -> Epoch:
        """An epoch by its number."""
        found = next((epoch for epoch in self.epochs if epoch.number == number), None)
        if found is None:
            raise UsageError(f"{self.root}: epoch {number} does not exist")
        return found

    def parent_of(self, epoch: Epoch) -> Epoch | None:
        """The epoch that an epoch continues, if it is in this log."""
        parent = epoch.manifest.parent
        return None if parent is None else next((other for other in self.epochs if other.number == parent.epoch), None)

    @property
    def recoverable_step(self) -> int:
        """The last complete step of the newest epoch."""
        return self.epochs[-1].recoverable_step

    def spans(self, upto: int | None = None) -> list[EpochSpan]:
        """Which epoch has which steps: oldest first, without gaps, up to step `upto` (the last complete one).

        A newer epoch replaces the steps of its parent after the step that it continues from. The list begins after
        steps that an epoch no longer has because their segments were dropped. A step that does not exist is refused.
        """
        last = self.recoverable_step if upto is None else upto
        if last > self.recoverable_step:
            damage = next((d for d in self.epochs[-1].defects if d.kind in ("damaged", "disorder")), None)
            raise UsageError(
                f"{self.root}: step {last} is not in the log (last complete step: {self.recoverable_step})",
                hint="`ucp log stat` shows the steps of every stream"
                if damage is None
                else f"later steps are not used, because of {damage}",
            )
        spans: list[EpochSpan] = []
        epoch: Epoch | None = self.epochs[-1]
        while epoch is not None:
            first = epoch.manifest.start + 1
            if last >= first:
                if last not in epoch.steps:
                    if spans:
                        break
                    raise UsageError(
                        f"{self.root}: step {last} is not, or no longer, in epoch {epoch.number}",
                        hint="`ucp log ls` lists steps and bases",
                    )
                spans.append(EpochSpan(epoch, max(first, epoch.steps.start), last))
                if epoch.steps.start > first:
                    break
            last = min(last, epoch.manifest.start)
            if epoch.manifest.parent is not None:
                last = min(last, epoch.manifest.parent.step)
            epoch = self.parent_of(epoch)
        return spans[::-1]


def find_parent(log: Log, step: int) -> ParentEpoch | None:
    """The epoch of a log that a state after `step` steps continues; None if the log does not reach that step."""
    epoch: Epoch | None = log.epochs[-1]
    while epoch is not None:
        if step > epoch.manifest.start:
            return ParentEpoch(epoch.number, step) if step in epoch.steps else None
        if step == epoch.manifest.start and (epoch.manifest.base is not None or epoch.manifest.parent is None):
            return ParentEpoch(epoch.number, step)
        epoch = log.parent_of(epoch)
    return None


def _find_epochs(given: Path) -> tuple[Path, list[Path]]:
    """(folder of the epochs, the epochs to open)."""
    if (given / MANIFEST).is_file() and EPOCH.fullmatch(given.name):
        return given.parent, [given]
    for root in (given, given / "log"):
        if root.is_dir():
            epochs = [path for path in root.iterdir() if EPOCH.fullmatch(path.name) and (path / MANIFEST).is_file()]
            if epochs:
                return root, sorted(epochs, key=lambda path: int(path.name.removeprefix("epoch-")))
    if not given.exists():
        raise StorageError(f"{given}: no such file or folder")
    raise NotUnderstoodError(
        f"{given}: contains no log (no epoch-…/{MANIFEST})", hint="give the folder that ucp.record was given"
    )


def _open_epoch(folder: Path, mode: Mode, check: Check) -> Epoch:
    manifest = read_manifest(folder)
    named = EPOCH.fullmatch(folder.name)
    if named is None or int(named[1]) != manifest.epoch:
        raise InconsistentError(f"{folder}: its manifest is of epoch {manifest.epoch}")
    epoch = Epoch(folder, manifest)
    for schema in manifest.streams:
        path = stream_folder(folder, schema.stream)
        scan = scan_stream(path, manifest.epoch, schema, check)
        if not scan.segments and not scan.defects:
            epoch.missing.append(schema.stream)
        epoch.streams[schema.stream] = LogStream(path, schema, scan)
    if mode == "point_in_time" and epoch.missing and any(stream.steps for stream in epoch.streams.values()):
        numbers = ", ".join(map(str, epoch.missing))
        raise InconsistentError(
            f"{folder}: streams {numbers} of {len(manifest.streams)} have no files",
            hint="copy the logs of all ranks into one folder; no step is complete without them",
        )
    return epoch


# One stream ---------------------------------------------------------------------------------------------------------

# An entry of a table as plain integers: block, encoding, dtype, state, count, zero, offset, length, checksum.
Row = tuple[int, ...]
_ROW: Final = struct.Struct("<IBBHIIQQQ")
assert _ROW.size == ENTRY.itemsize

_ROWS_PER_READ: Final = 16  # a replay reads one block of all steps, then the next block
_CACHED_READS: Final = 4096


class ReadBuffer(Protocol):
    """Reused memory that blocks are read into, one after the other."""

    def piece(self, nbytes: int) -> tuple[Bytes, memoryview]:
        """`nbytes` bytes, as an array and as the memory of that array."""
        ...


class LogStream:
    """The log of one rank in one epoch. Reading is thread-safe."""

    def __init__(self, folder: Path, schema: StreamSchema, scan: StreamScan) -> None:
        self.folder = folder
        self.schema = schema
        self.scan = scan
        self._files = SourceFiles(folder)
        self._hints: dict[int, tuple[int, int]] = {}  # block → (GRAD frame, entry) of the last read
        self._rows: dict[tuple[int, int], bytes] = {}  # (frame, first row) → rows of its table

    @property
    def number(self) -> int:
        return self.schema.stream

    @property
    def is_remote(self) -> bool:
        return self._files.is_remote

    @property
    def steps(self) -> range:
        """The complete steps of this stream, without gaps."""
        steps = self.scan.steps
        return range(next(iter(steps)), next(reversed(steps)) + 1) if steps else range(0)

    @property
    def defects(self) -> list[LogDefect]:
        return self.scan.defects

    def record(self, step: int) -> StepRecord:
        """The scalars of a complete step."""
        return self._logged(step).record

    def aux(self, step: int) -> Any:
        """The notes of a step (random states, loss scaler, …) as JSON values; None if there are none."""
        ref = self._logged(step).aux
        return None if ref is None else self._unpacked(unpack_json, ref)

    def digests(self) -> dict[int, list[StateDigest]]:
        """Step → digests of optimizer tensors after it."""
        found: dict[int, list[StateDigest]] = {}
        for ref in self._others(FrameType.DIGEST):
            found.setdefault(ref.header.step, []).extend(self._unpacked(unpack_digests, ref))
        return found

    def _unpacked(self, unpack: Callable[[bytes], Any], ref: FrameRef) -> Any:
        """The content of a frame; its checksum is right, but the bytes may still be invalid."""
        with self._bad_bytes(ref):
            return unpack(ref.read())

    @contextmanager
    def _bad_bytes(self, ref: FrameRef) -> Iterator[None]:
        """Raise BadBytesError of the `with` block as an error of a frame."""
        try:
            yield
        except BadBytesError as error:
            raise self._damaged(ref, str(error)) from None

    def read_block(self, step: int, block: int, room: ReadBuffer | None = None) -> EncodedBlock | None:
        """The gradient of a block in a complete step, its checksum verified.

        None if the step has no such block: the step was skipped, or the optimizer had no gradient and left the state
        unchanged. With `room`, the bytes are read there and are valid until it is used again.
        """
        grads = self._logged(step).grads
        hint = self._hints.get(block)
        if hint is not None and hint[0] < len(grads):
            row = self._row(grads[hint[0]], hint[1])
            if row is not None and row[0] == block:
                return self._read(grads[hint[0]], row, room)
        for number, ref in enumerate(grads):
            table = self.table(ref)
            for place in np.flatnonzero(table["block"] == block):
                self._hints[block] = number, int(place)
                return self._read(ref, table[place].item(), room)
        return None

    def blocks(self, step: int) -> list[int]:
        """Ids of the blocks with a gradient in a step."""
        return [int(block) for ref in self._logged(step).grads for block in self.table(ref)["block"]]

    def block_count(self, step: int) -> int:
        """The number of blocks with a gradient in a step."""
        heads = (self._bytes(ref, 0, TABLE_HEAD.size) for ref in self._logged(step).grads)
        return sum(TABLE_HEAD.unpack(head)[0] for head in heads)

    def states(self, kind: Literal[FrameType.FULL, FrameType.DIFF]) -> list[tuple[FrameRef, Table, int]]:
        """FULL or DIFF frames in order, each with its table and the step that differences start from (-1: none)."""
        return [(ref, *self._table(ref)) for ref in self._others(kind)]

    def read_entry(self, ref: FrameRef, entry: Any) -> EncodedBlock:
        """A block of a FULL or DIFF frame by its table entry."""
        return self._read(ref, entry.item())

    def table(self, ref: FrameRef) -> Table:
        """The table of a GRAD, DIFF or FULL frame."""
        return self._table(ref)[0]

    def close(self) -> None:
        self._files.close()

    def _logged(self, step: int) -> LoggedStep:
        try:
            return self.scan.steps[step]
        except KeyError:
            have = f"steps {self.steps.start} to {self.steps.stop - 1}" if self.steps else "none"
            raise UsageError(f"{self.folder}: step {step} is not complete (complete steps: {have})") from None

    def _others(self, kind: FrameType) -> list[FrameRef]:
        refs = [ref for logged in self.scan.steps.values() for ref in logged.others] + self.scan.loose
        return sorted((ref for ref in refs if ref.header.type == kind), key=lambda ref: ref.header.lsn)

    def _table(self, ref: FrameRef) -> tuple[Table, int]:
        with self._bad_bytes(ref):
            size = table_size(ref.header, self._bytes(ref, 0, TABLE_HEAD.size))
            return unpack_table(ref.header, self._bytes(ref, 0, size))

    def _row(self, ref: FrameRef, number: int) -> Row | None:
        """One entry of a table: most steps have a block at the same place."""
        if table_bytes(number + 1) > ref.header.length:
            return None
        inside = number % _ROWS_PER_READ
        key = ref.header.lsn, number - inside
        rows = self._rows.get(key)
        if rows is None:
            if len(self._rows) >= _CACHED_READS:
                self._rows.clear()
            offset = table_bytes(number - inside)
            size = min(_ROWS_PER_READ * _ROW.size, ref.header.length - offset)
            rows = self._rows[key] = self._bytes(ref, offset, size)
        return _ROW.unpack_from(rows, inside * _ROW.size)

    def _read(self, ref: FrameRef, row: Row, room: ReadBuffer | None = None) -> EncodedBlock:
        block, encoding, code, state, count, _, offset, length, expected = row
        dtype = DTYPES.get(code)
        if offset + length > ref.header.length or dtype is None:
            raise self._damaged(ref, f"block {block} is not inside its frame")
        if room is None:
            data: Bytes = np.empty(length, np.uint8)
            memory = data.data
        else:
            data, memory = room.piece(length)
        self._files.read_into(ref.name, ref.payload_offset + offset, memory)
        if checksum(memory) != expected:
            raise self._damaged(ref, f"the checksum of block {block} is wrong")
        return EncodedBlock(block, encoding, dtype, count, data, state)

    def _bytes(self, ref: FrameRef, offset: int, size: int) -> bytes:
        return self._files.read(ref.name, ref.payload_offset + offset, size)

    def _damaged(self, ref: FrameRef, reason: str) -> IntegrityError:
        return IntegrityError(
            f"{ref.file}: byte {ref.header.offset}, frame {ref.header.lsn} of step {ref.header.step}: {reason}",
            hint=f"the log is good up to step {ref.header.step - 1}; `ucp log verify` reads all of it",
        )
