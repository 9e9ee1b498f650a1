"""The log of one rank in one epoch, open for reading.

Reading a log: `Log.open(path)`.

    log = Log.open("run")                          # or run/log, or one epoch of it
    for span in log.spans(upto=1200):              # which epoch has which steps, oldest first
        for stream in span.epoch.streams.values():
            for block in stream.schema.blocks:     # where its elements belong: block.parameter, block.region
                record = stream.record(step)       # the scalars of a step
                if not record.skipped:
                    gradient = stream.read_block(step, block.id)   # None: the optimizer had none for it
                    consumed = gradient.float32() * record.scale   # where record.scale is not None

A log may be read while it is being written: what is found is what was complete when it was opened.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

from ucp.core.dtypes import DType
from ucp.errors import InconsistentError, IntegrityError, NotUnderstoodError, StorageError, UsageError
from ucp.log.codecs import DTYPES, Bits, Bytes, decode, to_float32
from ucp.log.epoch_manifest import MANIFEST, EpochManifest, ParentEpoch, read_manifest
from ucp.log.frames import BadBytesError, FrameType, checksum
from ucp.log.payloads import ENTRY, TABLE_HEAD, StateDigest, StepRecord, Table, table_bytes, unpack_digests, unpack_json
from ucp.log.stream_recovery import FrameRef, LogDefect, LoggedStep, StreamScan, scan_stream
from ucp.log.stream_schema import StreamSchema
from ucp.storage.local import SourceFiles
from ucp.storage.paths import parse_path

# An entry of a table as plain integers: block, encoding, dtype, state, count, zero, offset, length, checksum.
Row = tuple[int, ...]
_ROW: Final = struct.Struct("<IBBHIIQQQ")
assert _ROW.size == ENTRY.itemsize

_ROWS_AT_ONCE: Final = 16  # that are read: a replay goes through all steps for one block, then for the next
_KEPT_READS: Final = 4096  # of so many rows each


@dataclass(frozen=True, slots=True)
class LoggedBlock:
    """A block as it was read: still encoded, its checksum found right."""

    block: int
    state: int  # index into the manifest's state kinds; 0 is the gradient
    encoding: int
    dtype: DType
    count: int  # elements
    data: Bytes

    def bits(self) -> Bits:
        """The bit patterns of the elements, as unsigned integers (of a DIFF: the differences)."""
        try:
            return decode(self.encoding, self.data, self.dtype, self.count)
        except BadBytesError as error:  # though its checksum was right
            raise IntegrityError(
                f"block {self.block} of a log: {error}", hint="`ucp log verify` reads all of it and says where"
            ) from None

    def float32(self) -> npt.NDArray[np.float32]:
        """The elements as float32: exact, as every type of a gradient has at most 32 bits."""
        return to_float32(self.bits(), self.dtype)


class ReadBuffer(Protocol):
    """Where blocks are read to, one after the other."""

    def piece(self, nbytes: int) -> tuple[Bytes, memoryview]:
        """Room for so many bytes, twice: as an array and as the memory of that array."""
        ...


class LogStream:
    """The log of one rank in one epoch. Reading is thread-safe."""

    def __init__(self, folder: Path, schema: StreamSchema, scan: StreamScan) -> None:
        self.folder = folder
        self.schema = schema
        self.scan = scan
        self._files = SourceFiles(folder)
        self._hints: dict[int, tuple[int, int]] = {}  # block → (GRAD frame, entry) where it was last
        self._rows: dict[tuple[int, int], bytes] = {}  # of a frame's table, by frame and its first row

    @property
    def number(self) -> int:
        return self.schema.stream

    @property
    def is_remote(self) -> bool:
        return self._files.is_remote

    @property
    def steps(self) -> range:
        """The complete steps of this stream: every one of the range."""
        steps = self.scan.steps
        return range(next(iter(steps)), next(reversed(steps)) + 1) if steps else range(0)

    @property
    def defects(self) -> list[LogDefect]:
        return self.scan.defects

    def record(self, step: int) -> StepRecord:
        """The scalars of a complete step."""
        return self._logged(step).record

    def aux(self, step: int) -> Any:
        """The notes of a step (random states, loss scaler, …) as JSON values; None where there are none."""
        ref = self._logged(step).aux
        return None if ref is None else self._unpacked(unpack_json, ref)

    def digests(self) -> dict[int, list[StateDigest]]:
        """Step → digests of optimizer tensors after it."""
        found: dict[int, list[StateDigest]] = {}
        for ref in self._others(FrameType.DIGEST):
            found.setdefault(ref.header.step, []).extend(self._unpacked(unpack_digests, ref))
        return found

    def _unpacked(self, unpack: Callable[[bytes], Any], ref: FrameRef) -> Any:
        """What a frame holds, whose checksum is right and whose bytes may be nonsense all the same."""
        try:
            return unpack(ref.read())
        except BadBytesError as error:
            raise self._damaged(ref, str(error)) from None

    def read_block(self, step: int, block: int, room: ReadBuffer | None = None) -> LoggedBlock | None:
        """The gradient of a block in a complete step, its checksum verified.

        None where the step has no such block: the optimizer had no gradient for it (or the step was skipped) and left
        its state alone. With a `room` its bytes are put there, and are good until that is used again.
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
        """Ids of the blocks that a step has gradients of."""
        return [int(block) for ref in self._logged(step).grads for block in self.table(ref)["block"]]

    def block_count(self, step: int) -> int:
        """How many blocks a step has gradients of."""
        heads = (self._bytes(ref, 0, TABLE_HEAD.size) for ref in self._logged(step).grads)
        return sum(TABLE_HEAD.unpack(head)[0] for head in heads)

    def states(self, kind: Literal[FrameType.FULL, FrameType.DIFF]) -> list[tuple[FrameRef, Table, int]]:
        """FULL or DIFF frames in order, each with its table and the step that a difference starts from (-1: none)."""
        found = []
        for ref in self._others(kind):
            count, _, base_step = TABLE_HEAD.unpack(self._bytes(ref, 0, TABLE_HEAD.size))
            del count
            found.append((ref, self.table(ref), base_step))
        return found

    def read_entry(self, ref: FrameRef, entry: Any) -> LoggedBlock:
        """A block of a FULL or DIFF frame by its entry of the table."""
        return self._read(ref, entry.item())

    def table(self, ref: FrameRef) -> Table:
        """The table of a GRAD, DIFF or FULL frame (checked when the log was opened)."""
        count = TABLE_HEAD.unpack(self._bytes(ref, 0, TABLE_HEAD.size))[0]
        size = table_bytes(count)
        if size > ref.header.length:
            raise self._damaged(ref, "a table of blocks is longer than its frame")
        data = self._bytes(ref, 0, size)
        if checksum(data) != ref.header.checksum:
            raise self._damaged(ref, "the checksum of a table of blocks is wrong")
        return np.frombuffer(data, ENTRY, count, TABLE_HEAD.size)

    def close(self) -> None:
        self._files.close()

    def _logged(self, step: int) -> LoggedStep:
        try:
            return self.scan.steps[step]
        except KeyError:
            have = f"steps {self.steps.start} to {self.steps.stop - 1}" if self.steps else "no steps"
            raise UsageError(f"{self.folder}: step {step} is not complete here; there are {have}") from None

    def _others(self, kind: FrameType) -> list[FrameRef]:
        refs = [ref for logged in self.scan.steps.values() for ref in logged.others] + self.scan.loose
        return sorted((ref for ref in refs if ref.header.type == kind), key=lambda ref: ref.header.lsn)

    def _row(self, ref: FrameRef, number: int) -> Row | None:
        """One entry of a table: its place in the file does not change from step to step."""
        if table_bytes(number + 1) > ref.header.length:
            return None
        inside = number % _ROWS_AT_ONCE
        key = ref.header.lsn, number - inside
        rows = self._rows.get(key)
        if rows is None:
            if len(self._rows) >= _KEPT_READS:
                self._rows.clear()
            offset = table_bytes(number - inside)
            size = min(_ROWS_AT_ONCE * _ROW.size, ref.header.length - offset)
            rows = self._rows[key] = self._bytes(ref, offset, size)
        return _ROW.unpack_from(rows, inside * _ROW.size)

    def _read(self, ref: FrameRef, row: Row, room: ReadBuffer | None = None) -> LoggedBlock:
        block, encoding, code, state, count, _, offset, length, expected = row
        dtype = DTYPES.get(code)
        if offset + length > ref.header.length or dtype is None:
            raise self._damaged(ref, f"block {block} does not lie in its frame")
        if room is None:
            data: Bytes = np.empty(length, np.uint8)
            memory = data.data
        else:
            data, memory = room.piece(length)
        self._files.read_into(ref.name, ref.payload_offset + offset, memory)
        if checksum(memory) != expected:
            raise self._damaged(ref, f"the checksum of block {block} is wrong")
        return LoggedBlock(block, state, encoding, dtype, count, data)

    def _bytes(self, ref: FrameRef, offset: int, size: int) -> bytes:
        return self._files.read(ref.name, ref.payload_offset + offset, size)

    def _damaged(self, ref: FrameRef, reason: str) -> IntegrityError:
        return IntegrityError(
            f"{ref.file}: byte {ref.header.offset}, frame {ref.header.lsn} of step {ref.header.step}: {reason}",
            hint=f"the log is good up to step {ref.header.step - 1}; `ucp log verify` reads all of it",
        )


