"""`ucp.record`: log every step of a running job, so that the state after any of them can be restored in any layout."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from ucp.errors import StorageError, UcpError, UsageError
from ucp.log.frames import FrameType
from ucp.log.payloads import pack_digests
from ucp.log.reader import epoch_folder, stream_folder
from ucp.log.writer import StreamWriter
from ucp.storage.paths import local_path
from ucp.training.collectives import raise_on_all, rank_and_size
from ucp.training.gradient_compression import GradientCompression, checked_compression
from ucp.training.live_job import Hooks
from ucp.training.recording.base_saver import BaseInterval, RecorderTimings
from ucp.training.recording.capture import GradientCapture
from ucp.training.recording.capture_hooks import hook_gradients, hook_scalars
from ucp.training.recording.epoch_start import EpochStart, ShadowAddresses, What, connect_shadows, start_epoch
from ucp.training.recording.logged_values import StepValues, checked_aux, engine_state_json, state_digests
from ucp.training.recording.tamper_check import TamperCheck, UntrainedCheck
from ucp.training.shadow.sink import ShadowSinks

CHECK_SECONDS = 1.0  # between two checks for another job


OnError = Literal["raise", "stop"]


class Recorder:
    """A recording in progress. Call `close`, or use it as a context manager."""

    def __init__(
        self,
        path: Path | None,
        model: Any,
        start: EpochStart,
        writer: dict[str, Any],
        *,
        interval: BaseInterval,
        early: bool,
        on_error: OnError,
        aux: Callable[[], Any] | None,
        sink: ShadowSinks | None,
    ) -> None:
        """Install the hooks. `writer` are arguments of the log's writer."""
        self.path = path  # None without a log
        self.error: UcpError | None = None  # why the recording has stopped
        self.step = start.step  # the last recorded step, or the one before the first
        self.epoch = start.epoch
        self._start = self._passed = start.step  # `_passed` also counts steps that are not recorded
        self._on_error, self._aux, self._sink = on_error, aux, sink
        self._hooks = Hooks()
        self._job, self._stage, self._bases, self._keys = start.job, start.stage, start.bases, start.keys
        self._interval = interval
        self._schema = start.agreement.mine
        self._all_informed = False  # all ranks know that one has failed
        self._epoch_checked = time.monotonic()
        folder = None if start.folder is None else stream_folder(start.folder, self._schema.stream)
        gradients = start.what == "gradients"
        if sink is not None:
            writer = {**writer, "on_frame": sink.offer}
        self._writer = StreamWriter(
            folder, start.epoch, self._schema, durable_step=self.step, gradients=gradients, **writer
        )
        self._capture = GradientCapture(self._writer, self._schema, self._keys, start.groups, gradients=gradients)
        self._values = StepValues(start, model, self._writer, sink)
        self._untrained_check = UntrainedCheck(self._job)
        self._tamper_check: TamperCheck | None = None
        if gradients:
            names = [tensor.names[0] for tensor in self._schema.tensors]
            self._tamper_check = TamperCheck(self._job, self._capture, names, self._hooks)  # runs before the capture
            self._overlap = hook_gradients(self._job, self._capture, self._stage, self._hooks, model=model, early=early)
        else:
            self._overlap = hook_scalars(self._job, self._capture, self._hooks)
        self._hooks.after_step(self._job, self._end_step)
        self._timings = RecorderTimings(first_base_seconds=start.base_seconds)
        self._open = True

    # Every step -------------------------------------------------------------------------------------------------------

    def _end_step(self) -> None:
        """Submit the step, and save a base if one is due."""
        self._passed += 1
        if not self._open:
            self._inform_other_ranks()
            return
        begin, cpu = time.perf_counter(), time.thread_time()
        try:
            if self._tamper_check is not None:
                self._tamper_check.end_update()
            if self._capture.failure is not None:
                raise self._capture.failure
            self._untrained_check.check()
            self._check_epoch()
            self._bases.raise_finished_error()
            self._submit_step()
            self._overlap.next_step()
            if self._tamper_check is not None:
                self._tamper_check.end_step()
            self._bases.drop_old_segments(self._writer)
            self._timings.hook_seconds += time.perf_counter() - begin
            self._timings.hook_cpu_seconds += time.thread_time() - cpu
            if self._interval.is_tuning_step(self.step):
                self._tune()
            if self._interval.is_base_due(self.step, self._bases.last_step):
                self.base()
        except UcpError as error:
            self._stop(error)

    def _check_epoch(self) -> None:
        """Raise if another job has started a newer epoch in the same run folder."""
        if self.path is None or time.monotonic() - self._epoch_checked < CHECK_SECONDS:
            return
        self._epoch_checked = time.monotonic()
        if epoch_folder(self.path / "log", self.epoch + 1).exists():
            raise UsageError(
                f"{self.path}: another job has started to record here (epoch {self.epoch + 1}); steps of this job"
                f" after step {self.step} are not part of the log",
                hint="use a different folder for every job; if the other is a restart of this one, stop this one",
            )

    def _inform_other_ranks(self) -> None:
        """After a failure on this rank, take part in the next collective so that the other ranks stop too."""
        step, interval = self._passed, self._interval
        is_collective = interval.is_tuning_step(step) or interval.is_base_due(step, self._bases.last_step)
        if is_collective and self.error is not None and not self._all_informed:
            self._hooks.remove()
            with contextlib.suppress(UcpError):
                self._raise_on_all(self.error)

    def _raise_on_all(self, error: BaseException | None) -> None:
        """Raise if this rank or another one has stopped recording. Collective."""
        self._all_informed = True
        raise_on_all(error)
        self._all_informed = False

    def _tune(self) -> None:
        """Choose the interval between bases from the measurements of the slowest rank. Collective."""
        self._raise_on_all(None)
        self._writer.batch_steps = self._interval.choose(
            self._timings,
            self._writer.stats,
            steps=self.step - self._start,
            record_seconds=self._record_seconds,
            base_duration=self._bases.seconds,
            numel=self._schema.numel,
        ).batch_steps

    @property
    def _record_seconds(self) -> float:
        """Time spent in all hooks so far."""
        return self._timings.hook_seconds + self._capture.seconds

    def _submit_step(self) -> None:
        engine = self._job.engine
        skipped = self._capture.skipped or bool(getattr(getattr(engine, "optimizer", None), "overflow", False))
        if not skipped and not self._capture.called:
            raise UcpError(f"step {self.step + 1}: the optimizer was not called, although there was no overflow")
        slot = self._capture.acquire_slot()
        slot.values = self._values.of_step(slot.number, skipped=skipped)
        self._capture.finish(
            self.step + 1,
            stage=self._stage,
            skipped=skipped,
            micro_batches=1 if engine is None else int(engine.gradient_accumulation_steps()),
            samples=-1 if engine is None else int(engine.global_samples),
            aux=self._notes(),
        )
        self.step += 1

    def _notes(self) -> Any:
        """The contents of the step's AUX frame: the engine's state, the user's values, the costs of recording."""
        costs = self._timings.to_json(self.step + 1 - self._start, self._record_seconds, self._writer.stats)
        user = {} if self._aux is None else {"user": checked_aux(self._aux())}
        return {**engine_state_json(self._job), **user, "costs": costs}

    def _stop(self, error: UcpError) -> None:
        """Stop recording after a failure."""
        self.error = error
        self._open = False
        self._unhook()
        with contextlib.suppress(StorageError):
            self._writer.close("failed")
        self._close_sink()
        if self._on_error == "raise":
            raise error
        if rank_and_size()[1] > 1 and not self._all_informed:  # the others will reach a collective with this rank
            self._hooks.after_step(self._job, self._end_step)
            self._inform_other_ranks()

    # For the user -----------------------------------------------------------------------------------------------------

    @property
    def durable_step(self) -> int:
        """The last step of this rank that survives a crash. (The run can be restored to the minimum over all ranks.)

        Without a log, the last step that was sent to the shadow; its status shows whether it has received it.
        """
        return self._writer.durable_step

    def base(self) -> None:
        """Save a base of the current state in the background, and log its digests. Collective."""
        if self.path is None:
            raise UsageError("bases need a run folder", hint="use ucp.save")
        begin = time.perf_counter()
        self._raise_on_all(self.error or self._bases.failure())
        self.digest()
        self._writer.rotate()
        self._bases.take(self.step)
        self._timings.base_seconds += time.perf_counter() - begin
        self._timings.bases += 1

    def digest(self) -> None:
        """Log digests of this rank's optimizer tensors and states; a replay that reproduces them is proven exact."""
        self._writer.append(
            FrameType.DIGEST, self.step, pack_digests(state_digests(self._job.optimizer, self._schema, self._keys))
        )

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Any:
        """Clip the optimizer's gradients like `torch.nn.utils.clip_grad_norm_`; returns their norm.

        With torch's own function the clipped gradients are logged. With this one, the unclipped gradients and the
        factor are logged, so that gradients that were reduced in bfloat16 take half the bytes.
        """
        if self._job.engine is not None:
            raise UsageError("a DeepSpeed engine clips by itself", hint="set gradient_clipping in its configuration")
        return self._overlap.clip([p for group in self._job.groups for p in group["params"]], max_norm, norm_type)

    def flush(self) -> int:
        """Wait until every recorded step is durable; returns the last one."""
        return self._writer.flush()

    def stats(self) -> dict[str, Any]:
        """Steps, bytes, syncs, stalls; seconds in the trainer's thread (`hook_…`) and the writer's (`cpu_seconds`)."""
        return {
            **self._writer.stats.to_json(),
            "step": self.step,
            "shadow": None if self._sink is None else self._sink.report(),
            "bases": self._bases.taken,
            "base_every": self._interval.base_every,
            "base_seconds": self._timings.base_seconds,
            "slots": len(self._writer.slots),
            "early": self._overlap.tensors,
            "hook_seconds": self._record_seconds,
            "hook_cpu_seconds": self._timings.hook_cpu_seconds + self._capture.cpu_seconds,
        }

    def close(self, reason: str = "closed") -> None:
        """Log final digests, make everything durable, and remove the hooks. Waits for a base in progress."""
        if not self._open:
            return
        self._open = False
        self._unhook()
        self._capture.discard()
        try:
            with contextlib.ExitStack() as last:
                last.callback(self._close_sink)
                last.callback(self._writer.close, reason)
                self._values.close()
                self.digest()
                self._bases.wait()
                self._bases.drop_old_segments(self._writer)
        except StorageError as error:
            self.error = error
            if self._on_error == "raise":
                raise

    def _unhook(self) -> None:
        self._hooks.remove()
        self._overlap.stop()

    def _close_sink(self) -> None:
        if self._sink is not None:
            self._sink.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            self.close()
        elif self._open:  # other ranks may have died, so no collectives
            self._open = False
            self._unhook()
            self._writer.close(f"error: {type(error).__name__}")
            self._close_sink()


