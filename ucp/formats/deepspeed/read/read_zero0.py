"""Optimizer state with ZeRO off: whole state dicts that number their parameters without naming them.

The optimizer of a model-parallel rank is in its model file; with a mixture of experts, in one file per expert-parallel
rank. `read_zero0` decides which parameters each of these state dicts may own, and `infer_missing` finds their names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ucp.containers.inert import Inert, TensorRef
from ucp.core.checkpoint import MASTER, WEIGHT, ParamGroup, kind_of_state
from ucp.errors import first_few
from ucp.formats.deepspeed.experts import experts_per_layer, group_expert_degree, layer_degrees, split_expert_name
from ucp.formats.deepspeed.read.infer_missing import (
    OptimizerSlot,
    SlotCandidate,
    find_copies,
    match_by_name,
    match_by_shape,
    match_by_value,
    match_in_order,
)
from ucp.formats.deepspeed.read.optimizer_values import (
    FlatGroupShare,
    classify_states,
    group_hyper_parameters,
    is_scalar,
    stored_scalar,
)
from ucp.formats.deepspeed.read.rank_files import (
    RankFile,
    as_tensor,
    contains_tensor,
    describe_value,
    dict_or_empty,
    dicts_in,
    list_or_empty,
)
from ucp.formats.deepspeed.read.read_context import ReadContext
from ucp.formats.deepspeed.step_files import StepFiles, expert_optimizer_file_name
from ucp.formats.sharded.shard_fragments import FlatSlice, WholeTensor
from ucp.formats.sharded.shard_table import RankCoord, Shard


@dataclass(slots=True)
class UnshardedOptimizer:
    """An optimizer's state dict without its wrapper: torch's part, and master weights by group or flat by group."""

    file: RankFile
    state: Mapping[Any, Any]
    groups: list[Mapping[str, Any]]
    masters: list[list[TensorRef]] | None
    flat: list[TensorRef] | None


def read_zero0(context: ReadContext, files: StepFiles, tp: int, models: Mapping[RankCoord, RankFile]) -> int:
    """Add the optimizer states of every model-parallel rank to the shard table; return the expert-parallel degree."""
    before = _parameter_names(context)
    if files.expert_optim or _expert_parallel_degree(context, files, models) > 1:
        owned, degree = _read_expert_parallel(context, files, tp, models)
    else:
        owned, degree = _read_models(context, models, pipeline=bool(files.layers)), 1
    for name in before:
        if name not in owned and name not in context.shards.aliases:
            context.shards.roles[name] = "frozen"
    return degree


def _read_models(context: ReadContext, models: Mapping[RankCoord, RankFile], pipeline: bool) -> set[str]:
    """Read one optimizer per model file. The stages of a pipeline own consecutive parameters."""
    owned: set[str] = set()
    for tp in sorted({coord.tp for coord in models}):
        earlier: set[str] = set()
        for coord in sorted(coord for coord in models if coord.tp == tp):
            model = models[coord]
            found = unwrap_optimizer(model, model.mapping().get("optimizer"))
            if found is None:
                if model.mapping().get("optimizer") is not None:
                    text = f"{model.name}: its 'optimizer' has an unknown form; carried in extras"
                    context.note("optimizer-unknown", text)
                continue
            names = _parameter_names(context) if pipeline else _parameters_on_rank(context, coord)
            fresh, tied = [n for n in names if n not in earlier], [n for n in names if n in earlier]
            earlier |= read_unsharded_optimizer(context, coord, found, fresh, tied, contiguous=pipeline)
        owned |= earlier
    return owned


def _parameter_names(context: ReadContext) -> list[str]:
    shards = context.shards
    return [name for name, role in shards.roles.items() if role != "buffer" and name not in shards.aliases]


def _parameters_on_rank(context: ReadContext, coord: RankCoord) -> list[str]:
    shards = context.shards
    return [name for name in _parameter_names(context) if shards.get(name, shards.at(name, coord)) is not None]


def _read_expert_parallel(
    context: ReadContext, files: StepFiles, tp: int, models: Mapping[RankCoord, RankFile]
) -> tuple[set[str], int]:
    """Read one optimizer file per ep rank, with its experts and a copy of all dense parameters."""
    owned: set[str] = set()
    degree = _expert_parallel_degree(context, files, models)
    coords = {coord.pp * tp + coord.tp: coord for coord in models}
    missing = [(ep, mp) for ep in range(degree) for mp in coords if (ep, mp) not in files.expert_optim]
    for ep, mp in missing:
        context.problems.add(f"rank file {expert_optimizer_file_name(ep, mp)} is missing")
    if missing:
        context.problems.raise_any("restore the missing files, or give a checkpoint that is complete")
    for (ep, mp), name in sorted(files.expert_optim.items()):
        if mp not in coords:
            continue
        file, coord = context.files.open(context.prefix + name), coords[mp]
        found = unwrap_optimizer(file, file.mapping().get("optimizer"))
        if found is not None:
            names = _parameters_on_rank(context, coord)
            slots: Counter[int] = Counter()  # expert-parallel degree → parameters in groups that are named after it
            for group in found.groups:
                if own := group_expert_degree(group):
                    slots[own] += len(group.get("params", ()))
            degrees = layer_degrees(names, slots, degree)
            local = _parameters_on_ep_rank(context, names, ep, degrees)
            ep_coord = RankCoord(*coord[:2], ep)
            owned |= read_unsharded_optimizer(context, ep_coord, found, list(local), degrees=local)
        if ep == 0 and context.claim_all(models[coord].mapping().get("optimizer")):
            context.note("second-copy", f"{models[coord].name}: its 'optimizer' repeats that of {name}; not carried")
    return owned, degree


def _expert_parallel_degree(context: ReadContext, files: StepFiles, models: Mapping[RankCoord, RankFile]) -> int:
    """The number of expert-parallel ranks with optimizer state: by the files, and by the group names in one."""
    some = [context.files.open(context.prefix + name) for name in sorted(files.expert_optim.values())[:1]]
    degrees = [ep + 1 for ep, _ in files.expert_optim]
    for file in (*some, *models.values()):
        found = unwrap_optimizer(file, file.mapping().get("optimizer"))
        degrees += [group_expert_degree(group) or 1 for group in found.groups] if found is not None else []
    return max(degrees, default=1)


def _parameters_on_ep_rank(
    context: ReadContext, names: Sequence[str], ep: int, degrees: Mapping[str, int]
) -> dict[str, int]:
    """Parameters of one ep rank → expert-parallel degree (0 if dense). A rank has a block of each layer's experts."""
    counts = experts_per_layer(names)
    local: dict[str, int] = {}
    for name in names:
        split = split_expert_name(name)
        if split is None:
            placement = context.shards.placements.get(name)
            local[name] = placement.degree if placement is not None else 0
            continue
        layer, number, _ = split
        block = number // (counts[layer] // degrees[layer])
        if block == ep % degrees[layer]:
            local[name] = degrees[layer]
            context.shards.experts[name] = (number, block)
    return local


