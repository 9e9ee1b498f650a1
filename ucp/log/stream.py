"""The log of one rank in one epoch, open for reading."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

from ucp.errors import IntegrityError, UsageError
from ucp.files.local import SourceFiles
from ucp.log.codecs import DTYPES, Bits, Bytes, decode, to_float32
from ucp.log.frames import BadBytesError, FrameType, checksum
from ucp.log.payloads import ENTRY, TABLE_HEAD, Digest, StepRecord, Table, table_bytes, unpack_digests, unpack_json
from ucp.log.schema import StreamSchema
from ucp.log.walk import Defect, FrameRef, LoggedStep, StreamScan
from ucp.model.dtypes import DType

# An entry of a table as plain integers: block, encoding, dtype, state, count, zero, offset, length, checksum.
Row = tuple[int, ...]
_ROW: Final = struct.Struct("<IBBHIIQQQ")
assert _ROW.size == ENTRY.itemsize

_ROWS_AT_ONCE: Final = 16  # that are read: a replay goes through all steps for one block, then for the next
_KEPT_READS: Final = 4096  # of so many rows each


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
        try:
            return decode(self.encoding, self.data, self.dtype, self.count)
        except BadBytesError as error:  # though its checksum was right
            raise IntegrityError(
                f"block {self.block} of a log: {error}", hint="`ucp log verify` reads all of it and says where"
            ) from None

    def float32(self) -> npt.NDArray[np.float32]:
        """The elements as float32: exact, as every type of a gradient has at most 32 bits."""
        return to_float32(self.bits(), self.dtype)


class Memory(Protocol):
    """Where blocks are read to, one after the other."""

    def piece(self, nbytes: int) -> tuple[Bytes, memoryview]:
        """Room for so many bytes, twice: as an array and as the memory of that array."""
        ...


class Stream:
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
    def defects(self) -> list[Defect]:
        return self.scan.defects

    def record(self, step: int) -> StepRecord:
        """The scalars of a complete step."""
        return self._logged(step).record

    def aux(self, step: int) -> Any:
        """The notes of a step (random states, loss scaler, …) as JSON values; None where there are none."""
        ref = self._logged(step).aux
        return None if ref is None else self._unpacked(unpack_json, ref)

    def digests(self) -> dict[int, list[Digest]]:
        """Step → digests of optimizer tensors after it."""
        found: dict[int, list[Digest]] = {}
        for ref in self._others(FrameType.DIGEST):
            found.setdefault(ref.header.step, []).extend(self._unpacked(unpack_digests, ref))
        return found

    def _unpacked(self, unpack: Callable[[bytes], Any], ref: FrameRef) -> Any:
        """What a frame holds, whose checksum is right and whose bytes may be nonsense all the same."""
        try:
            return unpack(ref.read())
        except BadBytesError as error:
            raise self._damaged(ref, str(error)) from None

    def read_block(self, step: int, block: int, room: Memory | None = None) -> StoredBlock | None:
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

    def read_entry(self, ref: FrameRef, entry: Any) -> StoredBlock:
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

    def _read(self, ref: FrameRef, row: Row, room: Memory | None = None) -> StoredBlock:
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
        return StoredBlock(block, state, encoding, dtype, count, data)

    def _bytes(self, ref: FrameRef, offset: int, size: int) -> bytes:
        return self._files.read(ref.name, ref.payload_offset + offset, size)

    def _damaged(self, ref: FrameRef, reason: str) -> IntegrityError:
        return IntegrityError(
            f"{ref.file}: byte {ref.header.offset}, frame {ref.header.lsn} of step {ref.header.step}: {reason}",
            hint=f"the log is good up to step {ref.header.step - 1}; `ucp log verify` reads all of it",
        )
