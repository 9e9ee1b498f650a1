"""Which rank logs which elements of which parameter; all ranks agree on it before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ucp.core.checkpoint import Rank
from ucp.core.region import Region
from ucp.core.rules import Rule, RuleBook
from ucp.errors import UsageError
from ucp.log.codecs import DTYPE_CODES
from ucp.log.epoch_manifest import EpochManifest, KernelFingerprint, OptimizerGroup
from ucp.log.stream_schema import FIRST_KINDS, LogBlock, LoggedParameter, OptimizerTensor, StreamSchema, cut_blocks
from ucp.training.collect import StateCollector, TensorParallelRules
from ucp.training.collectives import all_gather, fail_together
from ucp.training.live_job import LiveJob, SteppedTensor, dtype_of, local_tensor
from ucp.training.recording.optimizer_kernel import depends_on_position, kernel_of, plain_hyper_parameters


@dataclass(frozen=True, slots=True)
class LoggableRegion:
    """A region of a parameter that a rank could log; in its optimizer tensor it begins at element `start`."""

    name: str
    region: Region
    tensor: int  # index into the job's stepped tensors
    start: int


@dataclass(slots=True)
class RankRegions:
    """What one rank could log, sent to all others."""

    rank: Rank
    parameters: list[LoggedParameter]
    slices: dict[str, Region]  # name → the region of this model-parallel rank
    regions: list[LoggableRegion]
    groups: list[tuple[dict[str, Any], list[str]]]
    buffers: list[tuple[LoggedParameter, int]] = field(default_factory=list)  # (whole buffer, index into `job.buffers`)
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class SchemaAgreement:
    """The streams that all ranks have agreed on, and this rank's own."""

    schemas: list[StreamSchema]
    parameters: list[LoggedParameter]
    groups: list[OptimizerGroup]
    notes: list[str]
    mine: StreamSchema
    stepped: list[int]  # tensor of this stream → index into `job.stepped`
    buffers: list[LoggedParameter]  # all logged buffers, of all ranks
    buffer_numbers: list[int]  # buffer of this stream → index into `job.buffers`


def agree_on_schema(
    job: LiveJob, grad_dtypes: Sequence[str], book: RuleBook | None, client_state: dict[str, Any], rank: int
) -> SchemaAgreement:
    """Assign the elements of all parameters to ranks. Collective. `grad_dtypes` has one entry per stepped tensor."""
    tp_rules = TensorParallelRules(job, book, client_state)
    tp_rules.agree_on_defaults()
    with fail_together():
        regions = _rank_regions(job, tp_rules)
    ranks: list[RankRegions] = all_gather(regions)
    parameters = _parameters(ranks)
    kept = assign_regions(ranks, {p.name: p.rule for p in parameters})
    index = {parameter.name: number for number, parameter in enumerate(parameters)}
    tensors = [_tensor(job, stepped, dtype) for stepped, dtype in zip(job.stepped, grad_dtypes, strict=True)]
    mine, stepped = _schema(rank, job.rank, kept[rank], tensors, index)
    buffers, buffer_numbers = _add_buffers(mine, ranks, rank)
    schemas: list[StreamSchema] = all_gather(mine)
    notes = list(dict.fromkeys(note for each in ranks for note in each.notes))
    return SchemaAgreement(schemas, parameters, _groups(ranks), notes, mine, stepped, buffers, buffer_numbers)


def is_trained(stepped: SteppedTensor) -> bool:
    """Whether this tensor gets gradients. An optimizer may also have been given frozen parameters."""
    return bool(stepped.key.requires_grad)


