"""Bases: the checkpoints that a log goes on from. `<run>/base/base-000017/base.json` says which step it is of."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ucp.errors import IntegrityError, StorageError
from ucp.log.epoch_manifest import write_json
from ucp.log.reader import Log
from ucp.storage.local import sync

FORMAT: Final = 1
BASE: Final = "base.json"
ATOMS: Final = "atoms"
_NAME: Final = re.compile(r"base-(\d+)")


@dataclass(frozen=True, slots=True)
class BaseCheckpoint:
    """A checkpoint after `step` steps of `epoch`. Tensors in `steps` are of other steps than the rest (fuzzy base)."""

    folder: Path
    number: int
    step: int
    epoch: int
    checkpoint: str = ATOMS  # relative to the folder, or absolute
    steps: dict[str, int] = field(default_factory=dict)  # parameter → step, where that is not `step`

    @property
    def path(self) -> Path:
        """Where the checkpoint is."""
        return self.folder / self.checkpoint

    @property
    def first_step(self) -> int:
        """The smallest step of any of its tensors: the log is needed from the next one on."""
        return min([self.step, *self.steps.values()])


def base_folder(run: Path, number: int) -> Path:
    return run / "base" / f"base-{number:06d}"


def write_base(base: BaseCheckpoint) -> None:
    """Say that a base is whole. Everything in its folder is made durable first."""
    for folder, _, files in os.walk(base.folder):
        for name in files:
            _sync_file(Path(folder) / name)
        sync(Path(folder))
    told: dict[str, Any] = {
        "format": FORMAT,
        "number": base.number,
        "step": base.step,
        "epoch": base.epoch,
        "checkpoint": base.checkpoint,
        "steps": base.steps,
    }
    base.folder.mkdir(parents=True, exist_ok=True)
    write_json(base.folder / BASE, told)
    sync(base.folder.parent)


def _sync_file(path: Path) -> None:
    try:
        sync(path)
    except OSError as error:
        raise StorageError(f"{path}: cannot be made durable: {error.strerror}") from error


def list_bases(run: Path) -> list[BaseCheckpoint]:
    """The whole bases of a run, by number. A folder without `base.json` is none (yet)."""
    root = run / "base"
    found = []
    for folder in sorted(root.iterdir()) if root.is_dir() else []:
        named = _NAME.fullmatch(folder.name)
        if named is None or not (folder / BASE).is_file():
            continue
        try:
            told = json.loads((folder / BASE).read_bytes())
            steps = {str(name): int(step) for name, step in told["steps"].items()}
            base = BaseCheckpoint(
                folder, int(named[1]), int(told["step"]), int(told["epoch"]), str(told["checkpoint"]), steps
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise IntegrityError(f"{folder / BASE}: is damaged: {error}") from error
        found.append(base)
    return sorted(found, key=lambda base: base.number)


def usable_bases(log: Log, upto: int | None = None) -> list[BaseCheckpoint]:
    """The bases from which step `upto` (the last that can be had) follows, by step.

    A base of an epoch that a newer one has left behind at an earlier step is not among them: the run did not go on
    from there. Nor is one after which steps are missing.
    """
    last = log.recoverable_step if upto is None else upto
    left_at: dict[int, int] = {}  # epoch of the line of descent → its last step that counts
    epoch = log.epochs[-1]
    until = last
    while True:
        left_at[epoch.number] = until
        parent = epoch.manifest.parent
        before = None if parent is None else next((e for e in log.epochs if e.number == parent.epoch), None)
        if parent is None or before is None:
            break
        until, epoch = min(until, parent.step), before
    spans = log.spans(last)
    have = spans[0].first if spans else last + 1
    bases = [
        base
        for base in list_bases(log.run_folder)
        if base.step <= left_at.get(base.epoch, -1) and (base.first_step >= have - 1 or base.first_step == last)
    ]
    return sorted(bases, key=lambda base: (base.step, base.number))
