"""Where a recorder sends its steps besides the log.

How a recording begins: all ranks agree on a new epoch of the log, and have a base that it starts from.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ucp.engine.work_shard import WorkShard
from ucp.errors import UsageError
from ucp.formats.sharded.rule_files import load_rule_book
from ucp.log.base_folders import list_bases
from ucp.log.epoch_manifest import EpochManifest, ParentEpoch, write_manifest
from ucp.log.payloads import GradientStage
from ucp.log.reader import Log, epoch_folder, find_parent
from ucp.log.stream_schema import FIRST_KINDS
from ucp.replay.exactness import find_kernel
from ucp.training.adapters import describe_job
from ucp.training.collectives import all_gather, raise_on_all, rank_and_size
from ucp.training.gradient_compression import GradientCompression, save_compression
from ucp.training.live_job import LiveJob
from ucp.training.recording.base_saver import BaseSaver
from ucp.training.recording.capture_hooks import grad_dtypes, stage_of
from ucp.training.recording.optimizer_kernel import kernel_of, own_step
from ucp.training.recording.schema_agreement import SchemaAgreement, agree_on_schema, manifest_of
from ucp.training.save import SaveHandle, save
from ucp.training.shadow.client import ShadowConnection, check_shares
from ucp.training.shadow.protocol import ShadowAddress, parse_addresses
from ucp.training.shadow.sink import ShadowSink, ShadowSinks

ShadowAddresses = str | Sequence[str]  # addresses of shadows


def continue_from_shadows(manifest: EpochManifest, to: ShadowAddresses) -> None:
    """Make a manifest that no log knows the next epoch of what the shadows follow, where they do. On rank 0."""
    told = []
    for address in parse_addresses(to):
        with ShadowConnection(address) as shadow:
            told.append(shadow.ask({"ask": "status"}))
    following = [one for one in told if one["step"] is not None]
    if not following:
        return
    if any(one["feeds"] for one in following):
        raise UsageError(
            "another job feeds this shadow now", hint="wait until its connections have ended, or start another shadow"
        )
    newest = max(following, key=lambda one: int(one["epoch"]))
    manifest.run, manifest.epoch = str(newest["run"]), int(newest["epoch"]) + 1
    if all((one["run"], one["epoch"]) == (newest["run"], newest["epoch"]) for one in told):
        # A share gives older steps as well: whether it has this one is its own to say.
        manifest.parent = ParentEpoch(int(newest["epoch"]), manifest.start)


def connect_shadows(
    to: ShadowAddresses, wait: float, manifest: EpochManifest | None, run: Path | None, rank: int
) -> ShadowSinks:
    """A connection to every shadow for this rank's stream. Collective. `manifest` is rank 0's to tell."""
    error: BaseException | None = None
    sinks: list[ShadowSink] = []
    told = all_gather(manifest)[0]
    try:
        addresses = parse_addresses(to)
        if rank == 0:
            _check_shadow_shards(addresses)
    except Exception as caught:  # noqa: BLE001
        error = caught
    raise_on_all(error)
    try:
        for address in addresses:
            sinks.append(ShadowSink(address, told, rank, run, wait=wait))
    except Exception as caught:  # noqa: BLE001 - told to the other ranks, then raised
        error = caught
    try:
        raise_on_all(error)
    except BaseException:
        for sink in sinks:
            sink.close()
        raise
    return ShadowSinks(sinks)


def _check_shadow_shards(addresses: Sequence[ShadowAddress]) -> None:
    """Do the shadows hold everything together? Asked before any of them begins to follow this run."""
    shares = []
    for address in addresses:
        with ShadowConnection(address) as shadow:
            number, count = shadow.ask({"ask": "status"})["share"]
        shares.append((address, WorkShard(number - 1, count)))
    check_shares(shares)


What = Literal["gradients", "state", "auto"]
Logged = Literal["gradients", "state"]


@dataclass(slots=True)
class EpochStart:
    """What a recording begins with."""

    job: LiveJob
    stage: GradientStage
    step: int  # that the state is of
    epoch: int
    folder: Path | None  # the epoch's; None: there is no log
    manifest: EpochManifest | None  # on rank 0
    what: Logged
    agreed: SchemaAgreement
    bases: BaseSaver
    base_seconds: float  # that the first base took

    @property
    def keys(self) -> list[Any]:
        """The optimizer's tensors of this rank's stream."""
        return [self.job.stepped[number].key for number in self.agreed.stepped]

    @property
    def groups(self) -> list[int]:
        """The groups that they are in."""
        return [self.job.stepped[number].group for number in self.agreed.stepped]


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
    """Agree on a new epoch, take or name its base. Collective. `save_with` is for `save`.

    Without a `run` there is no log: the epoch goes on from what the shadows at `to` hold, or from the base.

    The manifest of a log of gradients is written; that of a log of states must still be (`write_kinds`), since an
    optimizer may make its states in its first step.
    """
    rank, _ = rank_and_size()
    error: BaseException | None = None
    try:
        if keep_bases is not None and keep_bases < 1:
            raise UsageError("keep_bases must be at least 1, or None")
        if run is None and base == "now":
            raise UsageError(
                "without a folder for the run there is no place for a base",
                hint="base= names a checkpoint of this very state; None is for a shadow that has one (--base)",
            )
        book = load_rule_book(save_with["rules"], save_with["preset"])
        job = describe_job(model, optimizer)
        if job.optimizer is None:
            raise UsageError("only a job with an optimizer can be recorded", hint="give record() the optimizer")
        logged = _what_to_log(job, what)
        stage = stage_of(job) if logged == "gradients" else GradientStage.CONSUMED
        step = _steps_taken(job) if step is None else step
    except Exception as caught:  # noqa: BLE001 - told to the other ranks, then raised
        error = caught
    raise_on_all(error)
    assert step is not None
    agreed = agree_on_schema(job, grad_dtypes(job, stage), book, dict(save_with["client_state"] or {}), rank)
    manifest: EpochManifest | None = None
    first_base = 0
    try:
        if rank == 0:
            manifest, first_base = _new_epoch(run, job, agreed, step, logged, to)
    except Exception as caught:  # noqa: BLE001
        error = caught
    raise_on_all(error)
    epoch, first_base, parent = all_gather(
        None if manifest is None else (manifest.epoch, first_base, manifest.parent is not None)
    )[0]
    if base is None and not parent and run is not None:
        raise UsageError(
            f"{run}: there is no log that reaches step {step}",
            hint='record with base="now", or name a checkpoint of this very state',
        )

    def save_base(folder: Path, asynchronous: bool) -> SaveHandle:
        return save(folder, model, optimizer, asynchronous=asynchronous, **save_with)

    beside = None if compressed is None else lambda folder: save_compression(compressed, folder, rank)
    bases = BaseSaver(run or Path(), epoch, step, first_base, keep_bases, save_base, rank, beside)
    begin = time.perf_counter()
    named = bases.begin_with(step) if base == "now" else base
    base_seconds = time.perf_counter() - begin
    folder = None if run is None else epoch_folder(run / "log", epoch)
    try:
        if manifest is not None:
            manifest.base = named if run is not None or named is None else str(Path(named).resolve())
            if logged == "gradients" and folder is not None:
                write_manifest(folder, manifest)
    except Exception as caught:  # noqa: BLE001
        error = caught
    raise_on_all(error)
    return EpochStart(job, stage, step, epoch, folder, manifest, logged, agreed, bases, base_seconds)


def _what_to_log(job: LiveJob, what: What) -> Logged:
    """Gradients, where there is a kernel that repeats what the optimizer does with them."""
    if what not in ("gradients", "state", "auto"):
        raise UsageError(f"what={what!r} can be gradients, state or auto")
    if what != "auto":
        return what
    return "state" if find_kernel(kernel_of(job.optimizer))[0] is None else "gradients"


def write_kinds(start: EpochStart, kinds: list[str]) -> dict[str, int]:
    """Agree on the kinds of states of all ranks, and write the manifest. Collective. Gives kind → index."""
    union = sorted({kind for told in all_gather(kinds) for kind in told} - set(FIRST_KINDS))
    everything = [*FIRST_KINDS, *union]
    error: BaseException | None = None
    try:
        if start.manifest is not None and start.folder is not None:
            start.manifest.state_kinds = everything
            write_manifest(start.folder, start.manifest)
    except Exception as caught:  # noqa: BLE001 - told to the other ranks, then raised
        error = caught
    raise_on_all(error)
    return {kind: number for number, kind in enumerate(everything)}


def _new_epoch(
    run: Path | None, job: LiveJob, agreed: SchemaAgreement, step: int, logged: Logged, to: ShadowAddresses | None
) -> tuple[EpochManifest, int]:
    """The manifest of this epoch, and the number of the next base. On rank 0."""
    kernel = kernel_of(job.optimizer)
    if logged == "state":  # so that nobody replays gradients that are not there
        kernel = replace(kernel, id=f"{kernel.id} (state)")
    manifest = manifest_of(job, agreed, kernel, uuid.uuid4().hex, 0, step)
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


def _steps_taken(job: LiveJob) -> int:
    """How many steps a job has behind it, as far as it knows."""
    if job.engine is not None:
        return int(job.engine.global_steps)
    counts = [own_step(job.optimizer, stepped.key) for stepped in job.stepped]
    return max([0, *counts])
