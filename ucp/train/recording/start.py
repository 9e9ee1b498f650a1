"""How a recording begins: all ranks agree on a new epoch of the log, and have a base that it starts from."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ucp.errors import UsageError
from ucp.formats.rulefiles import rule_book
from ucp.log.bases import list_bases
from ucp.log.kinds import FIRST_KINDS
from ucp.log.manifest import Manifest, write_manifest
from ucp.log.payloads import Stage
from ucp.log.reader import Log, epoch_folder, find_parent
from ucp.replay.exactness import find_kernel
from ucp.train.describe import describe
from ucp.train.live import LiveJob
from ucp.train.recording.bases import Bases
from ucp.train.recording.compression import Compression, save_compression
from ucp.train.recording.deepspeed import grad_dtypes, stage_of
from ucp.train.recording.kernel import kernel_of, own_step
from ucp.train.recording.schema import Agreement, agree_on_schema, manifest_of
from ucp.train.recording.sinks import To, go_on_from_shadows
from ucp.train.saving import SaveHandle, save
from ucp.train.talk import agree, gather, world

What = Literal["gradients", "state", "auto"]
Logged = Literal["gradients", "state"]


@dataclass(slots=True)
class Start:
    """What a recording begins with."""

    job: LiveJob
    stage: Stage
    step: int  # that the state is of
    epoch: int
    folder: Path | None  # the epoch's; None: there is no log
    manifest: Manifest | None  # on rank 0
    what: Logged
    agreed: Agreement
    bases: Bases
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
    compressed: Compression | None = None,
    to: To | None = None,
) -> Start:
    """Agree on a new epoch, take or name its base. Collective. `save_with` is for `save`.

    Without a `run` there is no log: the epoch goes on from what the shadows at `to` hold, or from the base.

    The manifest of a log of gradients is written; that of a log of states must still be (`write_kinds`), since an
    optimizer may make its states in its first step.
    """
    rank, _ = world()
    error: BaseException | None = None
    try:
        if keep_bases is not None and keep_bases < 1:
            raise UsageError("keep_bases must be at least 1, or None")
        if run is None and base == "now":
            raise UsageError(
                "without a folder for the run there is no place for a base",
                hint="base= names a checkpoint of this very state; None is for a shadow that has one (--base)",
            )
        book = rule_book(save_with["rules"], save_with["preset"])
        job = describe(model, optimizer)
        if job.optimizer is None:
            raise UsageError("only a job with an optimizer can be recorded", hint="give record() the optimizer")
        logged = _what_to_log(job, what)
        stage = stage_of(job) if logged == "gradients" else Stage.CONSUMED
        step = _steps_taken(job) if step is None else step
    except Exception as caught:  # noqa: BLE001 - told to the other ranks, then raised
        error = caught
    agree(error)
    assert step is not None
    agreed = agree_on_schema(job, grad_dtypes(job, stage), book, dict(save_with["client_state"] or {}), rank)
    manifest: Manifest | None = None
    first_base = 0
    try:
        if rank == 0:
            manifest, first_base = _new_epoch(run, job, agreed, step, logged, to)
    except Exception as caught:  # noqa: BLE001
        error = caught
    agree(error)
    epoch, first_base, parent = gather(
        None if manifest is None else (manifest.epoch, first_base, manifest.parent is not None)
    )[0]
    if base is None and not parent and run is not None:
        raise UsageError(
            f"{run}: there is no log that reaches step {step}",
            hint='record with base="now", or name a checkpoint of this very state',
        )

    def save_base(folder: Path, asynchronous: bool) -> SaveHandle:
        return save(model, optimizer, folder, asynchronous=asynchronous, **save_with)

    beside = None if compressed is None else lambda folder: save_compression(compressed, folder, rank)
    bases = Bases(run or Path(), epoch, step, first_base, keep_bases, save_base, rank, beside)
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
    agree(error)
    return Start(job, stage, step, epoch, folder, manifest, logged, agreed, bases, base_seconds)


def _what_to_log(job: LiveJob, what: What) -> Logged:
    """Gradients, where there is a kernel that repeats what the optimizer does with them."""
    if what not in ("gradients", "state", "auto"):
        raise UsageError(f"what={what!r} can be gradients, state or auto")
    if what != "auto":
        return what
    return "state" if find_kernel(kernel_of(job.optimizer))[0] is None else "gradients"


def write_kinds(start: Start, kinds: list[str]) -> dict[str, int]:
    """Agree on the kinds of states of all ranks, and write the manifest. Collective. Gives kind → index."""
    union = sorted({kind for told in gather(kinds) for kind in told} - set(FIRST_KINDS))
    everything = [*FIRST_KINDS, *union]
    error: BaseException | None = None
    try:
        if start.manifest is not None and start.folder is not None:
            start.manifest.state_kinds = everything
            write_manifest(start.folder, start.manifest)
    except Exception as caught:  # noqa: BLE001 - told to the other ranks, then raised
        error = caught
    agree(error)
    return {kind: number for number, kind in enumerate(everything)}


def _new_epoch(
    run: Path | None, job: LiveJob, agreed: Agreement, step: int, logged: Logged, to: To | None
) -> tuple[Manifest, int]:
    """The manifest of this epoch, and the number of the next base. On rank 0."""
    kernel = kernel_of(job.optimizer)
    if logged == "state":  # so that nobody replays gradients that are not there
        kernel = replace(kernel, id=f"{kernel.id} (state)")
    manifest = manifest_of(job, agreed, kernel, uuid.uuid4().hex, 0, step)
    if run is None:
        assert to is not None
        go_on_from_shadows(manifest, to)
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


__all__ = ["Start", "start_epoch"]
