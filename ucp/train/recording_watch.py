"""Whether anything but the optimizer has changed what it steps: a log of gradients would know nothing of that."""

from __future__ import annotations

from collections.abc import Sequence

from ucp.errors import UsageError
from ucp.train.hooks import Hooks
from ucp.train.live import LiveJob
from ucp.train.recording_taker import Taker


class Watch:
    """Looks at the optimizer's tensors after a step and before the next. Autograd counts writes, so that is cheap.

    What it does not see (writes through `.data`) only a digest finds.
    """

    def __init__(self, job: LiveJob, taker: Taker, names: Sequence[str], hooks: Hooks) -> None:
        """`names` are of the taker's tensors. An engine writes into its own between steps: there, steps are counted."""
        self._taker = taker
        self._names = names
        self._engine, self._optimizer = job.engine, job.optimizer
        self._keys = [] if self._engine is not None else [getattr(key, "_local_tensor", key) for key in taker.keys]
        self._seen = self._look()
        hooks.add(job.optimizer.register_load_state_dict_post_hook(lambda _: self._fail("states were loaded into it")))
        hooks.add(job.optimizer.register_step_pre_hook(lambda *_: self._compare()))

    def end_update(self) -> None:
        """The optimizer has taken its step: did it have the gradients that were taken?"""
        hooks = self._optimizer._optimizer_step_pre_hooks
        if next(reversed(hooks)) == self._taker.hook.id:
            return
        # Something that was hung in later has had them after us. From the next step on it has them before.
        hooks.move_to_end(self._taker.hook.id)
        for number, key in enumerate(self._taker.keys if self._engine is None else ()):
            if key.grad is not None:
                self._taker.check(number, key.grad, all_of_it=True)

    def end_step(self) -> None:
        """The step is over: from now on nobody else may write."""
        self._seen = self._look()

    def _look(self) -> list[tuple[int, int]]:
        if self._engine is not None:
            return [(int(self._engine.global_steps), 0)]
        return [(key._version, key.data_ptr()) for key in self._keys]

    def _compare(self) -> None:
        now = self._look()
        if now == self._seen:
            return
        if self._engine is not None:
            self._fail(f"its engine is at step {now[0][0]}, and was at step {self._seen[0][0]}")
        else:
            number = next(i for i, (a, b) in enumerate(zip(now, self._seen, strict=True)) if a != b)
            self._fail(f"{self._names[number]} was changed by something else")

    def _fail(self, what: str) -> None:
        self._taker.failure = self._taker.failure or UsageError(
            f"since the optimizer's last step, {what}: a log of gradients does not lead there",
            hint='close the recorder and record again after it; or record states: what="state"',
        )
