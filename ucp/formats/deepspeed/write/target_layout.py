"""The layout of the target: which slice of which parameter every rank has, under which name, in which group.

The second half assigns layers to pipeline stages as DeepSpeed's PipelineModule does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

from ucp.core.checkpoint import MASTER, WEIGHT, Atom, Checkpoint, Mesh, Parameter
from ucp.core.dtypes import FLOAT32
from ucp.errors import ImpossibleError, UsageError
from ucp.formats.deepspeed.experts import experts_per_layer, group_expert_degree, split_expert_name
from ucp.formats.deepspeed.step_files import parse_layer_name
from ucp.formats.deepspeed.write.source_extras import SourceExtras
from ucp.formats.registry import WriteOptions
from ucp.formats.sharded.assembly import ONE_RANK_ORIGIN
from ucp.formats.sharded.slicer import (
    ParamSlicer,
    TargetSlice,
    master_atom,
    no_rule_error,
    weight_atom,
    with_vocab_padding,
)


@dataclass(frozen=True, slots=True)
class LocalParamGroup:
    """A parameter group of one model-parallel rank: hyper-parameters, and slices in the optimizer's own order."""

    hyper: dict[str, Any]
    members: tuple[TargetSlice, ...]
    ep: int = 1  # expert-parallel degree; the share of each ep rank is partitioned over the ranks that have it


