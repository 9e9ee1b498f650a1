"""The few globals whose meaning we know, each as a sealed stand-in that builds plain data when the pickle calls it.

They stand in for torch's rebuild functions, numpy's, and harmless builtins. Each is a pure function of checked
arguments; what it cannot represent becomes an ordinary `Inert` with the arguments, so nothing is lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from ucp import tunables
from ucp.files.inert import (
    Inert,
    InertDefaultDict,
    InertOrderedDict,
    NumpyArray,
    NumpyDType,
    NumpyScalar,
    Size,
    StorageRef,
    TensorRef,
    class_path,
    is_class,
    new_class,
)
from ucp.model.dtypes import BY_NAME, DType


class DangerousCall(Exception):  # noqa: N818 - never leaves the reader, which turns it into an UnsafeError
    """The pickle calls something that could run code; the argument is its path."""


class CopyBudget(threading.local):
    """Bytes that forms may still copy while one pickle is read; a small pickle could copy one large string forever."""

    left = 0

    def charge(self, cost: int) -> None:
        self.left -= cost
        if self.left < 0:
            raise ValueError("it makes copies of its own data without end")


copy_budget = CopyBudget()

FORMS: Final[dict[tuple[str, str], Any]] = {}
STORAGE_DTYPES: Final[dict[Any, DType | None]] = {}


def _form(*paths: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register `build` as what calling any of `paths` gives; `build(generic, *args)` may fall back to `generic(*args)`."""

    def register(build: Callable[..., Any]) -> Callable[..., Any]:
        for path in paths:
            module, _, qualname = path.rpartition(":")
            FORMS[module, qualname] = _make_form(module, qualname, build)
        return build

    return register


def _make_form(module: str, qualname: str, build: Callable[..., Any]) -> type[Inert]:
    generic = new_class(module, qualname)

    class Form(Inert):
        __slots__ = ()

        def __new__(cls, /, *args: Any, **kwargs: Any) -> Any:
            if kwargs:
                return generic(*args, **kwargs)
            return build(generic, *args)

    Form.__setattr__  # sealed from here on  # noqa: B018
    return new_class(module, qualname, Form)


# torch ------------------------------------------------------------------------------------------------------------


def _tensor(generic: Any, args: tuple[Any, ...], dtype: Any, requires_grad: Any, metadata: Any) -> Any:
    storage, offset, shape, strides = args[:4]
    if type(storage) is not StorageRef or type(dtype) is not DType or metadata:
        return generic(*args)  # conjugate and negative views, quantized types: no plain bytes
    if len(shape) != len(strides) or len(shape) > tunables.MAX_DIMENSIONS:
        raise ValueError(f"a tensor of {len(shape)} dimensions with {len(strides)} strides")
    for number in (offset, *shape, *strides):
        if type(number) is not int or not 0 <= number < 1 << 63:
            raise ValueError(f"a tensor with offset {offset!r}, shape {shape!r}, strides {strides!r}")
    return TensorRef(storage, offset, tuple(shape), tuple(strides), dtype, bool(requires_grad))


@_form("torch._utils:_rebuild_tensor")
def _rebuild_tensor(generic: Any, *args: Any) -> Any:
    if len(args) != 4:
        return generic(*args)
    return _tensor(generic, args, getattr(args[0], "dtype", None), False, None)


@_form("torch._utils:_rebuild_tensor_v2")
def _rebuild_tensor_v2(generic: Any, *args: Any) -> Any:
    if len(args) not in (6, 7):
        return generic(*args)
    return _tensor(generic, args, getattr(args[0], "dtype", None), args[4], args[6] if len(args) == 7 else None)


@_form("torch._utils:_rebuild_tensor_v3")
def _rebuild_tensor_v3(generic: Any, *args: Any) -> Any:
    if len(args) not in (7, 8):
        return generic(*args)
    return _tensor(generic, args, args[6], args[4], args[7] if len(args) == 8 else None)


def _as_parameter(data: TensorRef, requires_grad: Any, attributes: Any) -> TensorRef:
    return TensorRef(
        data.storage,
        data.offset,
        data.shape,
        data.strides,
        data.dtype,
        bool(requires_grad),
        True,
        attributes,
        data.subclass,
    )


