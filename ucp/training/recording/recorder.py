"""Whether a job is the only one that records into its folder.

A recording that is under way: what happens at the end of every step, and what its user may ask for.

`ucp.record`: log every step of a live job, so that any of them can be had again in any layout.
"""

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
from ucp.training.recording.logged_values import StepValues, job_notes, plain_notes, state_digests
from ucp.training.recording.tamper_check import TamperCheck, UntrainedCheck
from ucp.training.shadow.sink import ShadowSinks

CHECK_SECONDS = 1.0  # seconds


class EpochGuard:
    """Looks now and then whether another job has begun a newer epoch: then what this one logs leads nowhere."""

    def __init__(self, run: Path | None, epoch: int) -> None:
        """Without a `run` there is nothing to look at."""
        self._run = run
        self._epoch = epoch
        self._looked = time.monotonic()

    def check(self, step: int) -> None:
        """Raise where it is so. `step` is the last that was recorded."""
        if self._run is None or time.monotonic() - self._looked < CHECK_SECONDS:
            return
        self._looked = time.monotonic()
        if epoch_folder(self._run / "log", self._epoch + 1).exists():
            raise UsageError(
                f"{self._run}: another job records here since this one began (epoch {self._epoch + 1}): steps of this"
                f" one after step {step} do not count",
                hint="give every job a folder of its own; where the other is a restart of this one, end this one",
            )


OnError = Literal["raise", "stop"]


