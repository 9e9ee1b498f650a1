"""What torch's objects become: references to tensors and storages, sizes, dtypes."""

from __future__ import annotations

from typing import Any, Final

from ucp import tunables
from ucp.files.inert import Inert, Sealed, Size, StorageRef, TensorRef, class_path, new_class
from ucp.files.standins import form, keep, refuse_dangerous_arguments, register, stand_in
from ucp.model.dtypes import BY_NAME, DType

_STORAGES: Final = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
_UNTYPED_STORAGES: Final = ("UntypedStorage", "_UntypedStorage")
_DTYPE_ALIASES: Final = {
    "double": "float64",
    "float": "float32",
    "half": "float16",
    "long": "int64",
    "int": "int32",
    "short": "int16",
    "chalf": "complex32",
    "cfloat": "complex64",
    "cdouble": "complex128",
}
_PARAMETER_PATHS: Final = frozenset({"torch.nn.parameter.Parameter", "torch.nn.Parameter"})
_WORD: Final = 1 << 63

STORAGE_DTYPES: Final[dict[Any, DType | None]] = {}
"""Element type by stand-in of a storage class; None for the untyped ones."""


def _register_names() -> None:
    for module in ("torch", "torch.cuda", "torch.storage"):
        for name in (*_STORAGES, *_UNTYPED_STORAGES):
            kind = new_class(module, name)
            register(module, name, kind)
            STORAGE_DTYPES[kind] = BY_NAME[_STORAGES[name]] if name in _STORAGES else None
    for name, dtype in BY_NAME.items():
        register("torch", name, dtype)
    for alias, name in _DTYPE_ALIASES.items():
        register("torch", alias, BY_NAME[name])


_register_names()


def storage_of(pid: Any) -> StorageRef | None:
    """The storage that a persistent id of torch's form names, or None for any other id."""
    if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage":
        return None
    _, kind, key, device, numel = pid
    if not isinstance(kind, Sealed) or kind not in STORAGE_DTYPES or type(key) is not str or type(device) is not str:
        return None
    if type(numel) is not int or not 0 <= numel < _WORD:
        return None
    return StorageRef(key, STORAGE_DTYPES[kind], numel, device)


@form("torch._utils:_rebuild_tensor")
def _rebuild_tensor(cls: type[Inert], *args: Any) -> Any:
    """(storage, offset, shape, strides)"""
    if len(args) != 4 or type(args[0]) is not StorageRef:
        return keep(cls, args)
    return _tensor(cls, args, args[0].dtype, False, None)


@form("torch._utils:_rebuild_tensor_v2")
def _rebuild_tensor_v2(cls: type[Inert], *args: Any) -> Any:
    """(storage, offset, shape, strides, requires_grad, hooks[, metadata])"""
    if not 6 <= len(args) <= 7 or type(args[0]) is not StorageRef:
        return keep(cls, args)
    return _tensor(cls, args, args[0].dtype, args[4], args[6] if len(args) == 7 else None)


@form("torch._utils:_rebuild_tensor_v3")
def _rebuild_tensor_v3(cls: type[Inert], *args: Any) -> Any:
    """(storage, offset, shape, strides, requires_grad, hooks, dtype[, metadata])"""
    if not 7 <= len(args) <= 8 or type(args[0]) is not StorageRef:
        return keep(cls, args)
    return _tensor(cls, args, args[6], args[4], args[7] if len(args) == 8 else None)


def _tensor(cls: type[Inert], args: tuple[Any, ...], dtype: Any, requires_grad: Any, metadata: Any) -> Any:
    storage, offset, shape, strides = args[:4]
    if type(dtype) is not DType or metadata:
        return keep(cls, args)  # sub-byte types, conjugate and negative views: their bytes are not their values
    if not isinstance(shape, tuple) or not isinstance(strides, tuple):
        return keep(cls, args)
    if len(shape) != len(strides) or len(shape) > tunables.MAX_DIMENSIONS:
        raise ValueError(f"a tensor has {len(shape)} dimensions and {len(strides)} strides")
    for number in (offset, *shape, *strides):
        if type(number) is not int or not 0 <= number < _WORD:
            raise ValueError(f"a tensor has offset {offset!r}, shape {shape!r} and strides {strides!r}")
    return TensorRef(storage, offset, tuple(shape), tuple(strides), dtype, requires_grad is True)


@form("torch._utils:_rebuild_parameter")
def _rebuild_parameter(cls: type[Inert], *args: Any) -> Any:
    """(tensor, requires_grad, hooks)"""
    if len(args) != 3 or type(args[0]) is not TensorRef:
        return keep(cls, args)
    return _derived(args[0], requires_grad=args[1] is True, parameter=True, attributes=args[0].attributes)


@form("torch._utils:_rebuild_parameter_with_state")
def _rebuild_parameter_with_state(cls: type[Inert], *args: Any) -> Any:
    """(tensor, requires_grad, hooks, attributes)"""
    if len(args) != 4 or type(args[0]) is not TensorRef:
        return keep(cls, args)
    return _derived(args[0], requires_grad=args[1] is True, parameter=True, attributes=args[3])


@form("torch._tensor:_rebuild_from_type_v2", "torch._tensor:_rebuild_from_type", "torch.tensor:_rebuild_from_type")
def _rebuild_from_type(cls: type[Inert], *args: Any) -> Any:
    """(rebuild function, class, its arguments, attributes): a tensor of another class, or one with attributes"""
    refuse_dangerous_arguments(cls, args)
    if len(args) != 4 or args[0] not in _REBUILDERS or not isinstance(args[1], Sealed) or type(args[2]) is not tuple:
        return keep(cls, args)
    data = args[0](*args[2])
    if type(data) is not TensorRef:
        return keep(cls, args)
    path = class_path(args[1])
    is_parameter = path in _PARAMETER_PATHS
    return _derived(
        data,
        requires_grad=data.requires_grad,
        parameter=data.parameter or is_parameter,
        attributes=args[3],
        subclass=None if is_parameter or path == "torch.Tensor" else path,
    )


def _derived(
    data: TensorRef, *, requires_grad: bool, parameter: bool, attributes: Any, subclass: str | None = None
) -> TensorRef:
    subclass = subclass or data.subclass
    where = (data.storage, data.offset, data.shape, data.strides, data.dtype)
    return TensorRef(*where, requires_grad, parameter, attributes, subclass)


_REBUILDERS: Final = [
    stand_in("torch._utils", f"_rebuild_{what}")
    for what in ("tensor", "tensor_v2", "tensor_v3", "parameter", "parameter_with_state")
]


@form("torch:Size")
def _size(cls: type[Inert], *args: Any) -> Any:
    lengths = args[0] if len(args) == 1 else ()
    if len(args) > 1 or not isinstance(lengths, tuple | list) or len(lengths) > tunables.MAX_DIMENSIONS:
        return keep(cls, args)
    return Size(lengths) if all(type(length) is int for length in lengths) else keep(cls, args)
