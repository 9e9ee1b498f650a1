"""How a recording begins: all ranks agree on a new epoch of the log, and have a base that it starts from.

Before the first step, the ranks agree on which of them logs which elements of which parameter.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, Literal

from ucp.core.checkpoint import Rank
from ucp.core.region import Region
from ucp.core.rules import Rule, RuleBook
from ucp.engine.work_shard import WorkShard
from ucp.errors import UsageError
from ucp.formats.sharded.rule_files import load_rule_book
from ucp.log.base_folders import list_bases
from ucp.log.codecs import DTYPE_CODES
from ucp.log.epoch_manifest import EpochManifest, KernelFingerprint, OptimizerGroup, ParentEpoch, write_manifest
from ucp.log.payloads import GradientStage
from ucp.log.reader import Log, epoch_folder, find_parent
from ucp.log.stream_schema import FIRST_KINDS, LogBlock, LoggedParameter, OptimizerTensor, StreamSchema, cut_blocks
from ucp.replay.exactness import find_kernel
from ucp.training.adapters import describe_job
from ucp.training.collect import StateCollector, TensorParallelRules
from ucp.training.collectives import all_gather, fail_together, rank_and_size
from ucp.training.gradient_compression import GradientCompression, save_compression
from ucp.training.live_job import LiveJob, dtype_of, local_tensor
from ucp.training.recording.base_saver import BaseSaver
from ucp.training.recording.capture_hooks import grad_dtypes, stage_of
from ucp.training.recording.optimizer_kernel import depends_on_position, kernel_of, plain_hyper_parameters
from ucp.training.save import SaveHandle, save
from ucp.training.saved_index import steps_taken
from ucp.training.shadow.client import ShadowConnection, check_shards
from ucp.training.shadow.protocol import parse_addresses
from ucp.training.shadow.sink import ShadowSink, ShadowSinks

ShadowAddresses = str | Sequence[str]  # addresses of shadows
What = Literal["gradients", "state", "auto"]
Logged = Literal["gradients", "state"]


@dataclass(slots=True)
class EpochStart:
    """The start of a recording: what all ranks have agreed on, and the first base."""

    job: LiveJob
    stage: GradientStage
    step: int  # of the job's state
    epoch: int
    folder: Path | None  # of the epoch; None without a log
    manifest: EpochManifest | None  # on rank 0
    what: Logged
    agreement: SchemaAgreement
    bases: BaseSaver
    base_seconds: float  # duration of the first base

    @property
    def keys(self) -> list[Any]:
        """The optimizer's tensors of this rank's stream."""
        return [self.job.stepped[number].key for number in self.agreement.stepped]

    @property
    def groups(self) -> list[int]:
        """The param groups of `keys`."""
        return [self.job.stepped[number].group for number in self.agreement.stepped]


def start_epoch(
    run: Path | None,
    model: Any,
    optimizer: Any,
    *,
    what: What,
    base: str | None,
    keep_bases: int | None,
    step: int | None,
    save_with: dict[str, Any],
    compressed: GradientCompression | None = None,
    to: ShadowAddresses | None = None,
) -> EpochStart:
    """Agree on a new epoch, and save or name its base. Collective. `save_with` are arguments of `save`.

    Without a `run`, nothing is logged: the epoch continues from the state of the shadows at `to`, or from the base.

    The manifest of a log of gradients is written here; that of a log of states is written by `write_kinds`, because an
    optimizer may create its states in its first step.
    """
    rank, _ = rank_and_size()
    with fail_together():
        if keep_bases is not None and keep_bases < 1:
            raise UsageError("keep_bases must be at least 1, or None")
        if run is None and base == "now":
            raise UsageError(
                "a base needs a run folder",
                hint="base= names a checkpoint of exactly this state; None is for a shadow that has one (--base)",
            )
        book = load_rule_book(save_with["rules"], save_with["preset"])
        job = describe_job(model, optimizer)
        if job.optimizer is None:
            raise UsageError("only a job with an optimizer can be recorded", hint="pass the optimizer to record()")
        if what not in ("gradients", "state", "auto"):
            raise UsageError(f"invalid what={what!r} (expected gradients, state or auto)")
        kernel = kernel_of(job.optimizer)
        logged: Logged = "state" if find_kernel(kernel)[0] is None else "gradients"
        if what != "auto":
            logged = what
        stage = stage_of(job) if logged == "gradients" else GradientStage.CONSUMED
        step = steps_taken(job) if step is None else step
    assert step is not None
    agreement = agree_on_schema(job, grad_dtypes(job, stage), book, dict(save_with["client_state"] or {}), rank)
    manifest: EpochManifest | None = None
    first_base = 0
    with fail_together():
        if rank == 0:
            if logged == "state":  # an id that no replay kernel has, because the log has no gradients to replay
                kernel = replace(kernel, id=f"{kernel.id} (state)")
            manifest, first_base = _new_epoch(run, job, agreement, step, kernel, to)
    epoch, first_base, parent = all_gather(
        None if manifest is None else (manifest.epoch, first_base, manifest.parent is not None)
    )[0]
    if base is None and not parent and run is not None:
        raise UsageError(
            f"{run}: no log reaches step {step}",
            hint='record with base="now", or name a checkpoint of exactly this state',
        )

    def save_base(folder: Path, asynchronous: bool) -> SaveHandle:
        return save(folder, model, optimizer, asynchronous=asynchronous, **save_with)

    extra_files = None if compressed is None else lambda folder: save_compression(compressed, folder, rank)
    bases = BaseSaver(run or Path(), epoch, step, first_base, keep_bases, save_base, rank, extra_files)
    begin = time.perf_counter()
    first = bases.save_first(step) if base == "now" else base
    base_seconds = time.perf_counter() - begin
    folder = None if run is None else epoch_folder(run / "log", epoch)
    with fail_together():
        if manifest is not None:
            manifest.base = first if run is not None or first is None else str(Path(first).resolve())
            if logged == "gradients" and folder is not None:
                write_manifest(folder, manifest)
    return EpochStart(job, stage, step, epoch, folder, manifest, logged, agreement, bases, base_seconds)


def write_kinds(start: EpochStart, kinds: list[str]) -> dict[str, int]:
    """Agree on the union of all ranks' state kinds, and write the manifest. Collective. Returns kind → index."""
    union = sorted({kind for rank_kinds in all_gather(kinds) for kind in rank_kinds} - set(FIRST_KINDS))
    all_kinds = [*FIRST_KINDS, *union]
    with fail_together():
        if start.manifest is not None and start.folder is not None:
            start.manifest.state_kinds = all_kinds
            write_manifest(start.folder, start.manifest)
    return {kind: number for number, kind in enumerate(all_kinds)}


