"""Maintenance of logs that nothing writes to: cutting off a torn end, and dropping steps that a base replaces."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from ucp.errors import UsageError, storage_errors
from ucp.log.reader import Epoch, Log, LogStream
from ucp.log.stream_recovery import FrameRef, list_segments
from ucp.storage.local import sync


@dataclass(frozen=True, slots=True)
class FileCut:
    """A file to shorten or remove. `keep` is its new size in bytes; 0 removes it."""

    path: Path
    size: int
    keep: int

    def to_json(self) -> dict[str, object]:
        return {"path": str(self.path), "size": self.size, "keep": self.keep}


def plan_truncate(epoch: Epoch, step: int) -> list[FileCut]:
    """The cuts after which every stream of an epoch ends with `step`, which all must have, unless it is the start."""
    if step != epoch.manifest.start and step not in epoch.steps:
        have = f"{epoch.steps.start} to {epoch.steps.stop - 1}" if epoch.steps else "none"
        raise UsageError(f"{epoch.folder}: step {step} is not complete in all streams (complete steps: {have})")
    return [cut for stream in epoch.streams.values() for cut in plan_stream_cut(stream, step)]


def plan_stream_cut(stream: LogStream, step: int) -> list[FileCut]:
    """The cuts after which a stream ends with `step`; none if it is whole and ends there already."""
    logged = stream.scan.steps.get(step)
    if logged is not None and not stream.defects and step == stream.steps.stop - 1:
        return []
    cuts = []
    passed = logged is None
    for segment in list_segments(stream.folder):
        if passed:
            cuts.append(FileCut(segment.path, segment.size, 0))
        elif logged is not None and segment.path == logged.commit.file:
            end = max([logged.commit.header.end, *(ref.header.end for ref in _kept_after(stream, step))])
            if segment.size != end:
                cuts.append(FileCut(segment.path, segment.size, end))
            passed = True
    return cuts


def _kept_after(stream: LogStream, step: int) -> list[FrameRef]:
    """Whole frames of `step` after its commit, in the same file: digests, for example, are kept."""
    commit = stream.scan.steps[step].commit
    return [
        ref
        for ref in stream.scan.loose
        if ref.file == commit.file and ref.header.lsn > commit.header.lsn and ref.header.step == step
    ]


def apply_cuts(cuts: list[FileCut], *, save_tails: bool = False) -> None:
    """Shorten and remove files, durably; with `save_tails`, the bytes that are cut off are kept in `NAME.tail`."""
    for cut in sorted(cuts, key=lambda cut: cut.path, reverse=True):  # newest first: the rest is a prefix
        with storage_errors(cut.path, "cannot be shortened or removed"):
            if save_tails:
                _save_tail(cut)
            if cut.keep == 0:
                cut.path.unlink()
            else:
                fd = os.open(cut.path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    os.ftruncate(fd, cut.keep)
                    os.fsync(fd)
                finally:
                    os.close(fd)
            sync(cut.path.parent)


def _save_tail(cut: FileCut) -> None:
    with open(cut.path, "rb") as source, open(cut.path.with_name(cut.path.name + ".tail"), "wb") as tail:
        source.seek(cut.keep)
        shutil.copyfileobj(source, tail)
        tail.flush()
        os.fsync(tail.fileno())


def resume_stream(epoch: Epoch, stream: LogStream) -> int:
    """Cut a stream after the last step that all streams have; returns the number of the next frame.

    Every rank does this for its own stream, after all ranks have opened the log.
    """
    step = epoch.recoverable_step
    cuts = plan_stream_cut(stream, step)
    apply_cuts(cuts)
    logged = stream.scan.steps.get(step)
    if logged is None:
        return 0
    if not cuts:
        return stream.scan.next_lsn
    return max([logged.commit.header.lsn, *(ref.header.lsn for ref in _kept_after(stream, step))]) + 1


def plan_compact(log: Log, step: int) -> list[FileCut]:
    """Remove segments that are not needed to get from a base of `step` to any later step.

    The last segment of every stream is kept. Epochs that a newer one replaced before `step` are removed completely.
    """
    newest = {span.epoch.number for span in log.spans() if span.last > step}
    newest.add(log.epochs[-1].number)
    cuts: list[FileCut] = []
    for epoch in log.epochs:
        for stream in epoch.streams.values():
            segments = list_segments(stream.folder)
            if epoch.number not in newest:
                cuts.extend(FileCut(segment.path, segment.size, 0) for segment in segments)
                continue
            for segment in stream.scan.segments[:-1]:
                if segment.last_step is None or segment.last_step > step:
                    break
                cuts.append(FileCut(segment.path, segment.size, 0))
    return cuts


def remove_empty_epochs(log: Log) -> list[Path]:
    """Remove the folders of epochs without segments, except the newest."""
    gone = []
    for epoch in log.epochs[:-1]:
        if not any(list_segments(stream.folder) for stream in epoch.streams.values()):
            shutil.rmtree(epoch.folder)
            gone.append(epoch.folder)
    return gone
