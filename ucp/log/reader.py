"""Reading a log: `Log.open(path)`.

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from ucp.errors import InconsistentError, IntegrityError, NotUnderstoodError, UsageError
from ucp.files.local import SourceFiles
from ucp.log.codecs import DTYPES, Bits, Bytes, decode, to_float32
from ucp.log.frames import FRAME_BYTES, BadBytesError, FrameType, checksum
from ucp.log.manifest import MANIFEST, Manifest, read_manifest
from ucp.log.payloads import ENTRY, TABLE_HEAD, Digest, StepRecord, Table, table_bytes, unpack_digests, unpack_json
from ucp.log.schema import StreamSchema
from ucp.log.walk import Defect, FrameRef, LoggedStep, StreamScan, scan_stream
from ucp.model.dtypes import DType

Mode = Literal["point_in_time", "strict", "inspect"]
Check = Literal["all", "tail"]

EPOCH: Final = re.compile(r"epoch-(\d+)")
STREAM: Final = re.compile(r"stream-(\d+)")


def epoch_folder(log: Path, number: int) -> Path:
    return log / f"epoch-{number:06d}"


def stream_folder(epoch: Path, number: int) -> Path:
    return epoch / f"stream-{number:05d}"


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block as it was read: still encoded, its checksum found right."""

    block: int
    state: int  # index into the manifest's state kinds; 0 is the gradient
    encoding: int
    dtype: DType
    count: int  # elements
    data: Bytes

    def bits(self) -> Bits:
        """The bit patterns of the elements, as unsigned integers (of a DIFF: the differences)."""
        return decode(self.encoding, self.data, self.dtype, self.count)

    def float32(self) -> npt.NDArray[np.float32]:
        """The elements as float32: exact, as every type of a gradient has at most 32 bits."""
        return to_float32(self.bits(), self.dtype)


class Stream:
    """The log of one rank in one epoch. Reading is thread-safe."""

    def __init__(self, folder: Path, schema: StreamSchema, scan: StreamScan) -> None:
        self.folder = folder
        self.schema = schema
        self.scan = scan
        self._files = SourceFiles(folder)
        self._hints: dict[int, tuple[int, int]] = {}  # block → (GRAD frame, entry) where it was last

    @property
    def number(self) -> int:
        return self.schema.stream

    @property
    def steps(self) -> range:
        """The complete steps of this stream: every one of the range."""
        steps = self.scan.steps
        return range(next(iter(steps)), next(reversed(steps)) + 1) if steps else range(0)

    @property
    def defects(self) -> list[Defect]:
        return self.scan.defects

    def record(self, step: int) -> StepRecord:
        """The scalars of a complete step."""
        return self._logged(step).record

    def aux(self, step: int) -> Any:
        """The notes of a step (random states, loss scaler, …) as JSON values; None where there are none."""
        ref = self._logged(step).aux
        return None if ref is None else unpack_json(ref.read())

    def digests(self) -> dict[int, list[Digest]]:
        """Step → digests of optimizer tensors after it."""
        found: dict[int, list[Digest]] = {}
        for ref in self._others(FrameType.DIGEST):
            found.setdefault(ref.header.step, []).extend(unpack_digests(ref.read()))
        return found

    def read_block(self, step: int, block: int) -> StoredBlock | None:
        """The gradient of a block in a complete step, its checksum verified.

        None where the step has no such block: the optimizer had no gradient for it (or the step was skipped) and left
        its state alone.
        """
        grads = self._logged(step).grads
        hint = self._hints.get(block)
        if hint is not None and hint[0] < len(grads):
            entry = self._entry(grads[hint[0]], hint[1])
            if entry is not None and int(entry["block"]) == block:
                return self._read(grads[hint[0]], entry)
        for number, ref in enumerate(grads):
            table = self.table(ref)
            for place in np.flatnonzero(table["block"] == block):
                self._hints[block] = number, int(place)
                return self._read(ref, table[place])
        return None

    def blocks(self, step: int) -> list[int]:
        """Ids of the blocks that a step has gradients of."""
        return [int(block) for ref in self._logged(step).grads for block in self.table(ref)["block"]]

    def states(self, kind: Literal[FrameType.FULL, FrameType.DIFF]) -> list[tuple[FrameRef, Table, int]]:
        """FULL or DIFF frames in order, each with its table and the step that a difference starts from (-1: none)."""
        found = []
        for ref in self._others(kind):
            count, _, base_step = TABLE_HEAD.unpack(self._bytes(ref, 0, TABLE_HEAD.size))
            del count
            found.append((ref, self.table(ref), base_step))
        return found

    def read_entry(self, ref: FrameRef, entry: Any) -> StoredBlock:
        """A block of a FULL or DIFF frame by its entry of the table."""
        return self._read(ref, entry)

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

    def _entry(self, ref: FrameRef, number: int) -> Any:
        """One entry of a table: its place in the file does not change from step to step."""
        end = table_bytes(number + 1)
        if end > ref.header.length:
            return None
        return np.frombuffer(self._bytes(ref, end - ENTRY.itemsize, ENTRY.itemsize), ENTRY)[0]

    def _read(self, ref: FrameRef, entry: Any) -> StoredBlock:
        offset, length = int(entry["offset"]), int(entry["length"])
        if offset + length > ref.header.length or int(entry["dtype"]) not in DTYPES:
            raise self._damaged(ref, f"block {entry['block']} does not lie in its frame")
        data = np.empty(length, np.uint8)
        self._files.read_into(ref.file.name, ref.payload_offset + offset, data.data)
        if checksum(data.data) != int(entry["checksum"]):
            raise self._damaged(ref, f"the checksum of block {entry['block']} is wrong")
        dtype = DTYPES[int(entry["dtype"])]
        block, state, encoding = int(entry["block"]), int(entry["state"]), int(entry["encoding"])
        return StoredBlock(block, state, encoding, dtype, int(entry["count"]), data)

    def _bytes(self, ref: FrameRef, offset: int, size: int) -> bytes:
        return self._files.read(ref.file.name, ref.header.offset + FRAME_BYTES + offset, size)

    def _damaged(self, ref: FrameRef, reason: str) -> IntegrityError:
        return IntegrityError(
            f"{ref.file}: byte {ref.header.offset}, frame {ref.header.lsn} of step {ref.header.step}: {reason}",
            hint=f"the log is good up to step {ref.header.step - 1}; `ucp log verify` reads all of it",
        )


