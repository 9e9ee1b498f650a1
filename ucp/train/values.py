"""Values between a live job and extras: plain data only. Nothing is ever unpickled, imported or called.

Numbers, text, lists, dictionaries, tensors and numpy arrays come back as they were; an object of any other class stays
behind, and is named.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from ucp.engine.arrays import read_tensor
from ucp.errors import UcpError, UsageError
from ucp.files.inert import (
    Inert,
    InertDefaultDict,
    InertOrderedDict,
    NumpyArray,
    NumpyScalar,
    Size,
    class_path,
    is_class,
)
from ucp.files.pickle_writer import bare_object
from ucp.model.checkpoint import Atom
from ucp.model.dtypes import BY_NAME, DType

_ATOMIC: Final = (bool, int, float, complex, str, bytes)


class Gone:
    """Stands for what could not be brought back."""


GONE: Final = Gone()


def revive(value: Any, root: Path, path: str, left: list[str]) -> Any:
    """A live value from an inert one. What is not plain data is `GONE`; `left` says where it was and what.

    A dictionary loses the entries that are gone; a list or tuple with one is gone itself.
    """
    if value is None or isinstance(value, _ATOMIC):
        return value
    if isinstance(value, Atom):
        return read_tensor(root, value)
    if isinstance(value, dict):
        entries = ((key, revive(item, root, f"{path}.{key}", left)) for key, item in value.items())
        kept = [(key, item) for key, item in entries if item is not GONE]
        ordered = isinstance(value, InertOrderedDict) and not isinstance(value, InertDefaultDict)
        return OrderedDict(kept) if ordered else dict(kept)
    if isinstance(value, Size):
        import torch

        return torch.Size(value)
    if isinstance(value, (list, tuple)):
        items = [revive(item, root, f"{path}[{i}]", left) for i, item in enumerate(value)]
        if any(item is GONE for item in items):
            return GONE
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, (set, frozenset)):
        return set(value)
    if isinstance(value, DType):
        import torch

        return getattr(torch, value.name)
    try:
        if isinstance(value, NumpyArray):
            return value.to_numpy().copy()
        if isinstance(value, NumpyScalar):
            return value.to_python()
    except UcpError as error:
        left.append(f"{path}: {error.what}")
        return GONE
    left.append(f"{path}: {_told(value)} is not plain data")
    return GONE


def _told(value: Any) -> str:
    if is_class(value):
        return f"the class {class_path(value)}"
    return f"an object of {value.path}" if isinstance(value, Inert) else f"a {type(value).__name__}"


def still(value: Any, path: str, keep_tensor: Callable[[str, Any], Atom]) -> Any:
    """An inert value from a live one; `keep_tensor` gives the atom that stands for a tensor. Refuses other classes."""
    import argparse

    import numpy as np
    import torch

    if value is None or isinstance(value, _ATOMIC):
        return value
    if isinstance(value, torch.Tensor):
        return keep_tensor(path, value)
    if isinstance(value, dict):
        entries = [(still(key, path, keep_tensor), still(v, f"{path}.{key}", keep_tensor)) for key, v in value.items()]
        return InertOrderedDict(entries) if isinstance(value, OrderedDict) else dict(entries)
    if isinstance(value, torch.Size):
        return Size(value)
    if isinstance(value, (list, tuple)):
        items = [still(item, f"{path}[{i}]", keep_tensor) for i, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, (set, frozenset)):
        return {still(item, path, keep_tensor) for item in value}
    if isinstance(value, torch.dtype):
        return BY_NAME[str(value).removeprefix("torch.")]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        core = np.empty(0).__reduce__()[0].__module__.rpartition(".")[0]
        return NumpyArray(value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes(), core=core)
    if isinstance(value, argparse.Namespace):
        return bare_object("argparse", "Namespace", still(vars(value), path, keep_tensor))
    raise UsageError(
        f"client_state: {path} is a {type(value).__module__}.{type(value).__qualname__}, which is not plain data",
        hint="give numbers, text, lists, dictionaries, tensors and numpy arrays",
    )
