"""Shares: one conversion done by several processes, each writing whole files of the same plan."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ucp.core.target import Target
from ucp.errors import UsageError
from ucp.storage.paths import OWN_PREFIX

_JOURNAL_NAME: Final = re.compile(rf"{re.escape(OWN_PREFIX)}journal-(\d+)-of-(\d+)\.jsonl")


@dataclass(frozen=True, slots=True)
class WorkShard:
    """What process `number` of `count` does, numbered from 0."""

    number: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.count:
            raise UsageError(
                f"there is no part {self.number + 1} of {self.count}",
                hint=f"parts are numbered from 1 to {self.count}: --part 1/{self.count}",
            )

    def __str__(self) -> str:
        return f"part {self.number + 1}/{self.count}"

    @property
    def is_whole(self) -> bool:
        return self.count == 1

    @property
    def journal(self) -> str:
        """Name of the journal in the staging folder."""
        return OWN_PREFIX + ("journal.jsonl" if self.is_whole else f"journal-{self._label}.jsonl")

    @property
    def failure(self) -> str:
        """Name of the note in the staging folder that says why this share failed."""
        return f"{OWN_PREFIX}failed-{self._label}.json"

    @property
    def _label(self) -> str:
        return f"{self.number + 1}-of-{self.count}"

    def files(self, target: Target) -> frozenset[int]:
        """Numbers of the files that are written here: all shares together take every file once.

        The largest file goes to whoever has least so far, so shares differ by at most one file's bytes.
        """
        loads = [0] * self.count
        mine: set[int] = set()
        for number in sorted(range(len(target.files)), key=lambda n: (-target.files[n].size, n)):
            least = loads.index(min(loads))
            loads[least] += target.files[number].size
            if least == self.number:
                mine.add(number)
        return frozenset(mine)


UNSHARDED: Final = WorkShard(0, 1)


def journalled_shards(folder: Path) -> list[WorkShard]:
    """The shares that have a journal in a staging folder."""
    found = (_JOURNAL_NAME.fullmatch(path.name) for path in folder.glob(f"{OWN_PREFIX}journal-*.jsonl"))
    return sorted(
        (WorkShard(int(m[1]) - 1, int(m[2])) for m in found if m), key=lambda share: (share.count, share.number)
    )