def _rank_regions(job: LiveJob, tp_rules: TensorParallelRules) -> RankRegions:
    collector = StateCollector(job, tp_rules)
    steppable = {name for stepped in job.stepped if is_trained(stepped) for name in stepped.names}
    trained = {name: group for name, group in collector.add_parameters().items() if name in steppable}
    infos = collector.state.parameters
    for stepped in job.stepped:
        if is_trained(stepped) and dtype_of(stepped.key).name not in DTYPE_CODES:
            raise UsageError(
                f"parameter {stepped.names[0]} has dtype {dtype_of(stepped.key)}, which a log cannot store",
                hint="use ucp.save or ucp.snapshot instead, or separate parameters for real and imaginary parts",
            )
    parameters = []
    module_dtypes = {live.slice.name: dtype_of(live.tensor) for live in job.weights}
    dtypes = {name: dtype_of(stepped.key) for stepped in job.stepped for name in stepped.names}
    for name, group in trained.items():
        info = infos[job.logical_name(name)]
        dtype = str(module_dtypes.get(name, dtypes[name]))
        parameters.append(LoggedParameter(info.name, info.shape, dtype, group, info.rule, info.padded_shape))
    regions = [
        LoggableRegion(job.logical_name(part.name), collector.region_of(part), number, part.start)
        for number, stepped in enumerate(job.stepped)
        if is_trained(stepped)
        for part in stepped.slices
    ]
    groups = [
        (plain_hyper_parameters(group), [job.logical_name(name) for name in names])
        for group, names in zip(job.groups, job.names_by_group(), strict=True)
    ]
    own = RankRegions(
        job.rank,
        parameters,
        {job.logical_name(name): collector.slice_region(name) for name in trained},
        regions,
        groups,
    )
    not_logged = []
    for number, buffer in enumerate(job.buffers):
        info = infos[job.logical_name(buffer.slice.name)]
        whole = buffer.slice.region.numel == prod(info.shape) and info.rule.cut != "average"
        if whole and dtype_of(buffer.tensor).name in DTYPE_CODES:
            own.buffers.append((LoggedParameter(info.name, info.shape, str(dtype_of(buffer.tensor)), -1), number))
        else:
            not_logged.append(info.name)
    if not_logged:
        names = ", ".join(not_logged[:3])
        own.notes.append(f"buffers are not logged, they are those of the base: {names} ({len(not_logged)} in all)")
    if depends_on_position(kernel_of(job.optimizer)) and not all(
        local_tensor(s.key).is_contiguous() for s in job.stepped
    ):
        own.notes.append(
            "some optimizer tensors are not row-major: a fused kernel sees their elements in another order"
        )
    return own


def _tensor(job: LiveJob, stepped: Any, grad_dtype: str) -> OptimizerTensor:
    names = tuple(job.logical_name(name) for name in stepped.names)
    local = local_tensor(stepped.key)
    return OptimizerTensor(local.numel(), stepped.group, str(dtype_of(local)), grad_dtype, names)


def _parameters(ranks: Sequence[RankRegions]) -> list[LoggedParameter]:
    found: dict[str, LoggedParameter] = {}
    for each in ranks:
        for parameter in each.parameters:
            other = found.setdefault(parameter.name, parameter)
            if other.shape != parameter.shape:
                raise UsageError(
                    f"parameter {parameter.name} has shape {list(other.shape)} on one rank"
                    f" and {list(parameter.shape)} on another ({each.rank})"
                )
    return list(found.values())


def assign_regions(ranks: Sequence[RankRegions], rules: dict[str, Rule]) -> list[list[LoggableRegion]]:
    """The regions that each rank logs, so that every element is logged once.

    Equal model-parallel slices are replicas, which the first such rank logs (all ranks, if the rule is `average`). If
    several data-parallel ranks hold the same elements (ZeRO-0), the one with the fewest elements so far logs them.
    """
    owners = _owners(ranks, rules)
    candidates: dict[tuple[str, Region, tuple[int, int]], list[tuple[int, LoggableRegion]]] = {}
    for number, each in enumerate(ranks):
        coords = each.rank.pp, each.rank.tp
        for region in each.regions:
            if coords in owners[region.name]:
                candidates.setdefault((region.name, region.region, coords), []).append((number, region))
    kept: list[list[LoggableRegion]] = [[] for _ in ranks]
    load = [0] * len(ranks)
    for holders in candidates.values():
        number, region = min(holders, key=lambda holder: (load[holder[0]], holder[0]))
        kept[number].append(region)
        load[number] += region.region.numel
    return kept


