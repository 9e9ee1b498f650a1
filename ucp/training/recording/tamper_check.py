"""Whether anything but the optimizer has changed parameters or its states: a log of gradients knows nothing of that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from ucp.errors import UsageError
from ucp.training.live_job import Hooks, LiveJob, local_tensor
from ucp.training.recording.capture import GradientCapture, run_guarded
from ucp.training.recording.optimizer_kernel import constants
from ucp.training.recording.schema_agreement import is_trained

if TYPE_CHECKING:
    import torch

SAMPLE: Final = 16  # elements of each tensor that are looked at
_NOTHING: Final[dict[str, Any]] = {}


class TamperCheck:
    """Looks at the optimizer's tensors and states after a step and before the next.

    Autograd counts writes, so that is cheap. Writes through `.data` it does not count: a sample of the elements is
    compared. What that does not see only a digest finds.
    """

    def __init__(self, job: LiveJob, taker: GradientCapture, names: Sequence[str], hooks: Hooks) -> None:
        """`names` are of the taker's tensors. An engine writes into its own between steps: there, steps are counted."""
        self._taker = taker
        self._names = names
        self._engine, self._optimizer = job.engine, job.optimizer
        self._keys = [] if self._engine is not None else taker.keys
        self._sample = ElementSample(self._keys)
        self._dictionaries: list[int] = []  # ids of what the optimizer has for its tensors
        self._kept: list[Any] = []  # these dictionaries, so that no other gets the id of one that is gone
        self._of_keys: list[Mapping[str, Any]] = [_NOTHING] * len(self._keys)  # those of our tensors
        self._held: list[int] = []  # ids of their states
        self._by_tensor: list[list[int]] = [[] for _ in self._keys]  # the same, tensor by tensor
        self._values_held: list[Any] = []  # these states, for the same reason as dictionaries
        self._states: list[Any] = []  # those of them that are tensors
        self._owners: list[int] = []  # whose they are
        self._constants = constants(self._optimizer)
        self.end_step()
        hooks.add(job.optimizer.register_load_state_dict_post_hook(lambda _: self._fail("states were loaded into it")))
        hooks.add(job.optimizer.register_step_pre_hook(lambda *_: run_guarded(taker, self._compare)))

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
        self._seen_by_tensor = self._by_tensor
        self._values = self._sample.take()

    def _look(self) -> list[Any]:
        """What tells whether something was written to or replaced, first of the parameters, then of their states."""
        if self._engine is not None:
            return [int(self._engine.global_steps)]
        states = self._optimizer.state
        # Looking a tensor up takes longer than all of this, so dictionaries are kept while the same ones are there.
        dictionaries = [*map(id, states.values())]
        if dictionaries != self._dictionaries:
            self._dictionaries = dictionaries
            self._of_keys = [states.get(key, _NOTHING) for key in self._keys]
            self._kept = [*states.values()]
        held = [*map(id, chain.from_iterable([each.values() for each in self._of_keys]))]
        if held != self._held:
            self._held = held
            self._by_tensor = [[*map(id, each.values())] for each in self._of_keys]
            found = [(n, value) for n, each in enumerate(self._of_keys) for value in each.values()]
            self._values_held = [value for _, value in found]
            tensors = [(n, local_of(value)) for n, value in found if hasattr(value, "data_ptr")]
            self._owners, self._states = [n for n, _ in tensors], [value for _, value in tensors]
        return [write_marks(self._keys), held, [value._version for value in self._states]]

    def _compare(self) -> None:
        found = constants(self._optimizer)  # ZeRO steps one group after the other; one that is new is told of later
        if any(self._constants.get(group, told) != told for group, told in found.items()):
            self._fail("its settings were changed otherwise than a step can tell (fused, lr_decay, …)")
        before, now = self._seen, self._look()
        if self._engine is not None:
            if now != before:
                self._fail(f"its engine is at step {now[0]}, and was at step {before[0]}")
        elif now[0] != before[0]:
            self._fail(f"{self._names[_first_difference(now[0], before[0])]} was changed by something else")
        elif now != before:
            if now[1] != before[1]:
                number = _first_difference(self._by_tensor, self._seen_by_tensor)
            else:
                number = self._owners[_first_difference(now[2], before[2])]
            self._fail(f"a state of {self._names[number]} was changed by something else")
        elif (changed := self._sample.changed_since(self._values)) is not None:
            self._fail(f"{self._names[changed]} was changed by something else, through .data")

    def _fail(self, what: str) -> None:
        self._taker.failure = self._taker.failure or UsageError(
            f"since the optimizer's last step, {what}: a log of gradients does not lead there",
            hint='close the recorder and record again after it; or record states: what="state"',
        )


