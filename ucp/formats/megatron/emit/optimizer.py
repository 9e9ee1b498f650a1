"""Optimizer trees: the groups of the target's optimizers, and the states of the plain mixed-precision one."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ucp.files.inert import TensorRef
from ucp.files.local import SourceFiles
from ucp.files.torchzip_writer import Fill, NewTensor, new_tensor
from ucp.formats.megatron.arguments import Arguments
from ucp.formats.megatron.emit.model import Model, Tenant
from ucp.formats.megatron.layer_wise import Hand, dealt
from ucp.formats.megatron.names import is_expert
from ucp.formats.megatron.plain_optimizer import is_of_muon
from ucp.model.checkpoint import MASTER, STEP, WEIGHT, Atom, Checkpoint, Parameter, ParamGroup
from ucp.model.dtypes import FLOAT32
from ucp.model.region import Region

_EXPERTS: Final = "is_expert_parallel"
_TORCH_ONLY: Final = "foreach"  # a setting that torch's optimizers have and the fused ones have not


@dataclass(frozen=True, slots=True)
class TargetGroup:
    """A parameter group of the target: settings without `step`, and the parameters in it."""

    hyper: dict[str, Any]
    names: frozenset[str]
    step: Any  # what the source's group counts, or None

    @property
    def counts_in_parameters(self) -> bool:
        """Whether the optimizer keeps the step beside each parameter's state; fused optimizers keep it in the group."""
        return _TORCH_ONLY in self.hyper


def has_apart_experts(arguments: Arguments) -> bool:
    """Whether experts have ranks of their own, and so an optimizer of their own."""
    return arguments.number("num_experts", 0) > 0 and (arguments.ep > 1 or arguments.etp != arguments.tp)


def target_optimizers(source: Checkpoint, arguments: Arguments) -> list[list[TargetGroup]]:
    """The groups of every optimizer of the chain: Muon's where there is one, then Adam's or whatever it is.

    Of each, that of dense parameters comes first, then that of experts where it is apart.
    """
    apart = has_apart_experts(arguments)
    found: list[list[TargetGroup]] = []
    for muon in (True, False) if arguments.has_muon else (False,):
        chosen = [group for group in source.groups if is_of_muon(group.hyper, arguments) == muon]
        parts = [
            _target_groups(chosen, experts if apart else None) for experts in ((False, True) if apart else (False,))
        ]
        if muon and arguments.is_layer_wise:  # which keeps the groups of experts in one optimizer with the others
            parts = [[group for part in parts for group in part]]
        found += [parts[0], *(part for part in parts[1:] if part)]
    return found


def _target_groups(chosen: Sequence[ParamGroup], experts: bool | None) -> list[TargetGroup]:
    """The groups, with experts or the others in them alone; all where `experts` is None."""
    groups: list[TargetGroup] = []
    for group in chosen:
        names = [name for name in group.names if experts is None or is_expert(name) == experts]
        if not names:
            continue
        hyper = {key: value for key, value in group.hyper.items() if key != STEP and not isinstance(value, TensorRef)}
        if _EXPERTS in hyper:
            hyper[_EXPERTS] = experts is True
        _merge(groups, TargetGroup(hyper, frozenset(names), group.hyper.get(STEP)))
    return groups


def _merge(groups: list[TargetGroup], new: TargetGroup) -> None:
    """Groups of experts and of dense parameters are one where experts have no ranks of their own."""
    for i, known in enumerate(groups):
        if known.hyper == new.hyper:
            groups[i] = TargetGroup(known.hyper, known.names | new.names, known.step if new.step is None else new.step)
            return
    groups.append(new)


def has_states(source: Checkpoint) -> bool:
    """Whether there is an optimizer to write."""
    return bool(source.groups) and any(
        kind not in (WEIGHT, MASTER) for parameter in source.parameters.values() for kind in parameter.atoms
    )


def plain_tree(model: Model, tenants: Sequence[Tenant], scaler: Any, files: SourceFiles) -> Any:
    """The state of the optimizers of one rank as `state_dict` of the plain mixed-precision optimizer gives it."""
    chain = target_optimizers(model.source, model.job.arguments)
    return _tree(model, chain, _members(chain, tenants), scaler, files)


def layer_wise_tree(model: Model, tenants: Sequence[Tenant], tp: int, dp: int, scaler: Any, files: SourceFiles) -> Any:
    """What data-parallel rank `dp` has of it, where whole parameters are dealt to such ranks."""
    chain = target_optimizers(model.source, model.job.arguments)
    groups = [group for optimizer in chain for group in optimizer]
    hands = [
        Hand(mine, group.hyper.get(_EXPERTS) is True)
        for group, mine in zip(groups, _members(chain, tenants), strict=True)
    ]
    mine = dealt(hands, lambda tenant: tenant.tensor.numel, tp, dp, model.job.arguments)
    return _tree(model, chain, mine, scaler, files)


def _members(chain: Sequence[Sequence[TargetGroup]], tenants: Sequence[Tenant]) -> list[list[Tenant]]:
    """The tensors of a rank in each group of all optimizers."""
    return [
        [tenant for tenant in tenants if tenant.is_trained and tenant.tensor.lodgers[0].name in group.names]
        for groups in chain
        for group in groups
    ]


def _tree(
    model: Model,
    chain: Sequence[Sequence[TargetGroup]],
    members: Sequence[Sequence[Tenant]],
    scaler: Any,
    files: SourceFiles,
) -> Any:
    rest = iter(members)
    made = [_one(model, [(group, next(rest)) for group in groups], scaler, files) for groups in chain]
    return made if len(made) > 1 else made[0]


