"""The opcodes of a protocol-2 pickle for plain values, containers and inert objects; `pickle_writer` adds the rest.

What one object is to the reader (the same list twice, a list inside itself) is one object again in the file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Final

from ucp.files.inert import Inert, InertDefaultDict, InertOrderedDict, is_class, new_class

_OLD_MODULES: Final = {"builtins": "__builtin__", "copyreg": "copy_reg"}  # as protocol 2 calls them
_PERSISTENT_ID: Final = ("pickle", "persistent_id")
_CALL_OF_AN_OBJECT: Final = ("ucp.files.inert", "call")
_BATCH: Final = 1000
_INTS: Final = {int}


class UnwritableError(Exception):
    """Something that a pickle of ours cannot say; `path` are the keys that lead to it."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.path: list[Any] = []


class Opcodes:
    """Emits opcodes. Every object with an identity gets a memo slot when it is complete enough to be referred to."""

    savers: ClassVar[dict[type, Callable[[Any, Any], None]]]

    def __init__(self) -> None:
        self.out: list[bytes] = []
        self._slots = 0
        self._values: dict[tuple[type, Any], int] = {}  # text, bytes, globals and the like: equal ones are one
        self._objects: dict[int, tuple[int, Any]] = {}  # holds the object, so that its id is not given away

    def finish(self) -> bytes:
        """The whole pickle of what was saved."""
        return b"".join((b"\x80\x02", *self.out, b"."))

    def save(self, value: Any) -> None:
        """Leave `value` on the loader's stack."""
        save = self.savers.get(type(value))
        if save is not None:
            save(self, value)
        elif is_class(value):
            self.save_global(value.module, value.qualname)
        elif isinstance(value, Inert):
            self.save_inert(value)
        else:
            raise UnwritableError(f"a value of type {type(value).__name__}")

    # Memo ---------------------------------------------------------------------------------------------------------

    def _put(self) -> int:
        slot = self._slots
        self._slots += 1
        self.out.append(b"q%c" % slot if slot < 256 else b"r" + slot.to_bytes(4, "little"))
        return slot

    def _get(self, slot: int) -> None:
        self.out.append(b"h%c" % slot if slot < 256 else b"j" + slot.to_bytes(4, "little"))

    def _known(self, value: Any) -> bool:
        """Refer to `value` if it is in the memo."""
        known = self._objects.get(id(value))
        if known is not None:
            self._get(known[0])
        return known is not None

    def _remember(self, value: Any) -> None:
        self._objects[id(value)] = (self._put(), value)

    def _complete(self, value: Any) -> None:
        """`value` is on the stack; if it was met inside its own arguments, drop this copy for that one."""
        if id(value) in self._objects:
            self.out.append(b"0")
            self._known(value)
        else:
            self._remember(value)

    def _known_value(self, kind: type, value: Any) -> bool:
        """Refer to something equal of the same kind if it is in the memo."""
        slot = self._values.get((kind, value))
        if slot is not None:
            self._get(slot)
        return slot is not None

    def _remember_value(self, kind: type, value: Any) -> None:
        self._values[kind, value] = self._put()

    # Plain values -------------------------------------------------------------------------------------------------

    def save_none(self, value: None) -> None:
        del value
        self.out.append(b"N")

    def save_bool(self, value: bool) -> None:
        self.out.append(b"\x88" if value else b"\x89")

    def save_int(self, value: int) -> None:
        self.out.append(_int(value))

    def save_float(self, value: float) -> None:
        self.out.append(struct.pack(">cd", b"G", value))

    def save_str(self, value: str) -> None:
        if self._known_value(str, value):
            return
        data = value.encode("utf-8", "surrogatepass")
        if len(data) >= 1 << 32:
            raise UnwritableError(f"a text of {len(data)} bytes")
        self.out.append(b"X" + len(data).to_bytes(4, "little") + data)
        self._remember_value(str, value)

    def save_bytes(self, value: bytes) -> None:
        if self._known_value(bytes, value):
            return
        if value:
            self._reduce("_codecs", "encode", value.decode("latin-1"), "latin1")
        else:
            self._reduce("builtins", "bytes")
        self._remember_value(bytes, value)

    def save_bytearray(self, value: bytearray) -> None:
        if not self._known(value):
            self._reduce("builtins", "bytearray", *([bytes(value)] if value else []))
            self._remember(value)

    def save_complex(self, value: complex) -> None:
        self._reduce("builtins", "complex", value.real, value.imag)

    # Containers ---------------------------------------------------------------------------------------------------

    def save_tuple(self, value: tuple[Any, ...]) -> None:
        if not value:
            self.out.append(b")")
        elif not self._known(value):
            self._tuple(value)
            self._complete(value)

    def _tuple(self, items: Sequence[Any]) -> None:
        """A tuple without an identity: arguments."""
        if len(items) > 3:
            self.out.append(b"(")
        for number, item in enumerate(items):
            self._save_below(number, item)
        self.out.append((b")", b"\x85", b"\x86", b"\x87")[len(items)] if len(items) <= 3 else b"t")

    def save_list(self, value: list[Any]) -> None:
        if not self._known(value):
            self.out.append(b"]")
            self._remember(value)
            self._appends(value)

    def _appends(self, items: Sequence[Any]) -> None:
        for start in range(0, len(items), _BATCH):
            batch = items[start : start + _BATCH]
            self.out.append(b"(")
            if set(map(type, batch)) == _INTS:
                self.out.append(_ints(tuple(batch)))
            else:
                for number, item in enumerate(batch, start):
                    self._save_below(number, item)
            self.out.append(b"e")

    def save_dict(self, value: dict[Any, Any]) -> None:
        if not self._known(value):
            self.out.append(b"}")
            self._remember(value)
            self._setitems(value.items())

    def _setitems(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        batch = list(pairs)
        for start in range(0, len(batch), _BATCH):
            self.out.append(b"(")
            for key, item in batch[start : start + _BATCH]:
                self.save(key)
                self._save_below(key, item)
            self.out.append(b"u")

    def _save_below(self, key: Any, item: Any) -> None:
        try:
            self.save(item)
        except UnwritableError as error:
            error.path.insert(0, key)
            raise

    def save_set(self, value: set[Any] | frozenset[Any]) -> None:
        if not self._known(value):
            # A set's own order changes from run to run.
            items = sorted(value, key=lambda item: (type(item).__name__, repr(item)))
            self._reduce("builtins", type(value).__name__, items)
            self._complete(value)

    def save_ordered_dict(self, value: InertOrderedDict) -> None:
        if self._known(value):
            return
        if isinstance(value, InertDefaultDict):
            self._reduce("collections", "defaultdict", *([] if value.factory is None else [value.factory]))
        else:
            self._reduce("collections", "OrderedDict")
        self._remember(value)
        self._setitems(value.items())
        self._build(value.attributes)

    # Objects ------------------------------------------------------------------------------------------------------

    def save_global(self, module: str, qualname: str) -> None:
        path = (module, qualname)
        if self._known_value(type, path):
            return
        outer, _, name = qualname.rpartition(".")
        if outer:  # protocol 2 knows top-level names only
            self._reduce("builtins", "getattr", new_class(module, outer), name)
        elif path == ("builtins", "NoneType"):  # which no module has under that name
            self._reduce("builtins", "type", None)
        else:
            line = f"c{_OLD_MODULES.get(module, module)}\n{qualname}\n"
            if line.count("\n") != 2:
                raise UnwritableError(f"the name {module!r}.{qualname!r}")
            self.out.append(line.encode("utf-8", "surrogatepass"))
        self._remember_value(type, path)

    def _reduce(self, module: str, qualname: str, *args: Any) -> None:
        """Call `module.qualname(*args)` at load time."""
        self.save_global(module, qualname)
        self._tuple(args)
        self.out.append(b"R")

    def _build(self, state: Any) -> None:
        if state is not None:
            self.save(state)
            self.out.append(b"b")

    def save_inert(self, value: Inert) -> None:
        if self._known(value):
            return
        path = (value.module, value.qualname)
        if path == _PERSISTENT_ID:
            self.save(value.args[0])
            self.out.append(b"Q")
        elif path == _CALL_OF_AN_OBJECT:
            self.save(value.args[0])
            self._tuple(value.args[1:])
            self.out.append(b"R")
        elif value.kwargs:
            self._reduce("copyreg", "__newobj_ex__", type(value), value.args, value.kwargs)
        else:
            self.save_global(value.module, value.qualname)
            self._tuple(value.args)
            self.out.append(b"R" if value.called else b"\x81")
        self._complete(value)
        self._appends(value.items)
        self._setitems(value.pairs)
        self._build(value.state)


def _int(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return b"K%c" % value
    if 0 <= value < 1 << 16:
        return b"M" + value.to_bytes(2, "little")
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    size = len(data)
    return (b"\x8a%c" % size if size < 256 else b"\x8b" + size.to_bytes(4, "little")) + data


@lru_cache(maxsize=64)
def _ints(values: tuple[int, ...]) -> bytes:
    """Many whole numbers, which have no identity: every rank's file lists all parameters of the model."""
    return b"".join(map(_int, values))


Opcodes.savers = {
    type(None): Opcodes.save_none,
    bool: Opcodes.save_bool,
    int: Opcodes.save_int,
    float: Opcodes.save_float,
    str: Opcodes.save_str,
    bytes: Opcodes.save_bytes,
    bytearray: Opcodes.save_bytearray,
    complex: Opcodes.save_complex,
    tuple: Opcodes.save_tuple,
    list: Opcodes.save_list,
    dict: Opcodes.save_dict,
    set: Opcodes.save_set,
    frozenset: Opcodes.save_set,
    InertOrderedDict: Opcodes.save_ordered_dict,
    InertDefaultDict: Opcodes.save_ordered_dict,
}