class UntrainedCheck:
    """Parameters that this optimizer does not step. The log has them as they are in the base, so they must stay so."""

    def __init__(self, job: LiveJob) -> None:
        """An engine may hold them elsewhere between steps: values alone are looked at, and in stage 3 nothing is."""
        held = [(held.slice.name, held.tensor) for held in job.frozen]
        held += [(stepped.names[0], stepped.key) for stepped in job.stepped if not is_trained(stepped)]
        if job.engine is not None and job.mesh.zero == 3:
            held = []
        self._names = [name for name, _ in held]
        self._marked = [tensor for _, tensor in held] if job.engine is None else []
        self._seen = write_marks(self._marked)
        self._sample = ElementSample([tensor for _, tensor in held])
        self._values = self._sample.take()

    def check(self) -> None:
        """Raise where one of them was changed."""
        marks = write_marks(self._marked)
        changed = marks != self._seen
        number = _first_difference(marks, self._seen) if changed else self._sample.changed_since(self._values)
        if number is None:
            return
        raise UsageError(
            f"parameter {self._names[number]}, which the recorded optimizer does not step, was changed by something"
            " else: the log has it only as it was when recording began",
            hint="record the part of the model that the optimizer trains, every optimizer with a folder of its own;"
            " what is averaged from weights (EMA) can be a buffer",
        )


def write_marks(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """What tells of each tensor whether it was written to or replaced, as autograd counts."""
    is_cut = any(kind.__name__ == "DTensor" for kind in {*map(type, tensors)})
    here = [*map(local_of, tensors)] if is_cut else tensors
    return [*zip([local._version for local in here], [local.data_ptr() for local in here], strict=True)]


def local_of(tensor: Any) -> Any:
    """As `local_part`, without a new tensor. To ask one for what it does not have takes longer than all the rest."""
    return tensor._local_tensor if type(tensor).__name__ == "DTensor" else tensor


def _first_difference(some: Sequence[Any], others: Sequence[Any]) -> int:
    return next(number for number, (a, b) in enumerate(zip(some, others, strict=True)) if a != b)


class ElementSample:
    """A few elements of every tensor, spread over it; one copy for all tensors of a type."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._views: dict[Any, list[tuple[int, torch.Tensor]]] = {}
        for number, tensor in enumerate(tensors):
            view = _sample_view(tensor)
            if view is not None:
                self._views.setdefault((view.device, view.dtype), []).append((number, view))

    def take(self) -> list[torch.Tensor]:
        """The elements as they are now."""
        import torch

        return [torch.cat([view for _, view in views]) for views in self._views.values()]

    def changed_since(self, taken: Sequence[torch.Tensor]) -> int | None:
        """The first tensor that is not what it was; None where all are."""
        for views, before, now in zip(self._views.values(), taken, self.take(), strict=True):
            if not _same_bits(before, now):
                parts = before.split([view.numel() for _, view in views])
                return next(
                    number for (number, view), part in zip(views, parts, strict=True) if not _same_bits(view, part)
                )
        return None


def _sample_view(tensor: torch.Tensor) -> torch.Tensor | None:
    """A view of some elements; None where a tensor does not lie densely in memory, in whatever order."""
    local = local_tensor(tensor)
    extent = sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True)) + 1
    if not local.numel() or extent != local.numel():
        return None
    return local.as_strided((local.numel(),), (1,))[:: -(-local.numel() // SAMPLE)]


def _same_bits(some: torch.Tensor, others: torch.Tensor) -> bool:
    """The same bits? (NaN is no other value than NaN.)"""
    import torch

    return bool(torch.equal(some.contiguous().view(torch.uint8), others.contiguous().view(torch.uint8)))
