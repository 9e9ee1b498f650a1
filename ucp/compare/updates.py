"""Relative updates: how far each parameter and each layer moved between two steps of one run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ucp.compare.layers import layer_of
from ucp.compare.tally import Tally


@dataclass(frozen=True, slots=True)
class Update:
    """How far something moved: ‖b - a‖ and ‖a‖, both Euclidean over all its elements."""

    name: str
    change: float
    norm: float

    @property
    def relative(self) -> float:
        """‖b - a‖ / ‖a‖; infinite where something moved away from zero."""
        if self.norm == 0:
            return math.inf if self.change else 0.0
        return self.change / self.norm

    def to_json(self) -> dict[str, Any]:
        numbers = {"change": self.change, "norm": self.norm, "relative": self.relative}
        return {"name": self.name} | {
            key: value if math.isfinite(value) else repr(value) for key, value in numbers.items()
        }


@dataclass(frozen=True, slots=True)
class Updates:
    """Parameters in the model's order, and the layers they make up."""

    parameters: tuple[Update, ...]
    layers: tuple[Update, ...]
    total: Update

    def to_json(self) -> dict[str, Any]:
        return {
            "parameters": [update.to_json() for update in self.parameters],
            "layers": [update.to_json() for update in self.layers],
            "total": self.total.to_json(),
        }


def updates_of(tallies: Iterable[tuple[str, Tally]]) -> Updates:
    """Updates from what was summed up of each parameter."""
    parameters: list[Update] = []
    layers: dict[str, tuple[float, float]] = {}
    for name, tally in tallies:
        parameters.append(_update(name, tally.squares_of_change, tally.squares_a))
        change, norm = layers.get(layer_of(name), (0.0, 0.0))
        layers[layer_of(name)] = change + tally.squares_of_change, norm + tally.squares_a
    return Updates(
        tuple(parameters),
        tuple(_update(layer, *squares) for layer, squares in layers.items()),
        _update("all", sum(c for c, _ in layers.values()), sum(n for _, n in layers.values())),
    )


def _update(name: str, change: float, norm: float) -> Update:
    return Update(name, math.sqrt(change), math.sqrt(norm))