def _owners(ranks: Sequence[RankRegions], rules: dict[str, Rule]) -> dict[str, set[tuple[int, int]]]:
    """Name → the (pp, tp) coordinates of the ranks that log it."""
    first: dict[str, dict[Region, tuple[int, int]]] = {}
    averaged: dict[str, set[tuple[int, int]]] = {}
    for each in sorted(ranks, key=lambda each: (each.rank.pp, each.rank.tp)):
        coords = each.rank.pp, each.rank.tp
        for name, region in each.slices.items():
            if rules[name].cut == "average":
                averaged.setdefault(name, set()).add(coords)
            else:
                first.setdefault(name, {}).setdefault(region, coords)
    return {**{name: set(found.values()) for name, found in first.items()}, **averaged}


def _schema(
    stream: int, rank: Rank, kept: list[LoggableRegion], tensors: list[OptimizerTensor], index: dict[str, int]
) -> tuple[StreamSchema, list[int]]:
    """This rank's stream, and the index in `job.stepped` of each of its tensors."""
    schema = StreamSchema(stream, rank)
    used = sorted({region.tensor for region in kept})
    for number, stepped in enumerate(used):
        schema.tensors.append(tensors[stepped])
        parts = [(index[region.name], region.region, region.start) for region in kept if region.tensor == stepped]
        schema.blocks.extend(cut_blocks(len(schema.blocks), number, sorted(parts, key=lambda part: part[2])))
    return schema, used


def _add_buffers(
    mine: StreamSchema, ranks: Sequence[RankRegions], rank: int
) -> tuple[list[LoggedParameter], list[int]]:
    """Assign each buffer to the first rank that has it; returns all logged buffers, and the indices of this rank's."""
    owners: dict[str, tuple[int, LoggedParameter]] = {}
    for number, each in enumerate(ranks):
        for buffer, _ in each.buffers:
            owners.setdefault(buffer.name, (number, buffer))
    buffers = [buffer for _, buffer in owners.values()]
    index = {buffer.name: number for number, buffer in enumerate(buffers)}
    buffer_numbers = []
    for buffer, number in ranks[rank].buffers:
        if owners[buffer.name][0] == rank:
            region = Region.all_of(buffer.shape)
            mine.buffers.append(LogBlock(len(mine.buffers), index[buffer.name], region, -1, 0, region.numel))
            buffer_numbers.append(number)
    return buffers, buffer_numbers


def _groups(ranks: Sequence[RankRegions]) -> list[OptimizerGroup]:
    """Param groups with the parameters of all ranks (pipeline stages have different ones)."""
    count = max((len(each.groups) for each in ranks), default=0)
    groups = []
    for number in range(count):
        same = [each.groups[number] for each in ranks if number < len(each.groups)]
        names = dict.fromkeys(name for _, group_names in same for name in group_names)
        groups.append(OptimizerGroup(same[0][0], tuple(names)))
    return groups


def manifest_of(
    job: LiveJob, agreement: SchemaAgreement, kernel: KernelFingerprint, run: str, epoch: int, start: int
) -> EpochManifest:
    """The manifest of a new epoch, without parent, base, and the state kinds that the optimizer will create."""
    return EpochManifest(
        run,
        epoch,
        start,
        job.mesh,
        kernel,
        f"{type(job.optimizer).__module__}.{type(job.optimizer).__qualname__}",
        agreement.parameters,
        agreement.groups,
        agreement.schemas,
        state_kinds=list(FIRST_KINDS),
        notes=agreement.notes,
        buffers=agreement.buffers,
    )
