"""The three containers of sharded checkpoints: `torch_dist`, `torch_dcp` and `zarr` folders, as tensors of blocks.

* `torch_dist`: torch's distributed checkpoint files, with Megatron's keys.
* `torch_dcp`: what jobs with torch's FSDP2 save, one nested state dict in torch's distributed checkpoint files.
  Parameters have names, but the optimizer numbers its states group by group, as in a rank file.
* `zarr`: folders of megatron-core up to 0.11, one folder per tensor and one raw file per block.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Final

from ucp import settings
from ucp.containers.distcp import (
    ArchiveRange,
    DcpEntry,
    DcpFolder,
    DcpTensor,
    KeyPath,
    ObjectArchives,
    TensorArchives,
    read_dcp_folder,
)
from ucp.containers.torch_file import TorchFile
from ucp.containers.tree import with_atoms
from ucp.core.box import Box, Shape, strides_of
from ucp.core.checkpoint import STEP, Atom
from ucp.core.dtypes import BY_NAME, DType
from ucp.errors import InconsistentError, IntegrityError, NotUnderstoodError, storage_errors
from ucp.formats.megatron.job_arguments import JobArguments, arguments_of
from ucp.formats.megatron.mcore_modules import canonical_name, is_buffer, module_order
from ucp.formats.megatron.optimizer_groups import groups_of, optimizers_of, parameter_flags, stored_group_flags
from ucp.formats.megatron.read.sharded_tensors import BlockLocation, ShardedBlock, ShardedContents, ShardedTensor
from ucp.formats.sharded.shard_fragments import StoredShard
from ucp.storage.local import SourceFiles


def archive_tensor(archives: TensorArchives, key: str, entry: DcpTensor) -> ShardedTensor:
    """Return an entry of the metadata as a tensor under this key."""

    def find(box: Box, item: ArchiveRange) -> BlockLocation:
        with SourceFiles(archives.root) as files:
            found = archives.locate(entry, box, item, files)
        return found.offset, found.strides

    blocks = {
        box: ShardedBlock(item.file, item.rank, None, partial(find, box, item)) for box, item in entry.chunks.items()
    }
    return ShardedTensor(key, entry.shape, entry.dtype, blocks)


def read_torch_dist(root: Path, lost: dict[str, str] | None = None) -> ShardedContents:
    """Return every tensor and object of a `torch_dist` folder; an object is stored as the only item of a list.

    With `lost`, data files that are missing or too short are added to it instead of raising an error.
    """
    folder = read_dcp_folder(root, lost=lost)
    archives = TensorArchives(root, lost or ())
    tensors: dict[str, ShardedTensor] = {}
    objects: dict[str, Any] = {}
    with SourceFiles(root) as files:
        values = ObjectArchives(files)
        for key, entry in folder.entries.items():
            if isinstance(entry, DcpTensor):
                tensors[key] = archive_tensor(archives, key, entry)
            else:
                value = values.value(entry)
                objects[key] = value[0] if isinstance(value, list) and len(value) == 1 else value
    return ShardedContents(tensors, objects)


_MODEL: Final = "model"
_RANDOM: Final = "rng_state"
_MASTERS: Final = "fp32_from_fp16_params"


class TorchDcpFolder:
    """The state dict of a `torch_dcp` folder, in the form of a sharded checkpoint."""

    def __init__(self, root: Path, lost: dict[str, str] | None = None) -> None:
        self._root = root
        self._folder: DcpFolder = read_dcp_folder(root, lost=lost)
        self._archives = TensorArchives(root, lost or ())
        self.tree: dict[Any, Any] = {}  # everything except tensors of the model and states of the optimizer
        self._states: dict[KeyPath, DcpTensor] = {}  # paths below `optimizer` → states and masters
        self._weights: dict[str, DcpTensor] = {}
        with SourceFiles(root) as files:
            values = ObjectArchives(files)
            for entry in self._folder.entries.values():
                self._add_entry(entry, values)
        self.tree = _with_lists(self.tree)
        self.arguments: JobArguments = arguments_of(self.tree.get("args"), str(root))
        self._names = self._numbered()

    def mapping(self) -> Mapping[Any, Any]:
        """Return the common part: what a sharded checkpoint stores once for all ranks."""
        return {key: value for key, value in self.tree.items() if key not in (_MODEL, _RANDOM)}

    def step(self, optimizer: Mapping[str, Any]) -> StoredShard | None:
        """Return None: every parameter has its own step."""
        del optimizer
        return None

    def with_atoms(self, tree: Any) -> Any:
        """Return the tree itself, whose tensors are already atoms."""
        return tree

    def _add_entry(self, entry: DcpEntry, values: ObjectArchives) -> None:
        first, rest = entry.path[0], entry.path[1:]
        if isinstance(entry, DcpTensor) and first == _MODEL and len(rest) == 1:
            self._weights[canonical_name(str(rest[0]))] = entry
        elif isinstance(entry, DcpTensor) and first == "optimizer" and ("state" in rest or _MASTERS in rest):
            self._states[rest] = entry
        else:
            tree = self.tree
            for part in entry.path[:-1]:
                tree = tree.setdefault(part, {})
            if isinstance(entry, DcpTensor):
                tree[entry.path[-1]] = self._archives.atom(entry, f"common#{entry.key}", "extra")
            else:
                tree[entry.path[-1]] = values.value(entry)

    def _numbered(self) -> list[list[str]]:
        """Return the names of the parameters in each group, in the order in which the optimizer numbers them."""
        arguments = self.arguments
        floats = (name for name, entry in self._weights.items() if entry.dtype.family == "float")
        names = sorted((name for name in floats if not is_buffer(name)), key=module_order(arguments))
        flags = {name: parameter_flags(name, len(self._weights[name].shape), arguments) for name in names}
        found: list[list[str]] = []
        for optimizer in optimizers_of(self.tree.get("optimizer")):
            for group in groups_of(optimizer):
                wanted = stored_group_flags(group, arguments)
                mine = [name for name in names if flags[name] == wanted]
                if isinstance(group.get("params"), list) and len(mine) != len(group["params"]):
                    raise InconsistentError(
                        f"{self._root}: a parameter group of the optimizer has {len(group['params'])} parameters, but"
                        f" {len(mine)} parameters of the model belong to it",
                        hint="take the weights alone with --only weights",
                    )
                found.append(mine)
        return found

    def sharded(self) -> ShardedContents:
        """Return weights, masters and states under the keys of a sharded checkpoint, without steps."""
        tensors = {name: archive_tensor(self._archives, name, entry) for name, entry in self._weights.items()}
        for name, kind, entry in self._named_states():
            if kind != STEP:
                key = f"optimizer.state.{kind}.{name}"
                tensors[key] = archive_tensor(self._archives, key, entry)
        # Random and extra states have the keys of sharded checkpoints.
        objects = {f"{name}/shard_0_1": value for name, value in self.tree.get(_MODEL, {}).items()}
        if _RANDOM in self.tree:
            objects[f"{_RANDOM}/shard_0.0_1.1"] = self.tree[_RANDOM]
        return ShardedContents(tensors, objects)

    def steps(self) -> dict[str, Atom]:
        """Return the step of each parameter that has one."""
        return {
            name: self._archives.atom(entry, name, STEP) for name, kind, entry in self._named_states() if kind == STEP
        }

    def _named_states(self) -> Iterator[tuple[str, str, DcpTensor]]:
        """Yield name, kind and entry of every state."""
        order = [name for group in self._names for name in group]
        for path, entry in self._states.items():
            if _MASTERS in path:
                name, kind = self._names[int(path[-2])][int(path[-1])], "fp32_param"
            else:
                name, kind = order[int(path[-2])], str(path[-1])
            if kind != STEP and entry.shape != self._weights[name].shape:
                raise InconsistentError(
                    f"{self._root}: {entry.key} is {list(entry.shape)}, but {name}, the parameter of this number, is"
                    f" {list(self._weights[name].shape)}",
                    hint="take the weights alone with --only weights",
                )
            yield name, kind, entry


def _with_lists(tree: Any) -> Any:
    """Return the tree with lists in place of dicts with integer keys."""
    if not isinstance(tree, Mapping):
        return tree
    if tree and all(type(key) is int for key in tree):
        return [_with_lists(tree[key]) for key in sorted(tree)]
    return {key: _with_lists(value) for key, value in tree.items()}


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


def read_zarr(root: Path) -> ShardedContents:
    """Return every array and object of a `zarr` folder."""
    tensors: dict[str, ShardedTensor] = {}
    objects: dict[str, Any] = {}
    with storage_errors(root):
        for folder in sorted(child for child in root.iterdir() if child.is_dir()):
            if (folder / _ARRAY).is_file():
                tensors[folder.name] = _zarr_tensor(root, folder)
                continue
            for file in sorted(folder.glob("shard_*.pt")):
                key = f"{folder.name}/{file.stem}"
                archive = TorchFile(file)
                objects[key] = with_atoms(archive.tree, archive, f"{folder.name}/{file.name}", key)
    return ShardedContents(tensors, objects)


def _zarr_tensor(root: Path, folder: Path) -> ShardedTensor:
    shape, chunks, dtype = _read_array_header(folder / _ARRAY)
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
                hint="copy the file from the node that wrote it; without it the checkpoint is incomplete",
            )
        if file.stat().st_size != nbytes:
            raise IntegrityError(
                f"{file}: has {file.stat().st_size} bytes, a block of {dtype} {list(chunks)} has {nbytes}",
                hint="the file was copied or written incompletely; copy it again from an intact copy",
            )
        location = 0, None if steps == strides_of(kept) else steps  # blocks at the edge are stored in full size
        tensor.blocks[Box(start, kept)] = ShardedBlock(file.relative_to(root).as_posix(), 0, location)
    return tensor


def _read_array_header(file: Path) -> tuple[Shape, Shape, DType]:
    """Return shape, shape of a block, and dtype of an array."""
    try:
        if file.stat().st_size > _LARGEST_ARRAY:
            raise ValueError(f"it has {file.stat().st_size} bytes")
        data = json.loads(file.read_bytes())
        shape, chunks = _lengths(data["shape"]), _lengths(data["chunks"])
        named = str(data["dtype"])
        is_plain = data.get("compressor") is None and not data.get("filters") and data.get("order") == "C"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise IntegrityError(f"{file}: is not a valid description of an array: {error}") from error
    dtype = BY_NAME.get(named) or BY_NAME.get(_NUMPY.get(named.lstrip("<|"), ""))
    if dtype is None or not is_plain or data.get("zarr_format") != 2 or data.get("dimension_separator", ".") != ".":
        raise NotUnderstoodError(f"{file}: unsupported array: {named}, compressed or in another order")
    if len(shape) != len(chunks) or 0 in chunks:
        raise IntegrityError(f"{file}: blocks of {list(chunks)} do not tile an array of {list(shape)}")
    return shape, chunks, dtype


def _lengths(value: Any) -> Shape:
    if not isinstance(value, list) or len(value) > settings.MAX_DIMENSIONS:
        raise ValueError(f"lengths {value!r}")
    if not all(type(n) is int and 0 <= n < 1 << 63 for n in value):
        raise ValueError(f"lengths {value!r}")
    return tuple(value)