def stateless_chain(model: Model, scaler: Any, files: SourceFiles) -> list[dict[str, Any]]:
    """What every optimizer of the chain has besides states that are kept elsewhere: groups, steps, the loss scaler.

    That of the distributed optimizer with a mesh of ZeRO 1, else of the plain one.
    """
    return [_stateless(model, groups, scaler, files) for groups in target_optimizers(model.source, model.job.arguments)]


def _stateless(model: Model, groups: Sequence[TargetGroup], scaler: Any, files: SourceFiles) -> dict[str, Any]:
    distributed = bool(model.job.mesh.zero)
    listed: list[dict[str, Any]] = []
    common: dict[str, Any] = {}
    for group in groups:
        step = step_of(model.source, group, files)
        if step is not None and group.counts_in_parameters and not distributed:
            common = {"common_step": new_tensor(FLOAT32, (), struct.pack("<f", step))}
            step = None
        listed.append(dict(group.hyper) if step is None else {**group.hyper, STEP: step})
    scaling = {} if scaler is None else {"grad_scaler": scaler}
    if distributed:
        return {"optimizer": {"param_groups": listed}, **scaling}
    inner = {"state": common, "param_groups": listed}
    return {"optimizer": inner, **scaling} if is_mixed(model) else inner


def _one(
    model: Model, groups: Sequence[tuple[TargetGroup, Sequence[Tenant]]], scaler: Any, files: SourceFiles
) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {}
    param_groups: list[dict[str, Any]] = []
    masters: list[list[NewTensor]] = []
    number = 0
    for group, mine in groups:
        numbers = list(range(number, number + len(mine)))
        number += len(mine)
        step = step_of(model.source, group, files)
        for i, tenant in zip(numbers, mine, strict=True):
            table = _state(model, tenant, group, step)
            if table:
                state[i] = table
        counted = {STEP: step} if not group.counts_in_parameters and step is not None else {}
        param_groups.append({**group.hyper, **counted, "params": numbers})
        masters.append(list(_masters(model, mine)))
    inner = {"state": state, "param_groups": param_groups}
    if not is_mixed(model):
        return inner
    scaling = {} if scaler is None else {"grad_scaler": scaler}
    return {"optimizer": inner, **scaling, "fp32_from_fp16_params": masters}


def is_mixed(model: Model) -> bool:
    """Whether the model trains in half precision, with masters."""
    return model.dtype != FLOAT32


def _state(model: Model, tenant: Tenant, group: TargetGroup, step: Any) -> dict[str, Any]:
    table: dict[str, Any] = {}
    scalars: dict[str, Any] = {}
    parameter = tenant.parameter
    for kind, atom in parameter.atoms.items():
        if kind in (WEIGHT, MASTER, STEP):
            continue
        if atom.shape == () and parameter.shape != ():
            scalars[kind] = _scalar(atom)
            continue
        tensor = model.tensor(tenant, kind)
        if tensor is not None:
            table[kind] = tensor
    if table and group.counts_in_parameters:
        counted = parameter.atoms.get(STEP)
        if counted is not None:
            scalars[STEP] = _scalar(counted)
        elif step is not None:
            scalars[STEP] = new_tensor(FLOAT32, (), struct.pack("<f", step))
    return {**table, **scalars}


def _scalar(atom: Atom) -> NewTensor:
    return new_tensor(atom.dtype, (), Fill(atom, Region.all_of(())))


def _masters(model: Model, tenants: Sequence[Tenant]) -> Iterator[NewTensor]:
    """The masters of a group; parameters that the module keeps in single precision have none."""
    for tenant in tenants:
        weight = model.atom(tenant.tensor.lodgers[0].name, WEIGHT)
        if weight is not None and weight.dtype == FLOAT32:
            continue
        master = model.tensor(tenant, MASTER, _attributes(model, tenant))
        assert master is not None
        yield master


def _attributes(model: Model, tenant: Tenant) -> dict[str, Any]:
    """What Megatron sets on its parameters and copies to their masters: how they are cut."""
    rule = model.wholes[tenant.parameter.name].rule
    cut = rule.cut in ("split", "vocab")
    dim = rule.dim if cut else -1
    first = tenant.tensor.lodgers[0]
    gated = ".linear_fc1." in first.name  # the only fused matrices that Megatron marks
    marks = {
        "expert_tp": False,
        "is_qkv": False,
        "tensor_model_parallel": cut,
        "partition_dim": 1 - dim if cut and first.transposed else dim,
        "partition_stride": len(rule.parts) if rule.parts and gated and not first.transposed else 1,
    }
    return {**marks, "shared": True} if tenant.tensor.copy else marks


def step_of(source: Checkpoint, group: TargetGroup, files: SourceFiles) -> Any:
    """The steps that a group has counted: its own number, or that of its first parameter."""
    if isinstance(group.step, (int, float)):
        return group.step
    for name in sorted(group.names):
        parameter = source.parameters.get(name)
        if parameter is not None and STEP in parameter.atoms:
            return _number(parameter, files)
    return None


def _number(parameter: Parameter, files: SourceFiles) -> float | int | None:
    fragment = parameter.atoms[STEP].fragments[0]
    data = fragment.inline or files.read(fragment.file, fragment.offset, fragment.dtype.itemsize)
    code = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}.get(fragment.dtype.name)
    return struct.unpack(code, data)[0] if code is not None else None
