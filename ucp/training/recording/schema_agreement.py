"""Which rank logs which elements of which parameter: agreed on by all ranks before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ucp.core.mesh import Rank
from ucp.core.region import Region
from ucp.core.rules import Rule, RuleBook
from ucp.errors import UsageError
from ucp.log.codecs import DTYPE_CODES
from ucp.log.epoch_manifest import EpochManifest, KernelFingerprint, OptimizerGroup
from ucp.log.stream_schema import FIRST_KINDS, LogBlock, LoggedParameter, OptimizerTensor, StreamSchema, cut_blocks
from ucp.training.collect import StateCollector, TensorParallelRules
from ucp.training.collectives import all_gather, raise_on_all
from ucp.training.live_job import LiveJob, SteppedTensor, dtype_of, local_tensor
from ucp.training.recording.optimizer_kernel import kernel_of, plain_hyper_parameters, sees_vectors


@dataclass(frozen=True, slots=True)
class LoggableRegion:
    """A part of a parameter that a rank could log: `region` of the whole, in its optimizer tensor from `start` on."""

    name: str
    region: Region
    tensor: int  # index into the job's stepped tensors
    start: int


@dataclass(slots=True)
class RankRegions:
    """What one rank tells the others."""

    rank: Rank
    parameters: list[LoggedParameter]
    slices: dict[str, Region]  # name → this model-parallel rank's slice of the whole
    offers: list[LoggableRegion]
    groups: list[tuple[dict[str, Any], list[str]]]
    buffers: list[tuple[LoggedParameter, int]] = field(default_factory=list)  # whole ones, index into the job's buffers
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class SchemaAgreement:
    """What all ranks agreed on, and this rank's part of it."""

    schemas: list[StreamSchema]
    parameters: list[LoggedParameter]
    groups: list[OptimizerGroup]
    notes: list[str]
    mine: StreamSchema
    stepped: list[int]  # tensor of my stream → index into the job's stepped tensors
    buffers: list[LoggedParameter]  # all that are logged
    held: list[int]  # buffer of my stream → index into the job's buffers


def agree_on_schema(
    job: LiveJob, grad_dtypes: Sequence[str], book: RuleBook | None, client_state: dict[str, Any], rank: int
) -> SchemaAgreement:
    """Deal the parameters over the ranks. Collective. `grad_dtypes` are of the gradients of the stepped tensors."""
    offers: RankRegions | None = None
    error: BaseException | None = None
    slices = TensorParallelRules(job, book, client_state)
    slices.agree_on_defaults()
    try:
        offers = _rank_regions(job, slices)
    except Exception as caught:  # noqa: BLE001 - told to the other ranks, then raised
        error = caught
    raise_on_all(error)
    everyone: list[RankRegions] = all_gather(offers)
    parameters = _parameters(everyone)
    kept = assign_regions(everyone, {p.name: p.rule for p in parameters})
    index = {parameter.name: number for number, parameter in enumerate(parameters)}
    tensors = [_tensor(job, stepped, dtype) for stepped, dtype in zip(job.stepped, grad_dtypes, strict=True)]
    mine, stepped = _schema(rank, job.rank, kept[rank], tensors, index)
    buffers, held = _add_buffers(mine, everyone, rank)
    schemas: list[StreamSchema] = all_gather(mine)
    notes = list(dict.fromkeys(note for told in everyone for note in told.notes))
    return SchemaAgreement(schemas, parameters, _groups(everyone), notes, mine, stepped, buffers, held)


def is_trained(stepped: SteppedTensor) -> bool:
    """Will this tensor get gradients? Not a frozen parameter that the optimizer was given all the same."""
    return bool(stepped.key.requires_grad)


