"""What a pickle becomes when it is read without running it: named, inspectable stand-ins that can do nothing.

No class or function of a file is ever imported or called. A global that the file names is a *class stand-in*, a sealed
subclass of `Inert` that knows only its own path; calling it, as the pickle machine does to build an object, gives an
`Inert` that carries the arguments, and everything that the file then does to that object is stored on it as data.
Tensors, storages, sizes and numpy arrays have forms of their own, because the rest of the program asks for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from ucp.errors import NotUnderstoodError
from ucp.model.dtypes import DType

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Sealed(type):
    """Metaclass of every stand-in class. Stand-ins are shared between files, so no file may write on one."""

    def __setattr__(cls, name: str, value: object) -> NoReturn:
        raise TypeError(f"stand-in {class_path(cls)} cannot be changed (attribute {name!r})")

    def __delattr__(cls, name: str) -> NoReturn:
        raise TypeError(f"stand-in {class_path(cls)} cannot be changed (attribute {name!r})")

    def __repr__(cls) -> str:
        return f"<inert class {class_path(cls)}>"


class Inert(metaclass=Sealed):
    """Stand-in for one object of a file. Compares and hashes by identity, so that a hostile file cannot make that slow."""

    __slots__ = ("_items", "_pairs", "args", "called", "kwargs", "state")

    module = "ucp.files.inert"
    qualname = "Inert"

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: Any
    called: bool  # the file calls the class (REDUCE); False where it only asks for a bare instance (NEWOBJ)
    _items: list[Any]
    _pairs: list[tuple[Any, Any]]

    def __new__(cls, /, *args: Any, **kwargs: Any) -> Any:
        self = object.__new__(cls)
        self.args = args
        self.kwargs = kwargs
        self.state = None
        self.called = False
        return self

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        # The pickle machine makes bare instances by `__new__` alone; only a call of the class comes here.
        del args, kwargs
        self.called = True

    @property
    def path(self) -> str:
        """`module.qualname` of the class that the file names."""
        return f"{self.module}.{self.qualname}"

    @property
    def items(self) -> list[Any]:
        """What the file appended or added to the object, in order."""
        try:
            return self._items
        except AttributeError:
            self._items = []
            return self._items

    @property
    def pairs(self) -> list[tuple[Any, Any]]:
        """The (key, value) pairs that the file set on the object, in order."""
        try:
            return self._pairs
        except AttributeError:
            self._pairs = []
            return self._pairs

    def get(self, name: str, default: Any = None) -> Any:
        """Field `name` of the state: of a dict, or of a (dict or None, dict of slots or None) pair."""
        state = self.state
        if isinstance(state, dict):
            return state.get(name, default)
        if type(state) is tuple and len(state) == 2:
            for part in state:
                if isinstance(part, dict) and name in part:
                    return part[name]
        return default

    # The pickle machine looks these up by name. They store, and do nothing else.
    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.pairs.append((key, value))

    def append(self, item: Any) -> None:
        self.items.append(item)

    def extend(self, items: Iterable[Any]) -> None:
        self.items.extend(items)

    def add(self, item: Any) -> None:
        self.items.append(item)

    def __repr__(self) -> str:
        return f"<inert {self.path}>"


def is_class(value: object) -> bool:
    """Whether `value` is a class or function that the file names without calling it."""
    return isinstance(value, Sealed)


def class_path(value: object) -> str:
    """`module.qualname` of a class stand-in (see `is_class`)."""
    return f"{value.module}.{value.qualname}"  # type: ignore[attr-defined]


def new_class(module: str, qualname: str, base: type[Inert] = Inert) -> type[Inert]:
    """A fresh sealed stand-in class that carries the given path."""
    # The type's own name is fixed: a file's name may hold what Python refuses in one (null bytes, lone surrogates).
    return Sealed("Inert", (base,), {"__slots__": (), "module": module, "qualname": qualname})


class InertOrderedDict(dict[Any, Any]):
    """A `collections.OrderedDict` of the file. `attributes` is what was set on the object itself (`_metadata`), or None."""

    __slots__ = ("attributes",)

    attributes: Any

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.attributes = None

    def __setstate__(self, state: Any) -> None:
        self.attributes = state


class InertDefaultDict(InertOrderedDict):
    """A `collections.defaultdict` of the file; `factory` is the class stand-in it names, or None. It makes no defaults."""

    __slots__ = ("factory",)

    factory: Any

    def __init__(self, factory: Any = None) -> None:
        super().__init__()
        self.factory = factory


class Size(tuple[int, ...]):
    """A `torch.Size`."""

    __slots__ = ()


class _Unchangeable:
    """Values that a file can reach but must not write on; frozen dataclasses with slots would accept a BUILD otherwise."""

    __slots__ = ()

    def __setstate__(self, state: object) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} cannot be changed")


@dataclass(frozen=True, slots=True)
class StorageRef(_Unchangeable):
    """A storage entry of a torch file. `numel` counts elements of `dtype`, or bytes where `dtype` is None (untyped)."""

    key: str
    dtype: DType | None
    numel: int
    device: str

    __setstate__ = _Unchangeable.__setstate__

    def __reduce__(self) -> tuple[Any, ...]:
        return StorageRef, (self.key, self.dtype, self.numel, self.device)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize if self.dtype is not None else self.numel


@dataclass(frozen=True, slots=True)
class TensorRef(_Unchangeable):
    """A view of a storage. `offset` and `strides` are in elements of `dtype`."""

    storage: StorageRef
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    requires_grad: bool = False
    parameter: bool = False
    attributes: Any = field(default=None, compare=False)  # may be a graph that is costly to compare
    subclass: str | None = None  # path of the file's own tensor class, where it is neither Tensor nor Parameter

    __setstate__ = _Unchangeable.__setstate__

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorRef, (
            self.storage,
            self.offset,
            self.shape,
            self.strides,
            self.dtype,
            self.requires_grad,
            self.parameter,
            self.attributes,
            self.subclass,
        )

    @property
    def numel(self) -> int:
        count = 1
        for length in self.shape:
            count *= length
        return count

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie row-major without gaps; with fewer than two elements they always do."""
        expected = 1
        for length, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if length == 0:
                return True
            if length != 1:
                if stride != expected:
                    return self.numel < 2
                expected *= length
        return True


