"""`zarr` folders of megatron-core up to 0.11: one folder a tensor, one raw file a block, objects beside them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Final

from ucp import tunables
from ucp.errors import InconsistentError, IntegrityError, NotUnderstoodError, StorageError
from ucp.files.torchzip import TorchFile
from ucp.formats.megatron.carried import carried_tree
from ucp.formats.megatron.sharded import Found, Sharded, ShardedTensor
from ucp.model.box import Box, Shape, strides_of
from ucp.model.dtypes import BY_NAME, DType

_ARRAY: Final = ".zarray"
_LARGEST_ARRAY: Final = 1 << 16
_NUMPY: Final = {
    "f8": "float64",
    "f4": "float32",
    "f2": "float16",
    "i8": "int64",
    "i4": "int32",
    "i2": "int16",
    "i1": "int8",
    "u1": "uint8",
    "b1": "bool",
}


@dataclass(frozen=True, slots=True)
class ZarrBlock:
    """A block in a file of its own. Blocks at the edge are stored in full size: `strides` then step over the rest."""

    file: str
    strides: Shape | None

    @property
    def writer(self) -> int:
        return 0

    def locate(self) -> Found:
        return Found(0, self.strides)


def read_zarr(root: Path) -> Sharded:
    """Every array and every object of the folder."""
    tensors: dict[str, ShardedTensor] = {}
    objects: dict[str, Any] = {}
    try:
        folders = sorted(child for child in root.iterdir() if child.is_dir())
        for folder in folders:
            if (folder / _ARRAY).is_file():
                tensors[folder.name] = _array(root, folder)
                continue
            for file in sorted(folder.glob("shard_*.pt")):
                key = f"{folder.name}/{file.stem}"
                archive = TorchFile(file)
                objects[key] = carried_tree(f"{folder.name}/{file.name}", archive, archive.tree, key)
    except OSError as error:
        raise StorageError(f"{error.filename or root}: cannot be read: {error.strerror}") from error
    return Sharded(tensors, objects)


def _array(root: Path, folder: Path) -> ShardedTensor:
    shape, chunks, dtype = _described(folder / _ARRAY)
    tensor = ShardedTensor(folder.name, shape, dtype)
    steps = strides_of(chunks)
    nbytes = prod(chunks) * dtype.itemsize
    for cell in product(*(range(-(-n // size)) for n, size in zip(shape, chunks, strict=True))):
        name = ".".join(map(str, cell)) or "0"
        start = tuple(i * size for i, size in zip(cell, chunks, strict=True))
        kept = tuple(min(size, n - a) for a, size, n in zip(start, chunks, shape, strict=True))
        file = folder / name
        if not file.is_file():
            raise InconsistentError(
                f"{file}: is missing; it holds {Box(start, kept)} of {folder.name}",
                hint="copy the file from the node that wrote it; without it the checkpoint is not whole",
            )
        if file.stat().st_size != nbytes:
            raise IntegrityError(
                f"{file}: has {file.stat().st_size} bytes, a block of {dtype} {list(chunks)} has {nbytes}",
                hint="the file was copied or written incompletely; copy it again from where it is whole",
            )
        strides = None if steps == strides_of(kept) else steps
        tensor.blocks[Box(start, kept)] = ZarrBlock(file.relative_to(root).as_posix(), strides)
    return tensor


def _described(file: Path) -> tuple[Shape, Shape, DType]:
    """Shape, shape of a block, and element type."""
    try:
        if file.stat().st_size > _LARGEST_ARRAY:
            raise ValueError(f"it has {file.stat().st_size} bytes")
        data = json.loads(file.read_bytes())
        shape, chunks = _lengths(data["shape"]), _lengths(data["chunks"])
        named = str(data["dtype"])
        plain = data.get("compressor") is None and not data.get("filters") and data.get("order") == "C"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise IntegrityError(f"{file}: does not describe an array: {error}") from error
    dtype = BY_NAME.get(named) or BY_NAME.get(_NUMPY.get(named.lstrip("<|"), ""))
    if dtype is None or not plain or data.get("zarr_format") != 2 or data.get("dimension_separator", ".") != ".":
        raise NotUnderstoodError(f"{file}: an array of {named}, compressed or in another order, is not known here")
    if len(shape) != len(chunks) or 0 in chunks:
        raise IntegrityError(f"{file}: blocks of {list(chunks)} do not cut an array of {list(shape)}")
    return shape, chunks, dtype


def _lengths(value: Any) -> Shape:
    if not isinstance(value, list) or len(value) > tunables.MAX_DIMENSIONS:
        raise ValueError(f"lengths {value!r}")
    if not all(type(n) is int and 0 <= n < 1 << 63 for n in value):
        raise ValueError(f"lengths {value!r}")
    return tuple(value)