def _rank_regions(job: LiveJob, slices: TensorParallelRules) -> RankRegions:
    collector = StateCollector(job, slices)
    steppable = {name for stepped in job.stepped if is_trained(stepped) for name in stepped.names}
    trained = {name: group for name, group in collector.add_parameters().items() if name in steppable}
    notes = collector.state.parameters
    for stepped in job.stepped:
        if is_trained(stepped) and dtype_of(stepped.key).name not in DTYPE_CODES:
            raise UsageError(
                f"parameter {stepped.names[0]} has the element type {dtype_of(stepped.key)}, which a log does not hold",
                hint="save this job with ucp.save or ucp.snapshot, or keep real and imaginary parts as two parameters",
            )
    parameters = []
    held = {share.name: dtype_of(tensor) for share, tensor in ((h.slice, h.tensor) for h in job.weights)}
    dtypes = {name: dtype_of(stepped.key) for stepped in job.stepped for name in stepped.names}
    for name, group in trained.items():
        note = notes[job.logical_name(name)]
        dtype = str(held.get(name, dtypes[name]))
        parameters.append(LoggedParameter(note.name, note.shape, dtype, group, note.rule, note.padded_shape))
    offers = [
        LoggableRegion(job.logical_name(share.name), collector.region_of(share), number, share.start)
        for number, stepped in enumerate(job.stepped)
        if is_trained(stepped)
        for share in stepped.slices
    ]
    groups = [
        (plain_hyper_parameters(group), [job.logical_name(name) for name in names])
        for group, names in zip(job.groups, job.names_by_group(), strict=True)
    ]
    told = RankRegions(
        job.rank,
        parameters,
        {job.logical_name(name): collector.slice_region(name) for name in trained},
        offers,
        groups,
    )
    cut = []
    for number, buffer in enumerate(job.buffers):
        note = notes[job.logical_name(buffer.slice.name)]
        whole = buffer.slice.region.numel == prod(note.shape) and note.rule.cut != "average"
        if whole and dtype_of(buffer.tensor).name in DTYPE_CODES:
            told.buffers.append((LoggedParameter(note.name, note.shape, str(dtype_of(buffer.tensor)), -1), number))
        else:
            cut.append(note.name)
    if cut:
        names = ", ".join(cut[:3])
        told.notes.append(f"buffers are not logged, they are those of the base: {names} ({len(cut)} in all)")
    if sees_vectors(kernel_of(job.optimizer)) and not all(local_tensor(s.key).is_contiguous() for s in job.stepped):
        told.notes.append(
            "some optimizer tensors are not row-major: a fused kernel sees their elements in another order"
        )
    return told


def _tensor(job: LiveJob, stepped: Any, grad_dtype: str) -> OptimizerTensor:
    names = tuple(job.logical_name(name) for name in stepped.names)
    local = local_tensor(stepped.key)
    return OptimizerTensor(local.numel(), stepped.group, str(dtype_of(local)), grad_dtype, names)


def _parameters(everyone: Sequence[RankRegions]) -> list[LoggedParameter]:
    found: dict[str, LoggedParameter] = {}
    for told in everyone:
        for parameter in told.parameters:
            other = found.setdefault(parameter.name, parameter)
            if other.shape != parameter.shape:
                raise UsageError(
                    f"parameter {parameter.name} has shape {list(other.shape)} on one rank"
                    f" and {list(parameter.shape)} on another ({told.rank})"
                )
    return list(found.values())


def assign_regions(everyone: Sequence[RankRegions], rules: dict[str, Rule]) -> list[list[LoggableRegion]]:
    """Which of its offers each rank logs, so that every element is logged once.

    Equal model-parallel slices are copies: the first such rank logs them (of an averaged parameter, all). Of ranks that
    hold the same elements in one slice (ZeRO off), the one with the fewest elements so far takes them.
    """
    owners = _owners(everyone, rules)
    candidates: dict[tuple[str, Region, tuple[int, int]], list[tuple[int, LoggableRegion]]] = {}
    for number, told in enumerate(everyone):
        place = told.rank.pp, told.rank.tp
        for offer in told.offers:
            if place in owners[offer.name]:
                candidates.setdefault((offer.name, offer.region, place), []).append((number, offer))
    kept: list[list[LoggableRegion]] = [[] for _ in everyone]
    load = [0] * len(everyone)
    for held in candidates.values():
        number, offer = min(held, key=lambda each: (load[each[0]], each[0]))
        kept[number].append(offer)
        load[number] += offer.region.numel
    return kept


