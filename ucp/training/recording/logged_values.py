"""Everything that a recorder logs besides gradients.

Buffers when they have changed; after every step all states of an optimizer that cannot be replayed; the state of a
DeepSpeed engine as JSON; and digests of the optimizer's tensors and states.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ucp.core.checkpoint import kind_of_state
from ucp.errors import UsageError
from ucp.log.codecs import DTYPE_CODES, Bits, bits_type
from ucp.log.payloads import StateDigest
from ucp.log.segment_writer import StateValue
from ucp.log.stream_schema import BUFFER, FIRST_KINDS, PARAM, LogBlock, StreamSchema, logged_kind, shaped_kind
from ucp.log.writer import StreamWriter
from ucp.training.collect import digest_of, is_elementwise, number_tensor
from ucp.training.live_job import LiveJob, dtype_of, local_tensor, same_bits
from ucp.training.recording.epoch_start import EpochStart, write_kinds
from ucp.training.recording.optimizer_kernel import plain_hyper_parameters
from ucp.training.shadow.sink import ShadowSinks
from ucp.training.training_state import COUNTERS, SCALER_FIELDS, live_scaler

if TYPE_CHECKING:
    import torch


class BufferCapture:
    """The buffers that this rank logs, with the values that were logged last.

    A module may replace the tensor of a buffer, so buffers are looked up in their modules every time.
    """

    def __init__(self, job: LiveJob, model: Any, schema: StreamSchema, numbers: list[int]) -> None:
        """`numbers` are the indices of the stream's buffers in `job.buffers`."""
        wanted = {id(job.buffers[number].tensor): index for index, number in enumerate(numbers)}
        self._names = [job.buffers[number].slice.name for number in numbers]
        self._owners: list[tuple[Any, str]] = [(None, "")] * len(numbers)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if id(buffer) in wanted:
                    self._owners[wanted[id(buffer)]] = module, name
        self._known = [_copy_flat(job.buffers[number].tensor) for number in numbers]
        self._dtypes = [dtype_of(known) for known in self._known]
        self._counts = [block.count for block in schema.buffers]

    def changed(self) -> list[StateValue]:
        """The buffers that differ from what was logged last (or from the base)."""
        import torch

        found = []
        for index, (module, name) in enumerate(self._owners):
            now = module._buffers[name]
            known = self._known[index]
            if now is None or now.dtype != known.dtype or now.numel() != self._counts[index]:
                raise UsageError(
                    f"buffer {self._names[index]} has another shape or dtype than when recording started",
                    hint="close the recorder and record again after changing the model",
                )
            if not same_bits(local_tensor(now).cpu(), known):
                new = self._known[index] = _copy_flat(now)
                dtype = self._dtypes[index]
                bits = new.view(torch.uint8).numpy().view(bits_type(dtype))
                found.append(StateValue(index, FIRST_KINDS.index(BUFFER), dtype, bits, chained=False))
        return found


def _copy_flat(tensor: torch.Tensor) -> torch.Tensor:
    return local_tensor(tensor).reshape(-1).cpu().clone()