class TargetLayout:
    """The parameters of the source distributed over the target mesh.

    `extras` are those of the source; `settings` are those of the checkpoint `like` if there is one, else the same.
    """

    def __init__(self, source: Checkpoint, mesh: Mesh, options: WriteOptions) -> None:
        self.source = source
        self.mesh = mesh
        self.extras = SourceExtras(source)
        self.settings = SourceExtras(options.like) if options.like is not None else self.extras
        dtype = options.dtype or (self.settings.model_dtype if options.like is not None else None)
        self.dtype = dtype or self.extras.model_dtype
        self.recast = dtype is not None and dtype != self.extras.model_dtype
        self.slicer = ParamSlicer(source, mesh.tp, options.vocab_size, options.like, self.extras.vocab_multiple)
        self._check_rules()
        # DeepSpeed does not run a PipelineModule with ZeRO 2 and 3: the layers become a plain module.
        self.pipeline = SourcePipeline.of(source) if mesh.zero < 2 else None
        self.stages = assign_stages(source, mesh.pp, options.stages, options.like)
        counts = experts_per_layer(name for name, p in source.parameters.items() if p.expert is not None)
        self._degrees = self._expert_degrees(counts)
        self._per_rank: dict[str, int] = {}
        for layer, count in counts.items():
            if count % self._degrees[layer]:
                raise ImpossibleError(f"{layer}: {count} experts do not divide over ep={self._degrees[layer]}")
            self._per_rank[layer] = count // self._degrees[layer]
        self._atoms: dict[tuple[str, str], Atom | None] = {}
        self.lost_padding: set[str] = set()  # vocabularies whose padding rows the source no longer has
        _check_mesh(source, mesh, bool(self._per_rank))

    def _check_rules(self) -> None:
        """Refuse a tensor-parallel degree for which a parameter has no rule, or which does not divide it."""
        if self.mesh.tp == 1:
            return
        parameters = self.source.parameters.values()
        needed = [p for p in parameters if p.role != "buffer" and p.rule.cut == "replicated"]
        unknown = [p.name for p in needed if p.rule_origin == ONE_RANK_ORIGIN]
        if unknown and self.source.mesh.tp == 1:
            raise no_rule_error(unknown, self.mesh.tp)
        for parameter in parameters:
            self.slicer.local(parameter, 0)

    def _expert_degrees(self, layers: Iterable[str]) -> dict[str, int]:
        """MoE layer → its expert-parallel degree. Layers may have different ones; their groups are named after them.

        The mesh has the largest degree. Layers with a smaller one keep it.
        """
        known: dict[str, int] = {}
        for group in self.source.groups:
            for split in filter(None, map(split_expert_name, group.names)):
                known[split[0]] = group_expert_degree(group.hyper) or self.source.mesh.ep
        largest = max(known.values(), default=1)
        degrees = {layer: self.mesh.ep if k == largest else min(k, self.mesh.ep) for layer, k in known.items()}
        return {layer: degrees.get(layer, self.mesh.ep) for layer in layers}

    @property
    def has_experts(self) -> bool:
        return bool(self._per_rank)

    def on_stage(self, pp: int) -> list[Parameter]:
        """Parameters and buffers of one stage, in the model's order."""
        return [p for name, p in self.source.parameters.items() if pp in self.stages[name]]

    def groups(self, pp: int, tp: int, ep: int) -> list[LocalParamGroup]:
        """The parameter groups of one rank, without groups that have no parameter on this stage.

        A group without trained parameters on any stage is kept in ZeRO stages that support it, as in DeepSpeed's files.
        """
        found: list[LocalParamGroup] = []
        degrees: list[int | None] = []  # in the names of the source's groups
        for group in self.source.groups:
            members: list[TargetSlice] = []
            degree = 0
            for name in self._in_order(group.names):
                parameter = self.source.parameters.get(name)
                if parameter is None or not self._is_listed(parameter) or pp not in self.stages[name]:
                    continue
                local = self.local_name(parameter, ep)
                if local is not None:
                    split = split_expert_name(name)
                    degree = degree or (self._degrees[split[0]] if split is not None else 0)
                    members.append(self.slicer.local(parameter, tp, local))
            is_listed = any(p is not None and self._is_listed(p) for p in map(self.source.parameters.get, group.names))
            if members or (self.mesh.zero in (0, 3) and not is_listed):
                stored = group.hyper or self.extras.configured_hyper
                hyper = {key: value for key, value in stored.items() if key != "params"}
                if degree and group_expert_degree(hyper):
                    hyper["name"] = f"ep_size_{degree}"
                found.append(LocalParamGroup(hyper, tuple(members), degree or 1))
                degrees.append(group_expert_degree(group.hyper))
        return self._merged(found, degrees)

    def _merged(self, groups: list[LocalParamGroup], degrees: Sequence[int | None]) -> list[LocalParamGroup]:
        """Merge groups of experts whose names contained different `degrees` in the source and no longer do."""
        order = {name: number for number, name in enumerate(self.source.parameters)} if len(set(degrees)) > 2 else {}
        merged: dict[int, LocalParamGroup] = {}
        for number, group in enumerate(groups):
            same = next((at for at, other in merged.items() if other.hyper == group.hyper), None) if order else None
            if same is None or degrees[number] is None or degrees[same] in (None, degrees[number]):
                merged[number] = group
            else:
                members = sorted((*merged[same].members, *group.members), key=lambda m: order[m.parameter.name])
                merged[same] = LocalParamGroup(group.hyper, tuple(members), group.ep)
        return list(merged.values())

    def _is_listed(self, parameter: Parameter) -> bool:
        """Whether the optimizer file has an entry for this parameter of a group.

        ZeRO omits frozen parameters and empty ones from its buffers. With ZeRO off and without master weights, the
        optimizer lists all parameters that it was created with.
        """
        if self.mesh.zero == 0:
            return parameter.role == "trained" or (parameter.role == "frozen" and self.dtype == FLOAT32)
        return parameter.role == "trained" and prod(parameter.shape) > 0

    def _in_order(self, names: Sequence[str]) -> list[str]:
        """A group's names in the optimizer's own order: undoes the round-robin order of the source.

        Experts get the model's order: the source lists them by expert-parallel rank.
        """
        if any(p is not None and p.expert is not None for p in map(self.source.parameters.get, names)):
            wanted = set(names)
            return [name for name in self.source.parameters if name in wanted]
        zero = self.source.details.get("zero")
        is_reordered = isinstance(zero, dict) and zero.get("round_robin_gradients") and self.source.mesh.zero in (1, 2)
        if not is_reordered:
            return list(names)
        order = round_robin(len(names), self.source.mesh.dp)
        restored = [""] * len(names)
        for name, position in zip(names, order, strict=True):
            restored[position] = name
        return restored

    def local_name(self, parameter: Parameter, ep: int) -> str | None:
        """The parameter's name in the files of expert-parallel rank `ep`; None if it is on another one."""
        split = split_expert_name(parameter.name)
        if split is None:
            return parameter.name
        layer, number, rest = split
        per = self._per_rank[layer]
        if number // per != ep % self._degrees[layer]:
            return None
        return f"{layer}{number % per}{rest}"

    def weight(self, parameter: Parameter) -> Atom | None:
        """The weight of the target's module; None if the source has neither weight nor master."""
        return self.state(parameter, WEIGHT)

    def master(self, parameter: Parameter) -> Atom:
        """The master weight: the stored one, or the weight if the source has no master."""
        found = self.state(parameter, MASTER)
        assert found is not None
        return found

    def state(self, parameter: Parameter, kind: str) -> Atom | None:
        """A state of the parameter in the target, or None if it has none. The same object each time."""
        if (parameter.name, kind) not in self._atoms:
            found = parameter.atoms.get(kind)
            if kind == MASTER:
                found = master_atom(parameter)
            elif kind == WEIGHT and parameter.role != "buffer" and (found is None or self.recast):
                found = parameter.atoms.get(MASTER, found)
                if found is not None and found.dtype.family == "float":
                    found = weight_atom(parameter, self.dtype)
            is_padded = parameter.rule.cut == "vocab" and parameter.padded_shape is not None
            if found is not None and is_padded and found.shape == parameter.shape:
                padded = with_vocab_padding(parameter, found)
                if padded is found:
                    self.lost_padding.add(parameter.name)
                found = padded
            self._atoms[parameter.name, kind] = found
        return self._atoms[parameter.name, kind]

    def state_of(self, kind: str) -> Callable[[TargetSlice], Atom | None]:
        """`state` of one kind, for slices."""
        return lambda member: self.state(member.parameter, kind)


