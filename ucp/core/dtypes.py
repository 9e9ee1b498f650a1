"""Element types by their torch names, with size and safetensors tag; conversion of single elements to numbers."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final, Literal, NoReturn, TypeVar

Family = Literal["float", "int", "bool", "complex"]
_Class = TypeVar("_Class", bound=type)


def unchangeable(cls: _Class) -> _Class:
    """Class decorator: disable `__setstate__`, through which a hostile pickle could modify a frozen dataclass."""
    # Set from outside, because the dataclass decorator of Python 3.10 overwrites a method in the class body.
    type.__setattr__(cls, "__setstate__", _refuse_state)
    return cls


def _refuse_state(self: object, _: object) -> NoReturn:
    raise TypeError(f"a {type(self).__name__} cannot be changed")


@unchangeable
@dataclass(frozen=True, slots=True)
class DType:
    """An element type. `itemsize` is in bytes; `tag` is its name in safetensors files, None if there is none."""

    name: str
    itemsize: int
    family: Family
    tag: str | None

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return DType, (self.name, self.itemsize, self.family, self.tag)


_TABLE: Final = (
    DType("float64", 8, "float", "F64"),
    DType("float32", 4, "float", "F32"),
    DType("float16", 2, "float", "F16"),
    DType("bfloat16", 2, "float", "BF16"),
    DType("float8_e4m3fn", 1, "float", "F8_E4M3"),
    DType("float8_e5m2", 1, "float", "F8_E5M2"),
    DType("float8_e4m3fnuz", 1, "float", "F8_E4M3FNUZ"),
    DType("float8_e5m2fnuz", 1, "float", "F8_E5M2FNUZ"),
    DType("float8_e8m0fnu", 1, "float", "F8_E8M0"),
    DType("int64", 8, "int", "I64"),
    DType("int32", 4, "int", "I32"),
    DType("int16", 2, "int", "I16"),
    DType("int8", 1, "int", "I8"),
    DType("uint64", 8, "int", "U64"),
    DType("uint32", 4, "int", "U32"),
    DType("uint16", 2, "int", "U16"),
    DType("uint8", 1, "int", "U8"),
    DType("bool", 1, "bool", "BOOL"),
    DType("complex32", 4, "complex", None),
    DType("complex64", 8, "complex", "C64"),
    DType("complex128", 16, "complex", None),
)

BY_NAME: Final = {dtype.name: dtype for dtype in _TABLE}
BY_TAG: Final = {dtype.tag: dtype for dtype in _TABLE if dtype.tag is not None}

FLOAT64 = BY_NAME["float64"]
FLOAT32 = BY_NAME["float32"]
FLOAT16 = BY_NAME["float16"]
BFLOAT16 = BY_NAME["bfloat16"]
INT64 = BY_NAME["int64"]
UINT8 = BY_NAME["uint8"]
BOOL = BY_NAME["bool"]

# Further names that --dtype accepts.
ALIASES: Final = {
    "fp64": FLOAT64,
    "fp32": FLOAT32,
    "fp16": FLOAT16,
    "bf16": BFLOAT16,
    "double": FLOAT64,
    "float": FLOAT32,
    "half": FLOAT16,
}


def parse_dtype(text: str) -> DType | None:
    """The dtype with this name (`bf16`, `bfloat16`, `torch.bfloat16` and `BF16` are the same), or None."""
    word = text.strip().removeprefix("torch.").lower()
    return BY_NAME.get(word) or ALIASES.get(word) or BY_TAG.get(text.strip().upper())


_STRUCT_FORMATS: Final = {
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
    """The number that these bytes represent, or None for a dtype without a Python equivalent (float8, complex)."""
    if dtype.name == "bfloat16":
        return float(struct.unpack("<f", b"\0\0" + data)[0])
    form = _STRUCT_FORMATS.get(dtype.name)
    if form is None:
        return None
    value: float | int | bool = struct.unpack(form, data)[0]
    return value


def scalar_data(value: float, dtype: DType) -> bytes | None:
    """The bytes of this number as an element, or None for a dtype that `struct` cannot pack (bfloat16, float8, …)."""
    form = _STRUCT_FORMATS.get(dtype.name)
    if form is None:
        return None
    return struct.pack(form, value if dtype.family == "float" else int(value))