def _new_epoch(
    run: Path | None,
    job: LiveJob,
    agreement: SchemaAgreement,
    step: int,
    kernel: KernelFingerprint,
    to: ShadowAddresses | None,
) -> tuple[EpochManifest, int]:
    """The manifest of this epoch, without its base, and the number of the next base. On rank 0."""
    manifest = EpochManifest(
        uuid.uuid4().hex,
        0,
        step,
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
    if run is None:
        assert to is not None
        continue_from_shadows(manifest, to)
        return manifest, 0
    bases = list_bases(run)
    if (run / "log").is_dir() and any((run / "log").iterdir()):
        with Log.open(run / "log", "inspect", check="tail") as log:
            manifest.run = log.epochs[-1].manifest.run
            manifest.epoch = log.epochs[-1].number + 1
            manifest.parent = find_parent(log, step)
    return manifest, bases[-1].number + 1 if bases else 0


# Which rank logs which elements ---------------------------------------------------------------------------------------


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
    tensors = []
    for each, dtype in zip(job.stepped, grad_dtypes, strict=True):
        local, names = local_tensor(each.key), tuple(map(job.logical_name, each.names))
        tensors.append(OptimizerTensor(local.numel(), each.group, str(dtype_of(local)), dtype, names))
    mine, stepped = _schema(rank, job.rank, kept[rank], tensors, index)
    buffers, buffer_numbers = _add_buffers(mine, ranks, rank)
    schemas: list[StreamSchema] = all_gather(mine)
    notes = list(dict.fromkeys(note for each in ranks for note in each.notes))
    return SchemaAgreement(schemas, parameters, _groups(ranks), notes, mine, stepped, buffers, buffer_numbers)


def _rank_regions(job: LiveJob, tp_rules: TensorParallelRules) -> RankRegions:
    collector = StateCollector(job, tp_rules)
    steppable = {name for stepped in job.stepped if stepped.is_trained for name in stepped.names}
    trained = {name: group for name, group in collector.add_parameters().items() if name in steppable}
    infos = collector.parameters
    for stepped in job.stepped:
        if stepped.is_trained and dtype_of(stepped.key).name not in DTYPE_CODES:
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
        if stepped.is_trained
        for part in stepped.slices
    ]
    groups = [
        (plain_hyper_parameters(group), [job.logical_name(name) for name in names])
        for group, names in zip(job.groups, job.names_by_group(), strict=True)
    ]
    slices = {job.logical_name(name): collector.slice_region(name) for name in trained}
    own = RankRegions(job.rank, parameters, slices, regions, groups)
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
    are_contiguous = all(local_tensor(stepped.key).is_contiguous() for stepped in job.stepped)
    if depends_on_position(kernel_of(job.optimizer)) and not are_contiguous:
        own.notes.append(
            "some optimizer tensors are not row-major: a fused kernel sees their elements in another order"
        )
    return own


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


