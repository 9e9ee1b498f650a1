"""States of an optimizer in a log, for optimizers that cannot be replayed: all of them, after every step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ucp.errors import UsageError
from ucp.log.codecs import DTYPE_CODES, Bits, bits_type
from ucp.log.kinds import PARAM, logged_kind, own_kind
from ucp.log.schema import Block, StreamSchema
from ucp.log.values import Value
from ucp.model.checkpoint import STEP, kind_of_state
from ucp.train.live import dtype_of, local_part
from ucp.train.optimizers import is_counter

if TYPE_CHECKING:
    import torch


class StateTaker:
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

    def values(self, slot: int) -> list[Value]:
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
        yield PARAM, local_part(key), False
        for name, value in self._optimizer.state.get(key, {}).items():
            if value is None:
                continue
            kind = kind_of_state(name)
            if isinstance(value, torch.Tensor) and value.shape == key.shape and not is_counter(name, value):
                yield logged_kind(kind), local_part(value), False
            else:
                plain = self._own(number, kind, value)
                yield own_kind(kind, tuple(plain.shape)), plain, True

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
        local = local_part(value)
        if local.numel() == 1 and (kind == STEP or local.dim() == 0):
            return local.reshape(())
        if len(tensor.names) > 1 or sum(block.count for block in self._blocks[number]) != tensor.numel:
            raise UsageError(
                f"optimizer state '{kind}' of {tensor.names[0]} has shape {list(value.shape)}, which cannot be cut like"
                " the parameter"
            )
        return local

    def _copy(self, slot: int, block: Block, state: int, values: torch.Tensor, *, chained: bool = True) -> Value:
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
        return Value(block.id, state, dtype, held[0], chained=chained)
