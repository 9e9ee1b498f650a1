"""Where snapshots are kept: a folder with a folder for each, or a mapped store."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from pathlib import Path
from typing import Any, Final

from ucp.engine.place import discard_half_done
from ucp.errors import UcpError
from ucp.train.snapshots.saving import SnapshotSaver
from ucp.train.snapshots.store import SUFFIX, StoreSaver, discard_next
from ucp.train.talk import world

SCHEDULE: Final = "schedule.json"
_NAME: Final = re.compile(r"step-(\d+)(?:-\d+)?")


class Shelf:
    """The place at `path`; of folders, the newest `keep` stay (None: all)."""

    def __init__(self, path: Path, keep: int | None) -> None:
        self.path, self.keep = path, keep
        self.is_store = path.suffix == SUFFIX
        self._written: set[Path] = set()  # stores that hold snapshots of this job

    def make(self) -> None:
        """A folder must be there; a store is made with the first snapshot. What a killed job left half done goes."""
        if self.is_store:
            with contextlib.suppress(OSError, UcpError):
                discard_next(self.path)
            return
        self.path.mkdir(parents=True, exist_ok=True)
        for left in self.path.glob(".step-*.ucp-partial"):
            target = self.path / left.name[1:].removesuffix(".ucp-partial")
            if _NAME.fullmatch(target.name):
                with contextlib.suppress(OSError, UcpError):  # another job is at it
                    discard_half_done(target)

    def free_name(self, step: int) -> str:
        """A name for the snapshot of a step that no folder has yet, as rank 0 sees it."""
        name = f"step-{step:08d}"
        number = 2
        found = name
        while world()[0] == 0 and (self.path / found).exists():
            found = f"{name}-{number}"
            number += 1
        return found

    def saver(self, name: str, group: Any, durable: bool) -> SnapshotSaver:
        """What writes the next one."""
        if self.is_store:
            return StoreSaver(self.path, group, durable, self._written)
        return SnapshotSaver(self.path / name, group, durable)

    def tell(self, schedule: dict[str, Any]) -> None:
        """Put down when the tensors of the newest snapshot were copied."""
        folder = self.path.parent if self.is_store else self.path
        name = f"{self.path.stem}.{SCHEDULE}" if self.is_store else SCHEDULE
        with contextlib.suppress(OSError):  # for people only
            (folder / name).write_text(json.dumps(schedule), encoding="utf-8")

    def drop_old(self, step: int) -> None:
        """Remove folders that are too many. Those of later steps than `step` are of another job, which went further."""
        if self.keep is None or self.is_store:
            return
        with contextlib.suppress(OSError):  # what is superfluous does no harm
            named = [(folder, _NAME.fullmatch(folder.name)) for folder in self.path.iterdir()]
            folders = [folder for folder, match in named if match is not None and int(match[1]) <= step]
            folders.sort(key=lambda folder: folder.stat().st_mtime_ns)
            for folder in folders[: -self.keep]:
                shutil.rmtree(folder, ignore_errors=True)
