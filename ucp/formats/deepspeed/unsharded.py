"""ZeRO off: the optimizer's state dict in the model file, or (mixture of experts) in one file an ep rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ucp.files.inert import Inert, TensorRef
from ucp.formats.deepspeed.experts import named_degree
from ucp.formats.deepspeed.holdings import Group, Holder, Holding
from ucp.formats.deepspeed.hyper import group_hyper
from ucp.formats.deepspeed.matching import (
    Candidate,
    Slot,
    find_copies,
    match_by_name,
    match_by_shape,
    match_by_value,
    match_in_order,
)
from ucp.formats.deepspeed.reading import Reading
from ucp.formats.deepspeed.scalars import is_scalar, stored_scalar
from ucp.formats.deepspeed.shards import RankFile, describe, holds_tensor, tensor_of
from ucp.formats.deepspeed.states import Member, kind_of, sort_states
from ucp.formats.deepspeed.stored import FlatSlice, WholeTensor
from ucp.model.checkpoint import MASTER, WEIGHT


@dataclass(slots=True)
class Unsharded:
    """An optimizer's state dict, unwrapped: torch's part, and master weights by group or flat by group."""

    file: RankFile
    state: Mapping[Any, Any]
    groups: list[Mapping[str, Any]]
    masters: list[list[TensorRef]] | None
    flat: list[TensorRef] | None


def unwrap(file: RankFile, optimizer: object) -> Unsharded | None:
    """The state dict under `optimizer`, or None where there is none or it is of a kind that is sharded elsewhere."""
    if not isinstance(optimizer, dict) or "single_partition_of_fp32_groups" in optimizer:
        return None
    inner = optimizer.get("optimizer_state_dict", optimizer)
    if not isinstance(inner, dict) or not isinstance(inner.get("param_groups"), list):
        return None
    state = inner.get("state")
    masters = optimizer.get("fp32_groups")
    flat = optimizer.get("fp32_groups_flat")
    where = f"{file.name}: optimizer"
    return Unsharded(
        file,
        state if isinstance(state, dict) else {},
        [group for group in inner["param_groups"] if isinstance(group, dict)],
        [[tensor_of(ref, where) for ref in group] for group in masters] if isinstance(masters, list) else None,
        [tensor_of(ref, where) for ref in flat] if isinstance(flat, list) else None,
    )


def read_unsharded(
    reading: Reading,
    holder: Holder,
    found: Unsharded,
    names: Sequence[str],
    tied: Sequence[str] = (),
    contiguous: bool = False,
    degrees: Mapping[str, int] | None = None,
) -> set[str]:
    """Put the states of one model-parallel rank (and ep rank) into the holdings; returns the names that it owns.

    `names`: parameters that it may own, in the model's order; the first ones where `contiguous` (pipeline stages).
    `tied`: parameters of earlier stages, of which it may own a copy. `degrees`: expert-parallel degrees of experts.
    """
    candidates = _candidates(reading, holder, names, degrees or {})
    slots = sum(len(_params(group)) for group in found.groups)
    if found.flat is None and not contiguous and len(candidates) > slots:
        copies = find_copies(reading.source, candidates)
        for alias, owner in copies.items():
            _make_alias(reading, holder, alias, owner)
        candidates = [candidate for candidate in candidates if candidate.name not in copies]
    if found.flat is not None:
        dealt = _read_flat(reading, holder, found, candidates)
    else:
        dealt = _read_by_parameter(
            reading, holder, found, candidates, _candidates(reading, holder, tied, {}), contiguous
        )
    if dealt is None:
        reading.note(
            "optimizer-unnamed",
            f"{found.file.name}: the optimizer numbers {slots} parameters without naming them (ZeRO is off), and its"
            f" shapes fit the {len(candidates)} parameters of the module in more than one way, or in none; its state is"
            " carried in extras as it is, and no atom has it. Saving with ZeRO stage 1 records the names",
        )
        return set(names)
    groups = [
        Group(group_hyper(reading, found.file, group), given) for group, given in zip(found.groups, dealt, strict=True)
    ]
    _merge_groups(reading.holdings.groups.setdefault(Holder(holder.pp, holder.tp), []), groups)
    return {name for group in dealt for name in group}


def _merge_groups(known: list[Group], groups: list[Group]) -> None:
    """Groups of a further expert-parallel rank: the same groups with other experts in them."""
    if not known:
        known.extend(groups)
        return
    for mine, other in zip(known, groups, strict=False):
        mine.names.extend(name for name in other.names if name not in set(mine.names))


def _candidates(reading: Reading, holder: Holder, names: Sequence[str], degrees: Mapping[str, int]) -> list[Candidate]:
    found: list[Candidate] = []
    for name in names:
        row, at = reading.holdings.row(name), reading.holdings.at(name, holder)
        held = row.get(at) or next((item for other, item in row.items() if other.tp == at.tp), None)
        if held is not None:
            weights = held.kinds.get(WEIGHT)
            found.append(Candidate(name, held.shape, weights[0] if weights else None, degrees.get(name, 0)))
    return found


def _params(group: Mapping[str, Any]) -> list[Any]:
    params = group.get("params")
    return list(params) if isinstance(params, (list, tuple)) else []


def _told_names(group: Mapping[str, Any]) -> list[str]:
    """What an optimizer that was made from `named_parameters()` calls the parameters of a group."""
    names = group.get("param_names")
    return [str(name) for name in names] if isinstance(names, (list, tuple)) else []


def _make_alias(reading: Reading, holder: Holder, alias: str, owner: str) -> None:
    held, owned = (reading.holdings.get(name, reading.holdings.at(name, holder)) for name in (alias, owner))
    reading.holdings.aliases[alias] = owner
    if held is not None and owned is not None:
        for stored in held.kinds.pop(WEIGHT, []):
            owned.add(WEIGHT, stored)
    reading.holdings.roles.pop(alias, None)


def _read_by_parameter(
    reading: Reading,
    holder: Holder,
    found: Unsharded,
    candidates: Sequence[Candidate],
    tied: Sequence[Candidate],
    contiguous: bool,
) -> list[list[str]] | None:
    slots = _slots(reading, found)
    dealt = match_by_name(slots, [_told_names(group) for group in found.groups], [*candidates, *tied])
    if dealt is not None:
        return _take_by_parameter(reading, holder, found, dealt, [*candidates, *tied])
    dealt = match_by_value(reading.source, slots, [*candidates, *tied])
    how = "by comparing master weights with the module's"
    count = sum(map(len, slots))
    if dealt is None:
        dealt = match_by_shape(slots, candidates[:count] if contiguous else candidates)
        how = "by shape, in the order of the module"
    if dealt is None and all(len(group) == 1 for group in slots):
        dealt = match_in_order(slots, candidates)
        how = "as the module's in its order: there is a group for every one of them"
    for copy in tied:
        # A stage lists its copy of a tied weight first: tied modules are built before the layers.
        dealt = dealt or match_by_shape(slots, [copy, *candidates[: count - 1]])
    if dealt is None:
        return None
    reading.note(
        "names-inferred",
        f"{found.file.name}: the optimizer numbers its parameters without naming them (ZeRO is off);"
        f" they were told {how}",
    )
    return _take_by_parameter(reading, holder, found, dealt, [*candidates, *tied])


def _take_by_parameter(
    reading: Reading, holder: Holder, found: Unsharded, dealt: list[list[str]], candidates: Sequence[Candidate]
) -> list[list[str]]:
    """Put masters and states where their names are known."""
    shapes = {candidate.name: candidate.shape for candidate in candidates}
    for g, (group, names) in enumerate(zip(found.groups, dealt, strict=True)):
        for position, (index, name) in enumerate(zip(_params(group), names, strict=True)):
            held = reading.holdings.home(name, reading.holdings.at(name, holder), shapes[name], found.file.name)
            if found.masters is not None:
                held.add(MASTER, found.file.whole(reading.take(found.masters[g][position])))
            _add_states(reading, held, found.file, found.state.get(index))
    _mark_frozen(reading, found, dealt)
    return dealt


def _mark_frozen(reading: Reading, found: Unsharded, dealt: Sequence[Sequence[str]]) -> None:
    """Mark as frozen what an fp32 optimizer lists but keeps no state of, while it keeps states of others.

    `Adam(model.parameters())` lists them all; before a step DeepSpeed gives every other one a gradient, if only zeros.
    """
    if found.masters is not None or not found.state:
        return
    numbers = [index for group in found.groups for index in _params(group)]
    named = zip(numbers, (name for names in dealt for name in names), strict=True)
    frozen = [name for index, name in named if index not in found.state]
    for name in frozen:
        reading.holdings.roles[name] = "frozen"
    if frozen:
        reading.note(
            "frozen-inferred",
            f"{found.file.name}: of the {len(numbers)} parameters that the optimizer lists {len(frozen)} have no state"
            f" ({', '.join(frozen[:3])}{', …' if len(frozen) > 3 else ''}); taken as frozen",
        )


def _slots(reading: Reading, found: Unsharded) -> list[list[Slot]]:
    """What is known of each numbered parameter: its master weight, else the shapes of its states."""
    groups: list[list[Slot]] = []
    for g, group in enumerate(found.groups):
        params = _params(group)
        if found.masters is not None and (g >= len(found.masters) or len(found.masters[g]) != len(params)):
            reading.problems.add(
                f"{found.file.name}: group {g} has {len(params)} parameters, but not as many master weights"
            )
            reading.problems.raise_any("the file contradicts itself; restore it from where it is whole")
        slots: list[Slot] = []
        degree = named_degree(group) or 0
        for position, index in enumerate(params):
            if found.masters is not None:
                ref = found.masters[g][position]
                slots.append(Slot(found.file.whole(ref), ref.shape, degree=degree))
                continue
            state = found.state.get(index)
            tensors = [v for v in state.values() if isinstance(v, TensorRef)] if isinstance(state, dict) else []
            # A lone `step` says nothing about the parameter.
            slots.append(Slot(states=tuple(ref.shape for ref in tensors if ref.shape), degree=degree))
        groups.append(slots)
    return groups


def _add_states(reading: Reading, held: Holding, file: RankFile, state: object) -> None:
    if not isinstance(state, dict):
        return
    for key, value in state.items():
        if isinstance(value, TensorRef) and (value.shape == held.shape or value.numel > 1):
            if value.shape == held.shape:
                held.add(kind_of(key), file.whole(reading.take(value)))
            else:
                held.add(kind_of(key), file.whole(reading.take(value)), value.shape)
        elif is_scalar(value):
            number = stored_scalar(file, value, 0)
            if number is not None:
                held.add(kind_of(key), number, ())
                if isinstance(value, TensorRef):
                    reading.take(value)
        elif isinstance(value, Inert) and holds_tensor(value):
            reading.problems.add(
                f"parameter {held.name}: optimizer state '{key}' is {describe(value)} that carries tensors"
                f" ({file.name}); how it is cut over ranks is not known"
            )
        elif holds_tensor(value):
            reading.unplaced_states.setdefault(kind_of(key), f"a {type(value).__name__} in {file.name}")


def _read_flat(
    reading: Reading, holder: Holder, found: Unsharded, candidates: Sequence[Candidate]
) -> list[list[str]] | None:
    """FusedAdam: one flat master a group. The module's weights are views of the same flat layout in 16 bit."""
    assert found.flat is not None
    buffers: dict[tuple[str, str], list[tuple[int, Candidate]]] = {}
    for candidate in candidates:
        weight = candidate.weight
        if isinstance(weight, WholeTensor) and weight.spot.ref is not None:
            ref = weight.spot.ref
            buffers.setdefault((weight.spot.file, ref.storage.key), []).append((ref.offset, candidate))
    groups: list[list[tuple[int, Candidate]]] = []
    for master in found.flat:
        key = next((k for k, views in buffers.items() if _end_of(views) == master.numel), None)
        if key is None:
            return None
        groups.append(sorted(buffers.pop(key), key=lambda item: item[0]))
    for g, (master, views) in enumerate(zip(found.flat, groups, strict=True)):
        state = found.state.get(g)
        member = Member(found.file, 0, state if isinstance(state, dict) else {}, (master.numel,))
        states = sort_states(reading, f"group {g} ({holder})", [member])
        masters = (master.dtype, [found.file.spot(reading.take(master))])
        for offset, candidate in views:
            held = reading.holdings.home(candidate.name, holder, candidate.shape, found.file.name)
            for kind, (dtype, spots) in {MASTER: masters, **states.flat}.items():
                held.add(kind, FlatSlice(spots, dtype, master.numel, offset, prod(candidate.shape)))
            for kind, number in states.numbers.items():
                held.add(kind, number, ())
    return [[candidate.name for _, candidate in views] for views in groups]


def _end_of(views: Sequence[tuple[int, Candidate]]) -> int:
    """Length of the buffer that views fill from its start without a gap, else -1."""
    at = 0
    for offset, candidate in sorted(views, key=lambda item: item[0]):
        if offset != at:
            return -1
        at += prod(candidate.shape)
    return at
