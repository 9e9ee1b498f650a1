"""Optimizer states that are one number (`step`), whether the file keeps a tensor or a plain number."""

from __future__ import annotations

import struct
from typing import Any

from ucp.files.inert import NumpyScalar, TensorRef
from ucp.files.local import SourceFiles
from ucp.formats.deepspeed.shards import RankFile
from ucp.formats.deepspeed.stored import Number, Stored, WholeTensor
from ucp.model.dtypes import BOOL, FLOAT64, INT64


def is_scalar(value: object) -> bool:
    """Whether an optimizer state is one number."""
    if isinstance(value, TensorRef):
        return value.numel == 1
    return isinstance(value, (bool, int, float, NumpyScalar))


def stored_scalar(file: RankFile, value: Any, dp: int) -> Stored | None:
    """A number as a stored state, or None when it is larger than 64 bits."""
    if isinstance(value, TensorRef):
        return file.whole(value, dp)
    if isinstance(value, NumpyScalar):
        value = value.to_python()
    if isinstance(value, bool):
        return Number(file.name, BOOL, struct.pack("<?", value), dp)
    if isinstance(value, int):
        return Number(file.name, INT64, struct.pack("<q", value), dp) if -(2**63) <= value < 2**63 else None
    if isinstance(value, float):
        return Number(file.name, FLOAT64, struct.pack("<d", value), dp)
    return None


def scalar_bytes(stored: Stored, source: SourceFiles) -> bytes:
    """The bytes of a one-element state; reads a few bytes where the file keeps a tensor."""
    known = stored.spot.number() if isinstance(stored, WholeTensor) and stored.count else None
    if known is not None:
        return known
    for run in stored.runs():
        if run.inline is not None:
            return run.inline
        return source.read(run.file, run.offset, stored.dtype.itemsize)
    return b""