Mode = Literal["point_in_time", "strict", "inspect"]
Check = Literal["all", "tail"]

EPOCH: Final = re.compile(r"epoch-(\d+)")
STREAM: Final = re.compile(r"stream-(\d+)")


def epoch_folder(log: Path, number: int) -> Path:
    return log / f"epoch-{number:06d}"


def stream_folder(epoch: Path, number: int) -> Path:
    return epoch / f"stream-{number:05d}"


@dataclass(slots=True)
class Epoch:
    """A stretch of training with one layout and one optimizer; every stream of it."""

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
        """The last step that can be had; the step that the epoch began with where none can."""
        return self.steps.stop - 1 if self.steps else self.manifest.start

    @property
    def defects(self) -> list[LogDefect]:
        return [defect for stream in self.streams.values() for defect in stream.defects]


@dataclass(frozen=True, slots=True)
class EpochSpan:
    """The steps `first` to `last` (inclusive) are those of `epoch`."""

    epoch: Epoch
    first: int
    last: int


class Log:
    """A log that is open for reading."""

    def __init__(self, root: Path, epochs: list[Epoch]) -> None:
        self.root = root  # the folder that holds the epochs
        self.epochs = epochs  # by number

    @staticmethod
    def open(path: str | Path, mode: Mode = "point_in_time", *, check: Check = "all") -> Log:
        """Open the log of a run (its folder, its `log` folder, or one `epoch-…` alone).

        `point_in_time` takes what is whole: a prefix of whole steps of every stream. `strict` refuses a log with any
        defect. `inspect` takes a log that has nothing whole at all. Nothing is ever changed. With `check="tail"` only
        blocks that may not have become durable are read now; the others are checked when they are read.
        """
        given = parse_path(path)
        root, folders = _find(given)
        epochs = [_open_epoch(folder, mode, check) for folder in folders]
        if mode == "strict":
            _refuse_defects(epochs)
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
        for epoch in self.epochs:
            if epoch.number == number:
                return epoch
        raise UsageError(f"{self.root}: there is no epoch {number}")

    @property
    def recoverable_step(self) -> int:
        """The last step of the newest epoch that can be had."""
        return self.epochs[-1].recoverable_step

    def spans(self, upto: int | None = None) -> list[EpochSpan]:
        """Which epoch has which steps, oldest first, without gap, ending with step `upto` (the last that can be had).

        A newer epoch wins over the steps of its parent after the step that it went on from. Steps that an epoch no
        longer has (their segments were dropped) end the list at its beginning. A step that does not exist is refused.
        """
        last = self.recoverable_step if upto is None else upto
        if last > self.recoverable_step:
            damage = next((d for d in self.epochs[-1].defects if d.kind in ("damaged", "disorder")), None)
            raise UsageError(
                f"{self.root}: step {last} cannot be had; the log ends with step {self.recoverable_step}",
                hint="`ucp log stat` shows what every stream has"
                if damage is None
                else f"what follows is not used, because of {damage}",
            )
        found: list[EpochSpan] = []
        epoch: Epoch | None = self.epochs[-1]
        while epoch is not None:
            first = epoch.manifest.start + 1
            if last >= first:
                if last not in epoch.steps:
                    if found:
                        break
                    raise UsageError(
                        f"{self.root}: step {last} is no longer (or not) in epoch {epoch.number}",
                        hint="`ucp log ls` lists the steps and bases that there are",
                    )
                found.append(EpochSpan(epoch, max(first, epoch.steps.start), last))
                if epoch.steps.start > first:
                    break
            parent = epoch.manifest.parent
            last = min(last, epoch.manifest.start)
            epoch = None
            if parent is not None:
                last = min(last, parent.step)
                epoch = next((other for other in self.epochs if other.number == parent.epoch), None)
        return found[::-1]


