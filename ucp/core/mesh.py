"""The mesh of ranks that a checkpoint is sharded over, and the coordinates of one rank in it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Mesh:
    """Degrees of tensor, pipeline, data and expert parallelism, and the ZeRO stage (0 if states are not sharded)."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    zero: int = 0

    @property
    def world(self) -> int:
        """Number of ranks. Expert parallelism reuses data-parallel ranks, so `ep` is not a factor."""
        return self.tp * self.pp * self.dp

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    def __str__(self) -> str:
        text = f"tp {self.tp} × pp {self.pp} × dp {self.dp}"
        return (text + f", ep {self.ep}" if self.ep > 1 else text) + f", ZeRO {self.zero}"


class Rank(NamedTuple):
    """Coordinates of the rank that wrote a fragment; `ep` is None if the file is not specific to an expert rank."""

    pp: int = 0
    tp: int = 0
    dp: int = 0
    ep: int | None = None

    def __str__(self) -> str:
        text = f"pp {self.pp} tp {self.tp} dp {self.dp}"
        return text if self.ep is None else text + f" ep {self.ep}"