def round_robin(count: int, ranks: int) -> list[int]:
    """Positions in DeepSpeed's round-robin order for R ranks: 0, R, 2R, …, 1, R + 1, …"""
    return [i for first in range(min(ranks, count)) for i in range(first, count, ranks)]


def _check_mesh(source: Checkpoint, mesh: Mesh, has_experts: bool) -> None:
    """Refuse a mesh that DeepSpeed cannot run."""
    if min(mesh.tp, mesh.pp, mesh.dp, mesh.ep) < 1 or not 0 <= mesh.zero <= 3:
        raise UsageError(f"invalid parallel layout: {mesh}")
    if mesh.zero >= 2 and mesh.pp > 1:
        raise ImpossibleError(
            f"ZeRO-{mesh.zero} and pp={mesh.pp}: DeepSpeed runs pipelines with ZeRO 0 and 1 only", hint="use --zero 1"
        )
    if mesh.ep > 1 and not has_experts:
        raise ImpossibleError(f"ep={mesh.ep}, but the model has no experts", hint="leave --ep out")
    if mesh.dp % mesh.ep:
        raise ImpossibleError(
            f"ep={mesh.ep} does not divide dp={mesh.dp}: expert-parallel ranks are data-parallel ranks"
        )
    if mesh.zero == 3 and has_experts:
        raise ImpossibleError(
            "ZeRO-3 with the experts of DeepSpeed-MoE: no DeepSpeed release can save that", hint="use --zero 1 or 2"
        )
    if not source.parameters:
        raise ImpossibleError("the source has no parameters")


@dataclass(frozen=True, slots=True)
class SourcePipeline:
    """The layers of a pipelined model and their files."""

    layers: tuple[int, ...]  # layers that have a file
    tied: dict[str, int]  # key of a tied module → the first layer that has its file
    model_axis: bool  # file names contain the tensor-parallel rank
    again: dict[int, str]  # further layers with a file of a tied module → its key

    def layers_of(self, key: str) -> list[int]:
        """The layers that have a file of a tied module."""
        return [self.tied[key], *(layer for layer, other in self.again.items() if other == key)]

    @staticmethod
    def of(source: Checkpoint) -> SourcePipeline | None:
        """The pipeline of the source, from the details of its reader; None if the model is not pipelined."""
        facts = source.details.get("pipeline")
        if not isinstance(facts, dict):
            return None
        again = {int(layer): key for layer, key in facts.get("again", {}).items()}
        return SourcePipeline(tuple(facts["layers"]), dict(facts["tied"]), bool(facts["model_axis"]), again)


