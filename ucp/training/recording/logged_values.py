"""Buffers of a model in a log: absolute values, whenever they have changed.

States of an optimizer in a log, for optimizers that cannot be replayed: all of them, after every step.

What a recorder logs besides gradients: the job after a step as JSON, and digests of its optimizer state.

What a slot holds besides gradients: states of an optimizer that cannot be replayed, and buffers that changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ucp.core.checkpoint import STEP, kind_of_state
from ucp.errors import UsageError
from ucp.log.codecs import DTYPE_CODES, Bits, bits_type
from ucp.log.payloads import StateDigest
from ucp.log.segment_writer import StateValue
from ucp.log.stream_schema import BUFFER, FIRST_KINDS, PARAM, LogBlock, StreamSchema, logged_kind, shaped_kind
from ucp.log.writer import StreamWriter
from ucp.training.collect import digest_of
from ucp.training.live_job import LiveJob, dtype_of, flat_view, local_tensor
from ucp.training.optimizer_states import is_counter
from ucp.training.recording.epoch_start import EpochStart, write_kinds
from ucp.training.recording.optimizer_kernel import plain_hyper_parameters
from ucp.training.shadow.sink import ShadowSinks
from ucp.training.training_state import COUNTERS, SCALER_FIELDS, live_scaler

if TYPE_CHECKING:
    import torch


class BufferCapture:
    """The buffers that this rank logs, and what was last logged of each.

    A module may put another tensor in a buffer's place, so they are looked up in their modules every time.
    """

    def __init__(self, job: LiveJob, model: Any, schema: StreamSchema, held: list[int]) -> None:
        """`held` says which of the job's buffers each of the stream's is."""
        wanted = {id(job.buffers[number].tensor): (place, number) for place, number in enumerate(held)}
        self._names = [job.buffers[number].slice.name for number in held]
        self._owners: list[tuple[Any, str]] = [(None, "")] * len(held)
        for part in model.modules():
            for name, buffer in part._buffers.items():
                if id(buffer) in wanted:
                    self._owners[wanted[id(buffer)][0]] = part, name
        self._state = FIRST_KINDS.index(BUFFER)
        self._known = [_copy_flat(job.buffers[number].tensor) for number in held]
        self._dtypes = [dtype_of(known) for known in self._known]
        self._counts = [block.count for block in schema.buffers]

    def changed(self) -> list[StateValue]:
        """Those that are not what was last logged (or what the log started from)."""
        import torch

        found = []
        for place, (part, name) in enumerate(self._owners):
            now = part._buffers[name]
            known = self._known[place]
            if now is None or now.dtype != known.dtype or now.numel() != self._counts[place]:
                raise UsageError(
                    f"buffer {self._names[place]} has another shape or element type than when recording began",
                    hint="close the recorder and record again after changing the model",
                )
            if not torch.equal(_bytes(local_tensor(now).reshape(-1)), _bytes(known)):
                new = self._known[place] = _copy_flat(now)
                dtype = self._dtypes[place]
                bits = _bytes(new).numpy().view(bits_type(dtype))
                found.append(StateValue(place, self._state, dtype, bits, chained=False))
        return found


def _copy_flat(tensor: torch.Tensor) -> torch.Tensor:
    return local_tensor(tensor).reshape(-1).cpu().clone()


def _bytes(flat: torch.Tensor) -> torch.Tensor:
    import torch

    return flat.cpu().view(torch.uint8)


class StateCapture:
    """Copies the states of one stream's optimizer tensors. Slots have memory of their own, which is used again."""

    def __init__(self, optimizer: Any, schema: StreamSchema, keys: list[Any]) -> None:
        self._optimizer = optimizer
        self._keys = keys
        self._schema = schema
        self._blocks = [schema.blocks_of(number) for number in range(len(keys))]
        self._memory: dict[tuple[int, int, int], tuple[Bits, torch.Tensor]] = {}
        self.numbers: dict[str, int] | None = None  # kind → its index in the manifest, once that is agreed on

    def kinds(self) -> list[str]:
        """The names of all states that there are now."""
        return sorted({name for number in range(len(self._keys)) for name, _, _ in self._states(number)})

    def values(self, slot: int) -> list[StateValue]:
        """All states as they are now, copied into the memory of a slot."""
        assert self.numbers is not None
        found = []
        for number, blocks in enumerate(self._blocks):
            for name, tensor, is_own in self._states(number) if blocks else ():  # it may have no elements
                if name not in self.numbers:
                    raise UsageError(
                        f"the optimizer has a state {name} of {self._schema.tensors[number].names[0]} that it did not"
                        " have after its first step",
                        hint="close the recorder and record again",
                    )
                state = self.numbers[name]
                if is_own:
                    found.append(self._copy(slot, blocks[0], state, tensor.reshape(-1), chained=False))
                    continue
                flat = tensor.reshape(-1)
                found.extend(
                    self._copy(slot, block, state, flat[block.offset : block.offset + block.count]) for block in blocks
                )
        return found

    def _states(self, number: int) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """(name in the log, values on this rank, has it a shape of its own) of one optimizer tensor."""
        import torch

        key = self._keys[number]
        yield PARAM, local_tensor(key), False
        for name, value in self._optimizer.state.get(key, {}).items():
            if value is None:
                continue
            kind = kind_of_state(name)
            if isinstance(value, torch.Tensor) and value.shape == key.shape and not is_counter(name, value):
                yield logged_kind(kind), local_tensor(value), False
            else:
                plain = self._own(number, kind, value)
                yield shaped_kind(kind, tuple(plain.shape)), plain, True

    def _own(self, number: int, kind: str, value: Any) -> torch.Tensor:
        """A state with a shape of its own: a number, or what belongs to one whole parameter."""
        import torch

        if isinstance(value, bool):
            return torch.tensor(value)
        if isinstance(value, int):
            return torch.tensor(value, dtype=torch.int64)
        if isinstance(value, float):
            return torch.tensor(value, dtype=torch.float64)
        tensor = self._schema.tensors[number]
        if not isinstance(value, torch.Tensor):
            raise UsageError(f"optimizer state '{kind}' of {tensor.names[0]} is a {type(value).__name__}: no number")
        local = local_tensor(value)
        if local.numel() == 1 and (kind == STEP or local.dim() == 0):
            return local.reshape(())
        if len(tensor.names) > 1 or sum(block.count for block in self._blocks[number]) != tensor.numel:
            raise UsageError(
                f"optimizer state '{kind}' of {tensor.names[0]} has shape {list(value.shape)}, which cannot be cut like"
                " the parameter"
            )
        return local

    def _copy(
        self, slot: int, block: LogBlock, state: int, values: torch.Tensor, *, chained: bool = True
    ) -> StateValue:
        dtype = dtype_of(values)
        if dtype.name not in DTYPE_CODES:
            raise UsageError(f"an optimizer state has the element type {dtype}, which a log does not hold")
        key = slot, block.id, state
        held = self._memory.get(key)
        if held is None or held[0].size != values.numel() or held[1].dtype != values.dtype:
            import torch

            memory = np.zeros(values.numel() * dtype.itemsize, np.uint8)
            held = memory.view(bits_type(dtype)), torch.from_numpy(memory).view(values.dtype)
            self._memory[key] = held
        held[1].copy_(values)
        return StateValue(block.id, state, dtype, held[0], chained=chained)


