"""Relative updates: how far each parameter and each layer moved between two steps of one run."""

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
    """How far a parameter or layer moved: ‖b - a‖ and ‖a‖, Euclidean norms over all its elements."""

    name: str
    change: float
    norm: float

    @staticmethod
    def from_squares(name: str, change: float, norm: float) -> RelativeUpdate:
        """From the sums of squares of `b - a` and of `a`."""
        return RelativeUpdate(name, math.sqrt(change), math.sqrt(norm))

    @property
    def relative(self) -> float:
        """‖b - a‖ / ‖a‖; infinite if a is zero and b is not."""
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
    """Updates of all parameters, in the order of the model, and of their layers."""

    parameters: tuple[RelativeUpdate, ...]
    layers: tuple[RelativeUpdate, ...]
    total: RelativeUpdate

    def to_json(self) -> dict[str, Any]:
        return {
            "parameters": [update.to_json() for update in self.parameters],
            "layers": [update.to_json() for update in self.layers],
            "total": self.total.to_json(),
        }


def relative_updates(comparisons: Iterable[tuple[str, AtomComparison]]) -> RelativeUpdates:
    """Updates from the comparison of each parameter, by name."""
    make = RelativeUpdate.from_squares
    parameters: list[RelativeUpdate] = []
    layers: dict[str, tuple[float, float]] = {}
    for name, compared in comparisons:
        parameters.append(make(name, compared.squares_of_change, compared.squares_a))
        change, norm = layers.get(layer_of(name), (0.0, 0.0))
        layers[layer_of(name)] = change + compared.squares_of_change, norm + compared.squares_a
    return RelativeUpdates(
        tuple(parameters),
        tuple(make(layer, *squares) for layer, squares in layers.items()),
        make("all", sum(change for change, _ in layers.values()), sum(norm for _, norm in layers.values())),
    )
