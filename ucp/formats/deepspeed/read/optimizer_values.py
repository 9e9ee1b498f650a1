"""The values in optimizer state: states of a flat group, single numbers such as `step`, and hyper-parameters.

`classify_states` distinguishes the states of a flat group by their lengths, never by name: one value per element (any
optimizer's moments), one number, or neither. So it needs no list of optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ucp.containers.inert import Inert, NumpyScalar, TensorRef
from ucp.core.checkpoint import STEP, kind_of_state
from ucp.core.dtypes import DType, scalar_value
from ucp.errors import NotUnderstoodError, first_few
from ucp.formats.deepspeed.read.rank_files import RankFile, as_tensors, contains_tensor, describe_value, list_or_empty
from ucp.formats.deepspeed.read.read_context import ReadContext
from ucp.formats.sharded.shard_fragments import InlineNumber, StoredShard, TensorInFile, scalar_bytes


@dataclass(slots=True)
class FlatGroupShare:
    """One data-parallel rank's share of a flat group: file, states, and the lengths that its tensors may have."""

    file: RankFile
    dp: int
    state: Mapping[Any, Any]
    lengths: tuple[int, ...]
    swapped: Callable[[TensorRef, str], TensorInFile | None] | None = None  # locates a tensor that was swapped out
    whole: int | None = None  # total elements of the parameters with any in this share, for states that keep them whole


@dataclass(slots=True)
class FlatGroupStates:
    """The states of a flat group: kind → (dtype, one location per rank), and kind → the number.

    For the `whole` ones a rank stores its first and last parameter completely, although the partition of the buffer
    cuts them (Muon's momentum: orthogonalization needs whole matrices).
    """

    flat: dict[str, tuple[DType, list[TensorInFile]]] = field(default_factory=dict)
    whole: dict[str, tuple[DType, list[TensorInFile]]] = field(default_factory=dict)
    numbers: dict[str, StoredShard] = field(default_factory=dict)


def classify_states(context: ReadContext, group: str, members: Sequence[FlatGroupShare]) -> FlatGroupStates:
    """The states of one flat group over the shares of all its ranks; `group` names it in messages."""
    found = FlatGroupStates()
    keys: dict[Any, None] = {}
    for member in members:
        keys.update(dict.fromkeys(member.state))
    for key in keys:
        missing = [member for member in members if key not in member.state]
        if missing:
            names = first_few([member.file.name for member in missing], 5)
            context.problems.add(f"{group}: optimizer state '{key}' is missing on dp rank {missing[0].dp} ({names})")
            continue
        _classify_state(context, group, key, members, found)
    return found


def _classify_state(
    context: ReadContext, group: str, key: Any, members: Sequence[FlatGroupShare], found: FlatGroupStates
) -> None:
    kind = kind_of_state(key)
    first = members[0].state[key]
    located = [_locate_flat(member, key) for member in members]
    dtypes = {member.state[key].dtype for member in members if isinstance(member.state[key], TensorRef)}
    if (
        not all(located)
        and len(dtypes) == 1
        and all(
            isinstance(ref := member.state[key], TensorRef)
            and ref.is_contiguous
            and (ref.shape == (member.whole,) or (member.file.is_lost and ref.numel != 1))
            for member in members
        )
    ):
        claimed = [member.file.locate(context.claim(member.state[key]), member.dp) for member in members]
        found.whole[kind] = (dtypes.pop(), claimed)
        return
    # One value per element: on the first rank, which has no padding, or on most.
    is_element_wise = located[0] is not None or 2 * sum(location is not None for location in located) > len(located)
    if is_element_wise and not (is_scalar(first) and str(key) == "step"):
        for member, location in zip(members, located, strict=True):
            if location is None:
                context.problems.add(
                    f"{group}: optimizer state '{key}' on dp rank {member.dp} ({member.file.name}) is"
                    f" {describe_value(member.state[key])}, expected {' or '.join(map(str, member.lengths))} elements"
                )
        report_dtypes(context, f"{group}: optimizer state '{key}' has", dtypes)
        if all(location is not None for location in located) and len(dtypes) == 1:
            found.flat[kind] = (dtypes.pop(), [location for location in located if location is not None])
            for member in members:
                context.claim(member.state[key])
    elif is_scalar(first):
        _classify_number(context, group, key, members, found)
    elif any(isinstance(member.state[key], Inert) and contains_tensor(member.state[key]) for member in members):
        context.problems.add(
            f"{group}: optimizer state '{key}' is {describe_value(first)} that contains tensors"
            f" ({members[0].file.name}); how ranks split it is unknown"
        )
    elif contains_tensor(first):
        context.unplaced_states.setdefault(kind, f"{describe_value(first)} in {members[0].file.name}")


