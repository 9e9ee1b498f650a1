"""Hyper-parameters of a parameter group, as plain values where the file keeps small tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ucp.files.inert import NumpyScalar, TensorRef
from ucp.formats.deepspeed.reading import Reading
from ucp.formats.deepspeed.scalars import scalar_bytes
from ucp.formats.deepspeed.shards import RankFile
from ucp.model.numbers import scalar_value


def group_hyper(reading: Reading, file: RankFile, group: Mapping[str, Any]) -> dict[str, Any]:
    """A group of `param_groups` without its list of parameters; one-element tensors (a tensor `lr`) as numbers."""
    return {str(key): _plain(reading, file, value) for key, value in group.items() if key != "params"}


def _plain(reading: Reading, file: RankFile, value: Any) -> Any:
    if isinstance(value, TensorRef) and value.numel == 1:
        number = scalar_value(scalar_bytes(file.whole(value), reading.source), value.dtype)
        return value if number is None else number
    return value.to_python() if isinstance(value, NumpyScalar) else value
