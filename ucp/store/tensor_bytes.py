"""The bytes of what a job gives to a store, whatever holds them: tensors of torch, numpy arrays, plain bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ucp import tunables
from ucp.errors import UsageError
from ucp.store.layout import Entry

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def blocks_of(tensor: Any, entry: Entry) -> Iterator[Bytes]:
    """The bytes of an atom, row-major, in blocks that stay in the CPU's cache until they are digested.

    `tensor` is a tensor, a numpy array, or bytes as they are to be stored. `UsageError` where it is not what the store
    has room for.
    """
    if isinstance(tensor, (bytes, bytearray, memoryview)):
        flat: Any = np.frombuffer(tensor, np.uint8)
        fits = len(flat) == entry.nbytes
    else:
        name = str(tensor.dtype).removeprefix("torch.")
        fits = tuple(tensor.shape) == entry.shape and name == entry.dtype.name
        flat = tensor.reshape(-1) if isinstance(tensor, np.ndarray) else _flat(tensor)
    if not fits:
        given = f"{tensor.dtype} {list(tensor.shape)}" if hasattr(tensor, "dtype") else f"{len(flat)} bytes"
        raise UsageError(
            f"parameter {entry.name}, {entry.kind}: {given} was given, the store has room for"
            f" {entry.dtype} {list(entry.shape)}"
        )
    itemsize = entry.dtype.itemsize if hasattr(tensor, "dtype") else 1
    count = max(1, tunables.SLAB_BYTES // itemsize)
    for start in range(0, len(flat), count):
        yield _as_bytes(flat[start : start + count])


def _flat(tensor: Any) -> Any:
    local = tensor.detach()
    return getattr(local, "_local_tensor", local).reshape(-1)


def _as_bytes(block: Any) -> Bytes:
    if isinstance(block, np.ndarray):
        return np.ascontiguousarray(block).view(np.uint8)
    import torch

    made: Bytes = block.cpu().contiguous().view(torch.uint8).numpy()
    return made
