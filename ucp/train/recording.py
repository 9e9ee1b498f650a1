"""`ucp.record`: log every step of a live job, so that any of them can be had again in any layout."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from ucp.errors import StorageError, UcpError, UsageError
from ucp.log.bases import list_bases
from ucp.log.frames import FrameType
from ucp.log.manifest import Manifest, write_manifest
from ucp.log.measured import REPLAY_SECONDS
from ucp.log.payloads import pack_digests
from ucp.log.reader import Log, epoch_folder, find_parent, stream_folder
from ucp.log.tuning import Costs, Tuner
from ucp.log.writer import Writer
from ucp.shadow.sink import ShadowSink
from ucp.shadow.wire import parse_address
from ucp.train.describe import describe
from ucp.train.live import LiveJob
from ucp.train.recording_bases import Bases
from ucp.train.recording_hooks import Hooks, Taker, grad_dtypes, hang_in, stage_of
from ucp.train.recording_kernel import kernel_of, own_step
from ucp.train.recording_notes import job_notes, plain_notes, state_digests
from ucp.train.recording_schema import Agreement, agree_on_schema, manifest_of
from ucp.train.rulebooks import rule_book
from ucp.train.saving import SaveHandle, save
from ucp.train.talk import agree, gather, world

OnError = Literal["raise", "stop"]

TUNE_EVERY = 100  # steps, with an automatic interval between bases


def record(
    model: Any,
    optimizer: Any = None,
    path: str | os.PathLike[str] | None = None,
    *,
    base: str | Literal["now"] | None = "now",
    base_every: int | Literal["auto"] | None = None,
    mtbf: float | None = None,
    keep_bases: int | None = 2,
    step: int | None = None,
    compress: bool = False,
    slots: int | None = None,
    batch_steps: int = 1,
    aux: Callable[[], Any] | None = None,
    on_error: OnError = "raise",
    to: str | None = None,
    shadow_wait: float = 0.0,
    client_state: dict[str, Any] | None = None,
    rules: str | Path | None = None,
    preset: str | None = None,
) -> Recorder:
    """Log every optimizer step of a live job from now on. Every rank must call it, between two steps.

    `model` is a DeepSpeed engine, or a torch module (plain, DDP, FSDP2) with its `optimizer`; `path` is the run's
    folder, the same on all ranks. A log that is there is gone on with, in a new epoch.

    `base` says what the log starts from: `"now"` saves the state as it is, a path names a checkpoint of just this
    state, None needs a log that reaches this step. With `base_every`, another base is saved in the background after so
    many steps; `keep_bases` of them are kept, and the log from the oldest of these on (None: everything). With
    `"auto"`, the interval that wastes least time is chosen from what is measured and `mtbf`, the mean time between
    failures of the job in seconds; and again every hundred steps.

    `step` is the number of steps that the state has behind it (DeepSpeed and most optimizers know). `compress` packs
    blocks with zstd: a third less space for ten times the CPU. `slots` is how many steps may wait for the disk before
    training does, `batch_steps` how many at least become durable together. `aux` gives JSON values that are logged with
    every step. `on_error="stop"` ends the recording when it fails, where otherwise the step raises.

    `to="shadow://host:port"` sends every step to a shadow as well (`ucp shadow`). One that is too slow, or gone, holds
    the log up for `shadow_wait` seconds once, and not again before it takes something: it reads from the log what it
    has missed.
    """
    if path is None:
        if not isinstance(optimizer, (str, os.PathLike)):
            raise TypeError("record needs the path of the run's folder")
        optimizer, path = None, optimizer
    recorder = Recorder(Path(path), on_error, aux)
    recorder._begin(
        model,
        optimizer,
        base=base,
        base_every=base_every,
        mtbf=mtbf,
        keep_bases=keep_bases,
        step=step,
        writer={"compress": compress, "slots": slots, "batch_steps": batch_steps},
        to=to,
        shadow_wait=shadow_wait,
        save_with={"client_state": client_state, "rules": rules, "preset": preset},
    )
    return recorder


class Recorder:
    """A recording that is under way. `close` it, or use it as a context manager."""

    def __init__(self, path: Path, on_error: OnError, aux: Callable[[], Any] | None) -> None:
        self.path = path
        self.error: UcpError | None = None  # why the recording has stopped
        self.step = 0  # the last step that was recorded, or that recording began with
        self._on_error = on_error
        self._aux = aux
        self._hooks = Hooks()
        self._hook_seconds = 0.0
        self._hook_cpu_seconds = 0.0
        self._base_seconds = 0.0  # that training waited for bases
        self._bases_taken = 0
        self._start = 0
        self._tuner: Tuner | None = None
        self._mtbf = 0.0
        self._open = False

    # ------------------------------------------------------------------------------------------------------------------
    # Beginning

    def _begin(
        self,
        model: Any,
        optimizer: Any,
        *,
        base: str | None,
        base_every: int | Literal["auto"] | None,
        mtbf: float | None,
        keep_bases: int | None,
        step: int | None,
        writer: dict[str, Any],
        to: str | None,
        shadow_wait: float,
        save_with: dict[str, Any],
    ) -> None:
        rank, _ = world()
        error: BaseException | None = None
        agreed: Agreement | None = None
        try:
            if keep_bases is not None and keep_bases < 1:
                raise UsageError("keep_bases must be at least 1, or None")
            if base_every == "auto" and (mtbf is None or mtbf <= 0):
                raise UsageError("an automatic interval between bases needs mtbf=, the seconds between failures")
            book = rule_book(save_with["rules"], save_with["preset"])
            self._job = describe(model, optimizer)
            if self._job.optimizer is None:
                raise UsageError("only a job with an optimizer can be recorded", hint="give record() the optimizer")
            self._stage = stage_of(self._job)
            self.step = _steps_taken(self._job) if step is None else step
        except Exception as caught:  # noqa: BLE001 - told to the other ranks, then raised
            error = caught
        agree(error)
        dtypes = grad_dtypes(self._job, self._stage)
        agreed = agree_on_schema(self._job, dtypes, book, dict(save_with["client_state"] or {}), rank)
        manifest: Manifest | None = None
        first_base = 0
        try:
            if rank == 0:
                manifest, first_base = self._new_epoch(agreed)
        except Exception as caught:  # noqa: BLE001
            error = caught
        agree(error)
        epoch, first_base, parent = gather(
            None if manifest is None else (manifest.epoch, first_base, manifest.parent is not None)
        )[0]
        if base is None and not parent:
            raise UsageError(
                f"{self.path}: there is no log that reaches step {self.step}",
                hint='record with base="now", or name a checkpoint of this very state',
            )

        def save_base(folder: Path, asynchronous: bool) -> SaveHandle:
            return save(model, optimizer, folder, asynchronous=asynchronous, **save_with)

        self._bases = Bases(self.path, epoch, self.step, first_base, keep_bases, save_base, rank)
        self._base_every = None if base_every == "auto" else base_every
        self._tuner, self._mtbf = Tuner() if base_every == "auto" else None, mtbf or 0.0
        begin = time.perf_counter()
        named = self._bases.begin_with(self.step) if base == "now" else base
        self._first_base_seconds = time.perf_counter() - begin
        folder = epoch_folder(self.path / "log", epoch)
        try:
            if manifest is not None:
                manifest.base = named
                write_manifest(folder, manifest)
        except Exception as caught:  # noqa: BLE001
            error = caught
        agree(error)
        self.epoch = epoch
        self._sink = None if to is None else self._reach_shadow(to, shadow_wait, manifest, rank)
        if self._sink is not None:
            writer = {**writer, "tap": self._sink.offer}
        self._schema = agreed.mine
        self._keys = [self._job.stepped[number].key for number in agreed.stepped]
        groups = [self._job.stepped[number].group for number in agreed.stepped]
        self._writer = Writer(stream_folder(folder, rank), epoch, agreed.mine, durable_step=self.step, **writer)
        self._taker = Taker(self._writer, agreed.mine, self._keys, groups)
        hang_in(self._job, self._taker, self._stage, self._hooks)
        self._hang_in_end()
        self._start, self._started = self.step, time.perf_counter()
        self._open = True

    def _reach_shadow(self, to: str, wait: float, manifest: Manifest | None, rank: int) -> ShadowSink:
        """A connection to the shadow for this rank's stream. Collective."""
        error: BaseException | None = None
        sink: ShadowSink | None = None
        told = gather(manifest)[0]
        try:
            sink = ShadowSink(parse_address(to), told, rank, self.path, wait=wait)
        except Exception as caught:  # noqa: BLE001 - told to the other ranks, then raised
            error = caught
        try:
            agree(error)
        except BaseException:
            if sink is not None:
                sink.close()
            raise
        assert sink is not None
        return sink

    def _new_epoch(self, agreed: Agreement) -> tuple[Manifest, int]:
        """The manifest of this epoch, and the number of the next base. On rank 0."""
        bases = list_bases(self.path)
        manifest = manifest_of(self._job, agreed, kernel_of(self._job.optimizer), uuid.uuid4().hex, 0, self.step)
        if (self.path / "log").is_dir() and any((self.path / "log").iterdir()):
            with Log.open(self.path / "log", "inspect", check="tail") as log:
                manifest.run = log.epochs[-1].manifest.run
                manifest.epoch = log.epochs[-1].number + 1
                manifest.parent = find_parent(log, self.step)
        return manifest, bases[-1].number + 1 if bases else 0

    def _hang_in_end(self) -> None:
        """Find the moment when a step is over: for DeepSpeed when its counters are right, else after the update."""
        engine = self._job.engine
        if engine is None:
            self._hooks.add(self._job.optimizer.register_step_post_hook(lambda *_: self._end_step()))
            return

        def around(original: Callable[..., Any]) -> Callable[..., Any]:
            def take_model_step(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                self._end_step()
                return result

            return take_model_step

        self._hooks.wrap(engine, "_take_model_step", around)

    # ------------------------------------------------------------------------------------------------------------------
    # Every step

    def _end_step(self) -> None:
        """The step is over: hand it over, take a base if it is time."""
        if not self._open:
            return
        begin, cpu = time.perf_counter(), time.thread_time()
        try:
            if self._taker.failure is not None:
                raise self._taker.failure
            self._hand_over()
            self._bases.drop_superfluous(self._writer)
            self._hook_seconds += time.perf_counter() - begin
            self._hook_cpu_seconds += time.thread_time() - cpu
            if self._tuner is not None and (self.step - self._start) % TUNE_EVERY == 0:
                self._tune()
            if self._base_every is not None and self.step - self._bases.last_step >= self._base_every:
                self.base()
        except UcpError as error:
            self._stop(error)

    def _tune(self) -> None:
        """Choose the interval between bases anew, from what the slowest rank has measured. Collective."""
        assert self._tuner is not None
        steps = self.step - self._start
        stats = self._writer.stats
        record = (self._hook_seconds + self._taker.seconds) / steps
        base_time = self._bases.seconds
        mine = (
            (time.perf_counter() - self._started - self._base_seconds) / steps - record,
            self._base_seconds / self._bases_taken if self._bases_taken else self._first_base_seconds,
            stats.stall_seconds / stats.syncs if stats.syncs else 0.0,
            record,
            self._schema.numel * REPLAY_SECONDS,
            base_time,
        )
        step, base_stall, sync_stall, record, replay, base_time = map(max, zip(*gather(mine), strict=True))
        costs = Costs(max(step, 1e-9), self._mtbf, base_stall, sync_stall, record, replay, base_time, base_time)
        choice = self._tuner.update(costs)
        self._base_every = choice.base_every
        self._writer.batch_steps = choice.batch_steps

    def _hand_over(self) -> None:
        engine = self._job.engine
        skipped = engine is not None and bool(getattr(engine.optimizer, "overflow", False))
        if not skipped and not self._taker.scalars:
            raise UcpError(f"step {self.step + 1}: the optimizer was not called, and says that nothing overflowed")
        self._taker.finish(
            self.step + 1,
            stage=self._stage,
            skipped=skipped,
            micro_batches=1 if engine is None else int(engine.gradient_accumulation_steps()),
            samples=-1 if engine is None else int(engine.global_samples),
            aux=self._notes(),
            time_ns=time.time_ns(),
        )
        self.step += 1

    def _notes(self) -> Any:
        """What the step's AUX frame holds: the job after the step, what the user gives, what recording has cost."""
        stats = self._writer.stats
        costs = {
            "steps": self.step + 1 - self._start,
            "record_seconds": round(self._hook_seconds + self._taker.seconds, 6),
            "stall_seconds": round(stats.stall_seconds, 6),
            "syncs": stats.syncs,
            "bases": self._bases_taken,
            "base_seconds": round(self._base_seconds, 6),
        }
        user = {} if self._aux is None else {"user": plain_notes(self._aux())}
        return {**job_notes(self._job), **user, "costs": costs}

    def _stop(self, error: UcpError) -> None:
        """End a recording that has failed."""
        self.error = error
        self._open = False
        self._hooks.remove()
        with contextlib.suppress(StorageError):
            self._writer.close("failed")
        self._let_shadow_go()
        if self._on_error == "raise":
            raise error

    # ------------------------------------------------------------------------------------------------------------------
    # For the user

    @property
    def durable_step(self) -> int:
        """The last step of this rank that survives a crash. (What can be had is the least of all ranks'.)"""
        return self._writer.durable_step

    def base(self) -> None:
        """Save a base of the state as it is now, in the background, with its digests in the log. Collective."""
        begin = time.perf_counter()
        self.digest()
        self._writer.rotate()
        self._bases.take(self.step)
        self._base_seconds += time.perf_counter() - begin
        self._bases_taken += 1

    def digest(self) -> None:
        """Log digests of this rank's optimizer tensors and states: a replay that meets them is proven exact."""
        self._writer.append(
            FrameType.DIGEST, self.step, pack_digests(state_digests(self._job.optimizer, self._schema, self._keys))
        )

    def flush(self) -> int:
        """Wait until every recorded step is durable; gives the last one."""
        return self._writer.flush()

    def stats(self) -> dict[str, Any]:
        """Steps, bytes, syncs, stalls; seconds in the trainer's thread (`hook_…`) and the writer's (`cpu_seconds`)."""
        return {
            **self._writer.stats.to_json(),
            "step": self.step,
            "shadow": None if self._sink is None else self._sink.told(),
            "bases": self._bases.taken,
            "base_every": self._base_every,
            "base_seconds": self._base_seconds,
            "slots": len(self._writer.slots),
            "hook_seconds": self._hook_seconds + self._taker.seconds,
            "hook_cpu_seconds": self._hook_cpu_seconds + self._taker.cpu_seconds,
        }

    def close(self, reason: str = "closed") -> None:
        """Log final digests, make everything durable, take the hooks off. Waits for a base that is under way."""
        if not self._open:
            return
        self._open = False
        self._hooks.remove()
        self._taker.forget()
        try:
            self.digest()
            self._bases.wait()
            self._bases.drop_superfluous(self._writer)
        finally:
            self._writer.close(reason)
            self._let_shadow_go()

    def _let_shadow_go(self) -> None:
        if self._sink is not None:
            self._sink.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif self._open:  # other ranks may be gone: only what this one can do alone
            self._open = False
            self._hooks.remove()
            self._writer.close(f"error: {type(error).__name__}")
            self._let_shadow_go()


def _steps_taken(job: LiveJob) -> int:
    """How many steps a job has behind it, as far as it knows."""
    if job.engine is not None:
        return int(job.engine.global_steps)
    counts = [own_step(job.optimizer, stepped.key) for stepped in job.stepped]
    return max([0, *counts])


__all__ = ["Recorder", "record"]