def unwrap_optimizer(file: RankFile, optimizer: object) -> UnshardedOptimizer | None:
    """The state dict under `optimizer`; None if there is none, or if its kind is sharded and in other files."""
    if not isinstance(optimizer, dict) or "single_partition_of_fp32_groups" in optimizer:
        return None
    inner = optimizer.get("optimizer_state_dict", optimizer)
    if not isinstance(inner, dict) or not isinstance(inner.get("param_groups"), list):
        return None
    masters = optimizer.get("fp32_groups")
    flat = optimizer.get("fp32_groups_flat")
    where = f"{file.name}: optimizer"
    return UnshardedOptimizer(
        file,
        dict_or_empty(inner.get("state")),
        dicts_in(inner["param_groups"]),
        [[as_tensor(ref, where) for ref in group] for group in masters] if isinstance(masters, list) else None,
        [as_tensor(ref, where) for ref in flat] if isinstance(flat, list) else None,
    )


def read_unsharded_optimizer(
    context: ReadContext,
    coord: RankCoord,
    found: UnshardedOptimizer,
    names: Sequence[str],
    tied: Sequence[str] = (),
    contiguous: bool = False,
    degrees: Mapping[str, int] | None = None,
) -> set[str]:
    """Add the states of one model-parallel rank (and ep rank) to the shard table; return the names that it owns.

    `names`: parameters that it may own, in the model's order; the first ones if `contiguous` (pipeline stages).
    `tied`: parameters of earlier stages, of which it may own a copy. `degrees`: expert-parallel degrees of experts.
    """
    candidates = _candidates(context, coord, names, degrees or {})
    slots = sum(len(_params(group)) for group in found.groups)
    if found.flat is None and not contiguous and len(candidates) > slots:
        copies = find_copies(context.source, candidates)
        for alias, owner in copies.items():
            copy, owned = (context.shards.get(name, context.shards.at(name, coord)) for name in (alias, owner))
            context.shards.aliases[alias] = owner
            context.shards.roles.pop(alias, None)
            if copy is not None and owned is not None:
                owned.kinds.setdefault(WEIGHT, []).extend(copy.kinds.pop(WEIGHT, []))
        candidates = [candidate for candidate in candidates if candidate.name not in copies]
    if found.flat is not None:
        matched = _read_flat_groups(context, coord, found, candidates)
    else:
        tied_candidates = _candidates(context, coord, tied, {})
        matched = _read_by_parameter(context, coord, found, candidates, tied_candidates, contiguous)
    if matched is None:
        context.note(
            "optimizer-unnamed",
            f"{found.file.name}: the optimizer numbers {slots} parameters without naming them (ZeRO is off), and its"
            f" shapes fit the {len(candidates)} parameters of the module in no way or in more than one; its state is"
            " carried in extras unchanged, and no atom has it. Saving with ZeRO stage 1 records the names",
        )
        return set(names)
    groups = [
        ParamGroup(group_hyper_parameters(context, found.file, group), group_names)
        for group, group_names in zip(found.groups, matched, strict=True)
    ]
    known = context.shards.groups.setdefault(RankCoord(coord.pp, coord.tp), groups)
    for mine, other in zip(known, groups, strict=False) if known is not groups else ():
        # A further expert-parallel rank: the same groups with other experts in them.
        mine.names.extend(name for name in other.names if name not in set(mine.names))
    return {name for group in matched for name in group}


