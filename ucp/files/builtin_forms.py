"""What Python's own data types become: plain Python data where that is safe, inert objects otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ucp.files.inert import Inert, InertDefaultDict, InertOrderedDict, Sealed, class_path
from ucp.files.standins import (
    CallInWaiting,
    Dangerous,
    DangerousCall,
    copy_budget,
    form,
    keep,
    refuse_dangerous_arguments,
    register,
    stand_in,
)

_SCALARS = frozenset({str, int, float, bool, bytes, complex, type(None)})


@form("collections:OrderedDict")
def _ordered_dict(cls: type[Inert], *args: Any) -> Any:
    return keep(cls, args) if args else InertOrderedDict()


@form("collections:defaultdict")
def _default_dict(cls: type[Inert], *args: Any) -> Any:
    refuse_dangerous_arguments(cls, args)
    return keep(cls, args) if len(args) > 1 else InertDefaultDict(*args)


@form("builtins:set")
def _set(cls: type[Inert], *args: Any) -> Any:
    return _plain_set(set, cls, args)


@form("builtins:frozenset")
def _frozenset(cls: type[Inert], *args: Any) -> Any:
    return _plain_set(frozenset, cls, args)


def _plain_set(kind: Callable[..., Any], cls: type[Inert], args: tuple[Any, ...]) -> Any:
    """A set of scalars; any other keeps its elements as the list that they came in, unhashed."""
    if not args:
        return kind()
    if len(args) > 1 or type(args[0]) is not list:
        return keep(cls, args)
    copy_budget.charge(8 * len(args[0]))
    if any(type(element) not in _SCALARS for element in args[0]):
        return keep(cls, args)
    return kind(args[0])


@form("builtins:bytes")
def _bytes(cls: type[Inert], *args: Any) -> Any:
    if not args:
        return b""
    data = _latin1(args) if len(args) == 2 else args[0]
    return data if type(data) is bytes and len(args) <= 2 else keep(cls, args)


@form("builtins:bytearray")
def _bytearray(cls: type[Inert], *args: Any) -> Any:
    if not args:
        return bytearray()
    data = _latin1(args) if len(args) == 2 else args[0]
    if type(data) is not bytes or len(args) > 2:
        return keep(cls, args)
    copy_budget.charge(len(data))
    return bytearray(data)


@form("_codecs:encode")
def _encode(cls: type[Inert], *args: Any) -> Any:
    data = _latin1(args)
    return keep(cls, args) if data is None else data


def _latin1(args: tuple[Any, ...]) -> bytes | None:
    """How protocol 2 writes bytes: text in which each character is one byte."""
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
    """`type(None)` is how pickles name NoneType; whatever else calls `type` would make a class."""
    return stand_in("builtins", "NoneType") if args == (None,) else keep(cls, args)


@form("copyreg:_reconstructor")
def _reconstructor(cls: type[Inert], *args: Any) -> Any:
    """(class, base, state): an object of the class before its BUILD; a base that is data keeps it as the argument."""
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
    """An object of `cls` that knows its constructor was not called."""
    return cls.__new__(cls, *args, **kwargs)


class _Getattr(CallInWaiting):
    """`getattr(class, name)`, how protocol 2 names a nested class or an enum member; resolved by name only."""

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
