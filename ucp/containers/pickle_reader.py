"""Read a pickle as inert data: nothing in the file is imported or called.

Python's C unpickler does the work, for speed, with all access to the outside closed: globals resolve to sealed
stand-ins, persistent ids to references, and `pickle_guard` refuses opcodes that would exhaust the unpickler itself.
"""

from __future__ import annotations

import _compat_pickle
import io
import pickle
from dataclasses import dataclass
from typing import Any, Final

from ucp import settings
from ucp.containers.inert import new_class
from ucp.containers.pickle_danger import suspicious
from ucp.containers.pickle_guard import check_opcodes
from ucp.containers.pickle_stand_ins import DangerousCall, copy_budget, stand_in, storage_of
from ucp.errors import IntegrityError, UcpError, UnsafeError

__all__ = ["LoadedPickle", "load_pickle", "read_pickle", "suspicious"]

_MAX_GLOBALS: Final = 10_000  # real files name fewer than a hundred
_COPIES: Final = 4  # bytes that forms may copy per byte of pickle
_PersistentId: Final = new_class("pickle", "persistent_id")


@dataclass(frozen=True, slots=True)
class LoadedPickle:
    """The inert tree of a pickle, and (module, qualname) of every global that it names; see also `suspicious`."""

    tree: Any
    globals: frozenset[tuple[str, str]]


def read_pickle(data: bytes, where: str) -> Any:
    """The inert tree of `data`; bytes after its STOP are ignored. `where` names the file in messages.

    Raises IntegrityError if the pickle is damaged, and UnsafeError if it tries to run something or to exhaust memory.
    """
    return load_pickle(data, where).tree


def load_pickle(data: bytes, where: str) -> LoadedPickle:
    """Like `read_pickle`, with the names of all globals in the pickle."""
    if len(data) > settings.MAX_PICKLE_BYTES:
        raise UnsafeError(
            f"{where}: its pickle has {len(data)} bytes, the limit is {settings.MAX_PICKLE_BYTES}",
            hint="tensors must be stored outside the pickle; save the file again with torch.save",
        )
    check_opcodes(data, where)
    copy_budget.left = _COPIES * len(data)
    reader = _InertUnpickler(data)
    try:
        tree = reader.load()
    except Exception as error:  # noqa: BLE001 - whatever the unpickler raises, the bytes are the cause
        raise _explain(error, where) from (None if isinstance(error, DangerousCall) else error)
    return LoadedPickle(tree, frozenset(reader.met))


def _explain(error: Exception, where: str) -> UcpError:
    # The message may contain names from the file, whose escape sequences must not reach a terminal.
    what = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in str(error)[:500])
    if isinstance(error, DangerousCall):
        return UnsafeError(
            f"{where}: its pickle tries to call {what}, which no checkpoint needs; nothing was run",
            hint="do not open this file with torch.load or pickle, and find out where it comes from",
        )
    if isinstance(error, RecursionError | MemoryError):
        return UnsafeError(
            f"{where}: its pickle is nested too deeply or asks for too much memory ({type(error).__name__})",
            hint="no checkpoint needs this; find out where the file comes from",
        )
    return IntegrityError(
        f"{where}: its pickle is damaged: {what or type(error).__name__}",
        hint="the file was changed or copied incompletely; restore it and try again",
    )


class _InertUnpickler(pickle.Unpickler):
    """The C unpickler with both of its hooks to the outside, globals and persistent ids, replaced."""

    def __init__(self, data: bytes) -> None:
        # With a source that supports peek(), the unpickler reads large blocks instead of making one call per opcode.
        source: Any = io.BufferedReader(io.BytesIO(data), 1 << 16)
        super().__init__(source, encoding="utf-8", errors="backslashreplace")
        self._writes_old_names = data[:2] in (b"\x80\x02", b"\x80\x01") or data[:1] != b"\x80"
        self._known: dict[tuple[str, str], Any] = {}
        self.met: set[tuple[str, str]] = set()

    def find_class(self, module: str, name: str, /) -> Any:
        path = (module, name)
        known = self._known.get(path)
        if known is None:
            if len(self._known) >= _MAX_GLOBALS:
                raise ValueError(f"it names more than {_MAX_GLOBALS} different globals")
            real = path
            if self._writes_old_names:  # protocols below 3, which torch uses, write Python 2 names (`int` as `long`)
                renamed: tuple[str, str] | None = _compat_pickle.NAME_MAPPING.get(path)
                real = renamed or (_compat_pickle.IMPORT_MAPPING.get(module, module), name)
            self.met.add(real)
            known = self._known[path] = stand_in(*real)
        return known

    def persistent_load(self, pid: Any, /) -> Any:
        storage = storage_of(pid)
        return _PersistentId(pid) if storage is None else storage