def _candidates(
    context: ReadContext, coord: RankCoord, names: Sequence[str], degrees: Mapping[str, int]
) -> list[SlotCandidate]:
    found: list[SlotCandidate] = []
    for name in names:
        row, at = context.shards.row(name), context.shards.at(name, coord)
        shard = row.get(at) or next((item for other, item in row.items() if other.tp == at.tp), None)
        if shard is not None:
            weights = shard.kinds.get(WEIGHT)
            found.append(SlotCandidate(name, shard.shape, weights[0] if weights else None, degrees.get(name, 0)))
    return found


def _params(group: Mapping[str, Any]) -> list[Any]:
    return list(list_or_empty(group.get("params")))


def _read_by_parameter(
    context: ReadContext,
    coord: RankCoord,
    found: UnshardedOptimizer,
    candidates: Sequence[SlotCandidate],
    tied: Sequence[SlotCandidate],
    contiguous: bool,
) -> list[list[str]] | None:
    slots = _slots(context, found)
    # An optimizer that was created from `named_parameters()` stores their names.
    stored = [[str(name) for name in list_or_empty(group.get("param_names"))] for group in found.groups]
    matched = match_by_name(slots, stored, [*candidates, *tied])
    if matched is not None:
        return _add_by_parameter(context, coord, found, matched, [*candidates, *tied])
    matched = match_by_value(context.source, slots, [*candidates, *tied])
    how = "by comparing master weights with the module's"
    count = sum(map(len, slots))
    if matched is None:
        matched = match_by_shape(slots, candidates[:count] if contiguous else candidates)
        how = "by shape, in the order of the module"
    if matched is None and all(len(group) == 1 for group in slots):
        matched = match_in_order(slots, candidates)
        how = "by the order of the module: every parameter has a group of its own"
    for copy in tied:
        # A stage lists its copy of a tied weight first: tied modules are built before the layers.
        matched = matched or match_by_shape(slots, [copy, *candidates[: count - 1]])
    if matched is None:
        return None
    context.note(
        "names-inferred",
        f"{found.file.name}: the optimizer numbers its parameters without naming them (ZeRO is off);"
        f" the names were found {how}",
    )
    return _add_by_parameter(context, coord, found, matched, [*candidates, *tied])


def _add_by_parameter(
    context: ReadContext,
    coord: RankCoord,
    found: UnshardedOptimizer,
    matched: list[list[str]],
    candidates: Sequence[SlotCandidate],
) -> list[list[str]]:
    """Add masters and states to the shard table, now that their names are known."""
    shapes = {candidate.name: candidate.shape for candidate in candidates}
    for g, (group, names) in enumerate(zip(found.groups, matched, strict=True)):
        for position, (index, name) in enumerate(zip(_params(group), names, strict=True)):
            shard = context.shards.home(name, context.shards.at(name, coord), shapes[name], found.file.name)
            if found.masters is not None:
                shard.add(MASTER, found.file.whole(context.claim(found.masters[g][position])))
            _add_states(context, shard, found.file, found.state.get(index))
    _mark_frozen(context, found, matched)
    return matched


