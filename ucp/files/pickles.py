"""Read a pickle as inert data: nothing of the file is imported, nothing of the file is called.

Python's own C machine does the work, for speed, with every door closed: globals resolve to sealed stand-ins of ours,
persistent ids to references, and a walk over the opcodes beforehand refuses what the machine itself does not survive.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

from ucp import tunables
from ucp.errors import IntegrityError, UnsafeError
from ucp.files.inert import Inert, new_class
from ucp.files.pickle_danger import is_dangerous, modern_module, suspicious
from ucp.files.pickle_forms import FORMS, DangerousCall, copy_budget, storage_of
from ucp.files.pickle_guard import check_opcodes

__all__ = ["LoadedPickle", "load_pickle", "read_pickle", "suspicious"]

_SHARED_STAND_INS = 4096
_MAX_GLOBALS = 10_000


@dataclass(frozen=True, slots=True)
class LoadedPickle:
    """The inert tree of a pickle and the `module.qualname` of every global that it names."""

    tree: Any
    globals: frozenset[str]


def read_pickle(data: bytes, where: str) -> Any:
    """The inert tree of `data`. `where` names the file in messages.

    Raises IntegrityError when the bytes are no whole, sane pickle, and UnsafeError when it tries to run something.
    """
    return load_pickle(data, where).tree


def load_pickle(data: bytes, where: str) -> LoadedPickle:
    """As `read_pickle`, with the names of all globals that the pickle mentions."""
    if len(data) > tunables.MAX_PICKLE_BYTES:
        raise UnsafeError(f"{where}: its pickle of {len(data)} bytes is larger than {tunables.MAX_PICKLE_BYTES} bytes")
    check_opcodes(data, where)
    copy_budget.left = 4 * len(data)
    reader = _Reader(data)
    try:
        tree = reader.load()
    except DangerousCall as error:
        raise UnsafeError(
            f"{where}: its pickle tries to call {error}, which no checkpoint needs; nothing was run",
            hint="do not load this file with torch.load or pickle; find out who wrote it",
        ) from None
    except RecursionError as error:
        raise UnsafeError(f"{where}: its pickle is nested too deeply to read") from error
    except MemoryError as error:
        raise UnsafeError(f"{where}: its pickle asks for more memory than there is") from error
    except Exception as error:  # whatever the machine stumbles over, the bytes are at fault
        raise IntegrityError(
            f"{where}: its pickle is damaged: {error}",
            hint="the file was changed or copied incompletely; restore it and try again",
        ) from error
    return LoadedPickle(tree, frozenset(f"{module}.{name}" for module, name in reader.met))


class _Reader(pickle.Unpickler):
    """The C machine with both of its doors to the outside closed."""

    def __init__(self, data: bytes) -> None:
        # A reader that can peek lets the machine fetch large pieces instead of one call an opcode.
        super().__init__(io.BufferedReader(io.BytesIO(data), 1 << 16), encoding="utf-8", errors="backslashreplace")  # type: ignore[arg-type]
        self.met: set[tuple[str, str]] = set()

    def find_class(self, module: str, name: str, /) -> Any:
        path = (module, name)
        stand_in = _stand_ins.get(path)
        if stand_in is None:
            stand_in = _make_stand_in(module, name)
        self.met.add(path)
        if len(self.met) > _MAX_GLOBALS:
            raise ValueError(f"it names more than {_MAX_GLOBALS} different globals")
        return stand_in

    def persistent_load(self, pid: Any, /) -> Any:
        storage = storage_of(pid)
        return _PersistentId(pid) if storage is None else storage


_PersistentId = new_class("pickle", "persistent_id")
_stand_ins: dict[tuple[str, str], Any] = dict(FORMS)


class _Dangerous(Inert):
    """Base of stand-ins that may be named but not called."""

    __slots__ = ()

    def __new__(cls, /, *args: Any, **kwargs: Any) -> Any:
        raise DangerousCall(f"{cls.module}.{cls.qualname}")


def _make_stand_in(module: str, name: str) -> Any:
    known = FORMS.get((modern_module(module), name))
    if known is not None:
        stand_in = known
    else:
        stand_in = new_class(modern_module(module), name, _Dangerous if is_dangerous(module, name) else Inert)
    if len(_stand_ins) < _SHARED_STAND_INS:
        _stand_ins[module, name] = stand_in
    return stand_in