def assign_stages(
    source: Checkpoint, pp: int, first_layers: Sequence[int] | None = None, like: Checkpoint | None = None
) -> dict[str, tuple[int, ...]]:
    """Parameter name → the stages that have it.

    `first_layers` has the first layer of every stage. Without it the stages are those of `like`, or of the source if it
    has the same number, or DeepSpeed's default.
    """
    if first_layers is None:
        for known in (like, source):
            if known is not None and known.mesh.pp == pp and known.parameters.keys() >= source.parameters.keys():
                return {name: known.parameters[name].stages for name in source.parameters}
    else:
        option = f"--stages {','.join(map(str, first_layers))}"
        if len(first_layers) != pp:
            raise UsageError(
                f"{option} lists the first layers of {len(first_layers)} stages, but pp={pp}", hint="add --pp"
            )
        if list(first_layers) != sorted({0, *first_layers}):
            raise UsageError(f"{option}: the first layers must start with 0 and increase")
    if pp == 1:
        return dict.fromkeys(source.parameters, (0,))
    pipeline = SourcePipeline.of(source)
    if pipeline is None:
        raise ImpossibleError(
            f"pp={pp} needs a pipelined model, and the parameter names of this one have no layer numbers",
            hint="keep --pp 1; only checkpoints of a PipelineModule can be divided into stages",
        )
    starts = list(first_layers) if first_layers is not None else _balanced_starts(source, pipeline, pp)
    stage_of = {layer: sum(layer >= start for start in starts) - 1 for layer in pipeline.layers}
    placed: dict[str, tuple[int, ...]] = {}
    for name in source.parameters:
        found = parse_layer_name(name)
        if found is None:
            raise ImpossibleError(
                f"parameter {name}: cannot be assigned to a stage, because its name has no layer number"
            )
        if found.layer is not None:
            placed[name] = (stage_of[found.layer],)
        else:
            assert found.tied is not None
            uses = pipeline.layers_of(found.tied)
            # A use without a file (a forward function of the tied module) is the head, at the end of the model.
            placed[name] = tuple(sorted({*(stage_of[layer] for layer in uses), *((pp - 1,) if len(uses) == 1 else ())}))
    return placed


def _balanced_starts(source: Checkpoint, pipeline: SourcePipeline, pp: int) -> list[int]:
    """First layers of the stages by DeepSpeed's default, `partition_method="parameters"`."""
    if len(pipeline.layers) < pp:
        raise ImpossibleError(f"pp={pp}: the model has only {len(pipeline.layers)} layers")
    count = max(pipeline.layers) + 1
    heads = [key for key in pipeline.tied if len(pipeline.layers_of(key)) == 1]  # uses without a file, at the end
    weights = [0] * (count + len(heads))
    for name, parameter in source.parameters.items():
        found = parse_layer_name(name)
        if found is None or parameter.role != "trained":
            continue
        if found.layer is not None:
            weights[found.layer] += parameter.numel
        elif found.tied is not None:
            uses = pipeline.layers_of(found.tied)
            for layer in uses if len(uses) > 1 else (*uses, count + heads.index(found.tied)):
                weights[layer] += parameter.numel
    return balance_stages(weights, pp)


def balance_stages(weights: Sequence[int], parts: int) -> list[int]:
    """Divide `weights` into consecutive parts whose sums differ least (largest minus smallest); return their starts.

    Ties are resolved in favour of the latest last boundary, then the latest before it, and so on.
    """
    total = list(accumulate(weights, initial=0))
    n = len(weights)
    # best[i]: for the first i items in j parts, (difference, largest, smallest, start of the last part)
    best: list[tuple[float, float, float, int] | None] = [(0, 0, float("inf"), 0), *[None] * n]
    boundaries: list[list[int]] = []
    for j in range(1, parts + 1):
        following: list[tuple[float, float, float, int] | None] = [None] * (n + 1)
        for i in range(j, n + 1):
            for k in range(i):
                before = best[k]
                if before is None:
                    continue
                last = total[i] - total[k]
                largest, smallest = max(before[1], last), min(before[2], last)
                found = following[i]
                if found is None or found[0] >= largest - smallest:
                    following[i] = (largest - smallest, largest, smallest, k)
        boundaries.append([entry[3] if entry else 0 for entry in following])
        best = following
    starts: list[int] = []
    end = n
    for row in reversed(boundaries):
        end = row[end]
        starts.append(end)
    return starts[::-1]
