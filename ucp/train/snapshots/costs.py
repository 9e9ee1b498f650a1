"""What was measured of a job's snapshots: when tensors are updated, when the link is busy, rates, and waiting.

From it follows the plan of the next snapshot, and what `ucp snapshot plan` shows of the last one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from math import inf
from typing import Any

from ucp.train.snapshots.copying import ANY_UPDATE, Copier, Item
from ucp.train.snapshots.plan import Costs, open_time, smoothed, spread


class Measured:
    """Times are seconds since the end of the last optimizer step, rates bytes a second."""

    def __init__(self) -> None:
        self.released = time.perf_counter()  # when the last step ended
        self.deadlines: dict[int, float] = {}  # optimizer tensor → when its update began
        self.blocked: list[tuple[float, float]] = []  # when the link was left to others, in the last iteration
        self.link: float | None = None
        self.local: float | None = None
        self.prepare_seconds = 0.0
        self.stall_seconds = 0.0
        self.hook_cpu_seconds = 0.0  # of the trainer's thread
        self.late_bytes = 0
        self._holding: float | None = None  # since when the link is left to others
        self._held: list[tuple[float, float]] = []

    def since(self) -> float:
        return time.perf_counter() - self.released

    def updating(self, keys: Iterable[int]) -> None:
        """These tensors are about to be updated."""
        now = self.since()
        for key in keys:
            self.deadlines[key] = smoothed(self.deadlines.get(key), now)

    def hold(self, busy: bool) -> None:
        """The link is left to others from now on, or is free again."""
        now = self.since()
        if busy and self._holding is None:
            self._holding = now
        elif not busy and self._holding is not None:
            self._held.append((self._holding, now))
            self._holding = None

    def end_step(self) -> None:
        """A step has ended: time begins anew."""
        self.hold(False)
        self.blocked, self._held = self._held, []
        self.released = time.perf_counter()

    def copied(self, copiers: Sequence[Copier]) -> None:
        """All of a snapshot is aside."""
        for copier in copiers:
            if copier.nbytes and copier.seconds:
                self.link = smoothed(self.link, copier.nbytes / copier.seconds)
            if copier.trainer_bytes and copier.stall_seconds:
                self.local = smoothed(self.local, copier.trainer_bytes / copier.stall_seconds)
            self.stall_seconds += copier.stall_seconds
            self.late_bytes += copier.trainer_bytes

    # ------------------------------------------------------------------------------------------------------------------

    def deadline(self, item: Item) -> float:
        if item.keys is ANY_UPDATE:
            return min(self.deadlines.values(), default=0.0)
        return min((self.deadlines.get(key, 0.0) for key in item.keys), default=inf)

    def costs(self) -> Costs | None:
        """Rates, where enough was measured for a plan."""
        return Costs(self.link, self.local or self.link) if self.link is not None and self.deadlines else None

    def iterations(self, nbytes: int) -> int:
        """Over how many iterations a snapshot of so many bytes should be spread, as far as is known."""
        costs = self.costs()
        if costs is None:
            return 1
        return spread(nbytes, costs, open_time(0.0, min(self.deadlines.values()), self.blocked))


class Expected:
    """What was known when a part of a snapshot began: a plan follows from it, for who asks (`ucp snapshot plan`)."""

    def __init__(self, measured: Measured, items: Sequence[Item]) -> None:
        self.costs = measured.costs()
        self.blocked = list(measured.blocked)
        self.deadlines = [measured.deadline(item) for item in items]


def tell(
    step: int,
    parts: Sequence[tuple[int, Copier, Expected]],
    *,
    prepared: float,
    written: float,
) -> dict[str, Any]:
    """What `ucp snapshot plan` reads: when the tensors of each part (step, copier, what was known) were copied."""
    tensors: list[dict[str, Any]] = []
    for of_step, copier, expected in parts:
        start = min((item.started for item in copier.items if item.started), default=0.0)
        tensors += [
            {
                "name": item.name,
                "bytes": item.nbytes,
                "step": of_step,
                "deadline": None if deadline == inf or expected.costs is None else deadline,
                "copied": [item.started - start, item.finished - start],
                "by_trainer": item.by_trainer * item.live.element_size(),
            }
            for item, deadline in zip(copier.items, expected.deadlines, strict=True)
        ]
    costs, blocked = parts[-1][2].costs, parts[-1][2].blocked
    return {
        "schema": 1,
        "step": step,
        "parts": [of_step for of_step, _, _ in parts],
        "costs": None if costs is None else {"link": costs.link, "local": costs.local, "share": costs.share},
        "blocked": [list(stretch) for stretch in blocked],
        "tensors": tensors,
        "measured": {
            "stall": sum(copier.stall_seconds for _, copier, _ in parts),
            "late_bytes": sum(copier.trainer_bytes for _, copier, _ in parts),
            "prepare": prepared,
            "write": written,
        },
    }
