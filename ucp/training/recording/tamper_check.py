"""Detect changes of parameters and optimizer states that were not made by the optimizer: a gradient log misses them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from ucp.errors import UsageError
from ucp.training.live_job import Hooks, LiveJob, local_tensor, same_bits
from ucp.training.recording.capture import GradientCapture, run_guarded
from ucp.training.recording.optimizer_kernel import constants

if TYPE_CHECKING:
    import torch

SAMPLE: Final = 16  # elements of each tensor that are compared
_NOTHING: Final[dict[str, Any]] = {}


class TamperCheck:
    """Compares the optimizer's tensors and states after a step with those before the next one.

    Comparing autograd's version counters is cheap. They do not count writes through `.data`, so a sample of elements is
    compared too. Only digests find changes outside the sample.
    """

    def __init__(self, job: LiveJob, capture: GradientCapture, names: Sequence[str], hooks: Hooks) -> None:
        """`names` are those of the captured tensors. Engines write between steps, so only their steps are counted."""
        self._capture = capture
        self._names = names
        self._engine, self._optimizer = job.engine, job.optimizer
        self._keys = [] if self._engine is not None else capture.keys
        self._sample = ElementSample(self._keys)
        self._dictionary_ids: list[int] = []  # of the optimizer's state dictionaries
        self._dictionaries: list[Any] = []  # kept so that their ids are not reused
        self._key_states: list[Mapping[str, Any]] = [_NOTHING] * len(self._keys)  # dictionaries of the captured tensors
        self._state_ids: list[int] = []  # of the values in them
        self._ids_by_tensor: list[list[int]] = [[] for _ in self._keys]  # the same, by tensor
        self._state_values: list[Any] = []  # kept so that their ids are not reused
        self._states: list[Any] = []  # those of the values that are tensors
        self._owners: list[int] = []  # the captured tensor that each state belongs to
        self._constants = constants(self._optimizer)
        self.end_step()
        hooks.add(job.optimizer.register_load_state_dict_post_hook(lambda _: self._fail("states were loaded into it")))
        hooks.add(job.optimizer.register_step_pre_hook(lambda *_: run_guarded(capture, self._compare)))

    def end_update(self) -> None:
        """After the update: check that no later hook has changed the captured gradients."""
        hooks = self._optimizer._optimizer_step_pre_hooks
        if next(reversed(hooks)) == self._capture.hook.id:
            return
        # A hook that was installed later ran after ours. From the next step on, ours runs last.
        hooks.move_to_end(self._capture.hook.id)
        for number, key in enumerate(self._capture.keys if self._engine is None else ()):
            if key.grad is not None:
                self._capture.check(number, key.grad, all_of_it=True)

    def end_step(self) -> None:
        """Remember the state at the end of a step; only the optimizer may change it until the next one."""
        self._seen = self._marks()
        self._seen_ids_by_tensor = self._ids_by_tensor
        self._values = self._sample.take()

    def _marks(self) -> list[Any]:
        """Values that change when parameters or their states are written to or replaced."""
        if self._engine is not None:
            return [int(self._engine.global_steps)]
        states = self._optimizer.state
        # Looking up tensors takes longer than everything else here, so the dictionaries are cached.
        dictionary_ids = [*map(id, states.values())]
        if dictionary_ids != self._dictionary_ids:
            self._dictionary_ids = dictionary_ids
            self._key_states = [states.get(key, _NOTHING) for key in self._keys]
            self._dictionaries = [*states.values()]
        state_ids = [*map(id, chain.from_iterable([each.values() for each in self._key_states]))]
        if state_ids != self._state_ids:
            self._state_ids = state_ids
            self._ids_by_tensor = [[*map(id, each.values())] for each in self._key_states]
            found = [(n, value) for n, each in enumerate(self._key_states) for value in each.values()]
            self._state_values = [value for _, value in found]
            tensors = [(n, local_of(value)) for n, value in found if hasattr(value, "data_ptr")]
            self._owners, self._states = [n for n, _ in tensors], [value for _, value in tensors]
        return [write_marks(self._keys), state_ids, [value._version for value in self._states]]

    def _compare(self) -> None:
        found = constants(self._optimizer)  # ZeRO updates one group at a time; new groups are reported elsewhere
        if any(self._constants.get(group, now) != now for group, now in found.items()):
            self._fail("settings that are not logged with every step were changed (fused, lr_decay, …)")
        before, now = self._seen, self._marks()
        if self._engine is not None:
            if now != before:
                self._fail(f"the engine's step has changed from {before[0]} to {now[0]}")
        elif now[0] != before[0]:
            self._fail(f"{self._names[_first_difference(now[0], before[0])]} was changed by something else")
        elif now != before:
            if now[1] != before[1]:
                number = _first_difference(self._ids_by_tensor, self._seen_ids_by_tensor)
            else:
                number = self._owners[_first_difference(now[2], before[2])]
            self._fail(f"a state of {self._names[number]} was changed by something else")
        elif (changed := self._sample.changed_since(self._values)) is not None:
            self._fail(f"{self._names[changed]} was changed by something else, through .data")

    def _fail(self, what: str) -> None:
        self._capture.failure = self._capture.failure or UsageError(
            f"since the optimizer's last step, {what}; this cannot be replayed from gradients",
            hint='close the recorder and record again after such changes, or record states: what="state"',
        )


class UntrainedCheck:
    """Checks that parameters which the optimizer does not update stay as they are in the base."""

    def __init__(self, job: LiveJob) -> None:
        """Engines may move tensors between steps, so only their values are compared; ZeRO-3 is not checked."""
        untrained = [(live.slice.name, live.tensor) for live in job.frozen]
        untrained += [(stepped.names[0], stepped.key) for stepped in job.stepped if not stepped.is_trained]
        if job.engine is not None and job.mesh.zero == 3:
            untrained = []
        self._names = [name for name, _ in untrained]
        self._marked = [tensor for _, tensor in untrained] if job.engine is None else []
        self._seen = write_marks(self._marked)
        self._sample = ElementSample([tensor for _, tensor in untrained])
        self._values = self._sample.take()

    def check(self) -> None:
        """Raise if one of them was changed."""
        marks = write_marks(self._marked)
        changed = marks != self._seen
        number = _first_difference(marks, self._seen) if changed else self._sample.changed_since(self._values)
        if number is None:
            return
        raise UsageError(
            f"parameter {self._names[number]}, which the recorded optimizer does not update, was changed by something"
            " else; the log has only its value at the start of recording",
            hint="record only the part of the model that the optimizer trains, each optimizer in its own folder;"
            " averaged weights (EMA) can be buffers",
        )


def write_marks(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """(autograd version, address) of each tensor, which change when it is written to or replaced."""
    has_dtensors = any(kind.__name__ == "DTensor" for kind in {*map(type, tensors)})
    local = [*map(local_of, tensors)] if has_dtensors else tensors
    return [*zip([tensor._version for tensor in local], [tensor.data_ptr() for tensor in local], strict=True)]


def local_of(tensor: Any) -> Any:
    """Like `local_tensor`, but without detaching: `hasattr` and `detach` would take longer than the whole check."""
    return tensor._local_tensor if type(tensor).__name__ == "DTensor" else tensor


def _first_difference(left: Sequence[Any], right: Sequence[Any]) -> int:
    return next(number for number, (a, b) in enumerate(zip(left, right, strict=True)) if a != b)


class ElementSample:
    """A few elements of every tensor, evenly spaced; one copy for all tensors of a dtype and device."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._views: dict[Any, list[tuple[int, torch.Tensor]]] = {}
        for number, tensor in enumerate(tensors):
            view = _sample_view(tensor)
            if view is not None:
                self._views.setdefault((view.device, view.dtype), []).append((number, view))

    def take(self) -> list[torch.Tensor]:
        """Copies of the current elements."""
        import torch

        return [torch.cat([view for _, view in views]) for views in self._views.values()]

    def changed_since(self, taken: Sequence[torch.Tensor]) -> int | None:
        """The first tensor whose elements have changed, or None."""
        for views, before, now in zip(self._views.values(), taken, self.take(), strict=True):
            if not same_bits(before, now):
                parts = before.split([view.numel() for _, view in views])
                return next(
                    number for (number, view), part in zip(views, parts, strict=True) if not same_bits(view, part)
                )
        return None


def _sample_view(tensor: torch.Tensor) -> torch.Tensor | None:
    """A view of some elements; None if the tensor is not dense in memory."""
    local = local_tensor(tensor)
    extent = sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True)) + 1
    if not local.numel() or extent != local.numel():
        return None
    return local.as_strided((local.numel(),), (1,))[:: -(-local.numel() // SAMPLE)]