class Recorder:
    """A recording that is under way. `close` it, or use it as a context manager."""

    def __init__(
        self, path: Path | None, on_error: OnError, aux: Callable[[], Any] | None, sink: ShadowSinks | None
    ) -> None:
        self.path = path  # None: there is no log
        self.error: UcpError | None = None  # why the recording has stopped
        self.step = 0  # the last step that was recorded, or that recording began with
        self._on_error = on_error
        self._aux = aux
        self._hooks = Hooks()
        self._sink = sink
        self._start = 0
        self._open = False
        self._told = False  # do all ranks know that one has failed?

    def _begin(
        self,
        model: Any,
        start: EpochStart,
        writer: dict[str, Any],
        base_every: int | Literal["auto"] | None,
        mtbf: float | None,
        early: bool,
    ) -> None:
        """Hang the recorder in. `writer` are the arguments of the log's writer."""
        self._job, self._stage, self._bases = start.job, start.stage, start.bases
        self.step, self.epoch = start.step, start.epoch
        self._intervals = BaseInterval(base_every, mtbf or 0.0, self.step)
        if self._sink is not None:
            writer = {**writer, "on_frame": self._sink.offer}
        self._schema = start.agreed.mine
        self._keys = start.keys
        folder = None if start.folder is None else stream_folder(start.folder, self._schema.stream)
        gradients = start.what == "gradients"
        self._writer = StreamWriter(
            folder, start.epoch, self._schema, durable_step=self.step, gradients=gradients, **writer
        )
        self._taker = GradientCapture(self._writer, self._schema, self._keys, start.groups, gradients=gradients)
        self._values = StepValues(start, model, self._writer, self._sink)
        self._resting = UntrainedCheck(self._job)
        self._watch: TamperCheck | None = None
        if gradients:
            names = [tensor.names[0] for tensor in self._schema.tensors]
            self._watch = TamperCheck(self._job, self._taker, names, self._hooks)  # before what takes gradients
            self._early = hook_gradients(self._job, self._taker, self._stage, self._hooks, model=model, early=early)
        else:
            self._early = hook_scalars(self._job, self._taker, self._hooks)
        self._hang_in_end()
        self._start = self._passed = self.step  # steps that are over, recorded or not
        self._alone = EpochGuard(self.path, self.epoch)
        self._spent = RecorderTimings(first_base_seconds=start.base_seconds)
        self._open = True

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
        self._passed += 1
        if not self._open:
            self._tell_others()
            return
        begin, cpu = time.perf_counter(), time.thread_time()
        try:
            if self._watch is not None:
                self._watch.end_update()
            if self._taker.failure is not None:
                raise self._taker.failure
            self._resting.check()
            self._alone.check(self.step)
            self._bases.raise_error()
            self._hand_over()
            self._early.next_step()
            if self._watch is not None:
                self._watch.end_step()
            self._bases.drop_superfluous(self._writer)
            self._spent.hook_seconds += time.perf_counter() - begin
            self._spent.hook_cpu_seconds += time.thread_time() - cpu
            if self._intervals.are_chosen_after(self.step):
                self._tune()
            if self._intervals.want_base(self.step, self._bases.last_step):
                self.base()
        except UcpError as error:
            self._stop(error)

    def _tell_others(self) -> None:
        """The recording has failed on this rank: the others are told when they would wait for it."""
        due = self._intervals.want_all(self._passed, self._bases.last_step)
        if due and self.error is not None and not self._told:
            self._hooks.remove()
            with contextlib.suppress(UcpError):
                self._agree(self.error)

    def _agree(self, error: BaseException | None) -> None:
        """Raise where this rank or another no longer records. Collective."""
        self._told = True
        raise_on_all(error)
        self._told = False

    def _tune(self) -> None:
        """Choose the interval between bases anew, from what the slowest rank has measured. Collective."""
        self._agree(None)
        self._writer.batch_steps = self._intervals.choose(
            self._spent,
            self._writer.stats,
            steps=self.step - self._start,
            record_seconds=self._record_seconds,
            whole_base_seconds=self._bases.seconds,
            numel=self._schema.numel,
        ).batch_steps

    @property
    def _record_seconds(self) -> float:
        """That all hooks have taken so far."""
        return self._spent.hook_seconds + self._taker.seconds

    def _hand_over(self) -> None:
        engine = self._job.engine
        skipped = self._taker.skipped or bool(getattr(getattr(engine, "optimizer", None), "overflow", False))
        if not skipped and not self._taker.called:
            raise UcpError(f"step {self.step + 1}: the optimizer was not called, and says that nothing overflowed")
        slot = self._taker.begin()
        slot.values = self._values.of_step(slot.number, skipped=skipped)
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
        costs = self._spent.to_json(self.step + 1 - self._start, self._record_seconds, self._writer.stats)
        user = {} if self._aux is None else {"user": plain_notes(self._aux())}
        return {**job_notes(self._job), **user, "costs": costs}

    def _stop(self, error: UcpError) -> None:
        """End a recording that has failed."""
        self.error = error
        self._open = False
        self._unhook()
        with contextlib.suppress(StorageError):
            self._writer.close("failed")
        self._let_shadow_go()
        if self._on_error == "raise":
            raise error
        if rank_and_size()[1] > 1 and not self._told:  # the others go on, and will want to save a base with this one
            self._hang_in_end()
            self._tell_others()

    # ------------------------------------------------------------------------------------------------------------------
    # For the user

    @property
    def durable_step(self) -> int:
        """The last step of this rank that survives a crash. (What can be had is the least of all ranks'.)

        Without a log, the last that was handed to the connection with the shadow: whether it has that, it says itself.
        """
        return self._writer.durable_step

    def base(self) -> None:
        """Save a base of the state as it is now, in the background, with its digests in the log. Collective."""
        if self.path is None:
            raise UsageError("without a folder for the run there is no place for bases", hint="use ucp.save")
        begin = time.perf_counter()
        self._agree(self.error or self._bases.failure())
        self.digest()
        self._writer.rotate()
        self._bases.take(self.step)
        self._spent.base_seconds += time.perf_counter() - begin
        self._spent.bases += 1

    def digest(self) -> None:
        """Log digests of this rank's optimizer tensors and states: a replay that meets them is proven exact."""
        self._writer.append(
            FrameType.DIGEST, self.step, pack_digests(state_digests(self._job.optimizer, self._schema, self._keys))
        )

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Any:
        """Clip the optimizer's gradients as `torch.nn.utils.clip_grad_norm_` does; gives their norm.

        With torch's own function the clipped gradients are logged. With this one, what they were before and the factor
        are, so that gradients of few bits (reduced in bfloat16) stay so in the log: half the bytes.
        """
        if self._job.engine is not None:
            raise UsageError("a DeepSpeed engine clips by itself", hint="set gradient_clipping in its configuration")
        return self._early.clip([p for group in self._job.groups for p in group["params"]], max_norm, norm_type)

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
            "base_every": self._intervals.base_every,
            "base_seconds": self._spent.base_seconds,
            "slots": len(self._writer.slots),
            "early": self._early.tensors,
            "hook_seconds": self._record_seconds,
            "hook_cpu_seconds": self._spent.hook_cpu_seconds + self._taker.cpu_seconds,
        }

    def close(self, reason: str = "closed") -> None:
        """Log final digests, make everything durable, take the hooks off. Waits for a base that is under way."""
        if not self._open:
            return
        self._open = False
        self._unhook()
        self._taker.forget()
        try:
            with contextlib.ExitStack() as last:
                last.callback(self._let_shadow_go)
                last.callback(self._writer.close, reason)
                self._values.close()
                self.digest()
                self._bases.wait()
                self._bases.drop_superfluous(self._writer)
        except StorageError as error:
            self.error = error
            if self._on_error == "raise":
                raise

    def _unhook(self) -> None:
        self._hooks.remove()
        self._early.stop()

    def _let_shadow_go(self) -> None:
        if self._sink is not None:
            self._sink.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            self.close()
        elif self._open:  # other ranks may be gone: only what this one can do alone
            self._open = False
            self._unhook()
            self._writer.close(f"error: {type(error).__name__}")
            self._let_shadow_go()


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
    """Log every optimizer step of a live job from now on. Every rank must call it, between two steps.

    `model` is a DeepSpeed engine, or a torch module (plain, DDP, FSDP2) with its `optimizer`; `path` is the run's
    folder, the same on all ranks. A log that is there is gone on with, in a new epoch.

    `what` is logged: `"gradients"`, from which every state follows where the optimizer can be replayed; or `"state"`,
    all states of the optimizer after every step, which is several times as much. `"auto"` chooses by the optimizer.

    `base` says what the log starts from: `"now"` saves the state as it is, a path names a checkpoint of just this
    state, None needs a log that reaches this step. With `base_every`, another base is saved in the background after so
    many steps; `keep_bases` of them are kept, and the log from the oldest of these on (None: everything). With
    `"auto"`, the interval that wastes least time is chosen from what is measured and `mtbf`, the mean time between
    failures of the job in seconds; and again every hundred steps.

    `step` is the number of steps that the state has behind it (DeepSpeed and most optimizers know). `compress` packs
    blocks with zstd: a third less space for ten times the CPU. `slots` is how many steps may wait for the disk before
    training does, `batch_steps` how many at least become durable together. `aux` gives JSON values that are logged with
    every step. `on_error="stop"` ends the recording when it fails, where otherwise the step raises.

    `compressed` is what compresses the gradients that training itself uses, `ucp.TopK` or anything whose `state_dict()`
    has its error feedback: blocks are logged sparse then, and every base has that state, so a resume from it is exact.

    Gradients are taken when the optimizer is called; with `early`, as soon as each is final, layer by layer while the
    backward pass goes on, where that is right. DDP gets a comm hook for it. What is changed afterwards is taken again.

    `to="shadow://host:port"` sends every step to a shadow as well (`ucp shadow`). One that is too slow, or gone, holds
    the log up for `shadow_wait` seconds once, and not again before it takes something: it reads from the log what it
    has missed. A list names several shadows: each may hold everything, or a share (`ucp shadow --share 1/2`). With
    `to="shm://name"`, the steps go to a shadow of this machine through shared memory. Without a `path`, they go to the
    shadow alone: there is no log, so that one that has missed more than the job keeps cannot go on.
    """
    if path is None and to is None:
        raise TypeError("record needs the path of a run folder, or to=, the address of a shadow")
    if path is None and base_every is not None:
        raise UsageError("without a folder for the run there is no place for bases", hint="leave base_every= out")
    run = None if path is None else local_path(path, "jobs record")
    if base_every == "auto" and (mtbf is None or mtbf <= 0):
        raise UsageError("an automatic interval between bases needs mtbf=, the seconds between failures")
    save_with = {"client_state": client_state, "rules": rules, "preset": preset}
    start = start_epoch(
        run,
        model,
        optimizer,
        what=what,
        base=base,
        keep_bases=keep_bases,
        step=step,
        save_with=save_with,
        compressed=checked_compression(compressed),
        to=to,
    )
    sink = None if to is None else connect_shadows(to, shadow_wait, start.manifest, run, rank_and_size()[0])
    recorder = Recorder(run, on_error, aux, sink)
    writer = {"compress": compress, "sparse": compressed is not None, "slots": slots, "batch_steps": batch_steps}
    recorder._begin(model, start, writer, base_every, mtbf, early)
    return recorder
