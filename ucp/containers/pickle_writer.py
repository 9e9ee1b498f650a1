"""Write an inert tree back as a pickle; torch creates the real objects again when it loads the file.

The counterpart of `pickle_reader`: protocol 2, as `torch.save` writes it. Nothing in the tree is imported or
called. Equal trees give equal bytes, and object identity is kept: a list that occurs twice is one list in the file.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Final

from ucp.containers.inert import (
    TIME_UNITS,
    Inert,
    InertDefaultDict,
    InertOrderedDict,
    NumpyArray,
    NumpyDType,
    NumpyScalar,
    Size,
    StorageRef,
    TensorRef,
    is_class,
    new_class,
)
from ucp.containers.pickle_stand_ins import STORAGES
from ucp.core.box import strides_of
from ucp.core.dtypes import BY_NAME, DType
from ucp.errors import NotUnderstoodError, UnsafeError

_OLD_MODULES: Final = {"builtins": "__builtin__", "copyreg": "copy_reg"}  # as protocol 2 calls them
_PERSISTENT_ID: Final = ("pickle", "persistent_id")
_CALL_OF_AN_OBJECT: Final = ("ucp.containers.inert", "call")
_BATCH: Final = 1000
_INTS: Final = {int}


class UnwritableError(Exception):
    """A value that cannot be written; `path` are the keys that lead to it."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.path: list[Any] = []


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
    """A list of integers, written fast: the file of every rank lists all parameters of the model."""
    return b"".join(map(_int, values))


@dataclass(frozen=True, slots=True, eq=False)
class NewTensor:
    """A tensor to write: a view of `storage` from its element `offset` on, row-major unless `strides` are given.

    `storage` is anything that the `storage_ref` of `write_pickle` accepts. One NewTensor at two places of a tree is one
    tensor under two names; two NewTensors of one storage are two tensors that share memory.
    """

    storage: Any
    dtype: DType
    shape: tuple[int, ...]
    offset: int = 0
    strides: tuple[int, ...] | None = None
    requires_grad: bool = False
    parameter: bool = False
    attributes: Any = None  # attributes set on the tensor itself, as a dict, or None
    subclass: str | None = None


@lru_cache(maxsize=256)
def _class(module: str, qualname: str) -> type[Inert]:
    """The stand-in for a class whose objects are written; cached, because DCP metadata has thousands of them."""
    return new_class(module, qualname)


def called_object(module: str, qualname: str, *args: Any) -> Inert:
    """The object that `module.qualname(*args)` returns when the file is loaded: enum members, results of functions."""
    made: Inert = _class(module, qualname)(*args)
    return made


def bare_object(module: str, qualname: str, state: Any = None) -> Inert:
    """An object of the class `module.qualname` whose constructor is not called; `state` is its `__dict__`."""
    cls = _class(module, qualname)
    made: Inert = cls.__new__(cls)
    made.state = state
    return made


def with_state(value: Inert, state: Any) -> Inert:
    """A copy of an object with another `__dict__`."""
    made = object.__new__(type(value))
    made.called, made.args, made.kwargs, made.state = value.called, value.args, value.kwargs, state
    return made


# Element types with their own storage class; newer types are stored in untyped storages.
_STORAGE_CLASSES: Final = {BY_NAME[dtype]: new_class("torch", name) for name, dtype in STORAGES.items()}
_UNTYPED_STORAGE: Final = new_class("torch.storage", "UntypedStorage")
_ARRAY: Final = new_class("numpy", "ndarray")

# numpy kind → bytes per character, alignment, dtype flags.
_SIZED_NUMPY_KINDS: Final = {"S": (1, 1, 0), "U": (4, 4, 8)}
_OBJECT_FLAGS: Final = 63
_TIME: Final = re.compile(rf"([Mm]8)\[([1-9]\d*)?({'|'.join(sorted(TIME_UNITS))})\]")


