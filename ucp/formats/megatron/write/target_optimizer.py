"""Optimizer trees: the groups of the target's optimizers, and the states of the plain mixed-precision one.

The distributed optimizer's flat buffers for the target's ranks, and the regions of atoms that fill them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ucp.containers.inert import TensorRef
from ucp.containers.pickle_writer import NewTensor
from ucp.containers.torch_file_writer import RegionContent, ZeroContent, new_tensor
from ucp.core.checkpoint import MASTER, STEP, WEIGHT, Atom, Checkpoint, Parameter, ParamGroup
from ucp.core.dtypes import FLOAT32, DType
from ucp.core.region import Region
from ucp.errors import UsageError
from ucp.formats.megatron.job_arguments import JobArguments
from ucp.formats.megatron.mcore_modules import is_expert
from ucp.formats.megatron.optimizer_groups import LayerWiseGroup, is_muon_group, layer_wise_members
from ucp.formats.megatron.rank_layout import (
    BufferLayout,
    FileRank,
    ModuleRank,
    ModuleTensor,
    group_by_buffer,
    module_buffer_layout,
    module_tensors,
)
from ucp.formats.megatron.write.target_model import NamedTensor, TargetModel
from ucp.storage.local import SourceFiles

_EXPERTS: Final = "is_expert_parallel"
_TORCH_ONLY: Final = "foreach"  # a setting that torch's optimizers have and the fused ones have not


@dataclass(frozen=True, slots=True)
class TargetParamGroup:
    """A parameter group of the target: settings without `step`, and the parameters in it."""

    hyper: dict[str, Any]
    names: frozenset[str]
    step: Any  # what the source's group counts, or None

    @property
    def counts_in_parameters(self) -> bool:
        """Whether the optimizer keeps the step beside each parameter's state; fused optimizers keep it in the group."""
        return _TORCH_ONLY in self.hyper


def has_expert_optimizer(arguments: JobArguments) -> bool:
    """Whether experts have ranks of their own, and so an optimizer of their own."""
    return arguments.number("num_experts", 0) > 0 and (arguments.ep > 1 or arguments.etp != arguments.tp)


def target_optimizers(source: Checkpoint, arguments: JobArguments) -> list[list[TargetParamGroup]]:
    """The groups of every optimizer of the chain: Muon's where there is one, then Adam's or whatever it is.

    Of each, that of dense parameters comes first, then that of experts where it is apart.
    """
    apart = has_expert_optimizer(arguments)
    found: list[list[TargetParamGroup]] = []
    for muon in (True, False) if arguments.has_muon else (False,):
        chosen = [group for group in source.groups if is_muon_group(group.hyper, arguments) == muon]
        parts = [
            _target_groups(chosen, experts if apart else None) for experts in ((False, True) if apart else (False,))
        ]
        if muon and arguments.is_layer_wise:  # which keeps the groups of experts in one optimizer with the others
            parts = [[group for part in parts for group in part]]
        found += [parts[0], *(part for part in parts[1:] if part)]
    return found


def _target_groups(chosen: Sequence[ParamGroup], experts: bool | None) -> list[TargetParamGroup]:
    """The groups, with experts or the others in them alone; all where `experts` is None."""
    groups: list[TargetParamGroup] = []
    for group in chosen:
        names = [name for name in group.names if experts is None or is_expert(name) == experts]
        if not names:
            continue
        hyper = {key: value for key, value in group.hyper.items() if key != STEP and not isinstance(value, TensorRef)}
        if _EXPERTS in hyper:
            hyper[_EXPERTS] = experts is True
        _merge(groups, TargetParamGroup(hyper, frozenset(names), group.hyper.get(STEP)))
    return groups


def _merge(groups: list[TargetParamGroup], new: TargetParamGroup) -> None:
    """Groups of experts and of dense parameters are one where experts have no ranks of their own."""
    for i, known in enumerate(groups):
        if known.hyper == new.hyper:
            groups[i] = TargetParamGroup(
                known.hyper, known.names | new.names, known.step if new.step is None else new.step
            )
            return
    groups.append(new)


def has_states(source: Checkpoint) -> bool:
    """Whether there is an optimizer to write."""
    return bool(source.groups) and any(
        kind not in (WEIGHT, MASTER) for parameter in source.parameters.values() for kind in parameter.atoms
    )


def plain_tree(model: TargetModel, named_tensors: Sequence[NamedTensor], scaler: Any, files: SourceFiles) -> Any:
    """The state of the optimizers of one rank as `state_dict` of the plain mixed-precision optimizer gives it."""
    chain = target_optimizers(model.source, model.job.arguments)
    return _tree(model, chain, _members(chain, named_tensors), scaler, files)


