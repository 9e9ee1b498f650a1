"""`zero/optimizer_state.pt` of a universal folder: rank 0's optimizer state, under ZeRO-3 with its shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ucp.files.inert import Inert, TensorRef
from ucp.formats.deepspeed.holdings import Group
from ucp.formats.deepspeed.hyper import group_hyper
from ucp.formats.deepspeed.reading import Reading
from ucp.formats.deepspeed.scalars import stored_scalar
from ucp.formats.deepspeed.shards import RankFile
from ucp.formats.deepspeed.stored import Stored
from ucp.model.box import Shape
from ucp.model.checkpoint import STEP


def zero_stage(optimizer: RankFile) -> int:
    """The ZeRO stage of the source; BF16_Optimizer does not name it and counts as 1."""
    stage = optimizer.mapping().get("zero_stage")
    value = stage.args[0] if isinstance(stage, Inert) and stage.args else stage
    return value if type(value) is int else 1


def read_groups(reading: Reading, optimizer: RankFile, shapes: Sequence[Mapping[str, Shape]]) -> list[Group]:
    """Parameter groups of one pipeline stage; `shapes` has one dict a flat group (a sub-group under ZeRO-3)."""
    found = optimizer.mapping().get("param_groups") or _inner(optimizer).get("param_groups")
    stored = [group for group in found if isinstance(group, dict)] if isinstance(found, (list, tuple)) else []
    groups = [Group(group_hyper(reading, optimizer, group), []) for group in stored]
    for names, owner in zip(shapes, _owners(stored, len(shapes)), strict=True):
        if owner < len(groups):
            groups[owner].names.extend(names)
    return groups


def steps(optimizer: RankFile, shapes: Sequence[Mapping[str, Shape]]) -> Iterator[tuple[str, Stored]]:
    """(parameter, its step): under ZeRO-3 the step lies here, by sub-group, and not beside the parameter."""
    states = _states(optimizer)
    for index, names in enumerate(shapes):
        value = states.get(index, {}).get(STEP)
        number = stored_scalar(optimizer, value, 0) if value is not None else None
        if number is not None:
            for name in names:
                yield name, number


def shards(optimizer: RankFile) -> Iterator[TensorRef]:
    """Rank 0's shards under ZeRO-3: they repeat part of what the parameters' folders hold whole."""
    masters = optimizer.mapping().get("fp32_flat_groups")
    rows = [state.values() for state in _states(optimizer).values()]
    for value in (*(masters if isinstance(masters, (list, tuple)) else ()), *(value for row in rows for value in row)):
        if isinstance(value, TensorRef):
            yield value


def _inner(optimizer: RankFile) -> Mapping[Any, Any]:
    inner = optimizer.mapping().get("optimizer_state_dict")
    return inner if isinstance(inner, dict) else {}


def _states(optimizer: RankFile) -> dict[Any, Mapping[Any, Any]]:
    states = _inner(optimizer).get("state")
    return {k: s for k, s in states.items() if isinstance(s, dict)} if isinstance(states, dict) else {}


def _owners(groups: Sequence[Mapping[Any, Any]], flat: int) -> list[int]:
    """Group of each flat group: as `params` lists them, else by position."""
    owner: dict[int, int] = {}
    for index, group in enumerate(groups):
        listed = group.get("params")
        for member in listed if isinstance(listed, (list, tuple)) else ():
            if type(member) is int:
                owner[member] = index
    return [owner[i] for i in range(flat)] if sorted(owner) == list(range(flat)) else list(range(flat))
