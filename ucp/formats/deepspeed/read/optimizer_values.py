"""Sorts the optimizer's states of one flat group: which are one value an element, which one number, which neither.

Nothing here knows the name of a state: Adam's two moments, SGD's one and what an optimizer of tomorrow keeps are all
told apart by their lengths.

Optimizer states that are one number (`step`), whether the file keeps a tensor or a plain number.

Hyper-parameters of a parameter group, as plain values where the file keeps small tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ucp.containers.inert import Inert, NumpyScalar, TensorRef
from ucp.core.checkpoint import MASTER, STEP, WEIGHT
from ucp.core.dtypes import BOOL, FLOAT64, INT64, DType, scalar_value
from ucp.formats.deepspeed.read.rank_files import RankFile, contains_tensor, describe_value
from ucp.formats.deepspeed.read.read_context import ReadContext
from ucp.formats.sharded.shard_fragments import InlineNumber, StoredShard, TensorInFile, scalar_bytes


@dataclass(slots=True)
class FlatGroupShare:
    """One data-parallel rank's share of a flat group: file, states, and the lengths that its tensors may have."""

    file: RankFile
    dp: int
    state: Mapping[Any, Any]
    lengths: tuple[int, ...]
    swapped: Callable[[TensorRef, str], TensorInFile | None] | None = (
        None  # finds a tensor that was swapped out of the file
    )
    whole: int | None = None  # elements of all parameters that have some in this share, where such states are known


@dataclass(slots=True)
class FlatGroupStates:
    """The states of a flat group: kind → (dtype, one spot a member), and kind → the number.

    Of `whole` ones a member has its parameters to their ends, where a share of the buffer would cut the outer two
    (Muon's momentum: orthogonalizing takes whole matrices).
    """

    flat: dict[str, tuple[DType, list[TensorInFile]]] = field(default_factory=dict)
    whole: dict[str, tuple[DType, list[TensorInFile]]] = field(default_factory=dict)
    numbers: dict[str, StoredShard] = field(default_factory=dict)


def kind_of(key: object) -> str:
    """The kind of an optimizer state: its own name, out of the way of the two names that we gave a meaning."""
    text = str(key)
    return f"state_{text}" if text in (WEIGHT, MASTER) else text


def classify_states(context: ReadContext, group: str, members: Sequence[FlatGroupShare]) -> FlatGroupStates:
    """The states of one flat group over all its members; `group` names it in messages."""
    found = FlatGroupStates()
    keys: dict[Any, None] = {}
    for member in members:
        keys.update(dict.fromkeys(member.state))
    for key in keys:
        missing = [member for member in members if key not in member.state]
        if missing:
            names = ", ".join(member.file.name for member in missing[:5])
            context.problems.add(
                f"{group}: optimizer state '{key}' is missing on dp rank {missing[0].dp} ({names})"
                + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            )
            continue
        _classify_state(context, group, key, members, found)
    return found


def _classify_state(
    context: ReadContext, group: str, key: Any, members: Sequence[FlatGroupShare], found: FlatGroupStates
) -> None:
    first = members[0].state[key]
    spots = [_flat_spot(member, key) for member in members]
    if not all(spots) and all(_has_whole_parameters(member, key) for member in members):
        dtypes = {member.state[key].dtype for member in members}
        if len(dtypes) == 1:
            taken = [member.file.locate(context.claim(member.state[key]), member.dp) for member in members]
            found.whole[kind_of(key)] = (dtypes.pop(), taken)
            return
    if _is_element_wise(spots) and not (is_scalar(first) and str(key) == "step"):
        dtypes = {member.state[key].dtype for member in members if isinstance(member.state[key], TensorRef)}
        for member, spot in zip(members, spots, strict=True):
            if spot is None:
                context.problems.add(
                    f"{group}: optimizer state '{key}' on dp rank {member.dp} ({member.file.name}) is"
                    f" {_describe_shape(member.state[key])}, expected {' or '.join(map(str, member.lengths))} elements"
                )
        if len(dtypes) > 1:
            listed = ", ".join(sorted(map(str, dtypes)))
            context.problems.add(
                f"{group}: optimizer state '{key}' has a different dtype on different dp ranks: {listed}"
            )
        if all(spot is not None for spot in spots) and len(dtypes) == 1:
            found.flat[kind_of(key)] = (dtypes.pop(), [spot for spot in spots if spot is not None])
            for member in members:
                context.claim(member.state[key])
    elif is_scalar(first):
        _classify_number(context, group, key, members, found)
    elif any(isinstance(member.state[key], Inert) and contains_tensor(member.state[key]) for member in members):
        context.problems.add(
            f"{group}: optimizer state '{key}' is {describe_value(first)} that carries tensors ({members[0].file.name});"  # noqa: E501
            " how it is cut over ranks is not known"
        )
    elif contains_tensor(first):
        context.unplaced_states.setdefault(kind_of(key), f"{_describe_shape(first)} in {members[0].file.name}")


