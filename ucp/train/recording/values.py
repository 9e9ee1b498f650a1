"""What a slot holds besides gradients: states of an optimizer that cannot be replayed, and buffers that changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ucp.log.values import Value
from ucp.log.writer import Writer
from ucp.shadow.sink import Sinks
from ucp.train.recording.buffers import BufferWatch
from ucp.train.recording.start import Start, write_kinds
from ucp.train.recording.states import StateTaker

_BEGINNING = -1  # number of a slot that the ring does not have


class Values:
    """States (of a log of states) and buffers of one rank, step by step."""

    def __init__(self, start: Start, model: Any, writer: Writer, sink: Sinks | None = None) -> None:
        """A `sink` is told the names of the states before it gets any."""
        self._start = start
        self._sink = sink
        self._writer = writer
        module = model if start.job.engine is None else start.job.engine.module
        self._buffers = BufferWatch(start.job, module, start.agreed.mine, start.agreed.held)
        self._states: StateTaker | None = None
        self._first: list[Value] = []  # states that the log starts from; kinds are numbered provisionally
        self._names: list[str] = []
        if start.what == "state":
            states = self._states = StateTaker(start.job.optimizer, start.agreed.mine, start.keys)
            self._names = states.kinds()
            states.numbers = {name: number for number, name in enumerate(self._names)}
            self._first = states.values(_BEGINNING)
            states.numbers = None

    def of_step(self, slot: int, *, skipped: bool) -> list[Value]:
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

    def _agree(self, states: StateTaker) -> None:
        numbers = write_kinds(self._start, sorted({*self._names, *states.kinds()}))
        if self._sink is not None:
            self._sink.tell_kinds(sorted(numbers, key=lambda name: numbers[name]))
        first = [replace(value, state=numbers[self._names[value.state]]) for value in self._first]
        self._writer.begin_with(self._start.step, first)
        self._first, states.numbers = [], numbers