_PLAIN_NUMPY_KINDS = frozenset("biufcSU")


@dataclass(frozen=True, slots=True)
class NumpyArray(_Unchangeable):
    """A numpy array of the file. `descr` as numpy writes it (`<f8`); `data` row-major, or column-major where `fortran`.

    `data` is not bytes only for arrays of objects, which `to_numpy` refuses.
    """

    descr: str
    shape: tuple[int, ...]
    data: Any
    fortran: bool = False

    def __setstate__(self, state: object) -> None:
        """Fill the empty array that `_reconstruct` made with (version, shape, dtype, fortran, data); only once."""
        if self.descr or not isinstance(state, tuple) or len(state) not in (4, 5):
            raise TypeError("a numpy array was built twice or from an unknown state")
        shape, dtype, fortran, data = state[-4:]
        if not isinstance(dtype, NumpyDType):
            raise TypeError("a numpy array of unknown dtype")
        object.__setattr__(self, "descr", dtype.descr)
        object.__setattr__(self, "shape", tuple(shape) if isinstance(shape, tuple) else (shape,))
        object.__setattr__(self, "fortran", bool(fortran))
        object.__setattr__(self, "data", data)

    def __reduce__(self) -> tuple[Any, ...]:
        return NumpyArray, (self.descr, self.shape, self.data, self.fortran)

    def to_numpy(self) -> npt.NDArray[Any]:
        """A read-only array over the bytes; plain element types only."""
        import numpy as np

        dtype = _plain_numpy_dtype(self.descr)
        count = 1
        for length in self.shape:
            count *= length
        if not isinstance(self.data, bytes | bytearray) or count * dtype.itemsize != len(self.data):
            raise NotUnderstoodError(f"a numpy array of {self.descr} {self.shape} does not hold that many bytes")
        return np.frombuffer(self.data, dtype=dtype).reshape(self.shape, order="F" if self.fortran else "C")


@dataclass(frozen=True, slots=True)
class NumpyScalar(_Unchangeable):
    """A numpy scalar of the file."""

    descr: str
    data: bytes

    __setstate__ = _Unchangeable.__setstate__

    def __reduce__(self) -> tuple[Any, ...]:
        return NumpyScalar, (self.descr, self.data)

    def to_python(self) -> Any:
        """The plain Python value (bool, int, float, complex, str or bytes)."""
        import numpy as np

        dtype = _plain_numpy_dtype(self.descr)
        if dtype.itemsize != len(self.data):
            raise NotUnderstoodError(f"a numpy scalar of {self.descr} does not hold {len(self.data)} bytes")
        return np.frombuffer(self.data, dtype=dtype)[0].item()


class NumpyDType:
    """A numpy dtype of the file. `descr` is a plain type string; structured and dated types are marked by `structured`."""

    __slots__ = ("_built", "descr", "structured")

    def __init__(self, code: str) -> None:
        self.descr = code
        self.structured = False
        self._built = False

    def __setstate__(self, state: object) -> None:
        """numpy's (version, byte order, subarray, names, fields, item size, …); only once."""
        if self._built or not isinstance(state, tuple) or len(state) < 5 or not isinstance(state[1], str):
            raise TypeError("a numpy dtype was built twice or from an unknown state")
        self._built = True
        order, subarray, names, fields = state[1:5]
        self.structured = any(part is not None for part in (subarray, names, fields))
        if self.structured:
            self.descr = "structured"
        elif order in ("<", ">"):
            self.descr = order + self.descr

    def __repr__(self) -> str:
        return f"NumpyDType({self.descr!r})"


def _plain_numpy_dtype(descr: str) -> np.dtype[Any]:
    import numpy as np

    if descr.lstrip("<>|=")[:1] not in _PLAIN_NUMPY_KINDS or not descr.lstrip("<>|=")[1:].isdecimal():
        raise NotUnderstoodError(f"numpy type {descr!r} holds objects or structure, which is not read")
    try:
        return np.dtype(descr)
    except (TypeError, ValueError, OverflowError) as error:
        raise NotUnderstoodError(f"numpy type {descr!r} is unknown") from error
