"""Layers: which parameters belong together, told by their names.

Relative updates: how far each parameter and each layer moved between two steps of one run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ucp.compare.elements import AtomComparison


def layer_of(name: str) -> str:
    """The layer of a parameter: its name up to the first number (`blocks.3`, `model.layers.0`), else its module.

    >>> layer_of("model.layers.3.mlp.experts.7.up.weight")
    'model.layers.3'
    >>> layer_of("lm_head.weight")
    'lm_head'
    """
    words = name.split(".")
    for position, word in enumerate(words):
        if word.isdigit():
            return ".".join(words[: position + 1])
    return ".".join(words[:-1]) or name


@dataclass(frozen=True, slots=True)
class RelativeUpdate:
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
class RelativeUpdates:
    """Parameters in the model's order, and the layers they make up."""

    parameters: tuple[RelativeUpdate, ...]
    layers: tuple[RelativeUpdate, ...]
    total: RelativeUpdate

    def to_json(self) -> dict[str, Any]:
        return {
            "parameters": [update.to_json() for update in self.parameters],
            "layers": [update.to_json() for update in self.layers],
            "total": self.total.to_json(),
        }


def updates_of(tallies: Iterable[tuple[str, AtomComparison]]) -> RelativeUpdates:
    """Updates from what was summed up of each parameter."""
    parameters: list[RelativeUpdate] = []
    layers: dict[str, tuple[float, float]] = {}
    for name, tally in tallies:
        parameters.append(_update(name, tally.squares_of_change, tally.squares_a))
        change, norm = layers.get(layer_of(name), (0.0, 0.0))
        layers[layer_of(name)] = change + tally.squares_of_change, norm + tally.squares_a
    return RelativeUpdates(
        tuple(parameters),
        tuple(_update(layer, *squares) for layer, squares in layers.items()),
        _update("all", sum(c for c, _ in layers.values()), sum(n for _, n in layers.values())),
    )


def _update(name: str, change: float, norm: float) -> RelativeUpdate:
    return RelativeUpdate(name, math.sqrt(change), math.sqrt(norm))