def _mark_frozen(context: ReadContext, found: UnshardedOptimizer, matched: Sequence[Sequence[str]]) -> None:
    """Mark parameters as frozen that an fp32 optimizer lists without state, if it has states of others.

    `Adam(model.parameters())` lists all of them; DeepSpeed gives every trained one a gradient, if only zeros, before a
    step.
    """
    if found.masters is not None or not found.state:
        return
    numbers = [index for group in found.groups for index in _params(group)]
    named = zip(numbers, (name for names in matched for name in names), strict=True)
    frozen = [name for index, name in named if index not in found.state]
    for name in frozen:
        context.shards.roles[name] = "frozen"
    if frozen:
        context.note(
            "frozen-inferred",
            f"{found.file.name}: of the {len(numbers)} parameters that the optimizer lists {len(frozen)} have no state"
            f" ({first_few(frozen)}); treated as frozen",
        )


def _slots(context: ReadContext, found: UnshardedOptimizer) -> list[list[OptimizerSlot]]:
    """What is known of each numbered parameter: its master weight, else the shapes of its states."""
    groups: list[list[OptimizerSlot]] = []
    for g, group in enumerate(found.groups):
        params = _params(group)
        if found.masters is not None and (g >= len(found.masters) or len(found.masters[g]) != len(params)):
            context.problems.add(
                f"{found.file.name}: group {g} has {len(params)} parameters and a different number of master weights"
            )
            context.problems.raise_any("the file contradicts itself; restore it from an intact copy")
        slots: list[OptimizerSlot] = []
        degree = group_expert_degree(group) or 0
        for position, index in enumerate(params):
            if found.masters is not None:
                ref = found.masters[g][position]
                slots.append(OptimizerSlot(found.file.whole(ref), ref.shape, degree=degree))
                continue
            tensors = [v for v in dict_or_empty(found.state.get(index)).values() if isinstance(v, TensorRef)]
            # Scalars such as `step` do not help to identify the parameter.
            slots.append(OptimizerSlot(states=tuple(ref.shape for ref in tensors if ref.shape), degree=degree))
        groups.append(slots)
    return groups


def _add_states(context: ReadContext, shard: Shard, file: RankFile, state: object) -> None:
    for key, value in dict_or_empty(state).items():
        kind = kind_of_state(key)
        if isinstance(value, TensorRef) and (value.shape == shard.shape or value.numel > 1):
            shard.add(kind, file.whole(context.claim(value)), value.shape)
        elif is_scalar(value):
            number = stored_scalar(file, value, 0)
            if number is not None:
                shard.add(kind, number, ())
                if isinstance(value, TensorRef):
                    context.claim(value)
        elif isinstance(value, Inert) and contains_tensor(value):
            context.problems.add(
                f"parameter {shard.name}: optimizer state '{key}' is {describe_value(value)} that contains tensors"
                f" ({file.name}); how ranks split it is unknown"
            )
        elif contains_tensor(value):
            context.unplaced_states.setdefault(kind, f"a {type(value).__name__} in {file.name}")


def _read_flat_groups(
    context: ReadContext, coord: RankCoord, found: UnshardedOptimizer, candidates: Sequence[SlotCandidate]
) -> list[list[str]] | None:
    """Read FusedAdam's flat masters, one per group. The module's weights are views of the same layout in 16 bit."""
    assert found.flat is not None
    buffers: dict[tuple[str, str], list[tuple[int, SlotCandidate]]] = {}
    for candidate in candidates:
        weight = candidate.weight
        if isinstance(weight, WholeTensor) and weight.tensor.ref is not None:
            ref = weight.tensor.ref
            buffers.setdefault((weight.tensor.file, ref.storage.key), []).append((ref.offset, candidate))
    groups: list[list[tuple[int, SlotCandidate]]] = []
    for master in found.flat:
        key = next((k for k, views in buffers.items() if _contiguous_length(views) == master.numel), None)
        if key is None:
            return None
        groups.append(sorted(buffers.pop(key), key=lambda item: item[0]))
    for g, (master, views) in enumerate(zip(found.flat, groups, strict=True)):
        share = FlatGroupShare(found.file, 0, dict_or_empty(found.state.get(g)), (master.numel,))
        states = classify_states(context, f"group {g} ({coord})", [share])
        masters = (master.dtype, [found.file.locate(context.claim(master))])
        for offset, candidate in views:
            shard = context.shards.home(candidate.name, coord, candidate.shape, found.file.name)
            for kind, (dtype, located) in {MASTER: masters, **states.flat}.items():
                shard.add(kind, FlatSlice(located, dtype, master.numel, offset, prod(candidate.shape)))
            for kind, number in states.numbers.items():
                shard.add(kind, number, ())
    return [[candidate.name for _, candidate in views] for views in groups]


def _contiguous_length(views: Sequence[tuple[int, SlotCandidate]]) -> int:
    """Length of the buffer that views fill from its start without a gap, else -1."""
    at = 0
    for offset, candidate in sorted(views, key=lambda item: item[0]):
        if offset != at:
            return -1
        at += prod(candidate.shape)
    return at
