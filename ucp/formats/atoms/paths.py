"""Parameter names as file names: readable for ordinary names, safe for hostile ones, reversible for all.

Letters, digits, `_`, `-` and `.` stand for themselves; every other UTF-8 byte is written `%XX`, and a leading dot too.
Names that differ only in case have their capitals written `%XX` too, so that they stay apart on file systems that
ignore case. A name too long for one file name is cut into folders that end in `~`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from urllib.parse import unquote_to_bytes

from ucp import tunables
from ucp.errors import UsageError

SUFFIX = ".safetensors"

_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")
_CAPITALS = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ")
_RESERVED = frozenset(
    ("con", "prn", "aux", "nul", *(f"com{i}" for i in range(1, 10)), *(f"lpt{i}" for i in range(1, 10)))
)
_MORE = "~"
_EMPTY = "%"  # a parameter without a name
_MAX_ESCAPED_BYTES = 3000  # leaves room for the target folder below the usual limit of 4,096 for a path


def file_names(names: Iterable[str]) -> dict[str, str]:
    """Parameter name → path of its file, relative to the atoms folder. Deterministic, and free of collisions."""
    listed = list(names)
    folded = Counter(name.casefold() for name in listed)
    return {name: _path(name, spell_capitals=folded[name.casefold()] > 1) for name in listed}


def name_of(path: str) -> str:
    """The parameter name that a path of `file_names` stands for."""
    escaped = path.removesuffix(SUFFIX).replace(f"{_MORE}/", "")
    if escaped == _EMPTY:
        return ""
    return unquote_to_bytes(escaped).decode("utf-8", "surrogatepass")


def _path(name: str, *, spell_capitals: bool) -> str:
    escaped = _escape(name, spell_capitals=spell_capitals)
    if len(escaped) > _MAX_ESCAPED_BYTES:
        raise UsageError(f"parameter name of {len(name)} characters is too long for a path: {name[:80]}…")
    limit = tunables.NAME_BYTES
    chunks = [escaped[i : i + limit] for i in range(0, len(escaped), limit)] or [""]
    return f"{_MORE}/".join(chunks) + SUFFIX


def _escape(name: str, *, spell_capitals: bool) -> str:
    plain = _PLAIN - _CAPITALS if spell_capitals else _PLAIN
    data = name.encode("utf-8", "surrogatepass")
    text = "".join(chr(byte) if byte in plain else f"%{byte:02X}" for byte in data)
    if text and (text.startswith(".") or text.split(".", 1)[0].lower() in _RESERVED):
        text = f"%{data[0]:02X}{text[1:]}"
    return text or _EMPTY
