"""Index a checkpoint some of whose rank files are missing or cannot be opened (`ReadOptions.tolerant`).

Ranks of one kind write files of the same structure, with different values. So the structure of a lost file is that of a
surviving one, its *stand-in*: the index lists what the lost file contained, under the name of the lost file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ucp.storage.local import SourceFiles

_Key = TypeVar("_Key", bound=tuple[int, ...])


@dataclass(slots=True)
class LostFiles:
    """Files to do without, by path relative to the root: the reasons, and the stand-ins of those that have one."""

    reasons: dict[str, str] = field(default_factory=dict)
    stand_ins: dict[str, str] = field(default_factory=dict)

    def add(self, file: str, reason: str, stand_in: str | None = None) -> None:
        self.reasons.setdefault(file, reason)
        if stand_in is not None:
            self.stand_ins[file] = stand_in


def nearest(lost: _Key, survivors: Iterable[_Key], free: Sequence[int]) -> _Key | None:
    """The survivor that differs from `lost` only in coordinates that are listed in `free`, of which fewest differ."""
    fitting = [
        key for key in survivors if all(a == b or i in free for i, (a, b) in enumerate(zip(key, lost, strict=True)))
    ]
    order = {i: position for position, i in enumerate(free)}  # a difference in the first one of `free` is the smallest
    return min(
        fitting,
        key=lambda key: (max((order[i] for i in free if key[i] != lost[i]), default=-1), key),
        default=None,
    )


class SurvivingFiles(SourceFiles):
    """`SourceFiles` that reads the stand-in of a lost file: for scalars, of which ranks store copies."""

    def __init__(self, root: Path, lost: LostFiles) -> None:
        super().__init__(root)
        self.lost = lost

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        super().read_into(self.lost.stand_ins.get(file, file), offset, target)

    def scatter(self, file: str, offset: int, targets: Sequence[memoryview], nbytes: int) -> None:
        super().scatter(self.lost.stand_ins.get(file, file), offset, targets, nbytes)

    def read(self, file: str, offset: int, size: int) -> bytes:
        return super().read(self.lost.stand_ins.get(file, file), offset, size)