SCHEDULED: Final = ("lr", "betas", "eps", "weight_decay", "momentum", "dampening")  # what is different in every step
_LEFT_OUT: Final = object()


def job_notes(job: LiveJob) -> dict[str, Any]:
    """Counters, LR scheduler and loss scaler of a DeepSpeed engine as they are now, as far as JSON can keep them."""
    engine = job.engine
    if engine is None:
        return {}
    notes: dict[str, Any] = {"counters": {name: int(getattr(engine, name)) for name in COUNTERS}}
    # The scheduler has taken its step: these are for the next one.
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
    """A scheduler's state as JSON, with the states of the schedulers in it. What is not plain data is left out."""
    if isinstance(value, dict):
        found = {key: _scheduler_json(item) for key, item in value.items() if isinstance(key, str)}
        return {key: item for key, item in found.items() if item is not _LEFT_OUT}
    if isinstance(value, (list, tuple)):
        items = [_scheduler_json(item) for item in value]
        return _LEFT_OUT if any(item is _LEFT_OUT for item in items) else items
    if hasattr(value, "item") and getattr(value, "numel", lambda: value.size)() == 1:
        value = value.item()
    return value if value is None or isinstance(value, (bool, int, float, str)) else _LEFT_OUT


def plain_notes(value: Any) -> Any:
    """What the user gave, which must be JSON."""
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"what aux= gave is no JSON: {error}", hint="give numbers, text, lists and dictionaries"
        ) from error
    return value


