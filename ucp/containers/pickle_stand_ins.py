"""Stand-ins for the globals that a pickle names: dedicated ones for known types, inert classes for all others.

Stand-ins are sealed classes, never functions or instances: the unpickler requires a class where it creates an object,
and a sealed class is the only callable in Python that no pickle instruction can modify.

The functions decorated with `form` define what calling a known global returns: plain Python data for Python's own data
types if that is safe, `NumpyArray` and its relatives for numpy, `TensorRef` and `StorageRef` for torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from ucp import settings
from ucp.containers.inert import (
    Inert,
    InertDefaultDict,
    InertOrderedDict,
    NumpyArray,
    NumpyDType,
    NumpyScalar,
    Sealed,
    Size,
    StorageRef,
    TensorRef,
    class_path,
    new_class,
)
from ucp.containers.pickle_danger import CALLERS, DEFERRED_CALLS, MODERN_MODULES, is_dangerous
from ucp.core.dtypes import BY_NAME, DType

_MAX_CACHED: Final = 4096  # stand-ins kept for the next file; beyond that, each file creates its own
_MAX_NAME_LENGTH: Final = 1000


class DangerousCall(Exception):  # noqa: N818 - never leaves the pickle reader, which turns it into an UnsafeError
    """The pickle calls something that could run code; the argument describes it."""


class Dangerous(Inert):
    """Base of stand-ins that a pickle may name but not call."""

    __slots__ = ()

    def __new__(cls, /, *_: Any, **__: Any) -> Any:
        raise DangerousCall(class_path(cls))


class Caller(Inert):
    """Base of stand-ins for functions that call their arguments, which therefore must not be dangerous."""

    __slots__ = ()

    def __new__(cls, /, *args: Any, **kwargs: Any) -> Any:
        refuse_dangerous_arguments(cls, args)
        return Inert.__new__(cls, *args, **kwargs)


class DeferredCall(Caller):
    """Base of stand-ins whose objects would call something when called, such as `functools.partial`."""

    __slots__ = ()

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise DangerousCall(f"the result of {self.path}")


def refuse_dangerous_arguments(cls: type[Inert], args: tuple[Any, ...]) -> None:
    """Raise DangerousCall if a function that calls its arguments is passed a dangerous one."""
    for argument in args:
        if isinstance(argument, Sealed) and issubclass(argument, Dangerous):
            raise DangerousCall(f"{class_path(argument)} through {class_path(cls)}")


def keep(cls: type[Inert], args: tuple[Any, ...]) -> Any:
    """The result of a form for arguments that it cannot interpret: an inert object that stores them."""
    return Inert.__new__(cls, *args)


_stand_ins: dict[tuple[str, str], Any] = {}


def register(module: str, qualname: str, stand_in: Any) -> None:
    """Set the stand-in of a global; only while this module is imported."""
    _stand_ins[module, qualname] = stand_in


def form(*paths: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: calling the stand-in of any of the `module:qualname` paths returns `build(cls, *args)`."""

    def decorate(build: Callable[..., Any]) -> Callable[..., Any]:
        for path in paths:
            module, _, qualname = path.partition(":")
            register(module, qualname, new_class(module, qualname, call=build))
        return build

    return decorate


def stand_in(module: str, qualname: str) -> Any:
    """The stand-in for a global; ValueError for absurdly long names."""
    known = _stand_ins.get((module, qualname))
    if known is not None:
        return known
    if len(module) + len(qualname) > _MAX_NAME_LENGTH:
        raise ValueError(f"it names a global of {len(module) + len(qualname)} characters")
    modern = MODERN_MODULES.get(module, module)
    created = _stand_ins.get((modern, qualname)) or new_class(modern, qualname, _base(modern, qualname))
    if len(_stand_ins) < _MAX_CACHED:
        _stand_ins[module, qualname] = created
    return created


def _base(module: str, qualname: str) -> type[Inert]:
    path = f"{module}.{qualname}"
    if is_dangerous(module, qualname):
        return Dangerous
    if path in DEFERRED_CALLS:
        return DeferredCall
    return Caller if path in CALLERS else Inert


class CopyBudget(threading.local):
    """Bytes that forms may still copy while this thread reads one pickle; a hostile one could copy endlessly."""

    left = 0

    def charge(self, cost: int) -> None:
        self.left -= cost
        if self.left < 0:
            raise ValueError("it copies its own data endlessly")


copy_budget: Final = CopyBudget()


_SCALARS = frozenset({str, int, float, bool, bytes, complex, type(None)})


@form("collections:OrderedDict")
def _ordered_dict(cls: type[Inert], *args: Any) -> Any:
    return keep(cls, args) if args else InertOrderedDict()


@form("collections:defaultdict")
def _default_dict(cls: type[Inert], *args: Any) -> Any:
    refuse_dangerous_arguments(cls, args)
    return keep(cls, args) if len(args) > 1 else InertDefaultDict(*args)