def layer_wise_tree(
    model: TargetModel, named_tensors: Sequence[NamedTensor], tp: int, dp: int, scaler: Any, files: SourceFiles
) -> Any:
    """What data-parallel rank `dp` has of it, where whole parameters are dealt to such ranks."""
    chain = target_optimizers(model.source, model.job.arguments)
    groups = [group for optimizer in chain for group in optimizer]
    hands = [
        LayerWiseGroup(mine, group.hyper.get(_EXPERTS) is True)
        for group, mine in zip(groups, _members(chain, named_tensors), strict=True)
    ]
    mine = layer_wise_members(hands, lambda named_tensor: named_tensor.tensor.numel, tp, dp, model.job.arguments)
    return _tree(model, chain, mine, scaler, files)


def _members(
    chain: Sequence[Sequence[TargetParamGroup]], named_tensors: Sequence[NamedTensor]
) -> list[list[NamedTensor]]:
    """The tensors of a rank in each group of all optimizers."""
    return [
        [
            named_tensor
            for named_tensor in named_tensors
            if named_tensor.is_trained and named_tensor.tensor.packed_params[0].name in group.names
        ]
        for groups in chain
        for group in groups
    ]


def _tree(
    model: TargetModel,
    chain: Sequence[Sequence[TargetParamGroup]],
    members: Sequence[Sequence[NamedTensor]],
    scaler: Any,
    files: SourceFiles,
) -> Any:
    rest = iter(members)
    made = [_optimizer_tree(model, [(group, next(rest)) for group in groups], scaler, files) for groups in chain]
    return made if len(made) > 1 else made[0]


def stateless_chain(model: TargetModel, scaler: Any, files: SourceFiles) -> list[dict[str, Any]]:
    """What every optimizer of the chain has besides states that are kept elsewhere: groups, steps, the loss scaler.

    That of the distributed optimizer with a mesh of ZeRO 1, else of the plain one.
    """
    return [_stateless(model, groups, scaler, files) for groups in target_optimizers(model.source, model.job.arguments)]


def _stateless(
    model: TargetModel, groups: Sequence[TargetParamGroup], scaler: Any, files: SourceFiles
) -> dict[str, Any]:
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


def _optimizer_tree(
    model: TargetModel,
    groups: Sequence[tuple[TargetParamGroup, Sequence[NamedTensor]]],
    scaler: Any,
    files: SourceFiles,
) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {}
    param_groups: list[dict[str, Any]] = []
    masters: list[list[NewTensor]] = []
    number = 0
    for group, mine in groups:
        numbers = list(range(number, number + len(mine)))
        number += len(mine)
        step = step_of(model.source, group, files)
        for i, named_tensor in zip(numbers, mine, strict=True):
            table = _param_state(model, named_tensor, group, step)
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


def is_mixed(model: TargetModel) -> bool:
    """Whether the model trains in half precision, with masters."""
    return model.dtype != FLOAT32


def _param_state(model: TargetModel, named_tensor: NamedTensor, group: TargetParamGroup, step: Any) -> dict[str, Any]:
    table: dict[str, Any] = {}
    scalars: dict[str, Any] = {}
    parameter = named_tensor.parameter
    for kind, atom in parameter.atoms.items():
        if kind in (WEIGHT, MASTER, STEP):
            continue
        if atom.shape == () and parameter.shape != ():
            scalars[kind] = _scalar(atom)
            continue
        tensor = model.tensor(named_tensor, kind)
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
    return new_tensor(atom.dtype, (), RegionContent(atom, Region.all_of(())))


def _masters(model: TargetModel, named_tensors: Sequence[NamedTensor]) -> Iterator[NewTensor]:
    """The masters of a group; parameters that the module keeps in single precision have none."""
    for named_tensor in named_tensors:
        weight = model.atom(named_tensor.tensor.packed_params[0].name, WEIGHT)
        if weight is not None and weight.dtype == FLOAT32:
            continue
        master = model.tensor(named_tensor, MASTER, _attributes(model, named_tensor))
        assert master is not None
        yield master


def _attributes(model: TargetModel, named_tensor: NamedTensor) -> dict[str, Any]:
    """What Megatron sets on its parameters and copies to their masters: how they are cut."""
    rule = model.wholes[named_tensor.parameter.name].rule
    cut = rule.cut in ("split", "vocab")
    dim = rule.dim if cut else -1
    first = named_tensor.tensor.packed_params[0]
    gated = ".linear_fc1." in first.name  # the only fused matrices that Megatron marks
    marks = {
        "expert_tp": False,
        "is_qkv": False,
        "tensor_model_parallel": cut,
        "partition_dim": 1 - dim if cut and first.transposed else dim,
        "partition_stride": len(rule.parts) if rule.parts and gated and not first.transposed else 1,
    }
    return {**marks, "shared": True} if named_tensor.tensor.copy else marks


def step_of(source: Checkpoint, group: TargetParamGroup, files: SourceFiles) -> Any:
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


