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
from typing import Final, Literal

from ucp.errors import InconsistentError, IntegrityError, NotUnderstoodError, StorageError, UsageError
from ucp.files.paths import as_path
from ucp.log.manifest import MANIFEST, Manifest, Parent, read_manifest
from ucp.log.stream import StoredBlock, Stream
from ucp.log.walk import Defect, scan_stream

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
        given = as_path(path)
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
            damage = next((d for d in self.epochs[-1].defects if d.kind in ("damaged", "disorder")), None)
            raise UsageError(
                f"{self.root}: step {last} cannot be had; the log ends with step {self.recoverable_step}",
                hint="`ucp log stat` shows what every stream has"
                if damage is None
                else f"what follows is not used, because of {damage}",
            )
        found: list[Span] = []
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


def find_parent(log: Log, step: int) -> Parent | None:
    """Which epoch of a log a state after `step` steps goes on from; None where the log does not reach it."""
    epoch = log.epochs[-1]
    while True:
        if step > epoch.manifest.start:
            return Parent(epoch.number, step) if step in epoch.steps else None
        if step == epoch.manifest.start and (epoch.manifest.base is not None or epoch.manifest.parent is None):
            return Parent(epoch.number, step)
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


__all__ = [
    "EPOCH",
    "STREAM",
    "Epoch",
    "Log",
    "Span",
    "StoredBlock",
    "Stream",
    "epoch_folder",
    "find_parent",
    "stream_folder",
]