@form("builtins:set", "builtins:frozenset")
def _set(cls: type[Inert], *args: Any) -> Any:
    """A set of scalars; a set of anything else keeps its elements as a list, unhashed."""
    kind = set if cls.qualname == "set" else frozenset
    if not args:
        return kind()
    if len(args) > 1 or type(args[0]) is not list:
        return keep(cls, args)
    copy_budget.charge(8 * len(args[0]))
    if any(type(element) not in _SCALARS for element in args[0]):
        return keep(cls, args)
    return kind(args[0])


@form("builtins:bytes", "builtins:bytearray")
def _bytes(cls: type[Inert], *args: Any) -> Any:
    data = _latin1(args) if len(args) == 2 else args[0] if args else b""
    if type(data) is not bytes or len(args) > 2:
        return keep(cls, args)
    if cls.qualname == "bytes":
        return data
    copy_budget.charge(len(data))
    return bytearray(data)


@form("_codecs:encode")
def _encode(cls: type[Inert], *args: Any) -> Any:
    data = _latin1(args)
    return keep(cls, args) if data is None else data


def _latin1(args: tuple[Any, ...]) -> bytes | None:
    """Bytes as protocol 2 writes them: text in which each character is one byte."""
    if len(args) != 2 or type(args[0]) is not str or args[1] not in ("latin1", "latin-1"):
        return None
    copy_budget.charge(len(args[0]))
    try:
        return args[0].encode("latin-1")
    except UnicodeEncodeError:
        return None


@form("builtins:complex")
def _complex(cls: type[Inert], *args: Any) -> Any:
    if len(args) != 2 or any(type(part) is not float for part in args):
        return keep(cls, args)
    return complex(*args)


@form("builtins:type")
def _type(cls: type[Inert], *args: Any) -> Any:
    """Pickles refer to NoneType as `type(None)`; any other call of `type` would create a class."""
    return stand_in("builtins", "NoneType") if args == (None,) else keep(cls, args)


@form("copyreg:_reconstructor")
def _reconstructor(cls: type[Inert], *args: Any) -> Any:
    """(class, base, state): an object of the class before its BUILD; the state of a data type is its argument."""
    if len(args) != 3 or not isinstance(args[0], Sealed):
        return keep(cls, args)
    return _bare(args[0]) if args[2] is None else args[0](args[2])


@form("copyreg:__newobj__")
def _newobj(cls: type[Inert], *args: Any) -> Any:
    return _bare(*args) if args and isinstance(args[0], Sealed) else keep(cls, args)


@form("copyreg:__newobj_ex__")
def _newobj_ex(cls: type[Inert], *args: Any) -> Any:
    if len(args) != 3 or not isinstance(args[0], Sealed) or type(args[1]) is not tuple or type(args[2]) is not dict:
        return keep(cls, args)
    return _bare(args[0], *args[1], **args[2])


