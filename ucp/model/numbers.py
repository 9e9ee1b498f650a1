"""Single elements as numbers."""

from __future__ import annotations

import struct
from typing import Final

from ucp.model.dtypes import DType

_FORMATS: Final = {
    "float64": "<d",
    "float32": "<f",
    "float16": "<e",
    "int64": "<q",
    "int32": "<i",
    "int16": "<h",
    "int8": "<b",
    "uint8": "<B",
    "bool": "<?",
}


def scalar_value(data: bytes, dtype: DType) -> float | int | bool | None:
    """The number that these bytes are, or None for a dtype that has no plain number here."""
    if dtype.name == "bfloat16":
        return float(struct.unpack("<f", b"\0\0" + data)[0])
    form = _FORMATS.get(dtype.name)
    if form is None:
        return None
    value: float | int | bool = struct.unpack(form, data)[0]
    return value


def scalar_data(value: float, dtype: DType) -> bytes | None:
    """The bytes that this number is as an element, or None for a dtype that has no plain number here."""
    form = _FORMATS.get(dtype.name)
    if form is None:
        return None
    return struct.pack(form, value if dtype.family == "float" else int(value))
