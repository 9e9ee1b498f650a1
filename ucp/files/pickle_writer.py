"""Write an inert tree as the pickle that it came from: the real classes come to life again where torch loads it.

The counterpart of `pickles` and its forms: protocol 2, as `torch.save` writes it. Nothing of the tree is imported or
called here. Equal trees give equal bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Final

from ucp.errors import NotUnderstoodError, UnsafeError
from ucp.files.inert import (
    Inert,
    NumpyArray,
    NumpyDType,
    NumpyScalar,
    Size,
    StorageRef,
    TensorRef,
    new_class,
)
from ucp.files.inert_numpy import TIME_UNITS
from ucp.files.pickle_opcodes import Opcodes, UnwritableError
from ucp.model.box import strides_of
from ucp.model.dtypes import BY_NAME, DType

__all__ = ["NewTensor", "bare_object", "called_object", "write_pickle"]


@dataclass(frozen=True, slots=True, eq=False)
class NewTensor:
    """A tensor to write: a view of `storage` from its element `offset` on, row-major unless `strides` say otherwise.

    `storage` is whatever `write_pickle`'s `storage_ref` understands. One NewTensor at two places of a tree is one
    tensor under two names; two NewTensors of one storage are two tensors that share memory.
    """

    storage: Any
    dtype: DType
    shape: tuple[int, ...]
    offset: int = 0
    strides: tuple[int, ...] | None = None
    requires_grad: bool = False
    parameter: bool = False
    attributes: Any = None  # what is set on the tensor itself, as a dict, or None
    subclass: str | None = None


@lru_cache(maxsize=256)
def _class(module: str, qualname: str) -> type[Inert]:
    """The stand-in for a class of which we make objects: a folder's metadata has thousands of each."""
    return new_class(module, qualname)


def called_object(module: str, qualname: str, *args: Any) -> Inert:
    """The object that `module.qualname(*args)` will give when the file is loaded: enums, functions."""
    made: Inert = _class(module, qualname)(*args)
    return made


def bare_object(module: str, qualname: str, state: Any = None) -> Inert:
    """An object of the class `module.qualname` whose constructor is not called; `state` is its `__dict__`."""
    cls = _class(module, qualname)
    made: Inert = cls.__new__(cls)
    made.state = state
    return made


def write_pickle(tree: Any, where: str, storage_ref: Callable[[Any], StorageRef] = lambda storage: storage) -> bytes:
    """The bytes of data.pkl for `tree`. `where` names the file in messages.

    `storage_ref` gives the reference that the file shall hold for the storage of a tensor, or for a bare storage; it is
    called in the order in which `torch.save` would number them.
    """
    writer = _Writer(storage_ref)
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


# Element types that have a storage class of their own; the rest, being younger, lie in storages of bytes.
_STORAGE_CLASSES: Final = {
    BY_NAME[name]: new_class("torch", f"{cls}Storage")
    for name, cls in (
        ("float64", "Double"),
        ("float32", "Float"),
        ("float16", "Half"),
        ("bfloat16", "BFloat16"),
        ("int64", "Long"),
        ("int32", "Int"),
        ("int16", "Short"),
        ("int8", "Char"),
        ("uint8", "Byte"),
        ("bool", "Bool"),
        ("complex64", "ComplexFloat"),
        ("complex128", "ComplexDouble"),
    )
}
_UNTYPED_STORAGE: Final = new_class("torch.storage", "UntypedStorage")
_ARRAY: Final = new_class("numpy", "ndarray")

# numpy kind → bytes a character, alignment, flags of the dtype; plain numbers have sizes of their own.
_SIZED_NUMPY_KINDS: Final = {"S": (1, 1, 0), "U": (4, 4, 8)}
_OBJECT_FLAGS: Final = 63
_TIME: Final = re.compile(rf"([Mm]8)\[([1-9]\d*)?({'|'.join(sorted(TIME_UNITS))})\]")


class _Writer(Opcodes):
    """Adds the forms that tensors, storages and numpy values have in a file."""

    def __init__(self, storage_ref: Callable[[Any], StorageRef]) -> None:
        super().__init__()
        self._storage_ref = storage_ref

    def save_dtype(self, value: DType) -> None:
        self.save_global("torch", value.name)

    def save_size(self, value: Size) -> None:
        if not self._known(value):
            self._reduce("torch", "Size", tuple(value))
            self._remember(value)

    def save_storage(self, storage: Any) -> None:
        """The persistent id of a storage; a fresh one each time, as torch does."""
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
        """The function that rebuilds a tensor, its class where one is given, and the tuple of its arguments."""
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
    # Under the module's name that it had: both numpys answer to both, but not every loader that lists what it trusts.

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

    savers: ClassVar = {
        **Opcodes.savers,
        DType: save_dtype,
        Size: save_size,
        StorageRef: save_storage,
        TensorRef: save_tensor,
        NewTensor: save_tensor,
        NumpyArray: save_array,
        NumpyScalar: save_scalar,
        NumpyDType: save_numpy_dtype,
    }
