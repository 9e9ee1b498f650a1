"""Inert values: the result of reading a pickle without executing it.

No class or function named in a file is ever imported or called. A global is represented by a *class stand-in*, a sealed
subclass of `Inert` that only knows its own path. Calling it, as the unpickler does to build an object, returns an
`Inert` that stores the arguments; everything else that the pickle does to the object is stored on it as data. Tensors,
storages, sizes and numpy arrays have dedicated types; numpy arrays keep type string, shape and bytes, and are converted
on request only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Final, NoReturn

from ucp import settings
from ucp.core.dtypes import DType, unchangeable
from ucp.errors import NotUnderstoodError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Sealed(type):
    """Metaclass of all class stand-ins. Makes them immutable, because they are shared between files."""

    def __setattr__(cls, name: str, value: object) -> NoReturn:
        raise TypeError(f"stand-in {class_path(cls)} cannot be changed (attribute {name!r})")

    def __delattr__(cls, name: str) -> NoReturn:
        raise TypeError(f"stand-in {class_path(cls)} cannot be changed (attribute {name!r})")

    def __repr__(cls) -> str:
        return f"<inert class {class_path(cls)}>"


class Inert(metaclass=Sealed):
    """Stand-in for one object of a file. Compares and hashes by identity, so a hostile file cannot make that slow."""

    __slots__ = ("_items", "_pairs", "args", "called", "kwargs", "state")

    module = "ucp.containers.inert"
    qualname = "Inert"

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: Any
    called: bool  # True if the file calls the class (REDUCE), False if it creates a bare instance (NEWOBJ)
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
        # The unpickler creates bare instances with `__new__` alone; only a call of the class gets here.
        del args, kwargs
        self.called = True

    @property
    def path(self) -> str:
        """`module.qualname` of the class that the file names."""
        return f"{self.module}.{self.qualname}"

    @property
    def items(self) -> list[Any]:
        """The values that the file appended or added to the object, in order."""
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

    # The unpickler looks these methods up by name. They only store their arguments.
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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _Call(self, *args, **kwargs)

    def __repr__(self) -> str:
        return f"<inert {self.path}>"


def check_no_foreign_tensor(value: object, name: str, where: object) -> None:
    """Refuse a tensor whose values are not the bytes of one storage: leaving it out would lose a parameter."""
    if not isinstance(value, Inert):
        return
    kind = value.qualname
    if value.module in ("torch._utils", "torch._tensor") and kind.startswith("_rebuild"):
        kind = class_path(value.args[1]).rpartition(".")[2] if kind.startswith("_rebuild_from_type") else kind
    elif not kind.endswith("Tensor"):
        return
    if kind in ("DTensor", "ShardedTensor"):
        raise NotUnderstoodError(
            f"{where}: {name} is a {kind}, of which the file has one rank's shard",
            hint="save the job with torch.distributed.checkpoint, or gather the state first (full_state_dict=True)",
        )
    raise NotUnderstoodError(
        f"{where}: the bytes of {name} are not its values ({kind}), as of a quantized, sparse or conjugate tensor",
        hint="save it as a plain tensor",
    )


def is_class(value: object) -> bool:
    """Whether `value` is a class or function that the file names without calling it."""
    return isinstance(value, Sealed)


def class_path(value: object) -> str:
    """`module.qualname` of a class stand-in (see `is_class`)."""
    return f"{value.module}.{value.qualname}"  # type: ignore[attr-defined]


def new_class(
    module: str, qualname: str, base: type[Inert] = Inert, call: Callable[..., Any] | None = None
) -> type[Inert]:
    """A new stand-in class for the given path; calling it returns `call(cls, *args)`, or an `Inert` if that is None."""
    # The type's own name is fixed, because a name in a file may contain null bytes or lone surrogates.
    body: dict[str, Any] = {"__slots__": (), "module": module, "qualname": qualname}
    if call is not None:
        body["__new__"] = call
    stand_in: Any = Sealed("Inert", (base,), body)
    return stand_in  # type: ignore[no-any-return]


# The result of calling an inert *object*: stores the object and the arguments.
_Call = new_class("ucp.containers.inert", "call")


class InertOrderedDict(dict[Any, Any]):
    """A `collections.OrderedDict` of the file. `attributes` are those set on the object itself, or None."""

    __slots__ = ("attributes",)

    attributes: Any

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.attributes = None

    def __setstate__(self, state: Any) -> None:
        self.attributes = state


class InertDefaultDict(InertOrderedDict):
    """A `collections.defaultdict` of the file; `factory` is the class stand-in it names. It creates no defaults."""

    __slots__ = ("factory",)

    factory: Any

    def __init__(self, factory: Any = None) -> None:
        super().__init__()
        self.factory = factory


class Size(tuple[int, ...]):
    """A `torch.Size`."""

    __slots__ = ()


@unchangeable
@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage entry of a torch file. `numel` counts elements of `dtype`, or bytes if `dtype` is None (untyped)."""

    key: str
    dtype: DType | None
    numel: int
    device: str

    def __reduce__(self) -> tuple[Any, ...]:
        return StorageRef, (self.key, self.dtype, self.numel, self.device)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize if self.dtype is not None else self.numel