def record(
    path: str | os.PathLike[str] | None,
    model: Any,
    optimizer: Any = None,
    *,
    what: What = "auto",
    base: str | Literal["now"] | None = "now",
    base_every: int | Literal["auto"] | None = None,
    mtbf: float | None = None,
    keep_bases: int | None = 2,
    step: int | None = None,
    compress: bool = False,
    compressed: GradientCompression | None = None,
    slots: int | None = None,
    batch_steps: int = 1,
    aux: Callable[[], Any] | None = None,
    early: bool = False,
    on_error: OnError = "raise",
    to: ShadowAddresses | None = None,
    shadow_wait: float = 0.0,
    client_state: dict[str, Any] | None = None,
    rules: str | Path | None = None,
    preset: str | None = None,
) -> Recorder:
    """Log every optimizer step of a running job from now on. Every rank must call it, between two steps.

    `path` is the run's folder, the same on all ranks; an existing log is continued in a new epoch. `model` is a
    DeepSpeed engine, or a torch module (plain, DDP, FSDP2) with its `optimizer`.

    `what` is logged: `"gradients"`, from which states are replayed, or `"state"`, all states of the optimizer after
    every step, which takes several times as much space. `"auto"` logs gradients if the optimizer can be replayed.

    `base` is the start of the log: `"now"` saves the current state, a path names a checkpoint of exactly this state,
    and None requires a log that reaches this step. With `base_every=N`, another base is saved in the background every N
    steps; the newest `keep_bases` are kept, and the log after the oldest of them (None: everything). With `"auto"`, the
    interval with the least lost time is chosen from measurements and `mtbf`, the mean time between failures of the job
    in seconds, and updated every hundred steps.

    `step` is the number of steps that the job has taken (DeepSpeed and most optimizers count them). `compress` packs
    blocks with zstd: a third less space for ten times the CPU time. Up to `slots` steps may wait for the disk before
    training has to wait; at least `batch_steps` steps become durable together. `aux` returns JSON values to log with
    every step. With `on_error="stop"`, a failure ends the recording; by default it is raised in the optimizer step.

    `compressed` is the gradient compression of the training, `ucp.TopK` or any object whose `state_dict()` returns its
    error feedback: blocks are then logged sparse, and every base contains that state, so that resuming is exact.

    Gradients are captured when the optimizer is called; with `early`, as soon as each is final, during the backward
    pass. DDP gets a comm hook for this. Gradients that change afterwards are captured again.

    `to="shadow://host:port"` also sends every step to a shadow (`ucp shadow`), `to="shm://name"` through shared memory
    to one on this machine; a list names several shadows. A shadow that is too slow or gone delays the log once, by at
    most `shadow_wait` seconds, and reads what it has missed from the log. If `path` is None, nothing is logged: steps
    go to the shadow only, and a shadow that has missed more than the job keeps in memory cannot continue.
    """
    if path is None and to is None:
        raise TypeError("record needs the path of a run folder, or to=, the address of a shadow")
    if path is None and base_every is not None:
        raise UsageError("bases need a run folder", hint="do not pass base_every=")
    run = None if path is None else local_path(path, "jobs record")
    if base_every == "auto" and (mtbf is None or mtbf <= 0):
        raise UsageError('base_every="auto" needs mtbf=, the mean seconds between failures')
    start = start_epoch(
        run,
        model,
        optimizer,
        what=what,
        base=base,
        keep_bases=keep_bases,
        step=step,
        save_with={"client_state": client_state, "rules": rules, "preset": preset},
        compressed=checked_compression(compressed),
        to=to,
    )
    sink = None if to is None else connect_shadows(to, shadow_wait, start.manifest, run, rank_and_size()[0])
    writer = {"compress": compress, "sparse": compressed is not None, "slots": slots, "batch_steps": batch_steps}
    interval = BaseInterval(base_every, mtbf or 0.0, start.step)
    return Recorder(run, model, start, writer, interval=interval, early=early, on_error=on_error, aux=aux, sink=sink)
