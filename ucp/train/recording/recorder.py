"""A recording that is under way: what happens at the end of every step, and what its user may ask for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from ucp.errors import StorageError, UcpError, UsageError
from ucp.log.frames import FrameType
from ucp.log.payloads import pack_digests
from ucp.log.reader import stream_folder
from ucp.log.writer import Writer
from ucp.shadow.sink import Sinks
from ucp.train.hooks import Hooks
from ucp.train.recording.alone import Alone
from ucp.train.recording.costs import Intervals, Spent
from ucp.train.recording.hooks import hang_in, hang_in_scalars
from ucp.train.recording.notes import job_notes, plain_notes, state_digests
from ucp.train.recording.start import Start
from ucp.train.recording.taker import Taker
from ucp.train.recording.values import Values
from ucp.train.recording.watch import Resting, Watch
from ucp.train.talk import agree, world

OnError = Literal["raise", "stop"]


class Recorder:
    """A recording that is under way. `close` it, or use it as a context manager."""

    def __init__(self, path: Path | None, on_error: OnError, aux: Callable[[], Any] | None, sink: Sinks | None) -> None:
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
        start: Start,
        writer: dict[str, Any],
        base_every: int | Literal["auto"] | None,
        mtbf: float | None,
        early: bool,
    ) -> None:
        """Hang the recorder in. `writer` are the arguments of the log's writer."""
        self._job, self._stage, self._bases = start.job, start.stage, start.bases
        self.step, self.epoch = start.step, start.epoch
        self._intervals = Intervals(base_every, mtbf or 0.0, self.step)
        if self._sink is not None:
            writer = {**writer, "tap": self._sink.offer}
        self._schema = start.agreed.mine
        self._keys = start.keys
        folder = None if start.folder is None else stream_folder(start.folder, self._schema.stream)
        gradients = start.what == "gradients"
        self._writer = Writer(folder, start.epoch, self._schema, durable_step=self.step, gradients=gradients, **writer)
        self._taker = Taker(self._writer, self._schema, self._keys, start.groups, gradients=gradients)
        self._values = Values(start, model, self._writer, self._sink)
        self._resting = Resting(self._job)
        self._watch: Watch | None = None
        if gradients:
            names = [tensor.names[0] for tensor in self._schema.tensors]
            self._watch = Watch(self._job, self._taker, names, self._hooks)  # before what takes gradients
            self._early = hang_in(self._job, self._taker, self._stage, self._hooks, model=model, early=early)
        else:
            self._early = hang_in_scalars(self._job, self._taker, self._hooks)
        self._hang_in_end()
        self._start = self._passed = self.step  # steps that are over, recorded or not
        self._alone = Alone(self.path, self.epoch)
        self._spent = Spent(first_base_seconds=start.base_seconds)
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
        agree(error)
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
        if world()[1] > 1 and not self._told:  # the others go on, and will want to save a base with this one
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


__all__ = ["OnError", "Recorder"]
