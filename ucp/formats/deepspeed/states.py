"""Sorts the optimizer's states of one flat group: which are one value an element, which one number, which neither.

Nothing here knows the name of a state: Adam's two moments, SGD's one and what an optimizer of tomorrow keeps are all
told apart by their lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ucp.files.inert import Inert, TensorRef
from ucp.formats.deepspeed.reading import Reading
from ucp.formats.deepspeed.scalars import is_scalar, scalar_bytes, stored_scalar
from ucp.formats.deepspeed.shards import RankFile, describe, holds_tensor
from ucp.formats.deepspeed.stored import Spot, Stored
from ucp.model.checkpoint import MASTER, STEP, WEIGHT
from ucp.model.dtypes import DType
from ucp.model.numbers import scalar_value


@dataclass(slots=True)
class Member:
    """One data-parallel rank's share of a flat group: file, states, and the lengths that its tensors may have."""

    file: RankFile
    dp: int
    state: Mapping[Any, Any]
    lengths: tuple[int, ...]
    swapped: Callable[[TensorRef, str], Spot | None] | None = None  # finds a tensor that was swapped out of the file
    whole: int | None = None  # elements of all parameters that have some in this share, where such states are known


@dataclass(slots=True)
class FlatStates:
    """The states of a flat group: kind → (dtype, one spot a member), and kind → the number.

    Of `whole` ones a member has its parameters to their ends, where a share of the buffer would cut the outer two
    (Muon's momentum: orthogonalizing takes whole matrices).
    """

    flat: dict[str, tuple[DType, list[Spot]]] = field(default_factory=dict)
    whole: dict[str, tuple[DType, list[Spot]]] = field(default_factory=dict)
    numbers: dict[str, Stored] = field(default_factory=dict)


def kind_of(key: object) -> str:
    """The kind of an optimizer state: its own name, out of the way of the two names that we gave a meaning."""
    text = str(key)
    return f"state_{text}" if text in (WEIGHT, MASTER) else text


def sort_states(reading: Reading, group: str, members: Sequence[Member]) -> FlatStates:
    """The states of one flat group over all its members; `group` names it in messages."""
    found = FlatStates()
    keys: dict[Any, None] = {}
    for member in members:
        keys.update(dict.fromkeys(member.state))
    for key in keys:
        missing = [member for member in members if key not in member.state]
        if missing:
            names = ", ".join(member.file.name for member in missing[:5])
            reading.problems.add(
                f"{group}: optimizer state '{key}' is missing on dp rank {missing[0].dp} ({names})"
                + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            )
            continue
        _sort_one(reading, group, key, members, found)
    return found


def _sort_one(reading: Reading, group: str, key: Any, members: Sequence[Member], found: FlatStates) -> None:
    first = members[0].state[key]
    spots = [_flat_spot(member, key) for member in members]
    if not all(spots) and all(_is_whole(member, key) for member in members):
        dtypes = {member.state[key].dtype for member in members}
        if len(dtypes) == 1:
            taken = [member.file.spot(reading.take(member.state[key]), member.dp) for member in members]
            found.whole[kind_of(key)] = (dtypes.pop(), taken)
            return
    if _is_flat(spots) and not (is_scalar(first) and str(key) == "step"):
        dtypes = {member.state[key].dtype for member in members if isinstance(member.state[key], TensorRef)}
        for member, spot in zip(members, spots, strict=True):
            if spot is None:
                reading.problems.add(
                    f"{group}: optimizer state '{key}' on dp rank {member.dp} ({member.file.name}) is"
                    f" {_shape_text(member.state[key])}, expected {' or '.join(map(str, member.lengths))} elements"
                )
        if len(dtypes) > 1:
            listed = ", ".join(sorted(map(str, dtypes)))
            reading.problems.add(
                f"{group}: optimizer state '{key}' has a different dtype on different dp ranks: {listed}"
            )
        if all(spot is not None for spot in spots) and len(dtypes) == 1:
            found.flat[kind_of(key)] = (dtypes.pop(), [spot for spot in spots if spot is not None])
            for member in members:
                reading.take(member.state[key])
    elif is_scalar(first):
        _number(reading, group, key, members, found)
    elif any(isinstance(member.state[key], Inert) and holds_tensor(member.state[key]) for member in members):
        reading.problems.add(
            f"{group}: optimizer state '{key}' is {describe(first)} that carries tensors ({members[0].file.name});"
            " how it is cut over ranks is not known"
        )
    elif holds_tensor(first):
        reading.unplaced_states.setdefault(kind_of(key), f"{_shape_text(first)} in {members[0].file.name}")


def _is_whole(member: Member, key: Any) -> bool:
    ref = member.state[key]
    return isinstance(ref, TensorRef) and ref.shape == (member.whole,) and ref.is_contiguous


def _is_flat(spots: Sequence[Spot | None]) -> bool:
    """Whether a state is meant to have one value an element: on the first rank (which has no padding), or on most."""
    return spots[0] is not None or 2 * sum(spot is not None for spot in spots) > len(spots)


def _flat_spot(member: Member, key: Any) -> Spot | None:
    ref = member.state[key]
    if not isinstance(ref, TensorRef) or len(ref.shape) != 1 or not ref.is_contiguous:
        return None
    if ref.numel == 0 and 0 not in member.lengths:
        return member.swapped(ref, str(key)) if member.swapped is not None else None
    return member.file.spot(ref, member.dp) if ref.numel in member.lengths else None


def _number(reading: Reading, group: str, key: Any, members: Sequence[Member], found: FlatStates) -> None:
    numbers = [stored_scalar(member.file, member.state[key], member.dp) for member in members]
    kept = [number for number in numbers if number is not None]
    if len(kept) != len(members):
        reading.unplaced_states.setdefault(kind_of(key), f"not a 64-bit number in {members[0].file.name}")
        return
    first = scalar_bytes(kept[0], reading.source)
    for member, number in zip(members[1:], kept[1:], strict=True):
        other = scalar_bytes(number, reading.source)
        if other == first and number.dtype == kept[0].dtype:
            continue
        if kind_of(key) != STEP:  # of a rank's share of the buffer, as the mean square that Adafactor keeps
            why = f"every data-parallel rank has a number of its own, as in {members[0].file.name}"
            reading.unplaced_states.setdefault(kind_of(key), why)
            return
        reading.problems.add(
            f"{group}: '{key}' is {scalar_value(first, kept[0].dtype)} in {members[0].file.name}"
            f" (dp rank {members[0].dp}), but {scalar_value(other, number.dtype)} in {member.file.name}"
            f" (dp rank {member.dp}): files of different steps are mixed"
        )
    found.numbers[kind_of(key)] = kept[0]
    for member in members:
        if isinstance(member.state[key], TensorRef):
            reading.take(member.state[key])


def _shape_text(value: object) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, TensorRef) else f"a {type(value).__name__}"