@dataclass(slots=True)
class Epoch:
    """A stretch of training with one layout and one optimizer; every stream of it."""

    folder: Path
    manifest: Manifest
    streams: dict[int, Stream] = field(default_factory=dict)
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
    def defects(self) -> list[Defect]:
        return [defect for stream in self.streams.values() for defect in stream.defects]


@dataclass(frozen=True, slots=True)
class Span:
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
        given = Path(path)
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

    def spans(self, upto: int | None = None) -> list[Span]:
        """Which epoch has which steps, oldest first, without gap, ending with step `upto` (the last that can be had).

        A newer epoch wins over the steps of its parent after the step that it went on from. Steps that an epoch no
        longer has (their segments were dropped) end the list at its beginning. A step that does not exist is refused.
        """
        last = self.recoverable_step if upto is None else upto
        if last > self.recoverable_step:
            raise UsageError(
                f"{self.root}: step {last} cannot be had; the log ends with step {self.recoverable_step}",
                hint="`ucp log stat` shows what every stream has",
            )
        found: list[Span] = []
        epoch: Epoch | None = self.epochs[-1]
        while epoch is not None:
            first = epoch.manifest.start + 1
            if last >= first:
                if last not in epoch.steps:
                    if found:
                        break
                    raise UsageError(f"{self.root}: step {last} is no longer (or not) in epoch {epoch.number}")
                found.append(Span(epoch, max(first, epoch.steps.start), last))
                if epoch.steps.start > first:
                    break
            parent = epoch.manifest.parent
            last = min(last, epoch.manifest.start)
            epoch = None
            if parent is not None:
                last = min(last, parent.step)
                epoch = next((other for other in self.epochs if other.number == parent.epoch), None)
        return found[::-1]


def _find(given: Path) -> tuple[Path, list[Path]]:
    """(folder of the epochs, the epochs that are meant)."""
    if (given / MANIFEST).is_file() and EPOCH.fullmatch(given.name):
        return given.parent, [given]
    for root in (given, given / "log"):
        if root.is_dir():
            epochs = [path for path in root.iterdir() if EPOCH.fullmatch(path.name) and (path / MANIFEST).is_file()]
            if epochs:
                return root, sorted(epochs, key=lambda path: int(path.name.removeprefix("epoch-")))
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
        epoch.streams[schema.stream] = Stream(path, schema, scan)
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


__all__ = ["BadBytesError", "Epoch", "Log", "Span", "StoredBlock", "Stream"]