@_form("torch._utils:_rebuild_parameter")
def _rebuild_parameter(generic: Any, *args: Any) -> Any:
    if len(args) != 3 or type(args[0]) is not TensorRef:
        return generic(*args)
    return _as_parameter(args[0], args[1], None)


@_form("torch._utils:_rebuild_parameter_with_state")
def _rebuild_parameter_with_state(generic: Any, *args: Any) -> Any:
    if len(args) != 4 or type(args[0]) is not TensorRef:
        return generic(*args)
    return _as_parameter(args[0], args[1], args[3])


@_form("torch._tensor:_rebuild_from_type_v2", "torch._tensor:_rebuild_from_type", "torch.tensor:_rebuild_from_type")
def _rebuild_from_type(generic: Any, *args: Any) -> Any:
    """(rebuild function, class, its arguments, attributes): a tensor of a subclass, or one with attributes."""
    if len(args) != 4 or args[0] not in _REBUILDERS or type(args[2]) is not tuple or not is_class(args[1]):
        return generic(*args)
    data = args[0](*args[2])
    if type(data) is not TensorRef:
        return generic(*args)
    path = class_path(args[1])
    is_parameter = data.parameter or path in _PARAMETER_PATHS
    subclass = None if path == "torch.Tensor" or path in _PARAMETER_PATHS else path
    return TensorRef(
        data.storage,
        data.offset,
        data.shape,
        data.strides,
        data.dtype,
        data.requires_grad,
        is_parameter,
        args[3],
        subclass,
    )


_PARAMETER_PATHS: Final = frozenset({"torch.nn.parameter.Parameter", "torch.nn.Parameter"})
_REBUILDERS: Final = frozenset(
    FORMS["torch._utils", name]
    for name in (
        "_rebuild_tensor",
        "_rebuild_tensor_v2",
        "_rebuild_tensor_v3",
        "_rebuild_parameter",
        "_rebuild_parameter_with_state",
    )
)


@_form("torch:Size")
def _size(generic: Any, *args: Any) -> Any:
    lengths = args[0] if len(args) == 1 else ()
    if len(args) > 1 or type(lengths) not in (tuple, list, Size) or len(lengths) > tunables.MAX_DIMENSIONS:
        return generic(*args)
    if any(type(length) is not int for length in lengths):
        return generic(*args)
    return Size(lengths)


def storage_of(pid: Any) -> StorageRef | None:
    """The storage that a persistent id of torch's form names, or None for any other id."""
    if type(pid) is not tuple or len(pid) < 5 or pid[0] != "storage":
        return None
    _, kind, key, device, numel = pid[:5]
    if not is_class(kind) or kind not in STORAGE_DTYPES or type(key) is not str or type(device) is not str:
        return None
    if type(numel) is not int or not 0 <= numel < 1 << 63:
        return None
    return StorageRef(key, STORAGE_DTYPES[kind], numel, device)


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


def _register_storages() -> None:
    for module in ("torch", "torch.cuda", "torch.storage"):
        for name, dtype in _STORAGES.items():
            FORMS[module, name] = new_class(module, name)
            STORAGE_DTYPES[FORMS[module, name]] = BY_NAME[dtype]
        for name in ("UntypedStorage", "_UntypedStorage"):
            FORMS[module, name] = new_class(module, name)
            STORAGE_DTYPES[FORMS[module, name]] = None


def _register_dtypes() -> None:
    for name, dtype in BY_NAME.items():
        FORMS["torch", name] = dtype
    for alias, name in _DTYPE_ALIASES.items():
        FORMS["torch", alias] = BY_NAME[name]


_DTYPE_ALIASES: Final = {
    "double": "float64",
    "float": "float32",
    "half": "float16",
    "long": "int64",
    "int": "int32",
    "short": "int16",
    "cfloat": "complex64",
    "cdouble": "complex128",
    "chalf": "complex32",
}

_register_storages()
_register_dtypes()


# builtins, collections, copyreg -------------------------------------------------------------------------------------


@_form("collections:OrderedDict")
def _ordered_dict(generic: Any, *args: Any) -> Any:
    return generic(*args) if args else InertOrderedDict()


@_form("collections:defaultdict")
def _default_dict(generic: Any, *args: Any) -> Any:
    return generic(*args) if len(args) > 1 else InertDefaultDict(*args)


@_form("builtins:set")
def _set(generic: Any, *args: Any) -> Any:
    return _plain_set(set, generic, args)