@unchangeable
@dataclass(frozen=True, slots=True)
class TensorRef:
    """A view of a storage. `offset` and `strides` are in elements of `dtype`."""

    storage: StorageRef
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    requires_grad: bool = False
    parameter: bool = False
    attributes: Any = field(default=None, compare=False)  # may be an object graph that is slow to compare
    subclass: str | None = None  # path of the tensor class, if it is neither Tensor nor Parameter

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorRef, tuple(getattr(self, name) for name in self.__slots__)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are row-major without gaps; always true for fewer than two elements."""
        expected = 1
        for length, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if length == 0:
                return True
            if length != 1:
                if stride != expected:
                    return self.numel < 2
                expected *= length
        return True


NUMPY_1: Final = "numpy.core"  # the package with the functions that numpy's pickles call
NUMPY_2: Final = "numpy._core"
_PLAIN_KINDS: Final = frozenset("biufcSU")
TIME_UNITS: Final = frozenset(["Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as", "generic"])


@dataclass(frozen=True)  # without slots: the dataclass decorator of Python 3.10 would overwrite our __setstate__
class NumpyArray:
    """A numpy array of a file. `descr` is numpy's type string (`<f8`); `data` is column-major if `fortran` is set.

    `data` is not bytes only for arrays of objects, which `to_numpy` refuses. `core` is the package of the numpy version
    that wrote the array: `torch.load(weights_only=True)` accepts only the name that its own numpy uses.
    """

    descr: str
    shape: tuple[int, ...]
    data: Any
    fortran: bool = False
    core: str = field(default=NUMPY_2, compare=False)

    __hash__ = None  # type: ignore[assignment]  # unhashable like an array; values from a file must not be hashed

    def __setstate__(self, state: object) -> None:
        """Fill the empty array that `_reconstruct` created from ([version,] shape, dtype, fortran, data); only once."""
        if self.descr or type(state) is not tuple or len(state) not in (4, 5):
            raise TypeError("a numpy array is built twice or from an unknown state")
        shape, dtype, fortran, data = state[-4:]
        if type(dtype) is not NumpyDType or type(shape) is not tuple or len(shape) > settings.MAX_DIMENSIONS:
            raise TypeError("a numpy array has no known dtype or shape")
        if any(type(length) is not int or length < 0 for length in shape):
            raise TypeError(f"a numpy array has the shape {shape!r}")
        for name, value in (("descr", dtype.descr), ("shape", shape), ("fortran", bool(fortran)), ("data", data)):
            object.__setattr__(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return NumpyArray, (self.descr, self.shape, self.data, self.fortran, self.core)

    def to_numpy(self) -> npt.NDArray[Any]:
        """A read-only array over the bytes; plain element types only."""
        import numpy as np

        dtype, count = _plain_dtype(self.descr), prod(self.shape)
        if not isinstance(self.data, bytes | bytearray) or count * dtype.itemsize != len(self.data):
            raise NotUnderstoodError(
                f"a numpy array of {self.descr} {self.shape} does not have the number of bytes of its shape"
            )
        if count == 0:
            return np.empty(self.shape, dtype)
        return np.frombuffer(bytes(self.data), dtype=dtype).reshape(self.shape, order="F" if self.fortran else "C")


@unchangeable
@dataclass(frozen=True, slots=True)
class NumpyScalar:
    """A numpy scalar of a file; `core` as for an array."""

    descr: str
    data: bytes
    core: str = field(default=NUMPY_2, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return NumpyScalar, (self.descr, self.data, self.core)

    def to_python(self) -> Any:
        """The plain Python value: bool, int, float, complex, str or bytes."""
        import numpy as np

        dtype = _plain_dtype(self.descr)
        if dtype.itemsize != len(self.data):
            raise NotUnderstoodError(f"a numpy scalar of {self.descr} holds {len(self.data)} bytes")
        return np.frombuffer(self.data, dtype=dtype)[0].item() if dtype.itemsize else np.zeros((), dtype).item()


class NumpyDType:
    """A numpy dtype of a file. `descr` is its type string; `structured` is set if it has fields or sub-arrays."""

    __slots__ = ("_built", "descr", "structured")

    def __init__(self, code: str) -> None:
        self.descr = code
        self.structured = False
        self._built = False

    def __setstate__(self, state: object) -> None:
        """Set byte order and structure from (version, order, subarray, names, fields, item size, …); only once."""
        if self._built or type(state) is not tuple or len(state) < 5 or type(state[1]) is not str:
            raise TypeError("a numpy dtype is built twice or from an unknown state")
        self._built = True
        order, subarray, names, fields = state[1:5]
        self.structured = any(part is not None for part in (subarray, names, fields))
        if self.structured:
            self.descr = "structured"
            return
        if self.descr in ("M8", "m8"):
            self.descr += _time_unit(state[8] if len(state) > 8 else None)
        if order in ("<", ">"):
            self.descr = order + self.descr

    def __repr__(self) -> str:
        return f"NumpyDType({self.descr!r})"


def _time_unit(metadata: object) -> str:
    """The unit of a datetime64 or timedelta64 as numpy spells it, such as `[25us]`, from (…, (unit, count, …))."""
    if type(metadata) is tuple and len(metadata) == 2 and type(metadata[1]) is tuple and len(metadata[1]) == 4:
        unit, count, *rest = metadata[1]
        if type(unit) is bytes and unit.decode("latin-1") in TIME_UNITS and type(count) is int and rest == [1, 1]:
            return f"[{'' if count == 1 else count}{unit.decode()}]"
    raise TypeError(f"a numpy date or duration has an unknown unit: {metadata!r:.80}")


def _plain_dtype(descr: str) -> np.dtype[Any]:
    import numpy as np

    code = descr.lstrip("<>|=")
    if code[:1] not in _PLAIN_KINDS or not code[1:].isdecimal():
        raise NotUnderstoodError(f"numpy type {descr!r} contains objects or fields, which are not supported")
    try:
        return np.dtype(descr)
    except (TypeError, ValueError, OverflowError) as error:
        raise NotUnderstoodError(f"numpy type {descr!r} is unknown") from error
