"""From frames to steps: which are complete, and where the order breaks."""

from __future__ import annotations

from ucp.log.found import Defect, FrameRef, LoggedStep, StreamScan, forget_from
from ucp.log.frames import BadBytesError, FrameType
from ucp.log.payloads import Commit, StepRecord


def group_steps(scan: StreamScan, frames: list[FrameRef]) -> None:
    """Group frames into steps; stop at the first that is out of order."""
    opened: LoggedStep | None = None
    opening: FrameRef | None = None
    for ref in frames:
        header = ref.header
        try:
            if header.type == FrameType.STEP:
                if opened is not None:
                    raise BadBytesError(f"step {header.step} begins before step {opened.step} has ended")
                if scan.steps and header.step != next(reversed(scan.steps)) + 1:
                    raise BadBytesError(f"step {header.step} follows step {next(reversed(scan.steps))}")
                opened, opening = LoggedStep(header.step, StepRecord.unpack(ref.read()), [], None, [], ref), ref
                scan.ended = False
            elif opened is None or opening is None:
                if header.type in (FrameType.GRAD, FrameType.COMMIT):
                    raise BadBytesError(f"a {header.type.name} frame outside of a step")
                scan.ended = header.type == FrameType.EPOCH_END
                if not scan.ended:
                    scan.loose.append(ref)
            elif header.step != opened.step:
                raise BadBytesError(f"a frame of step {header.step} inside step {opened.step}")
            elif header.type == FrameType.COMMIT:
                told = Commit.unpack(ref.read())
                grads = [(grad.header.length, grad.header.checksum) for grad in opened.grads]
                if told != Commit.of(grads, opening.header.lsn):
                    raise BadBytesError(f"the commit of step {opened.step} does not agree with its frames")
                opened.commit = ref
                scan.steps[opened.step] = opened
                opened = opening = None
            elif header.type == FrameType.GRAD:
                opened.grads.append(ref)
            elif header.type == FrameType.AUX:
                opened.aux = ref
            else:
                opened.others.append(ref)
        except BadBytesError as error:
            defect = Defect("disorder", ref.file, header.offset, header.lsn, _last(scan), str(error))
            scan.defects.append(defect)
            forget_from(scan, ref)
            scan.next_lsn = header.lsn
            return
    if opening is not None:
        reason = f"step {opening.header.step} has no commit"
        header = opening.header
        scan.defects.append(Defect("incomplete", opening.file, header.offset, header.lsn, _last(scan), reason))


def _last(scan: StreamScan) -> int | None:
    return next(reversed(scan.steps), None)