class _InertPickler:
    """Emits protocol-2 opcodes. An object gets a memo slot as soon as it is complete enough to be referred to."""

    def __init__(self, storage_ref: Callable[[Any], StorageRef]) -> None:
        self._storage_ref = storage_ref
        self.out: list[bytes] = []
        self._slots = 0
        self._values: dict[tuple[type, Any], int] = {}  # strings, bytes, globals, …: equal ones are shared
        self._objects: dict[int, tuple[int, Any]] = {}  # keeps the object alive, so that its id is not reused

    def finish(self) -> bytes:
        """The complete pickle of the saved value."""
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
        """Memoize the value on the stack; if its own arguments already contained it, replace it by that object."""
        if id(value) in self._objects:
            self.out.append(b"0")
            self._known(value)
        else:
            self._remember(value)

    def _known_value(self, kind: type, value: Any) -> bool:
        """Refer to an equal value of the same type if it is in the memo."""
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
        """A tuple that is not memoized: arguments."""
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
            # The iteration order of a set changes from run to run.
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
        if outer:  # protocol 2 supports top-level names only
            self._reduce("builtins", "getattr", new_class(module, outer), name)
        elif path == ("builtins", "NoneType"):  # no module has an attribute of that name
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

    # Tensors ------------------------------------------------------------------------------------------------------

    def save_dtype(self, value: DType) -> None:
        self.save_global("torch", value.name)

    def save_size(self, value: Size) -> None:
        if not self._known(value):
            self._reduce("torch", "Size", tuple(value))
            self._remember(value)

    def save_storage(self, storage: Any) -> None:
        """The persistent id of a storage; not memoized, as in torch."""
        ref = self._storage_ref(storage)
        if ref.dtype in _STORAGE_CLASSES:
            kind, count = _STORAGE_CLASSES[ref.dtype], ref.numel
        else:
            kind, count = _UNTYPED_STORAGE, ref.nbytes
        self._tuple(("storage", kind, ref.key, ref.device, count))
        self.out.append(b"Q")

    def save_tensor(self, value: TensorRef | NewTensor) -> None:
        if self._known(value):
            return
        if value.subclass is None and (value.attributes is None or value.parameter):
            self._save_rebuild(value)
            self.out.append(b"R")
        else:
            module, _, name = (value.subclass or "torch.Tensor").rpartition(".")
            self.save_global("torch._tensor", "_rebuild_from_type_v2")
            self.out.append(b"(")
            self._save_rebuild(value, new_class(module, name))
            self._save_below("attributes", value.attributes)
            self.out.append(b"tR")
        self._complete(value)

    def _save_rebuild(self, value: TensorRef | NewTensor, cls: type[Inert] | None = None) -> None:
        """The function that rebuilds a tensor, its class if given, and the tuple of its arguments."""
        if not value.parameter:
            self._save_data(value, value.requires_grad, cls)
            return
        with_state = cls is None and value.attributes is not None
        self.save_global("torch._utils", "_rebuild_parameter_with_state" if with_state else "_rebuild_parameter")
        if cls is not None:
            self.save(cls)
        self.out.append(b"(")
        self._save_data(value, False)
        self.out.append(b"R")
        self.save_bool(value.requires_grad)
        self._reduce("collections", "OrderedDict")  # hooks
        if with_state:
            self._save_below("attributes", value.attributes)
        self.out.append(b"t")

    def _save_data(self, value: TensorRef | NewTensor, requires_grad: bool, cls: type[Inert] | None = None) -> None:
        dtype = self._storage_ref(value.storage).dtype
        typed = dtype in _STORAGE_CLASSES
        if typed and dtype != value.dtype:
            raise UnwritableError(f"a {value.dtype} tensor in a storage of {dtype}")
        self.save_global("torch._utils", "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3")
        if cls is not None:
            self.save(cls)
        self.out.append(b"(")
        self.save_storage(value.storage)
        self.save_int(value.offset)
        self._tuple(value.shape)
        self._tuple(strides_of(value.shape) if value.strides is None else value.strides)
        self.save_bool(requires_grad)
        self._reduce("collections", "OrderedDict")  # hooks
        if not typed:
            self.save_dtype(value.dtype)
        self.out.append(b"t")

    # numpy --------------------------------------------------------------------------------------------------------
    # Keep the module name of the source: numpy 1 and 2 accept both names, but allow-lists of loaders may not.

    def save_array(self, value: NumpyArray) -> None:
        if self._known(value):
            return
        self.save_global(f"{value.core}.multiarray", "_reconstruct")
        self._tuple((_ARRAY, (0,), b"b"))
        self.out.append(b"R")
        self._remember(value)
        self.out.append(b"(")
        self.save_int(1)
        self._tuple(value.shape)
        self._save_numpy_descr(value.descr)
        self.save_bool(value.fortran)
        self.save(bytes(value.data) if isinstance(value.data, bytearray) else value.data)
        self.out.append(b"tb")

    def save_scalar(self, value: NumpyScalar) -> None:
        if self._known(value):
            return
        self.save_global(f"{value.core}.multiarray", "scalar")
        self._save_numpy_descr(value.descr)
        self.save_bytes(value.data)
        self.out.append(b"\x86R")
        self._remember(value)

    def save_numpy_dtype(self, value: NumpyDType) -> None:
        self._save_numpy_descr(value.descr)

    def _save_numpy_descr(self, descr: str) -> None:
        if self._known_value(NumpyDType, descr):
            return
        code = descr.lstrip("<>|=")
        kind, length = code[:1], code[1:]
        order = descr[0] if descr[:1] in ("<", ">") else "|"
        state: tuple[Any, ...] = (3, order, None, None, None, -1, -1, _OBJECT_FLAGS if kind == "O" else 0)
        if kind in _SIZED_NUMPY_KINDS and length.isdecimal():
            width, alignment, flags = _SIZED_NUMPY_KINDS[kind]
            state = (3, order, None, None, None, width * int(length), alignment, flags)
        elif time := _TIME.fullmatch(code):
            code, count, unit = time[1], int(time[2] or 1), time[3].encode()
            state = (4, order, None, None, None, -1, -1, 0, (None, (unit, count, 1, 1)))
        elif not kind or kind not in "biufcO" or not length.isdecimal():
            raise UnwritableError(f"a numpy value of type {descr or 'unknown'!r}")
        self._reduce("numpy", "dtype", code, False, True)
        self._remember_value(NumpyDType, descr)
        self._tuple(state)
        self.out.append(b"b")

    savers: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        type(None): save_none,
        bool: save_bool,
        int: save_int,
        float: save_float,
        str: save_str,
        bytes: save_bytes,
        bytearray: save_bytearray,
        complex: save_complex,
        tuple: save_tuple,
        list: save_list,
        dict: save_dict,
        set: save_set,
        frozenset: save_set,
        InertOrderedDict: save_ordered_dict,
        InertDefaultDict: save_ordered_dict,
        DType: save_dtype,
        Size: save_size,
        StorageRef: save_storage,
        TensorRef: save_tensor,
        NewTensor: save_tensor,
        NumpyArray: save_array,
        NumpyScalar: save_scalar,
        NumpyDType: save_numpy_dtype,
    }


def write_pickle(tree: Any, where: str, storage_ref: Callable[[Any], StorageRef] = lambda storage: storage) -> bytes:
    """The bytes of data.pkl for `tree`. `where` names the file in messages.

    `storage_ref` returns the reference to write for the storage of a tensor or for a bare storage; it is
    called in the order in which `torch.save` would number them.
    """
    writer = _InertPickler(storage_ref)
    try:
        writer.save(tree)
    except UnwritableError as error:
        path = "".join(f"[{key!r}]" for key in error.path)
        raise NotUnderstoodError(
            f"{where}: {path or 'it'} cannot be written: {error}",
            hint="take it out of what the job saves beside its states: load the file, delete the key, save it again",
        ) from None
    except RecursionError:
        raise UnsafeError(f"{where}: what it should hold is nested too deeply to write") from None
    return writer.finish()