class StateCapture:
    """Copies all states of one stream's optimizer tensors. Every slot has its own memory, which is reused."""

    def __init__(self, optimizer: Any, schema: StreamSchema, keys: list[Any]) -> None:
        self._optimizer = optimizer
        self._keys = keys
        self._schema = schema
        self._blocks = [schema.blocks_of(number) for number in range(len(keys))]
        self._memory: dict[tuple[int, int, int], tuple[Bits, torch.Tensor]] = {}
        self.numbers: dict[str, int] | None = None  # kind → its index in the manifest, once all ranks have agreed

    def kinds(self) -> list[str]:
        """The names of all states that exist now."""
        return sorted({name for number in range(len(self._keys)) for name, _, _ in self._states(number)})

    def values(self, slot: int) -> list[StateValue]:
        """The current states, copied into the memory of a slot."""
        assert self.numbers is not None
        found = []
        for number, blocks in enumerate(self._blocks):
            for name, tensor, is_shaped in self._states(number) if blocks else ():  # it may have no elements
                if name not in self.numbers:
                    raise UsageError(
                        f"the optimizer has a state {name} of {self._schema.tensors[number].names[0]} that did not"
                        " exist after its first step",
                        hint="close the recorder and record again",
                    )
                state, flat = self.numbers[name], tensor.reshape(-1)
                if is_shaped:
                    found.append(self._copy(slot, blocks[0], state, flat, chained=False))
                    continue
                for block in blocks:
                    part = flat[block.offset : block.offset + block.count]
                    found.append(self._copy(slot, block, state, part, chained=True))
        return found

    def _states(self, number: int) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """(name in the log, local values, whether its shape differs from the tensor's) of one tensor's states."""
        key = self._keys[number]
        yield PARAM, local_tensor(key), False
        for name, value in self._optimizer.state.get(key, {}).items():
            kind = kind_of_state(name)
            if value is None:
                continue
            if is_elementwise(kind, value, key):
                yield logged_kind(kind), local_tensor(value), False
            else:
                shaped = self._shaped(number, kind, value)
                yield shaped_kind(kind, tuple(shaped.shape)), shaped, True

    def _shaped(self, number: int, kind: str, value: Any) -> torch.Tensor:
        """A state with another shape than its tensor: a number, or a factored moment of one whole parameter."""
        tensor = self._schema.tensors[number]
        found = number_tensor(kind, value, tensor.names[0])
        if found is not None:
            return found
        if len(tensor.names) > 1 or sum(block.count for block in self._blocks[number]) != tensor.numel:
            raise UsageError(
                f"optimizer state '{kind}' of {tensor.names[0]} has shape {list(value.shape)}, which cannot be split"
                " like the parameter"
            )
        return local_tensor(value)

    def _copy(self, slot: int, block: LogBlock, state: int, values: torch.Tensor, *, chained: bool) -> StateValue:
        dtype = dtype_of(values)
        if dtype.name not in DTYPE_CODES:
            raise UsageError(f"an optimizer state has dtype {dtype}, which a log cannot store")
        key = slot, block.id, state
        views = self._memory.get(key)
        if views is None or views[0].size != values.numel() or views[1].dtype != values.dtype:
            import torch

            memory = np.zeros(values.numel() * dtype.itemsize, np.uint8)
            views = memory.view(bits_type(dtype)), torch.from_numpy(memory).view(values.dtype)
            self._memory[key] = views
        views[1].copy_(values)
        return StateValue(block.id, state, dtype, views[0], chained=chained)


SCHEDULED: Final = ("lr", "betas", "eps", "weight_decay", "momentum", "dampening")  # may change with every step
_LEFT_OUT: Final = object()


def engine_state_json(job: LiveJob) -> dict[str, Any]:
    """The current counters, hyper-parameters, LR scheduler and loss scaler of a DeepSpeed engine as JSON values."""
    engine = job.engine
    if engine is None:
        return {}
    notes: dict[str, Any] = {"counters": {name: int(getattr(engine, name)) for name in COUNTERS}}
    # The scheduler has already stepped: these are the values of the next optimizer step.
    notes["hyper"] = [
        plain_hyper_parameters({key: group[key] for key in SCHEDULED if key in group}) for group in job.groups
    ]
    if hasattr(engine.lr_scheduler, "state_dict"):
        notes["lr_scheduler"] = _scheduler_json(engine.lr_scheduler.state_dict())
    scaler = live_scaler(engine.optimizer)
    if scaler is not None:
        fields = {name: getattr(scaler, name, None) for name in (*SCALER_FIELDS, "min_loss_scale")}
        notes["scaler"] = {name: value for name, value in fields.items() if isinstance(value, (int, float))}
    return notes


