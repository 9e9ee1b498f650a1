"""What recovery finds in a stream: whole frames, complete steps, and why there are no more of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ucp.log.frames import FRAME_BYTES, FrameHeader, SegmentHeader
from ucp.log.payloads import StepRecord
from ucp.log.segmentfile import SegmentFile

DefectKind = Literal["torn", "damaged", "incomplete", "disorder"]


@dataclass(frozen=True, slots=True)
class Defect:
    """Why a stream ends earlier than its files do.

    `torn`: a write that never became durable (the end of the last segment). `damaged`: bytes that were durable once.
    `incomplete`: whole frames of a step that has no commit. `disorder`: whole frames that contradict each other.
    """

    kind: DefectKind
    file: Path
    offset: int  # in bytes
    lsn: int  # of the first frame that is lost
    step: int | None  # the last step that was seen before
    reason: str

    def __str__(self) -> str:
        seen = "before any step" if self.step is None else f"after step {self.step}"
        return f"{self.file}: byte {self.offset}, frame {self.lsn}, {seen}: {self.kind}: {self.reason}"


@dataclass(frozen=True, slots=True)
class FrameRef:
    """A whole frame and the file that it is in."""

    file: Path
    header: FrameHeader
    name: str  # of the file, without its folder
    payload_offset: int

    @staticmethod
    def of(file: Path, header: FrameHeader) -> FrameRef:
        return FrameRef(file, header, file.name, header.offset + FRAME_BYTES)

    def read(self) -> bytes:
        """The payload of a frame."""
        with SegmentFile(self.file) as file:
            return file.read(self.payload_offset, self.header.length)


@dataclass(slots=True)
class Segment:
    """A file of a stream: `end` is the offset behind its last whole frame."""

    path: Path
    first_lsn: int
    size: int
    header: SegmentHeader | None = None
    end: int = 0
    frames: int = 0
    first_step: int | None = None
    last_step: int | None = None


@dataclass(slots=True)
class LoggedStep:
    """A complete step of one stream."""

    step: int
    record: StepRecord
    grads: list[FrameRef]
    aux: FrameRef | None
    others: list[FrameRef]  # DIFF, FULL and DIGEST inside the step
    commit: FrameRef

    @property
    def nbytes(self) -> int:
        return sum(ref.header.length for ref in self.grads)


@dataclass(slots=True)
class StreamScan:
    """What recovery found in a stream."""

    folder: Path
    stream: int
    segments: list[Segment] = field(default_factory=list)
    steps: dict[int, LoggedStep] = field(default_factory=dict)  # complete ones, in order and without gaps
    loose: list[FrameRef] = field(default_factory=list)  # DIGEST, FULL, DIFF, AUX after the commit of their step
    defects: list[Defect] = field(default_factory=list)
    ended: bool = False  # the writer closed the stream
    next_lsn: int = 0  # of the frame that would come next


def forget_from(scan: StreamScan, ref: FrameRef) -> None:
    """Forget everything from a frame on."""
    for number, segment in enumerate(scan.segments):
        if segment.path == ref.file:
            segment.end = ref.header.offset
            del scan.segments[number + 1 :]
            return