def _owners(everyone: Sequence[RankRegions], rules: dict[str, Rule]) -> dict[str, set[tuple[int, int]]]:
    """Name → the (pp, tp) places that log it."""
    first: dict[str, dict[Region, tuple[int, int]]] = {}
    places: dict[str, set[tuple[int, int]]] = {}
    for told in sorted(everyone, key=lambda told: (told.rank.pp, told.rank.tp)):
        place = told.rank.pp, told.rank.tp
        for name, region in told.slices.items():
            if rules[name].cut == "average":
                places.setdefault(name, set()).add(place)
            else:
                first.setdefault(name, {}).setdefault(region, place)
    return {**{name: set(found.values()) for name, found in first.items()}, **places}


def _schema(
    stream: int, rank: Rank, kept: list[LoggableRegion], tensors: list[OptimizerTensor], index: dict[str, int]
) -> tuple[StreamSchema, list[int]]:
    """This rank's stream, and which stepped tensor each of its tensors is."""
    schema = StreamSchema(stream, rank)
    used = sorted({offer.tensor for offer in kept})
    for number, stepped in enumerate(used):
        schema.tensors.append(tensors[stepped])
        shares = [(index[offer.name], offer.region, offer.start) for offer in kept if offer.tensor == stepped]
        schema.blocks.extend(cut_blocks(len(schema.blocks), number, sorted(shares, key=lambda share: share[2])))
    return schema, used


def _add_buffers(
    mine: StreamSchema, everyone: Sequence[RankRegions], rank: int
) -> tuple[list[LoggedParameter], list[int]]:
    """All buffers that are logged, by the first rank that has them; and which of its own a rank logs."""
    owners: dict[str, tuple[int, LoggedParameter]] = {}
    for number, told in enumerate(everyone):
        for buffer, _ in told.buffers:
            owners.setdefault(buffer.name, (number, buffer))
    buffers = [buffer for _, buffer in owners.values()]
    index = {buffer.name: number for number, buffer in enumerate(buffers)}
    held = []
    for buffer, number in everyone[rank].buffers:
        if owners[buffer.name][0] == rank:
            region = Region.all_of(buffer.shape)
            mine.buffers.append(LogBlock(len(mine.buffers), index[buffer.name], region, -1, 0, region.numel))
            held.append(number)
    return buffers, held


def _groups(everyone: Sequence[RankRegions]) -> list[OptimizerGroup]:
    """Groups with the parameters that all ranks have in them (pipeline stages have different ones)."""
    count = max((len(told.groups) for told in everyone), default=0)
    groups = []
    for number in range(count):
        held = [told.groups[number] for told in everyone if number < len(told.groups)]
        names = dict.fromkeys(name for _, some in held for name in some)
        groups.append(OptimizerGroup(held[0][0], tuple(names)))
    return groups


def manifest_of(
    job: LiveJob, agreed: SchemaAgreement, kernel: KernelFingerprint, run: str, epoch: int, start: int
) -> EpochManifest:
    """The manifest of a new epoch, still without parent, base, and the kinds of states that the optimizer makes."""
    return EpochManifest(
        run,
        epoch,
        start,
        job.mesh,
        kernel,
        f"{type(job.optimizer).__module__}.{type(job.optimizer).__qualname__}",
        agreed.parameters,
        agreed.groups,
        agreed.schemas,
        state_kinds=list(FIRST_KINDS),
        notes=agreed.notes,
        buffers=agreed.buffers,
    )


__all__ = ["LoggableRegion", "RankRegions", "SchemaAgreement", "agree_on_schema", "assign_regions", "manifest_of"]