def state_digests(optimizer: Any, schema: StreamSchema, keys: Sequence[Any]) -> list[StateDigest]:
    """XXH3-128 of every optimizer tensor of a stream and of its states, over its blocks end to end."""
    import torch

    found = []
    for number, key in enumerate(keys):
        blocks = schema.blocks_of(number)
        if not blocks:
            continue  # a tensor without elements
        states = {
            logged_kind(kind_of_state(name)): value
            for name, value in optimizer.state.get(key, {}).items()
            if isinstance(value, torch.Tensor) and value.shape == key.shape and not is_counter(name, value)
        }
        for kind, tensor in {PARAM: key, **states}.items():
            flat = flat_view(tensor)
            flat = local_tensor(tensor).reshape(-1) if flat is None else flat
            parts = [flat[block.offset : block.offset + block.count] for block in blocks]
            found.append(StateDigest(number, kind, digest_of(parts[0] if len(parts) == 1 else torch.cat(parts))))
    return found


_NO_SLOT = -1  # number of a slot that the ring does not have


class StepValues:
    """States (of a log of states) and buffers of one rank, step by step."""

    def __init__(self, start: EpochStart, model: Any, writer: StreamWriter, sink: ShadowSinks | None = None) -> None:
        """A `sink` is told the names of the states before it gets any."""
        self._start = start
        self._sink = sink
        self._writer = writer
        module = model if start.job.engine is None else start.job.engine.module
        self._buffers = BufferCapture(start.job, module, start.agreed.mine, start.agreed.held)
        self._states: StateCapture | None = None
        self._first: list[StateValue] = []  # states that the log starts from; kinds are numbered provisionally
        self._names: list[str] = []
        if start.what == "state":
            states = self._states = StateCapture(start.job.optimizer, start.agreed.mine, start.keys)
            self._names = states.kinds()
            states.numbers = {name: number for number, name in enumerate(self._names)}
            self._first = states.values(_NO_SLOT)
            states.numbers = None

    def of_step(self, slot: int, *, skipped: bool) -> list[StateValue]:
        """What to log after a step. Collective with the first step that a log of states has."""
        found = self._buffers.changed()
        states = self._states
        if states is None or (states.numbers is None and skipped):
            return found
        if states.numbers is None:
            self._agree(states)
        return [*states.values(slot), *found]

    def close(self) -> None:
        """Write the manifest of a log that has no steps. Collective."""
        if self._states is not None and self._states.numbers is None:
            self._agree(self._states)

    def _agree(self, states: StateCapture) -> None:
        numbers = write_kinds(self._start, sorted({*self._names, *states.kinds()}))
        if self._sink is not None:
            self._sink.tell_kinds(sorted(numbers, key=lambda name: numbers[name]))
        first = [replace(value, state=numbers[self._names[value.state]]) for value in self._first]
        self._writer.set_base_values(self._start.step, first)
        self._first, states.numbers = [], numbers
