"""What numpy's objects become: dtypes, arrays and scalars that carry their bytes."""

from __future__ import annotations

from typing import Any

from ucp.files.inert import Inert, NumpyArray, NumpyDType, NumpyScalar, Sealed, class_path
from ucp.files.standins import form, keep


@form("numpy:dtype")
def _dtype(cls: type[Inert], *args: Any) -> Any:
    """(type code, align, copy), before its BUILD"""
    return NumpyDType(args[0]) if args and type(args[0]) is str else keep(cls, args)


@form("numpy.core.multiarray:_reconstruct", "numpy._core.multiarray:_reconstruct")
def _reconstruct(cls: type[Inert], *args: Any) -> Any:
    """(class, shape, type code) of an empty array, before its BUILD; matrices and masked arrays keep their class"""
    if len(args) != 3 or not isinstance(args[0], Sealed) or class_path(args[0]) != "numpy.ndarray":
        return keep(cls, args)
    return NumpyArray("", (), b"", core=_core(cls))


@form("numpy.core.multiarray:scalar", "numpy._core.multiarray:scalar")
def _scalar(cls: type[Inert], *args: Any) -> Any:
    """(dtype, bytes)"""
    if len(args) != 2 or type(args[0]) is not NumpyDType or type(args[1]) is not bytes:
        return keep(cls, args)
    return NumpyScalar(args[0].descr, args[1], _core(cls))


@form("numpy.core.numeric:_frombuffer", "numpy._core.numeric:_frombuffer")
def _frombuffer(cls: type[Inert], *args: Any) -> Any:
    """(bytes, dtype, shape, order): how protocol 5 writes an array"""
    if len(args) != 4 or type(args[0]) not in (bytes, bytearray) or type(args[1]) is not NumpyDType:
        return keep(cls, args)
    if args[3] not in ("C", "F"):
        return keep(cls, args)
    array = NumpyArray("", (), b"", core=_core(cls))
    array.__setstate__((args[2], args[1], args[3] == "F", args[0]))
    return array


def _core(cls: type[Inert]) -> str:
    """`numpy.core` of `numpy.core.multiarray`"""
    return cls.module.rpartition(".")[0]
