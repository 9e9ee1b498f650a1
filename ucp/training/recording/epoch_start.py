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
from ucp.training.collectives import all_gather, fail_together, rank_and_size
from ucp.training.gradient_compression import GradientCompression, save_compression
from ucp.training.live_job import LiveJob
from ucp.training.recording.base_saver import BaseSaver
from ucp.training.recording.capture_hooks import grad_dtypes, stage_of
from ucp.training.recording.optimizer_kernel import kernel_of
from ucp.training.recording.schema_agreement import SchemaAgreement, agree_on_schema, manifest_of
from ucp.training.save import SaveHandle, save
from ucp.training.saved_index import steps_taken
from ucp.training.shadow.client import ShadowConnection, check_shards
from ucp.training.shadow.protocol import ShadowAddress, parse_addresses
from ucp.training.shadow.sink import ShadowSink, ShadowSinks

ShadowAddresses = str | Sequence[str]  # addresses of shadows


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
            _check_shadow_shards(addresses)
    try:
        with fail_together():
            for address in addresses:
                sinks.append(ShadowSink(address, first_manifest, rank, run, wait=wait))
    except BaseException:
        for sink in sinks:
            sink.close()
        raise
    return ShadowSinks(sinks)


def _check_shadow_shards(addresses: Sequence[ShadowAddress]) -> None:
    """Check that the shadows together hold the whole state, before any of them follows this run."""
    shards = []
    for address in addresses:
        with ShadowConnection(address) as shadow:
            number, count = shadow.ask({"ask": "status"})["share"]
        shards.append((address, WorkShard(number - 1, count)))
    check_shards(shards)


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
        logged = _what_to_log(job, what)
        stage = stage_of(job) if logged == "gradients" else GradientStage.CONSUMED
        step = steps_taken(job) if step is None else step
    assert step is not None
    agreement = agree_on_schema(job, grad_dtypes(job, stage), book, dict(save_with["client_state"] or {}), rank)
    manifest: EpochManifest | None = None
    first_base = 0
    with fail_together():
        if rank == 0:
            manifest, first_base = _new_epoch(run, job, agreement, step, logged, to)
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


def _what_to_log(job: LiveJob, what: What) -> Logged:
    """Resolve "auto": gradients if there is a replay kernel for the optimizer, otherwise states."""
    if what not in ("gradients", "state", "auto"):
        raise UsageError(f"invalid what={what!r} (expected gradients, state or auto)")
    if what != "auto":
        return what
    return "state" if find_kernel(kernel_of(job.optimizer))[0] is None else "gradients"


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
    run: Path | None, job: LiveJob, agreement: SchemaAgreement, step: int, logged: Logged, to: ShadowAddresses | None
) -> tuple[EpochManifest, int]:
    """The manifest of this epoch, and the number of the next base. On rank 0."""
    kernel = kernel_of(job.optimizer)
    if logged == "state":  # an id that no replay kernel has, because the log has no gradients to replay
        kernel = replace(kernel, id=f"{kernel.id} (state)")
    manifest = manifest_of(job, agreement, kernel, uuid.uuid4().hex, 0, step)
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