# Shadows --------------------------------------------------------------------------------------------------------------


def continue_from_shadows(manifest: EpochManifest, to: ShadowAddresses) -> None:
    """Continue the epochs that the shadows follow, if any, in a manifest without a log. On rank 0."""
    statuses = []
    for address in parse_addresses(to):
        with ShadowConnection(address) as shadow:
            statuses.append(shadow.ask({"ask": "status"}))
    follower = [status for status in statuses if status["step"] is not None]
    if not follower:
        return
    if any(status["feeds"] for status in follower):
        raise UsageError(
            "another job is connected to this shadow", hint="wait until that job has ended, or start another shadow"
        )
    newest = max(follower, key=lambda status: int(status["epoch"]))
    manifest.run, manifest.epoch = str(newest["run"]), int(newest["epoch"]) + 1
    if all((status["run"], status["epoch"]) == (newest["run"], newest["epoch"]) for status in statuses):
        # A shadow of a shard can also return older steps; the shadow itself checks whether it has this one.
        manifest.parent = ParentEpoch(int(newest["epoch"]), manifest.start)


def connect_shadows(
    to: ShadowAddresses, wait: float, manifest: EpochManifest | None, run: Path | None, rank: int
) -> ShadowSinks:
    """Connect this rank's stream to every shadow. Collective; `manifest` is that of rank 0."""
    sinks: list[ShadowSink] = []
    first_manifest = all_gather(manifest)[0]
    with fail_together():
        addresses = parse_addresses(to)
        if rank == 0:
            shards = []
            for address in addresses:  # they must hold the whole state, before any of them follows this run
                with ShadowConnection(address) as shadow:
                    number, count = shadow.ask({"ask": "status"})["share"]
                shards.append((address, WorkShard(number - 1, count)))
            check_shards(shards)
    try:
        with fail_together():
            for address in addresses:
                sinks.append(ShadowSink(address, first_manifest, rank, run, wait=wait))
    except BaseException:
        for sink in sinks:
            sink.close()
        raise
    return ShadowSinks(sinks)