def _scheduler_json(value: Any) -> Any:
    """A scheduler's state, including nested schedulers, as JSON values; other data is left out."""
    if isinstance(value, dict):
        found = {key: _scheduler_json(item) for key, item in value.items() if isinstance(key, str)}
        return {key: item for key, item in found.items() if item is not _LEFT_OUT}
    if isinstance(value, (list, tuple)):
        items = [_scheduler_json(item) for item in value]
        return _LEFT_OUT if any(item is _LEFT_OUT for item in items) else items
    if hasattr(value, "item") and getattr(value, "numel", lambda: value.size)() == 1:
        value = value.item()
    return value if value is None or isinstance(value, (bool, int, float, str)) else _LEFT_OUT


def checked_aux(value: Any) -> Any:
    """The result of the user's `aux=`, which must be valid JSON."""
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"the result of aux= is not valid JSON: {error}", hint="return numbers, text, lists and dictionaries"
        ) from error
    return value


def state_digests(optimizer: Any, schema: StreamSchema, keys: Sequence[Any]) -> list[StateDigest]:
    """XXH3-128 of every optimizer tensor of a stream and of its states, over the concatenated blocks."""
    import torch

    found = []
    for number, key in enumerate(keys):
        blocks = schema.blocks_of(number)
        if not blocks:
            continue  # a tensor without elements
        states = {
            logged_kind(kind_of_state(name)): value
            for name, value in optimizer.state.get(key, {}).items()
            if is_elementwise(kind_of_state(name), value, key)
        }
        for kind, tensor in {PARAM: key, **states}.items():
            flat = local_tensor(tensor).reshape(-1)
            parts = [flat[block.offset : block.offset + block.count] for block in blocks]
            found.append(StateDigest(number, kind, digest_of(parts[0] if len(parts) == 1 else torch.cat(parts))))
    return found


_NO_SLOT = -1  # a slot number that the writer's ring does not use


class StepValues:
    """The changed buffers, and in a log of states the optimizer states, of one rank after every step."""

    def __init__(self, start: EpochStart, model: Any, writer: StreamWriter, sink: ShadowSinks | None = None) -> None:
        """A `sink` receives the names of the states before any values."""
        self._start = start
        self._sink = sink
        self._writer = writer
        module = model if start.job.engine is None else start.job.engine.module
        self._buffers = BufferCapture(start.job, module, start.agreement.mine, start.agreement.buffer_numbers)
        self._states: StateCapture | None = None
        self._first: list[StateValue] = []  # states at the start of the log, with provisional numbers of kinds
        self._names: list[str] = []
        if start.what == "state":
            states = self._states = StateCapture(start.job.optimizer, start.agreement.mine, start.keys)
            self._names = states.kinds()
            states.numbers = {name: number for number, name in enumerate(self._names)}
            self._first = states.values(_NO_SLOT)
            states.numbers = None

    def of_step(self, slot: int, *, skipped: bool) -> list[StateValue]:
        """The values to log after a step. Collective at the first step of a log of states."""
        found = self._buffers.changed()
        states = self._states
        if states is None or (states.numbers is None and skipped):
            return found
        if states.numbers is None:
            self._agree_on_kinds(states)
        return [*states.values(slot), *found]

    def close(self) -> None:
        """Write the manifest of a log without steps. Collective."""
        if self._states is not None and self._states.numbers is None:
            self._agree_on_kinds(self._states)

    def _agree_on_kinds(self, states: StateCapture) -> None:
        numbers = write_kinds(self._start, sorted({*self._names, *states.kinds()}))
        if self._sink is not None:
            self._sink.send_state_kinds(sorted(numbers, key=lambda name: numbers[name]))
        first = [replace(value, state=numbers[self._names[value.state]]) for value in self._first]
        self._writer.set_base_values(self._start.step, first)
        self._first, states.numbers = [], numbers
