"""Raw `optimizer.state_dict()`s number their parameters: which number is which name, where that can be told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from ucp.formats.dcp.groups import Group
from ucp.formats.dcp.keys import LIKE_WEIGHT, OptimizerKeys, unwrapped
from ucp.formats.dcp.roles import surely_buffer
from ucp.formats.dealing import deal, states_fit
from ucp.formats.distcp_index import Entry, TensorEntry
from ucp.model.box import Shape

_NAMES: Final = "param_names"


def match_numbers(
    optimizer: OptimizerKeys, groups: list[Group], tensors: Mapping[str, TensorEntry]
) -> dict[str, str] | None:
    """Number → name, or None. `tensors` are the model's, in its own order.

    Numbers count parameters group by group: in the model's order, or with matrices before everything else, as jobs
    do that spare biases and norms the weight decay. Shapes must agree with it. Failing that, groups may be dealt in any
    one way that fits.
    """
    numbers = [name for group in groups for name in group.names] or sorted(optimizer.states, key=int)
    names = [name for name in tensors if not surely_buffer(name, tensors[name])]
    matrices_first = sorted(names, key=lambda name: len(tensors[name].shape) < 2)
    for order in (names, matrices_first) if len(groups) > 1 else (names,):
        found = _match(numbers, order, optimizer.states, tensors)
        if found is not None:
            return found
    shapes = {number: _shapes(optimizer.states.get(number, {})) for number in numbers}
    dealt = deal(
        [[partial(states_fit, shapes[number]) for number in group.names] for group in groups],
        [(name, tensors[name].shape) for name in names],
    )
    if not groups or dealt is None:
        return None
    return dict(zip(numbers, [name for group in dealt for name in group], strict=True))


def told_names(groups: Sequence[Group]) -> dict[str, str]:
    """Numbers to names, of groups that have both: optimizers that were made from `named_parameters()` do."""
    found: dict[str, str] = {}
    for group in groups:
        names = group.hyper.get(_NAMES)
        if isinstance(names, list) and len(names) == len(group.names):
            found.update((number, unwrapped(str(name))) for number, name in zip(group.names, names, strict=True))
    return found


def _shapes(states: Mapping[str, Entry]) -> tuple[Shape, ...]:
    """The shapes of states that say something of the parameter's; a number such as `step` says nothing."""
    tensors = {kind: entry.shape for kind, entry in states.items() if isinstance(entry, TensorEntry)}
    return tuple(shape for kind, shape in tensors.items() if shape or kind in LIKE_WEIGHT)


def _match(
    numbers: list[str], order: list[str], states: Mapping[str, Mapping[str, Entry]], tensors: Mapping[str, TensorEntry]
) -> dict[str, str] | None:
    """Numbers to names in order, where the shapes of all states agree with that; buffers have no number."""
    names = iter(order)
    found: dict[str, str] = {}
    for number in numbers:
        shapes = _shapes(states.get(number, {}))
        for name in names:
            if all(shape == tensors[name].shape for shape in shapes) and (shapes or len(numbers) == len(order)):
                found[number] = name
                break
        else:
            return None
    return found if len(found) == len(order) or _is_unambiguous(found, order, tensors) else None


def _is_unambiguous(found: Mapping[str, str], order: list[str], tensors: Mapping[str, TensorEntry]) -> bool:
    """Nothing that was skipped looks like anything that was matched."""
    taken = set(found.values())
    shapes = {tensors[name].shape for name in taken}
    return not any(tensors[name].shape in shapes for name in order if name not in taken)
