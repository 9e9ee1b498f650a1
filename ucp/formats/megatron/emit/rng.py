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

    def __init__(self, stored: Mapping[tuple[int, int], Any], mesh: Mesh) -> None:
        self._stored = dict(stored)
        self._stages = 1 + max((pp for pp, _ in stored), default=0)
        self._slices = 1 + max((tp for _, tp in stored), default=0)
        self.notes: list[Note] = []
        if stored and (mesh.pp > self._stages or mesh.tp > self._slices):
            self.notes.append(
                Note(
                    "rng-repeated",
                    "there are more ranks than the source has random states: some ranks share one"
                    " (start with --no-load-rng for fresh ones)",
                )
            )

    def of(self, pp: int, tp: int) -> Any:
        """The state of one rank, or None where the source has none at all."""
        found = self._stored.get((pp % self._stages, tp % self._slices))
        return found if found is not None else next(iter(self._stored.values()), None)
