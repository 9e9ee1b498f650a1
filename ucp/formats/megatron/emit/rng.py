"""Random states for the ranks of the target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ucp.model.checkpoint import Note
from ucp.model.layout import Mesh


class RandomStates:
    """The source's random states, dealt to the target's ranks: their own where the source had such a rank.

    Ranks that the source did not have get the state of another one; `notes` then say so.
    """

    def __init__(self, stored: Mapping[tuple[int, int, int], Any], mesh: Mesh) -> None:
        self._stored = dict(stored)
        self._degrees = [1 + max((rank[axis] for rank in stored), default=0) for axis in range(3)]
        self.notes: list[Note] = []
        if stored and any(n > held for n, held in zip((mesh.pp, mesh.tp, mesh.ep), self._degrees, strict=True)):
            self.notes.append(
                Note(
                    "rng-repeated",
                    "there are more ranks than the source has random states: some ranks share one"
                    " (start with --no-load-rng for fresh ones)",
                )
            )

    def of(self, pp: int, tp: int, dp: int = 0) -> Any:
        """The state of one rank, or None where the source has none at all. With parallel experts `dp` counts them."""
        stages, slices, others = self._degrees
        found = self._stored.get((pp % stages, tp % slices, dp % others))
        return found if found is not None else next(iter(self._stored.values()), None)
