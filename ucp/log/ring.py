"""The memory between a trainer and its log: a few slots, each with room for the gradients of one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ucp import tunables
from ucp.log.codecs import Bits, bits_type
from ucp.log.frames import padded
from ucp.log.payloads import StepRecord
from ucp.log.schema import StreamSchema
from ucp.log.values import Value
from ucp.model.dtypes import BY_NAME, DType


@dataclass(slots=True)
class Slot:
    """Room for one step. Whoever has acquired it fills `arrays` of some blocks, names them in `present`, sets the rest.

    `arrays` never change place: they may be wrapped once and used for every step.
    """

    number: int
    arrays: list[Bits]  # one a block of the schema, in its gradient's own type, as bit patterns
    dtypes: list[DType]
    step: int = 0
    record: StepRecord = field(default_factory=StepRecord)
    present: list[int] = field(default_factory=list)  # ids of the blocks that the step has
    values: list[Value] = field(default_factory=list)  # states and buffers; theirs is the memory of who filled the slot
    aux: Any = None  # JSON values

    @property
    def nbytes(self) -> int:
        """Of everything that the step has."""
        grads = sum(self.arrays[block].nbytes for block in self.present)
        return grads + sum(value.bits.nbytes for value in self.values)

    def clear(self) -> None:
        self.present = []
        self.values = []
        self.aux = None
        self.record = StepRecord()


def make_slots(schema: StreamSchema, count: int | None = None, *, gradients: bool = True) -> list[Slot]:
    """Slots for a stream; as many as `LOG_RING_BYTES` allow, but at least four, unless `count` is given.

    Without `gradients` they have no memory of their own, and there are two: states are more to hold than gradients.
    """
    if not gradients:
        return [Slot(number, [], []) for number in range(count or 2)]
    dtypes = [BY_NAME[schema.tensors[block.tensor].grad_dtype] for block in schema.blocks]
    sizes = [block.count * dtype.itemsize for block, dtype in zip(schema.blocks, dtypes, strict=True)]
    total = sum(map(padded, sizes))
    if count is None:
        count = min(max(tunables.LOG_RING_BYTES // max(total, 1), 4), 64)
    slots = []
    for number in range(count):
        memory = np.empty(max(total, 1), np.uint8)
        memory.fill(0)  # touches every page: the first steps should not pay for that
        arrays: list[Bits] = []
        at = 0
        for size, dtype in zip(sizes, dtypes, strict=True):
            arrays.append(memory[at : at + size].view(bits_type(dtype)))
            at += padded(size)
        slots.append(Slot(number, arrays, dtypes))
    return slots
