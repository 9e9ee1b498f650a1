"""Optimizers that number their parameters and name none: which names their groups list, told by shapes.

Groups are lists of the model's parameters in the model's order, so every group is a subsequence of the model; if only
one way of dealing the names out fits all shapes, it is the right one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Final

from ucp.core.box import Shape

_MAX_STATES: Final = 20_000  # half-dealt states kept at a time; beyond it nothing is decided

ShapePredicate = Callable[[Shape], bool]  # whether a parameter of this shape can be the one that a number means


def states_fit(states: Sequence[Shape], shape: Shape) -> bool:
    """Whether a parameter of this shape can have states of those: one is like it, or its rows and columns (Adafactor).

    All that is kept of a vector is like it: there is nothing to sum over. No states fit everything.
    """
    if not states:
        return True
    if len(shape) < 2:
        return shape in states and all(state == shape or prod(state) == 1 for state in states)
    rows, columns = shape[:-1], (*shape[:-2], *shape[-1:])
    kept = ((*rows, 1), (*shape[:-2], 1, *shape[-1:]))  # with the dimension that was summed over
    return shape in states or any(not Counter(pair) - Counter(states) for pair in ((rows, columns), kept))


def match_slots(
    groups: Sequence[Sequence[ShapePredicate]], candidates: Sequence[tuple[str, Shape]]
) -> list[list[str]] | None:
    """Names of every group's parameters when exactly one way of dealing the model out in order fits; else None.

    A candidate that goes to no group is a frozen parameter or a buffer.
    """
    left_out = len(candidates) - sum(map(len, groups))
    if left_out < 0:
        return None
    start = ((0,) * len(groups), left_out)
    # state → (number of ways, capped at 2; the state before and the group that took the name)
    ways: dict[Any, tuple[int, Any]] = {start: (1, None)}
    history: list[dict[Any, tuple[int, Any]]] = []
    for _, shape in candidates:
        after: dict[Any, tuple[int, Any]] = {}
        for state, (count, _) in ways.items():
            for taker, following in _choices(state, groups, shape):
                known = after.get(following)
                after[following] = (2, None) if known or count > 1 else (1, (state, taker))
        if not after or len(after) > _MAX_STATES:
            return None
        history.append(after)
        ways = after
    end = (tuple(map(len, groups)), 0)
    if ways.get(end, (0, None))[0] != 1:
        return None
    return _retrace(end, history, candidates, len(groups))


def _choices(state: Any, groups: Sequence[Sequence[ShapePredicate]], shape: Shape) -> list[tuple[int | None, Any]]:
    """Who may take the next name: a group whose next parameter fits, or nobody while some are left over."""
    positions, left_out = state
    found: list[tuple[int | None, Any]] = []
    for g, at in enumerate(positions):
        if at < len(groups[g]) and groups[g][at](shape):
            found.append((g, ((*positions[:g], at + 1, *positions[g + 1 :]), left_out)))
    if left_out:
        found.append((None, (positions, left_out - 1)))
    return found


def _retrace(
    end: Any,
    history: Sequence[Mapping[Any, tuple[int, Any]]],
    candidates: Sequence[tuple[str, Shape]],
    groups: int,
) -> list[list[str]]:
    dealt: list[list[str]] = [[] for _ in range(groups)]
    state = end
    for (name, _), after in zip(reversed(candidates), reversed(history), strict=True):
        state, taker = after[state][1]
        if taker is not None:
            dealt[taker].append(name)
    return [names[::-1] for names in dealt]