# What the distributed optimizer keeps of every parameter, whatever it is: its name in files → the kind of atom.
DISTRIBUTED_STATES: Final = {"param": MASTER, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


@dataclass(frozen=True, slots=True)
class GradBuffer:
    """A gradient buffer of one rank: its tensors lie at the seats of `layout`; `key`: dtypes of weights and grads."""

    key: tuple[DType, DType]
    tensors: tuple[ModuleTensor, ...]
    layout: BufferLayout


class TargetBuffers:
    """The buffers of every rank of a job."""

    def __init__(self, model: TargetModel) -> None:
        self._model = model
        self._arguments = model.job.arguments
        self._trained = {
            name: whole for name, whole in model.wholes.items() if model.source.parameters[name].role == "trained"
        }
        self._singles: dict[tuple[str, str], Atom] = {}

    def of(self, rank: ModuleRank, *, experts: bool | None) -> list[GradBuffer]:
        """Those of a rank; with `experts` given, of its optimizer for experts or for everything else."""
        tensors = [
            tensor
            for tensor in module_tensors(rank, self._trained, self._arguments)
            if experts is None or tensor.is_expert == experts
        ]
        found: list[GradBuffer] = []
        for mine in group_by_buffer(tensors):
            layout = module_buffer_layout(mine, tensors, rank, self._arguments, expert=bool(experts))
            found.append(GradBuffer((mine[0].dtype, _grad_dtype(mine[0].dtype, self._arguments)), tuple(mine), layout))
        return found

    def contents(self, buffer: GradBuffer, state: str) -> Iterator[RegionContent | ZeroContent]:
        """One state of a whole buffer as it lies on disk: bucket after bucket, with zeros in the gaps."""
        at = 0
        for start, tensor in tensors_by_start(buffer):
            if start > at:
                yield ZeroContent(start - at)
            yield from self.fills(tensor, state)
            at = start + tensor.numel
        if buffer.layout.numel > at:
            yield ZeroContent(buffer.layout.numel - at)

    def fills(self, tensor: ModuleTensor, state: str) -> list[RegionContent]:
        """One state of a tensor; the optimizer keeps all of them in single precision."""
        fills = self._model.fills(tensor, DISTRIBUTED_STATES[state])
        if fills is None:
            raise UsageError(
                f"{tensor.packed_params[0].name} has no '{state}': the distributed optimizer keeps Adam's states of"
                " every parameter",
                hint="use --optimizer plain",
            )
        return [fill if fill.atom.dtype == FLOAT32 else replace(fill, atom=self._single(fill.atom)) for fill in fills]

    def _single(self, atom: Atom) -> Atom:
        return self._singles.setdefault((atom.name, atom.kind), replace(atom, dtype=FLOAT32))


def tensors_by_start(buffer: GradBuffer) -> list[tuple[int, ModuleTensor]]:
    """The tensors of a buffer by where they start on disk, in elements."""
    starts = buffer.layout.starts
    places = [starts[seat.bucket] + seat.start for seat in buffer.layout.bucket_ranges]
    return sorted(zip(places, buffer.tensors, strict=True), key=lambda item: item[0])


def gathered_tree(buffers: TargetBuffers, pp: int, held: FileRank, arguments: JobArguments) -> Any:
    """`distrib_optim.pt` of one rank of stage `pp`: what all ranks that share a state have of it.

    Where experts have ranks of their own there are two optimizers. A rank that is not the first of those that share the
    state of one has None in place of it.
    """
    rank = ModuleRank(pp, held.tp, held.ep, held.etp)
    if not has_expert_optimizer(arguments):
        return _gathered_state(buffers, buffers.of(rank, experts=None))
    dense = _gathered_state(buffers, buffers.of(rank, experts=False)) if held.leads_dense else None
    experts = _gathered_state(buffers, buffers.of(rank, experts=True)) if held.leads_experts else None
    return [dense, experts]


def _gathered_state(buffers: TargetBuffers, found: Sequence[GradBuffer]) -> dict[Any, Any]:
    tree: dict[Any, Any] = {"buckets_coalesced": True}
    for number, buffer in enumerate(found):
        numel = buffer.layout.numel
        table: dict[str, Any] = {
            state: new_tensor(FLOAT32, (numel,), *buffers.contents(buffer, state)) for state in DISTRIBUTED_STATES
        }
        tree[number] = {buffer.key: {**table, "numel_unpadded": numel}}
    return tree


def _grad_dtype(dtype: DType, arguments: JobArguments) -> DType:
    """The dtype in which gradients are summed up: Megatron does it in single precision for bfloat16, unless told."""
    said = arguments.fields.get("accumulate_allreduce_grads_in_fp32")
    single = said if isinstance(said, bool) else arguments.flag("bf16")
    return FLOAT32 if single else dtype
