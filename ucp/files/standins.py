"""The stand-in for every global that a pickle may name: a form where we know its meaning, an inert class otherwise.

Stand-ins are sealed classes, never functions or instances: a class is what the pickle machine demands where it makes an
object, and a sealed one is the only callable of Python on which no pickle instruction can write.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from ucp.files.inert import Inert, Sealed, class_path, new_class
from ucp.files.pickle_danger import CALLERS, CALLS_IN_WAITING, is_dangerous, modern_module

_SHARED: Final = 4096  # stand-ins kept for the next file; beyond that, each file makes its own
_LONGEST_NAME: Final = 1000


class DangerousCall(Exception):  # noqa: N818 - never leaves the pickle reader, which turns it into an UnsafeError
    """The pickle calls something that could run code; the argument says what."""


class Dangerous(Inert):
    """Base of stand-ins that a pickle may name but not call."""

    __slots__ = ()

    def __new__(cls, /, *_: Any, **__: Any) -> Any:
        raise DangerousCall(class_path(cls))


class Caller(Inert):
    """Base of stand-ins for what calls its first arguments, and must not be handed anything dangerous."""

    __slots__ = ()

    def __new__(cls, /, *args: Any, **kwargs: Any) -> Any:
        refuse_dangerous_arguments(cls, args)
        return Inert.__new__(cls, *args, **kwargs)


class CallInWaiting(Caller):
    """Base of stand-ins whose objects would call something when they are called."""

    __slots__ = ()

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise DangerousCall(f"what {self.path} gives")


def refuse_dangerous_arguments(cls: type[Inert], args: tuple[Any, ...]) -> None:
    """Raise DangerousCall where a callable that calls its arguments is handed a dangerous one."""
    for argument in args:
        if isinstance(argument, Sealed) and issubclass(argument, Dangerous):
            raise DangerousCall(f"{class_path(argument)} through {class_path(cls)}")


def keep(cls: type[Inert], args: tuple[Any, ...]) -> Any:
    """What a form gives for arguments that it cannot interpret: an inert object that carries them."""
    return Inert.__new__(cls, *args)


_stand_ins: dict[tuple[str, str], Any] = {}


def register(module: str, qualname: str, stand_in: Any) -> None:
    """Give a global its own stand-in; only at import."""
    _stand_ins[module, qualname] = stand_in


def form(*paths: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register `build(cls, *args)` as what calling any of the `module:qualname` paths gives."""

    def decorate(build: Callable[..., Any]) -> Callable[..., Any]:
        for path in paths:
            module, _, qualname = path.partition(":")
            register(module, qualname, new_class(module, qualname, call=build))
        return build

    return decorate


def stand_in(module: str, qualname: str) -> Any:
    """The stand-in for a global; ValueError for names that no program has."""
    known = _stand_ins.get((module, qualname))
    if known is not None:
        return known
    if len(module) + len(qualname) > _LONGEST_NAME:
        raise ValueError(f"it names a global of {len(module) + len(qualname)} characters")
    modern = modern_module(module)
    made = _stand_ins.get((modern, qualname)) or new_class(modern, qualname, _base(modern, qualname))
    if len(_stand_ins) < _SHARED:
        _stand_ins[module, qualname] = made
    return made


def _base(module: str, qualname: str) -> type[Inert]:
    path = f"{module}.{qualname}"
    if is_dangerous(module, qualname):
        return Dangerous
    if path in CALLS_IN_WAITING:
        return CallInWaiting
    return Caller if path in CALLERS else Inert


class CopyBudget(threading.local):
    """Bytes that forms may still copy while this thread reads one pickle, which could copy one large text forever."""

    left = 0

    def charge(self, cost: int) -> None:
        self.left -= cost
        if self.left < 0:
            raise ValueError("it copies its own data without end")


copy_budget: Final = CopyBudget()