@_form("builtins:frozenset")
def _frozenset(generic: Any, *args: Any) -> Any:
    return _plain_set(frozenset, generic, args)


def _plain_set(kind: Callable[..., Any], generic: Any, args: tuple[Any, ...]) -> Any:
    if len(args) > 1 or (args and type(args[0]) not in (list, tuple)):
        return generic(*args)
    copy_budget.charge(8 * len(args[0]) if args else 0)
    return kind(*args)


@_form("builtins:bytearray")
def _bytearray(generic: Any, *args: Any) -> Any:
    if not args:
        return bytearray()
    data = _latin1(args) if len(args) == 2 else args[0]
    if len(args) > 2 or type(data) is not bytes:
        return generic(*args)
    copy_budget.charge(len(data))
    return bytearray(data)


@_form("builtins:bytes")
def _bytes(generic: Any, *args: Any) -> Any:
    if not args:
        return b""
    data = _latin1(args) if len(args) == 2 else args[0]
    return data if type(data) is bytes and len(args) <= 2 else generic(*args)


@_form("_codecs:encode")
def _encode(generic: Any, *args: Any) -> Any:
    data = _latin1(args)
    return generic(*args) if data is None else data


def _latin1(args: tuple[Any, ...]) -> bytes | None:
    """How protocol 2 writes bytes: text in which each character is one byte."""
    if len(args) != 2 or type(args[0]) is not str or args[1] not in ("latin1", "latin-1"):
        return None
    copy_budget.charge(len(args[0]))
    try:
        return args[0].encode("latin-1")
    except UnicodeEncodeError:
        return None


@_form("builtins:complex")
def _complex(generic: Any, *args: Any) -> Any:
    if len(args) != 2 or any(type(part) not in (float, int) for part in args):
        return generic(*args)
    return complex(*args)


@_form("copyreg:_reconstructor")
def _reconstructor(generic: Any, *args: Any) -> Any:
    """(class, base, state): an object of `class` before its BUILD; bases that are data keep that data as an argument."""
    if len(args) != 3 or not is_class(args[0]):
        return generic(*args)
    return args[0].__new__(args[0]) if args[2] is None else args[0](args[2])


@_form("copyreg:__newobj__")
def _newobj(generic: Any, *args: Any) -> Any:
    return args[0].__new__(*args) if args and is_class(args[0]) else generic(*args)


@_form("copyreg:__newobj_ex__")
def _newobj_ex(generic: Any, *args: Any) -> Any:
    if len(args) != 3 or not is_class(args[0]) or type(args[1]) is not tuple or type(args[2]) is not dict:
        return generic(*args)
    return args[0].__new__(args[0], *args[1], **args[2])


# numpy --------------------------------------------------------------------------------------------------------------


@_form("numpy:dtype")
def _numpy_dtype(generic: Any, *args: Any) -> Any:
    return NumpyDType(args[0]) if args and type(args[0]) is str else generic(*args)


@_form("numpy.core.multiarray:_reconstruct", "numpy._core.multiarray:_reconstruct")
def _numpy_reconstruct(generic: Any, *args: Any) -> Any:
    if len(args) != 3 or not is_class(args[0]) or class_path(args[0]) != "numpy.ndarray":
        return generic(*args)  # subclasses (matrix, masked arrays) keep their name
    return NumpyArray("", (), b"")


@_form("numpy.core.multiarray:scalar", "numpy._core.multiarray:scalar")
def _numpy_scalar(generic: Any, *args: Any) -> Any:
    if len(args) != 2 or type(args[0]) is not NumpyDType or type(args[1]) is not bytes:
        return generic(*args)
    return NumpyScalar(args[0].descr, args[1])


@_form("numpy.core.numeric:_frombuffer", "numpy._core.numeric:_frombuffer")
def _numpy_frombuffer(generic: Any, *args: Any) -> Any:
    """(bytes, dtype, shape, order): how protocol 5 writes an array."""
    if len(args) != 4 or type(args[0]) not in (bytes, bytearray) or type(args[1]) is not NumpyDType:
        return generic(*args)
    if type(args[2]) is not tuple or args[3] not in ("C", "F"):
        return generic(*args)
    return NumpyArray(args[1].descr, args[2], args[0], args[3] == "F")
