"""Raw `optimizer.state_dict()`s number their parameters: which number is which name, where that can be told."""

from __future__ import annotations

from collections.abc import Mapping

from ucp.formats.dcp.groups import Group
from ucp.formats.dcp.keys import OptimizerKeys
from ucp.formats.dcp.roles import surely_buffer
from ucp.formats.distcp_index import Entry, TensorEntry


def match_numbers(
    optimizer: OptimizerKeys, groups: list[Group], tensors: Mapping[str, TensorEntry]
) -> dict[str, str] | None:
    """Number → name, or None. `tensors` are the model's, in its own order.

    Numbers count parameters group by group: in the model's order, or with matrices before everything else, as jobs
    do that spare biases and norms the weight decay. Shapes must agree with it.
    """
    numbers = [name for group in groups for name in group.names] or sorted(optimizer.states, key=int)
    names = [name for name in tensors if not surely_buffer(name, tensors[name])]
    matrices_first = sorted(names, key=lambda name: len(tensors[name].shape) < 2)
    for order in (names, matrices_first) if len(groups) > 1 else (names,):
        found = _match(numbers, order, optimizer.states, tensors)
        if found is not None:
            return found
    return None


def _match(
    numbers: list[str], order: list[str], states: Mapping[str, Mapping[str, Entry]], tensors: Mapping[str, TensorEntry]
) -> dict[str, str] | None:
    """Numbers to names in order, where the shapes of all states agree with that; buffers have no number."""
    names = iter(order)
    found: dict[str, str] = {}
    for number in numbers:
        shapes = [e.shape for e in states.get(number, {}).values() if isinstance(e, TensorEntry) and e.shape]
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