def _bare(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """An object of `cls` whose constructor was not called."""
    return cls.__new__(cls, *args, **kwargs)


class _Getattr(DeferredCall):
    """`getattr(class, name)`: protocol 2 refers to nested classes and enum members so. Resolved by name only."""

    __slots__ = ()

    module = "builtins"
    qualname = "getattr"

    def __new__(cls, /, *args: Any) -> Any:
        if len(args) != 2 or type(args[1]) is not str:
            raise DangerousCall(class_path(cls))
        owner, name = args
        if name.startswith("__") or (isinstance(owner, Sealed) and issubclass(owner, Dangerous)):
            raise DangerousCall(f"builtins.getattr for {name!r}")
        if isinstance(owner, Sealed):
            return stand_in(owner.module, f"{owner.qualname}.{name}")  # type: ignore[attr-defined]
        return keep(cls, args)


register("builtins", "getattr", _Getattr)


@form("numpy:dtype")
def _dtype(cls: type[Inert], *args: Any) -> Any:
    """(type code, align, copy), before its BUILD."""
    return NumpyDType(args[0]) if args and type(args[0]) is str else keep(cls, args)


@form("numpy.core.multiarray:_reconstruct", "numpy._core.multiarray:_reconstruct")
def _reconstruct(cls: type[Inert], *args: Any) -> Any:
    """(class, shape, type code) of an empty array, before its BUILD; matrices and masked arrays stay inert."""
    if len(args) != 3 or not isinstance(args[0], Sealed) or class_path(args[0]) != "numpy.ndarray":
        return keep(cls, args)
    return NumpyArray("", (), b"", core=_core(cls))


@form("numpy.core.multiarray:scalar", "numpy._core.multiarray:scalar")
def _scalar(cls: type[Inert], *args: Any) -> Any:
    """(dtype, bytes)."""
    if len(args) != 2 or type(args[0]) is not NumpyDType or type(args[1]) is not bytes:
        return keep(cls, args)
    return NumpyScalar(args[0].descr, args[1], _core(cls))


@form("numpy.core.numeric:_frombuffer", "numpy._core.numeric:_frombuffer")
def _frombuffer(cls: type[Inert], *args: Any) -> Any:
    """(bytes, dtype, shape, order): an array as protocol 5 writes it."""
    if len(args) != 4 or type(args[0]) not in (bytes, bytearray) or type(args[1]) is not NumpyDType:
        return keep(cls, args)
    if args[3] not in ("C", "F"):
        return keep(cls, args)
    array = NumpyArray("", (), b"", core=_core(cls))
    array.__setstate__((args[2], args[1], args[3] == "F", args[0]))
    return array


def _core(cls: type[Inert]) -> str:
    """`numpy.core` for `numpy.core.multiarray`."""
    return cls.module.rpartition(".")[0]


STORAGES: Final = {
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

_STORAGE_DTYPES: Final[dict[Any, DType | None]] = {}  # stand-in of a storage class → element type; None if untyped

for _module in ("torch", "torch.cuda", "torch.storage"):
    for _name in (*STORAGES, *_UNTYPED_STORAGES):
        register(_module, _name, new_class(_module, _name))
        _STORAGE_DTYPES[_stand_ins[_module, _name]] = BY_NAME[STORAGES[_name]] if _name in STORAGES else None
for _name, _element_type in (*BY_NAME.items(), *((alias, BY_NAME[name]) for alias, name in _DTYPE_ALIASES.items())):
    register("torch", _name, _element_type)


def storage_of(pid: Any) -> StorageRef | None:
    """The storage that one of torch's persistent ids refers to, or None for any other id."""
    if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage":
        return None
    _, kind, key, device, numel = pid
    if not isinstance(kind, Sealed) or kind not in _STORAGE_DTYPES or type(key) is not str or type(device) is not str:
        return None
    if type(numel) is not int or not 0 <= numel < _WORD:
        return None
    return StorageRef(key, _STORAGE_DTYPES[kind], numel, device)


_TENSOR_FIELDS: Final = {"_rebuild_tensor": 4, "_rebuild_tensor_v2": 6, "_rebuild_tensor_v3": 7}


@form(*(f"torch._utils:{name}" for name in _TENSOR_FIELDS))
def _rebuild_tensor(cls: type[Inert], *args: Any) -> Any:
    """(storage, offset, shape, strides[, requires_grad, hooks[, dtype]][, metadata])"""
    count = _TENSOR_FIELDS[cls.qualname]  # without the metadata, which only newer forms may have
    if not count <= len(args) <= count + (count > 4) or type(args[0]) is not StorageRef:
        return keep(cls, args)
    storage, offset, shape, strides = args[:4]
    requires_grad = count > 4 and args[4] is True
    dtype = args[6] if count == 7 else storage.dtype
    metadata = args[count] if len(args) > count else None
    if type(dtype) is not DType or metadata:
        return keep(cls, args)  # sub-byte types, conjugate and negative views: the bytes are not the values
    if not isinstance(shape, tuple) or not isinstance(strides, tuple):
        return keep(cls, args)
    if len(shape) != len(strides) or len(shape) > settings.MAX_DIMENSIONS:
        raise ValueError(f"a tensor has {len(shape)} dimensions and {len(strides)} strides")
    for number in (offset, *shape, *strides):
        if type(number) is not int or not 0 <= number < _WORD:
            raise ValueError(f"a tensor has offset {offset!r}, shape {shape!r} and strides {strides!r}")
    return TensorRef(storage, offset, tuple(shape), tuple(strides), dtype, requires_grad)


@form("torch._utils:_rebuild_parameter", "torch._utils:_rebuild_parameter_with_state")
def _rebuild_parameter(cls: type[Inert], *args: Any) -> Any:
    """(tensor, requires_grad, hooks[, attributes])"""
    count = 4 if cls.qualname == "_rebuild_parameter_with_state" else 3
    if len(args) != count or type(args[0]) is not TensorRef:
        return keep(cls, args)
    attributes = args[3] if count == 4 else args[0].attributes
    return replace(args[0], requires_grad=args[1] is True, parameter=True, attributes=attributes)


@form("torch._tensor:_rebuild_from_type_v2", "torch._tensor:_rebuild_from_type", "torch.tensor:_rebuild_from_type")
def _rebuild_from_type(cls: type[Inert], *args: Any) -> Any:
    """(rebuild function, class, its arguments, attributes): a tensor subclass, or a tensor with attributes."""
    refuse_dangerous_arguments(cls, args)
    if len(args) != 4 or args[0] not in _REBUILDERS or not isinstance(args[1], Sealed) or type(args[2]) is not tuple:
        return keep(cls, args)
    data = args[0](*args[2])
    if type(data) is not TensorRef:
        return keep(cls, args)
    path = class_path(args[1])
    is_parameter = path in _PARAMETER_PATHS
    subclass = data.subclass if is_parameter or path == "torch.Tensor" else path
    return replace(data, parameter=data.parameter or is_parameter, attributes=args[3], subclass=subclass)


_REBUILDERS: Final = [
    stand_in("torch._utils", name) for name in (*_TENSOR_FIELDS, "_rebuild_parameter", "_rebuild_parameter_with_state")
]


@form("torch:Size")
def _size(cls: type[Inert], *args: Any) -> Any:
    lengths = args[0] if len(args) == 1 else ()
    if len(args) > 1 or not isinstance(lengths, tuple | list) or len(lengths) > settings.MAX_DIMENSIONS:
        return keep(cls, args)
    return Size(lengths) if all(type(length) is int for length in lengths) else keep(cls, args)
