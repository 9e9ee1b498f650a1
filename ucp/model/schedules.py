"""The state of a learning-rate scheduler among what a job saved: where it is, and how far the schedule has come.

torch's schedulers count `last_epoch`, DeepSpeed's `last_batch_iteration`, which is one less at the same moment. Both
take a state that says more than they know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

_COUNT: Final = "last_epoch"
_DEEPSPEED_COUNT: Final = "last_batch_iteration"
_RATES: Final = "_last_lr"
_NAMED_SO: Final = "sched"
_DEEPEST: Final = 4  # dictionaries inside each other that are looked into

KeyPath = tuple[str | int, ...]  # keys of dictionaries, numbers in lists


def find_schedule(tree: Mapping[str, Any]) -> tuple[KeyPath, dict[str, Any]] | None:
    """The one scheduler's state in a tree, with the keys that lead to it; None where there is none, or several.

    Schedulers that are made of others keep the states of those inside their own, so the outermost counts.
    """
    found = list(_schedules((), tree))
    return found[0] if len(found) == 1 else None


def _schedules(path: KeyPath, tree: Mapping[str, Any] | list[Any]) -> Iterator[tuple[KeyPath, dict[str, Any]]]:
    for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        if isinstance(value, dict) and _is_schedule(str(key), value):
            yield (*path, key), value
        elif isinstance(value, (dict, list)) and len(path) + 1 < _DEEPEST:
            yield from _schedules((*path, key), value)


def _is_schedule(name: str, state: Mapping[str, Any]) -> bool:
    counts = type(state.get(_COUNT)) is int or type(state.get(_DEEPSPEED_COUNT)) is int
    return counts and (_RATES in state or _DEEPSPEED_COUNT in state or _NAMED_SO in name.lower())


def in_all_words(state: Mapping[str, Any], rates: Sequence[Any]) -> dict[str, Any]:
    """The state with what a scheduler of the other framework asks for; its own values stay.

    `rates` are the learning rates of the groups.
    """
    count, theirs = state.get(_COUNT), state.get(_DEEPSPEED_COUNT)
    if type(count) is int:
        return {_DEEPSPEED_COUNT: count - 1, **state}
    if type(theirs) is int:
        return {_COUNT: theirs + 1, "_step_count": theirs + 2, _RATES: list(rates), **state}
    return dict(state)
