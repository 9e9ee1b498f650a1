"""numpy's objects as a pickle carries them: type string, shape and bytes, made into arrays only when someone asks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ucp import tunables
from ucp.errors import NotUnderstoodError
from ucp.model.dtypes import unchangeable

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

NUMPY_1: Final = "numpy.core"  # where numpy keeps the functions that make arrays of pickles
NUMPY_2: Final = "numpy._core"
_PLAIN_KINDS: Final = frozenset("biufcSU")
TIME_UNITS: Final = frozenset(["Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as", "generic"])


@dataclass(frozen=True)  # without slots: Python 3.10 would put a setter of its own in the place of ours
class NumpyArray:
    """A numpy array of a file. `descr` as numpy writes it (`<f8`); `data` row-major, or column-major where `fortran`.

    `data` is something else than bytes only for arrays of objects, which `to_numpy` refuses. `core` is the package of
    the numpy that wrote it: loaders that keep a list of what they call know it under the name of their own numpy alone.
    """

    descr: str
    shape: tuple[int, ...]
    data: Any
    fortran: bool = False
    core: str = field(default=NUMPY_2, compare=False)

    __hash__ = None  # type: ignore[assignment]  # like an array, and what a file puts in must not be hashed

    def __setstate__(self, state: object) -> None:
        """Fill the empty array that numpy's `_reconstruct` made with ([version,] shape, dtype, fortran, data); once."""
        if self.descr or type(state) is not tuple or len(state) not in (4, 5):
            raise TypeError("a numpy array is built twice or from an unknown state")
        shape, dtype, fortran, data = state[-4:]
        if type(dtype) is not NumpyDType or type(shape) is not tuple or len(shape) > tunables.MAX_DIMENSIONS:
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

        dtype = _plain_dtype(self.descr)
        count = 1
        for length in self.shape:
            count *= length
        if not isinstance(self.data, bytes | bytearray) or count * dtype.itemsize != len(self.data):
            raise NotUnderstoodError(
                f"a numpy array of {self.descr} {self.shape} does not hold as many bytes as it claims"
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
    """A numpy dtype of a file. `descr` is its type string; `structured` where it has fields or sub-arrays."""

    __slots__ = ("_built", "descr", "structured")

    def __init__(self, code: str) -> None:
        self.descr = code
        self.structured = False
        self._built = False

    def __setstate__(self, state: object) -> None:
        """Take byte order and structure from numpy's (version, order, subarray, names, fields, item size, …); once."""
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
    """`[25us]` for numpy's (…, (unit, count, …)), without which the bytes of a date or a duration mean nothing."""
    if type(metadata) is tuple and len(metadata) == 2 and type(metadata[1]) is tuple and len(metadata[1]) == 4:
        unit, count, *rest = metadata[1]
        if type(unit) is bytes and unit.decode("latin-1") in TIME_UNITS and type(count) is int and rest == [1, 1]:
            return f"[{'' if count == 1 else count}{unit.decode()}]"
    raise TypeError(f"a numpy date or duration in a unit that is not known: {metadata!r:.80}")


def _plain_dtype(descr: str) -> np.dtype[Any]:
    import numpy as np

    code = descr.lstrip("<>|=")
    if code[:1] not in _PLAIN_KINDS or not code[1:].isdecimal():
        raise NotUnderstoodError(f"numpy type {descr!r} holds objects or structure, which is not read")
    try:
        return np.dtype(descr)
    except (TypeError, ValueError, OverflowError) as error:
        raise NotUnderstoodError(f"numpy type {descr!r} is unknown") from error