def _has_whole_parameters(member: FlatGroupShare, key: Any) -> bool:
    ref = member.state[key]
    return isinstance(ref, TensorRef) and ref.shape == (member.whole,) and ref.is_contiguous


def _is_element_wise(spots: Sequence[TensorInFile | None]) -> bool:
    """Whether a state is meant to have one value an element: on the first rank (which has no padding), or on most."""
    return spots[0] is not None or 2 * sum(spot is not None for spot in spots) > len(spots)


def _flat_spot(member: FlatGroupShare, key: Any) -> TensorInFile | None:
    ref = member.state[key]
    if not isinstance(ref, TensorRef) or len(ref.shape) != 1 or not ref.is_contiguous:
        return None
    if ref.numel == 0 and 0 not in member.lengths:
        return member.swapped(ref, str(key)) if member.swapped is not None else None
    return member.file.locate(ref, member.dp) if ref.numel in member.lengths else None


def _classify_number(
    context: ReadContext, group: str, key: Any, members: Sequence[FlatGroupShare], found: FlatGroupStates
) -> None:
    numbers = [stored_scalar(member.file, member.state[key], member.dp) for member in members]
    kept = [number for number in numbers if number is not None]
    if len(kept) != len(members):
        context.unplaced_states.setdefault(kind_of(key), f"not a 64-bit number in {members[0].file.name}")
        return
    first = scalar_bytes(kept[0], context.source)
    for member, number in zip(members[1:], kept[1:], strict=True):
        other = scalar_bytes(number, context.source)
        if other == first and number.dtype == kept[0].dtype:
            continue
        if kind_of(key) != STEP:  # of a rank's share of the buffer, as the mean square that Adafactor keeps
            why = f"every data-parallel rank has a number of its own, as in {members[0].file.name}"
            context.unplaced_states.setdefault(kind_of(key), why)
            return
        context.problems.add(
            f"{group}: '{key}' is {scalar_value(first, kept[0].dtype)} in {members[0].file.name}"
            f" (dp rank {members[0].dp}), but {scalar_value(other, number.dtype)} in {member.file.name}"
            f" (dp rank {member.dp}): files of different steps are mixed"
        )
    found.numbers[kind_of(key)] = kept[0]
    for member in members:
        if isinstance(member.state[key], TensorRef):
            context.claim(member.state[key])


def _describe_shape(value: object) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, TensorRef) else f"a {type(value).__name__}"


def is_scalar(value: object) -> bool:
    """Whether an optimizer state is one number."""
    if isinstance(value, TensorRef):
        return value.numel == 1
    return isinstance(value, (bool, int, float, NumpyScalar))


def stored_scalar(file: RankFile, value: Any, dp: int) -> StoredShard | None:
    """A number as a stored state, or None when it is larger than 64 bits."""
    if isinstance(value, TensorRef):
        return file.whole(value, dp)
    if isinstance(value, NumpyScalar):
        value = value.to_python()
    if isinstance(value, bool):
        return InlineNumber(file.name, BOOL, struct.pack("<?", value), dp)
    if isinstance(value, int):
        return InlineNumber(file.name, INT64, struct.pack("<q", value), dp) if -(2**63) <= value < 2**63 else None
    if isinstance(value, float):
        return InlineNumber(file.name, FLOAT64, struct.pack("<d", value), dp)
    return None


def group_hyper_parameters(context: ReadContext, file: RankFile, group: Mapping[str, Any]) -> dict[str, Any]:
    """A group of `param_groups` without its list of parameters; one-element tensors (a tensor `lr`) as numbers."""
    return {str(key): _plain_value(context, file, value) for key, value in group.items() if key != "params"}


def _plain_value(context: ReadContext, file: RankFile, value: Any) -> Any:
    if isinstance(value, TensorRef) and value.numel == 1:
        number = scalar_value(scalar_bytes(file.whole(value), context.source), value.dtype)
        return value if number is None else number
    return value.to_python() if isinstance(value, NumpyScalar) else value
