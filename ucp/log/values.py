"""States and buffers after a step, as they go into a log: differences to the step before, or absolute values."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ucp.log.codecs import Bits, Bytes, Encoding, encode, encode_difference
from ucp.log.steps import EncodedBlock, StateFrames
from ucp.model.dtypes import DType


@dataclass(frozen=True, slots=True)
class Value:
    """A state of a block, or a buffer, after a step."""

    block: int
    state: int  # index into the manifest's state kinds
    dtype: DType
    bits: Bits
    chained: bool = True  # logged with every step, so that a difference to the step before leads to it


class ValueEncoder:
    """Knows the values of the step before. For one thread."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, int], Bits] = {}
        self._step = -1
        self._packs = importlib.util.find_spec("zstandard") is not None

    def begin_with(self, step: int, values: Sequence[Value]) -> None:
        """These are the values that the base has; copied."""
        self._step = step
        self._before = {(value.block, value.state): value.bits.copy() for value in values if value.chained}

    def encode(self, step: int, values: Sequence[Value], *, compress: bool) -> StateFrames:
        """All values of a step, each in its smaller form. A value that was not there before is absolute."""
        full: list[EncodedBlock] = []
        differences: list[EncodedBlock] = []
        for value in values:
            made = self._difference(value)
            if made is not None:
                differences.append(made)
            else:
                encoding, data = encode(value.bits, value.dtype, compress=compress)
                full.append(_block(value, encoding, data))
            if value.chained:
                self._remember(value)
        frames = StateFrames(full, differences, self._step)
        self._step = step
        return frames

    def _difference(self, value: Value) -> EncodedBlock | None:
        before = self._before.get((value.block, value.state)) if value.chained and self._packs else None
        if before is None or before.shape != value.bits.shape or before.dtype != value.bits.dtype:
            return None
        encoding, data = encode_difference(before, value.bits)
        return _block(value, encoding, data) if data.nbytes < value.bits.nbytes else None

    def _remember(self, value: Value) -> None:
        if not self._packs:
            return
        key = value.block, value.state
        before = self._before.get(key)
        if before is None or before.shape != value.bits.shape or before.dtype != value.bits.dtype:
            self._before[key] = value.bits.copy()
        else:
            np.copyto(before, value.bits)


def _block(value: Value, encoding: Encoding, data: Bytes) -> EncodedBlock:
    return EncodedBlock(value.block, encoding, value.dtype, len(value.bits), data, value.state)


__all__ = ["Value", "ValueEncoder"]