def find_parent(log: Log, step: int) -> ParentEpoch | None:
    """Which epoch of a log a state after `step` steps goes on from; None where the log does not reach it."""
    epoch = log.epochs[-1]
    while True:
        if step > epoch.manifest.start:
            return ParentEpoch(epoch.number, step) if step in epoch.steps else None
        if step == epoch.manifest.start and (epoch.manifest.base is not None or epoch.manifest.parent is None):
            return ParentEpoch(epoch.number, step)
        parent = epoch.manifest.parent
        before = None if parent is None else next((e for e in log.epochs if e.number == parent.epoch), None)
        if before is None:
            return None
        epoch = before


def _find(given: Path) -> tuple[Path, list[Path]]:
    """(folder of the epochs, the epochs that are meant)."""
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
        f"{given}: holds no log (no epoch-…/{MANIFEST})", hint="give the folder that ucp.record was given"
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
    if mode == "point_in_time" and epoch.manifest.streams and epoch.missing and _any_steps(epoch):
        numbers = ", ".join(map(str, epoch.missing))
        raise InconsistentError(
            f"{folder}: streams {numbers} of {len(manifest.streams)} have no files",
            hint="copy the logs of all ranks into one folder; without them no step is whole",
        )
    return epoch


def _any_steps(epoch: Epoch) -> bool:
    return any(stream.steps for stream in epoch.streams.values())


def _refuse_defects(epochs: list[Epoch]) -> None:
    for epoch in epochs:
        defects = epoch.defects
        if epoch.missing:
            raise InconsistentError(f"{epoch.folder}: streams {', '.join(map(str, epoch.missing))} have no files")
        if defects:
            more = f" (and {len(defects) - 1} more defects)" if len(defects) > 1 else ""
            raise IntegrityError(f"{defects[0]}{more}", hint="`ucp log verify` lists all of them")
