"""The steps of a log as updates: when an optimizer tensor was updated, and with which hyper-parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from ucp.core.optimizers import Hyper
from ucp.log.payloads import GroupScalars, LrKind
from ucp.log.reader import EpochSpan, LogStream
from ucp.replay.kernels import PYTHON_NUMBER

_LR_KINDS: Final = {LrKind.FLOAT: PYTHON_NUMBER, LrKind.TENSOR32: "float32", LrKind.TENSOR64: "float64"}


@dataclass(frozen=True, slots=True)
class OptimizerUpdate:
    """One call of the optimizer, in this step of the log and with these hyper-parameters.

    The kernel was given the logged gradient times `scale` (see `gradients.consumed`), or the gradient itself.
    """

    step: int
    hyper: Hyper
    scale: float | None
    before: int  # updates that the optimizer had counted before (the largest count of the group); -1 if it counts none


class StreamUpdates:
    """The updates of one stream in a span of steps. Steps are read once for each group."""

    def __init__(self, span: EpochSpan, stream: LogStream) -> None:
        self._span = span
        self.stream = stream
        self._constants = [group.hyper for group in span.epoch.manifest.groups]
        self._block_count = len(stream.schema.blocks)
        self.of_group = cache(self._of_group)
        self._missing: dict[int, frozenset[int]] | None = None  # step → blocks without gradient, if there are any

    def of_tensor(self, tensor: int) -> list[OptimizerUpdate]:
        """The updates of an optimizer tensor: none in steps in which it had no gradient."""
        schema = self.stream.schema
        updates = self.of_group(schema.tensors[tensor].group)
        first = next((block.id for block in schema.blocks if block.tensor == tensor), None)
        if first is None:
            return []
        missing = self._missing_blocks()
        return [update for update in updates if first not in missing.get(update.step, ())] if missing else updates

    def _of_group(self, group: int) -> list[OptimizerUpdate]:
        return list(self._updates(group))

    def _updates(self, group: int) -> Iterator[OptimizerUpdate]:
        constants = self._constants[group] if group < len(self._constants) else {}
        for step in range(self._span.first, self._span.last + 1):
            record = self.stream.record(step)
            if record.skipped:
                continue
            scalars = next((one for one in record.groups if one.group == group), None)
            if scalars is None or not scalars.stepped:
                continue
            scale = None if record.scale is None else float(record.scale)
            yield OptimizerUpdate(step, group_hyper(constants, scalars), scale, scalars.opt_step)

    def _missing_blocks(self) -> dict[int, frozenset[int]]:
        if self._missing is None:
            self._missing = {}
            for step in range(self._span.first, self._span.last + 1):
                if not self.stream.record(step).skipped and self.stream.block_count(step) != self._block_count:
                    every = frozenset(range(self._block_count))
                    self._missing[step] = every.difference(self.stream.blocks(step))
        return self._missing


def all_steps_skipped(stream: LogStream, first: int, last: int) -> bool:
    """Were all steps after `first` up to `last` skipped? Then the state after `last` is that after `first`."""
    return all(stream.record(step).skipped for step in range(first + 1, last + 1))


def group_hyper(constants: Mapping[str, Any], scalars: GroupScalars) -> Hyper:
    """A group's hyper-parameters in one step: those of the step, and of the epoch's manifest for the rest."""
    hyper = {**constants, "lr": scalars.lr, "lr_kind": _LR_KINDS[scalars.lr_kind]}
    hyper.update(maximize=scalars.maximize, amsgrad=scalars.amsgrad, nesterov=scalars.nesterov)
    if not math.isnan(scalars.beta1):
        hyper["betas"] = (scalars.beta1, scalars.beta2)
    for key in ("eps", "weight_decay", "momentum", "dampening"):
        value = getattr(scalars, key)
        if not math.isnan(value):
            hyper[key] = value
    return hyper