def _locate_flat(member: FlatGroupShare, key: Any) -> TensorInFile | None:
    """The location of a flat tensor of the right length; None for any other value."""
    ref = member.state[key]
    if not isinstance(ref, TensorRef) or len(ref.shape) != 1 or not ref.is_contiguous:
        return None
    if member.file.is_lost and ref.numel != 1:  # as long as the partition of the rank that stands in
        return member.file.locate(ref, member.dp)
    if ref.numel == 0 and 0 not in member.lengths:
        return member.swapped(ref, str(key)) if member.swapped is not None else None
    return member.file.locate(ref, member.dp) if ref.numel in member.lengths else None


def _classify_number(
    context: ReadContext, group: str, key: Any, members: Sequence[FlatGroupShare], found: FlatGroupStates
) -> None:
    kind = kind_of_state(key)
    numbers = [number for m in members if (number := stored_scalar(m.file, m.state[key], m.dp)) is not None]
    if len(numbers) != len(members):
        context.unplaced_states.setdefault(kind, f"not a 64-bit number in {members[0].file.name}")
        return
    first = scalar_bytes(numbers[0], context.source)
    for member, number in zip(members[1:], numbers[1:], strict=True):
        other = scalar_bytes(number, context.source)
        if other == first and number.dtype == numbers[0].dtype:
            continue
        if kind != STEP:  # a statistic of the rank's own partition, such as Adafactor's mean square
            reason = f"every data-parallel rank has a different number, as in {members[0].file.name}"
            context.unplaced_states.setdefault(kind, reason)
            return
        context.problems.add(
            f"{group}: '{key}' is {scalar_value(first, numbers[0].dtype)} in {members[0].file.name}"
            f" (dp rank {members[0].dp}), but {scalar_value(other, number.dtype)} in {member.file.name}"
            f" (dp rank {member.dp}): files of different steps are mixed"
        )
    found.numbers[kind] = numbers[0]
    for member in members:
        if isinstance(member.state[key], TensorRef):
            context.claim(member.state[key])


def report_dtypes(context: ReadContext, what: str, dtypes: Collection[DType]) -> None:
    """Report tensors that must have one dtype and have several."""
    if len(dtypes) > 1:
        listed = ", ".join(sorted(map(str, dtypes)))
        context.problems.add(f"{what} different dtypes on different dp ranks: {listed}")


def is_scalar(value: object) -> bool:
    """Whether an optimizer state is one number, stored as a tensor or as a plain number."""
    if isinstance(value, TensorRef):
        return value.numel == 1
    return isinstance(value, (bool, int, float, NumpyScalar))


def stored_scalar(file: RankFile, value: Any, dp: int) -> StoredShard | None:
    """A number as a stored state, or None if it does not fit into 64 bits."""
    if isinstance(value, TensorRef):
        return file.whole(value, dp)
    if isinstance(value, NumpyScalar):
        value = value.to_python()
    return InlineNumber.of(file.name, value, dp)


def group_hyper_parameters(context: ReadContext, file: RankFile, group: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of `param_groups` without its list of parameters; one-element tensors (a tensor `lr`) as numbers."""
    hyper: dict[str, Any] = {}
    for key, value in group.items():
        number = value.to_python() if isinstance(value, NumpyScalar) else None
        if isinstance(value, TensorRef) and value.numel == 1:
            number = scalar_value(scalar_bytes(file.whole(value), context.source), value.dtype)
        hyper[str(key)] = value if number is None else number
    hyper.pop("params", None)
    return hyper


def flat_group_owners(groups: Sequence[Mapping[Any, Any]]) -> dict[int, int]:
    """Flat group (sub-group under ZeRO-3) → the position of the parameter group that lists it in `params`."""
    return {
        member: position
        for position, group in enumerate(groups)
        for member in list_or_empty(group.get("params"))
        if type(member) is int
    }


def open_masters(file: RankFile, key: str) -> tuple[Mapping[Any, Any], list[TensorRef]]:
    """The `optimizer_state_dict` of a rank's file, and its flat master weights, which are under `key`."""
    top = file.mapping("optimizer_state_dict")
    if key not in top:
        raise NotUnderstoodError(f"{file.name}: {key} is missing; found {', '.join(map(str, list(top)[:12]))}")
    return top, as_tensors(top[key], f"{file.name}: {key}")
