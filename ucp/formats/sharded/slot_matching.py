"""Names for the parameters of optimizers that only number them, found by their shapes.

Every group lists parameters in the order of the model, so it is a subsequence of the model. If exactly one assignment
of names to groups fits all shapes, it is the right one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Final

from ucp.core.box import Shape

_MAX_STATES: Final = 20_000  # partial assignments kept at a time; with more, nothing is decided

ShapePredicate = Callable[[Shape], bool]  # whether a slot can be a parameter of this shape


def states_fit(states: Sequence[Shape], shape: Shape) -> bool:
    """Whether a parameter of this shape can have states of these shapes: its own, or rows and columns (Adafactor).

    The states of a vector have its own shape or one element. An empty list of states fits every parameter.
    """
    if not states:
        return True
    if len(shape) < 2:
        return shape in states and all(state == shape or prod(state) == 1 for state in states)
    rows, columns = shape[:-1], (*shape[:-2], *shape[-1:])
    kept = ((*rows, 1), (*shape[:-2], 1, *shape[-1:]))  # with the reduced dimension kept
    return shape in states or any(not Counter(pair) - Counter(states) for pair in ((rows, columns), kept))


def match_slots(
    groups: Sequence[Sequence[ShapePredicate]], candidates: Sequence[tuple[str, Shape]]
) -> list[list[str]] | None:
    """Return the names of every group's parameters if exactly one assignment in order fits, else None.

    A candidate that is in no group is a frozen parameter or a buffer.
    """
    left_out = len(candidates) - sum(map(len, groups))
    if left_out < 0:
        return None
    start = ((0,) * len(groups), left_out)
    # state → (number of assignments, capped at 2; the previous state and the group that took the name)
    states: dict[Any, tuple[int, Any]] = {start: (1, None)}
    history: list[dict[Any, tuple[int, Any]]] = []
    for _, shape in candidates:
        after: dict[Any, tuple[int, Any]] = {}
        for state, (count, _) in states.items():
            for group, following in _choices(state, groups, shape):
                known = after.get(following)
                after[following] = (2, None) if known or count > 1 else (1, (state, group))
        if not after or len(after) > _MAX_STATES:
            return None
        history.append(after)
        states = after
    end = (tuple(map(len, groups)), 0)
    if states.get(end, (0, None))[0] != 1:
        return None
    names: list[list[str]] = [[] for _ in groups]
    state = end
    for (name, _), after in zip(reversed(candidates), reversed(history), strict=True):
        state, group = after[state][1]
        if group is not None:
            names[group].append(name)
    return [of_group[::-1] for of_group in names]


def _choices(state: Any, groups: Sequence[Sequence[ShapePredicate]], shape: Shape) -> list[tuple[int | None, Any]]:
    """Return the groups whose next slot fits the next name, and None if the name can be left out."""
    positions, left_out = state
    found: list[tuple[int | None, Any]] = []
    for g, at in enumerate(positions):
        if at < len(groups[g]) and groups[g][at](shape):
            found.append((g, ((*positions[:g], at + 1, *positions[g + 1 :]), left_out)))
    if left_out:
        found.append((None, (positions, left_out - 1)))
    return found
