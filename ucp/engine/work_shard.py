"""Work shards: one conversion done by several processes, each of which writes whole files of the same plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ucp.core.target import Target
from ucp.errors import UsageError


@dataclass(frozen=True, slots=True)
class WorkShard:
    """The work of process `number` of `count` processes, numbered from 0."""

    number: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.count:
            raise UsageError(
                f"shard {self.number + 1} of {self.count} does not exist",
                hint=f"shards are numbered from 1 to {self.count}: --shard 1/{self.count}",
            )

    def __str__(self) -> str:
        return f"shard {self.number + 1}/{self.count}"

    @property
    def is_whole(self) -> bool:
        """Whether this is the whole conversion."""
        return self.count == 1

    @property
    def label(self) -> str:
        """Part of the names of this shard's journal and notes."""
        return f"{self.number + 1}-of-{self.count}"

    @property
    def others(self) -> list[WorkShard]:
        """All other shards of the same conversion."""
        return [WorkShard(number, self.count) for number in range(self.count) if number != self.number]

    def files(self, target: Target) -> frozenset[int]:
        """Numbers of the target's files that this shard writes: every file belongs to exactly one shard.

        Files are assigned largest first to the shard with the fewest bytes, so shards differ by at most one file.
        """
        loads = [0] * self.count
        own: set[int] = set()
        for number in sorted(range(len(target.files)), key=lambda n: (-target.files[n].size, n)):
            least = loads.index(min(loads))
            loads[least] += target.files[number].size
            if least == self.number:
                own.add(number)
        return frozenset(own)


UNSHARDED: Final = WorkShard(0, 1)
