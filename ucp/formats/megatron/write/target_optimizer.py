"""The optimizers of the target: their groups, the states of the plain one, and the buffers of the distributed one."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ucp.containers.inert import TensorRef
from ucp.containers.pickle_writer import NewTensor
from ucp.containers.torch_file_writer import RegionContent, ZeroContent, new_tensor
from ucp.core.checkpoint import MASTER, STEP, WEIGHT, Atom, Checkpoint, ParamGroup
from ucp.core.dtypes import FLOAT32, DType, scalar_value
from ucp.core.region import Region
from ucp.errors import ImpossibleError
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
_TORCH_ONLY: Final = "foreach"  # a setting of torch's optimizers that fused optimizers do not have


@dataclass(frozen=True, slots=True)
class TargetParamGroup:
    """A parameter group of the target: settings without `step`, and the parameters in it."""

    hyper: dict[str, Any]
    names: frozenset[str]
    step: Any  # of the source's group, or None

    @property
    def counts_in_parameters(self) -> bool:
        """Whether the optimizer keeps a step per parameter; fused optimizers keep one per group."""
        return _TORCH_ONLY in self.hyper


def target_optimizers(source: Checkpoint, arguments: JobArguments) -> list[list[TargetParamGroup]]:
    """Return the groups of every optimizer of the chain: Muon if the job has it, then Adam or another one.

    For each of them, the optimizer of dense parameters comes first, then that of experts if they have their own.
    """
    has_own_optimizer = arguments.has_expert_optimizer
    found: list[list[TargetParamGroup]] = []
    for muon in (True, False) if arguments.has_muon else (False,):
        chosen = [group for group in source.groups if is_muon_group(group.hyper, arguments) == muon]
        parts = [
            _target_groups(chosen, experts if has_own_optimizer else None)
            for experts in ((False, True) if has_own_optimizer else (False,))
        ]
        if muon and arguments.is_layer_wise:  # it has the groups of experts in the same optimizer
            parts = [[group for part in parts for group in part]]
        found += [parts[0], *(part for part in parts[1:] if part)]
    return found


def _target_groups(chosen: Sequence[ParamGroup], experts: bool | None) -> list[TargetParamGroup]:
    """Return the groups with only the experts or only the other parameters; with all if `experts` is None."""
    groups: list[TargetParamGroup] = []
    for group in chosen:
        names = [name for name in group.names if experts is None or is_expert(name) == experts]
        if not names:
            continue
        hyper = {key: value for key, value in group.hyper.items() if key != STEP and not isinstance(value, TensorRef)}
        if _EXPERTS in hyper:
            hyper[_EXPERTS] = experts is True
        step = group.hyper.get(STEP)
        # Groups of experts and of dense parameters are one if experts have no ranks of their own.
        at = next((i for i, known in enumerate(groups) if known.hyper == hyper), None)
        if at is None:
            groups.append(TargetParamGroup(hyper, frozenset(names), step))
        else:
            known = groups[at]
            groups[at] = TargetParamGroup(hyper, known.names | set(names), known.step if step is None else step)
    return groups


def has_states(source: Checkpoint) -> bool:
    """Whether the source has optimizer states to write."""
    return bool(source.groups) and any(
        kind not in (WEIGHT, MASTER) for parameter in source.parameters.values() for kind in parameter.atoms
    )


def optimizer_tree(
    model: TargetModel,
    tensors: Sequence[NamedTensor],
    scaler: Any,
    files: SourceFiles,
    layer_wise: tuple[int, int] | None = None,
) -> Any:
    """Return the state of one rank's optimizers as the plain mixed-precision optimizer's `state_dict` has it.

    If whole parameters are assigned to data-parallel ranks, `layer_wise` is the tensor- and data-parallel rank.
    """
    arguments = model.job.arguments
    chain = target_optimizers(model.source, arguments)
    groups = [group for optimizer in chain for group in optimizer]
    members = [
        [named for named in tensors if named.is_trained and named.tensor.packed_params[0].name in group.names]
        for group in groups
    ]
    if layer_wise is not None:
        zipped = zip(groups, members, strict=True)
        all_groups = [LayerWiseGroup(mine, group.hyper.get(_EXPERTS) is True) for group, mine in zipped]
        members = layer_wise_members(all_groups, lambda named: named.tensor.numel, *layer_wise, arguments)
    rest = iter(members)
    made = [_optimizer_tree(model, [(group, next(rest)) for group in groups], scaler, files) for groups in chain]
    return made if len(made) > 1 else made[0]


def stateless_chain(model: TargetModel, scaler: Any, files: SourceFiles) -> list[dict[str, Any]]:
    """Return every optimizer of the chain without parameter states: groups, steps, the loss scaler.

    In the form of the distributed optimizer if the mesh has ZeRO 1, else of the plain one.
    """
    distributed = bool(model.job.mesh.zero)
    scaling = {} if scaler is None else {"grad_scaler": scaler}
    chain: list[dict[str, Any]] = []
    for groups in target_optimizers(model.source, model.job.arguments):
        listed: list[dict[str, Any]] = []
        common: dict[str, Any] = {}
        for group in groups:
            step = step_of(model.source, group, files)
            if step is not None and group.counts_in_parameters and not distributed:
                common = {"common_step": new_tensor(FLOAT32, (), struct.pack("<f", step))}
                step = None
            listed.append(dict(group.hyper) if step is None else {**group.hyper, STEP: step})
        inner = {"param_groups": listed} if distributed else {"state": common, "param_groups": listed}
        chain.append({"optimizer": inner, **scaling} if distributed or is_mixed(model) else inner)
    return chain


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
        for i, named in zip(numbers, mine, strict=True):
            table = _param_state(model, named, group, step)
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


def _param_state(model: TargetModel, named: NamedTensor, group: TargetParamGroup, step: Any) -> dict[str, Any]:
    table: dict[str, Any] = {}
    scalars: dict[str, Any] = {}
    parameter = named.parameter
    for kind, atom in parameter.atoms.items():
        if kind in (WEIGHT, MASTER, STEP):
            continue
        if atom.shape == () and parameter.shape != ():
            scalars[kind] = _scalar(atom)
            continue
        tensor = model.tensor(named, kind)
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


def _masters(model: TargetModel, tensors: Sequence[NamedTensor]) -> Iterator[NewTensor]:
    """Yield the masters of a group; parameters that the module has in single precision have none."""
    for named in tensors:
        weight = model.atom(named.tensor.packed_params[0].name, WEIGHT)
        if weight is not None and weight.dtype == FLOAT32:
            continue
        master = model.tensor(named, MASTER, _attributes(model, named))
        assert master is not None
        yield master


def _attributes(model: TargetModel, named: NamedTensor) -> dict[str, Any]:
    """Return the attributes that Megatron sets on parameters and copies to their masters: how they are split."""
    rule = model.params[named.parameter.name].rule
    is_split = rule.cut in ("split", "vocab")
    dim = rule.dim if is_split else -1
    first = named.tensor.packed_params[0]
    is_gated = ".linear_fc1." in first.name  # the only fused matrices that Megatron marks as such
    marks = {
        "expert_tp": False,
        "is_qkv": False,
        "tensor_model_parallel": is_split,
        "partition_dim": 1 - dim if is_split and first.transposed else dim,
        "partition_stride": len(rule.parts) if rule.parts and is_gated and not first.transposed else 1,
    }
    return {**marks, "shared": True} if named.tensor.copy else marks


def step_of(source: Checkpoint, group: TargetParamGroup, files: SourceFiles) -> Any:
    """Return the step of a group: its own number, or that of its first parameter."""
    if isinstance(group.step, (int, float)):
        return group.step
    for name in sorted(group.names):
        parameter = source.parameters.get(name)
        if parameter is not None and STEP in parameter.atoms:
            fragment = parameter.atoms[STEP].fragments[0]
            data = fragment.inline or files.read(fragment.file, fragment.offset, fragment.dtype.itemsize)
            return scalar_value(data, fragment.dtype)
    return None


# States that the distributed optimizer keeps of every parameter: name in files → kind of atom.
DISTRIBUTED_STATES: Final = {"param": MASTER, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


@dataclass(frozen=True, slots=True)
class GradBuffer:
    """A gradient buffer of one rank, with the position of each tensor in `layout`; `key`: dtypes of weight and grad."""

    key: tuple[DType, DType]
    tensors: tuple[ModuleTensor, ...]
    layout: BufferLayout

    def tiles(self, bucket: int) -> Iterator[tuple[int, int, ModuleTensor | None]]:
        """Yield the tensors of a bucket in order, each as [start, stop); None for the gaps between them."""
        positions = zip(self.layout.bucket_ranges, self.tensors, strict=True)
        here = [(position.start, tensor) for position, tensor in positions if position.bucket == bucket]
        at = 0
        for start, tensor in sorted(here, key=lambda item: item[0]):
            if start > at:
                yield at, start, None
            at = start + tensor.numel
            yield start, at, tensor
        if at < self.layout.lengths[bucket]:
            yield at, self.layout.lengths[bucket], None


class TargetBuffers:
    """The buffers of every rank of a job."""

    def __init__(self, model: TargetModel) -> None:
        self._model = model
        self._arguments = model.job.arguments
        self._trained = {
            name: param for name, param in model.params.items() if model.source.parameters[name].role == "trained"
        }
        self._singles: dict[tuple[str, str], Atom] = {}

    def of(self, rank: ModuleRank, *, experts: bool | None) -> list[GradBuffer]:
        """Return the buffers of a rank; `experts` selects its optimizer for experts or for everything else."""
        tensors = [
            tensor
            for tensor in module_tensors(rank, self._trained, self._arguments)
            if experts is None or tensor.is_expert == experts
        ]
        # Gradients are accumulated in float32 if the job asks for it, and by default for bfloat16.
        asked = self._arguments.fields.get("accumulate_allreduce_grads_in_fp32")
        is_single = asked if isinstance(asked, bool) else self._arguments.flag("bf16")
        found: list[GradBuffer] = []
        for mine in group_by_buffer(tensors):
            layout = module_buffer_layout(mine, tensors, rank, self._arguments, expert=bool(experts))
            dtype = mine[0].dtype
            found.append(GradBuffer((dtype, FLOAT32 if is_single else dtype), tuple(mine), layout))
        return found

    def buffer_contents(self, buffer: GradBuffer, state: str) -> Iterator[RegionContent | ZeroContent]:
        """Yield one state of a whole buffer as on disk: bucket after bucket, with zeros in the gaps."""
        for bucket in range(len(buffer.layout.lengths)):
            for start, stop, tensor in buffer.tiles(bucket):
                yield from [ZeroContent(stop - start)] if tensor is None else self.tensor_contents(tensor, state)

    def tensor_contents(self, tensor: ModuleTensor, state: str) -> list[RegionContent]:
        """Return one state of a tensor; the optimizer keeps all of them in single precision."""
        contents = self._model.contents(tensor, DISTRIBUTED_STATES[state])
        if contents is None:
            raise ImpossibleError(
                f"{tensor.packed_params[0].name} has no '{state}': the distributed optimizer keeps Adam's states of"
                " every parameter",
                hint="use --optimizer plain",
            )
        for i, content in enumerate(contents):
            atom = content.atom
            if atom.dtype != FLOAT32:
                single = self._singles.setdefault((atom.name, atom.kind), replace(atom, dtype=FLOAT32))
                contents[i] = replace(content, atom=single)
        return contents


def gathered_tree(buffers: TargetBuffers, pp: int, rank: FileRank, arguments: JobArguments) -> Any:
    """Return `distrib_optim.pt` of one rank of stage `pp`: the state of all ranks that share it.

    If experts have ranks of their own, there are two optimizers. Only the first of the ranks that share the state of an
    optimizer writes it; the others write None.
    """
    module = ModuleRank(pp, rank.tp, rank.ep, rank.etp)
    if not arguments.has_expert_optimizer:
        return _gathered_state(buffers, buffers.of(module, experts=None))
    dense = _gathered_state(buffers, buffers.of(module, experts=False)) if rank.leads_dense else None
    experts = _gathered_state(buffers, buffers.of(module, experts=True)) if rank.leads_experts else None
    return [dense, experts]


def _gathered_state(buffers: TargetBuffers, found: Sequence[GradBuffer]) -> dict[Any, Any]:
    tree: dict[Any, Any] = {"buckets_coalesced": True}
    for number, buffer in enumerate(found):
        numel = buffer.layout.numel
        table: dict[str, Any] = {
            state: new_tensor(FLOAT32, (numel,), *buffers.buffer_contents(buffer, state))
            for state in DISTRIBUTED_STATES
        }
        tree[number] = {buffer.key: {**table, "numel_unpadded": numel}}
    return tree
