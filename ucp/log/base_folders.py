"""Bases: the checkpoints that a log starts from. `<run>/base/base-000017/base.json` contains the step."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from ucp.errors import IntegrityError, storage_errors
from ucp.log.epoch_manifest import write_json
from ucp.log.reader import Epoch, Log
from ucp.storage.local import sync, sync_tree

FORMAT: Final = 1
BASE: Final = "base.json"
ATOMS: Final = "atoms"
_NAME: Final = re.compile(r"base-(\d+)")


@dataclass(frozen=True, slots=True)
class BaseCheckpoint:
    """A checkpoint after `step` of `epoch`. Parameters in `steps` are of other steps (a fuzzy base)."""

    folder: Path
    number: int
    step: int
    epoch: int
    checkpoint: str = ATOMS  # relative to the folder, or absolute
    steps: dict[str, int] = field(default_factory=dict)  # parameter → step, if that is not `step`

    @property
    def path(self) -> Path:
        """The folder of the checkpoint."""
        return self.folder / self.checkpoint

    @property
    def first_step(self) -> int:
        """The smallest step of any of its tensors: the log is needed from the next step on."""
        return min([self.step, *self.steps.values()])


def base_folder(run: Path, number: int) -> Path:
    return run / "base" / f"base-{number:06d}"


def write_base(base: BaseCheckpoint) -> None:
    """Mark a base as complete by writing `base.json`, after making everything else in its folder durable."""
    with storage_errors(base.folder, "cannot be synced"):
        sync_tree(base.folder)
    fields = asdict(base)
    content = {"format": FORMAT, **{key: fields[key] for key in ("number", "step", "epoch", "checkpoint", "steps")}}
    base.folder.mkdir(parents=True, exist_ok=True)
    write_json(base.folder / BASE, content)
    sync(base.folder.parent)


def list_bases(run: Path) -> list[BaseCheckpoint]:
    """The complete bases of a run (those with a `base.json`), by number."""
    root = run / "base"
    bases = []
    for folder in sorted(root.iterdir()) if root.is_dir() else []:
        named = _NAME.fullmatch(folder.name)
        if named is None or not (folder / BASE).is_file():
            continue
        try:
            content = json.loads((folder / BASE).read_bytes())
            steps = {str(name): int(step) for name, step in content["steps"].items()}
            base = BaseCheckpoint(
                folder, int(named[1]), int(content["step"]), int(content["epoch"]), str(content["checkpoint"]), steps
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise IntegrityError(f"{folder / BASE}: damaged: {error}") from error
        bases.append(base)
    return sorted(bases, key=lambda base: base.number)


def usable_bases(log: Log, upto: int | None = None) -> list[BaseCheckpoint]:
    """The bases from which step `upto` (by default the last complete one) can be reached, by step.

    These do not include a base of a step that the run undid when it restarted from an earlier one, nor a base after
    which steps are missing from the log.
    """
    last = log.recoverable_step if upto is None else upto
    last_valid: dict[int, int] = {}  # epoch and its ancestors → the last step that still counts
    epoch: Epoch | None = log.epochs[-1]
    until = last
    while epoch is not None:
        last_valid[epoch.number] = until
        if epoch.manifest.parent is not None:
            until = min(until, epoch.manifest.parent.step)
        epoch = log.parent_of(epoch)
    spans = log.spans(last)
    first = spans[0].first if spans else last + 1
    bases = [
        base
        for base in list_bases(log.run_folder)
        if base.step <= last_valid.get(base.epoch, -1) and (base.first_step >= first - 1 or base.first_step == last)
    ]
    return sorted(bases, key=lambda base: (base.step, base.number))
