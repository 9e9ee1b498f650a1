"""Read a Hugging Face folder: weights in safetensors or `pytorch_model.bin` files, complete or in shards."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ucp.containers.config_files import read_json
from ucp.containers.inert import TensorRef
from ucp.containers.safetensors_file import read_safetensors
from ucp.containers.torch_file import TorchFile
from ucp.core.box import Shape
from ucp.core.checkpoint import WEIGHT, Atom, Checkpoint, Extras, Fragment, Mesh, Note, Parameter
from ucp.core.dtypes import DType
from ucp.core.region import Region
from ucp.core.rules import resolve
from ucp.errors import InconsistentError, IntegrityError, NotUnderstoodError, UsageError
from ucp.formats.registry import ReadOptions

FORMAT: Final = "safetensors"
CONFIG: Final = "config.json"
_INDEXES: Final = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WHOLES: Final = ("model.safetensors", "adapter_model.safetensors", "pytorch_model.bin", "adapter_model.bin")
_SHARD: Final = re.compile(r"(?:model|pytorch_model)-(\d+)-of-(\d+)\.(?:safetensors|bin)")
_LARGEST_INDEX: Final = 256 << 20
_TIED: Final = ("lm_head.weight", "model.embed_tokens.weight"), ("lm_head.weight", "transformer.wte.weight")
_RESTORE: Final = "download or copy the folder again"


@dataclass(frozen=True, slots=True)
class _HuggingFaceTensor:
    """A tensor in a file; `offset` in bytes, `strides` in elements if it is not row-major."""

    file: str
    offset: int
    shape: Shape
    dtype: DType
    strides: Shape | None = None


def recognises(path: Path) -> bool:
    """Whether `path` is a file of weights, or a folder with files or an index of the usual names."""
    if path.is_file():
        return path.suffix == ".safetensors" or path.name in _WHOLES
    return any((path / name).is_file() for name in (*_INDEXES, *_WHOLES)) or any(_shards(path))


def read(path: Path, options: ReadOptions) -> Checkpoint:
    """Index the weights. Only rules of the user describe how to split parameters: the folder has none."""
    if options.tag is not None:
        raise UsageError(f"{path}: a folder of weights has no steps", hint="leave --tag out")
    root = path.parent if path.is_file() else path
    files = [path.name] if path.is_file() else _files(root)
    stored: dict[str, _HuggingFaceTensor] = {}
    for file in files:
        for name, tensor in _tensors(root, file):
            if name in stored:
                raise InconsistentError(
                    f"{root}: {name} is in {stored[name].file} and in {file}", hint="remove the file that is left over"
                )
            stored[name] = tensor
    _check_index(root, stored)
    sizes = {child.name: child.stat().st_size for child in sorted(root.iterdir()) if child.is_file()}
    beside = [] if path.is_file() else [name for name in sizes if name not in files and name not in _INDEXES]
    config = _config(root / CONFIG)
    left = [name for name in beside if _is_state(name)]
    parameters = {name: _parameter(name, tensor, options) for name, tensor in stored.items()}
    _tie(parameters, stored, config)
    return Checkpoint(
        format=FORMAT,
        root=root,
        mesh=Mesh(),
        parameters=parameters,
        framework=_framework(config),
        extras=Extras({}, {name: name for name in beside if not _is_pickle(name)}),
        notes=[Note("left-behind", f"only weights are read, not {', '.join(left)}")] if left else [],
        sizes=sizes,
        details=_details(config, stored) | ({"adapter": True} if _is_adapter(files) else {}),
    )


def _shards(root: Path) -> Iterator[tuple[str, int, int]]:
    """Files with the name of a shard: name, number, count."""
    if root.is_dir():
        for child in sorted(root.iterdir()):
            found = _SHARD.fullmatch(child.name)
            if found:
                yield child.name, int(found[1]), int(found[2])


def _files(root: Path) -> list[str]:
    """The files with weights: safetensors before pickles, complete files before shards."""
    for name in _WHOLES[:2]:
        if (root / name).is_file():
            return [name]
    shards = list(_shards(root))
    for ending in (".safetensors", ".bin"):
        found = [(name, number, count) for name, number, count in shards if name.endswith(ending)]
        index = root / _INDEXES[ending == ".bin"]
        if index.is_file():
            return sorted(set(_weight_map(index).values()))
        if found:
            missing = set(range(1, found[0][2] + 1)) - {number for _, number, _ in found}
            if missing or len({count for _, _, count in found}) > 1:
                raise InconsistentError(
                    f"{root}: of {found[0][2]} shards, numbers {sorted(missing)} are missing", hint=_RESTORE
                )
            return [name for name, _, _ in found]
        for name in _WHOLES[2:] if ending == ".bin" else ():
            if (root / name).is_file():
                return [name]
    raise NotUnderstoodError(f"{root}: contains no weights")


def _weight_map(path: Path) -> dict[str, str]:
    content = read_json(path, _LARGEST_INDEX, _RESTORE)
    found = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise IntegrityError(f"{path}: has no weight_map", hint=_RESTORE)
    for file in found.values():
        if "/" in file or "\\" in file or file in ("", ".", ".."):
            raise IntegrityError(f"{path}: names {file!r}, which is not a file in the same folder")
    return found


def _check_index(root: Path, stored: Mapping[str, _HuggingFaceTensor]) -> None:
    """Check that every tensor of an index is in the file that the index names."""
    for name in _INDEXES:
        if not (root / name).is_file() or not any(t.file.endswith(name.split(".")[1]) for t in stored.values()):
            continue
        for tensor, file in _weight_map(root / name).items():
            if tensor not in stored or stored[tensor].file != file:
                raise InconsistentError(
                    f"{root / name}: lists {tensor} in {file}, which does not contain it", hint=_RESTORE
                )


def _tensors(root: Path, file: str) -> Iterator[tuple[str, _HuggingFaceTensor]]:
    path = root / file
    if file.endswith(".safetensors"):
        for entry in read_safetensors(path).entries.values():
            yield entry.name, _HuggingFaceTensor(file, entry.start, entry.shape, entry.dtype)
        return
    archive = TorchFile(path)
    tree = archive.tree
    if not isinstance(tree, dict):
        raise NotUnderstoodError(f"{path}: does not contain a dict of tensors")
    for name, ref in tree.items():
        if isinstance(name, str) and isinstance(ref, TensorRef):
            strides = None if ref.is_contiguous else ref.strides
            yield name, _HuggingFaceTensor(file, archive.position(ref), ref.shape, ref.dtype, strides)


def _parameter(name: str, tensor: _HuggingFaceTensor, options: ReadOptions) -> Parameter:
    fragment = Fragment(Region.all_of(tensor.shape), tensor.file, tensor.offset, tensor.dtype, strides=tensor.strides)
    atom = Atom(name, WEIGHT, tensor.shape, tensor.dtype, (fragment,))
    role = "trained" if tensor.dtype.family == "float" else "buffer"
    parameter = Parameter(name, tensor.shape, "buffer" if role == "buffer" else "trained", {WEIGHT: atom})
    named = options.rules.find(name) if options.rules is not None else None
    if named is not None:
        rule = resolve(named.rule, [tensor.shape], name)
        if rule.cut == "vocab" and rule.true_size is None:
            rule = replace(rule, true_size=tensor.shape[rule.dim])  # it is not padded
        parameter.rule, parameter.rule_origin = rule, named.origin
    return parameter


def _tie(parameters: dict[str, Parameter], stored: Mapping[str, _HuggingFaceTensor], config: Mapping[str, Any]) -> None:
    """Make one parameter of two names if the model ties them, or if they are the same bytes of a file."""
    for alias, owner in _TIED:
        if owner not in parameters:
            continue
        default = config.get("model_type") == "gpt2"
        tied = config.get("tie_word_embeddings", default) is True
        here, there = stored.get(alias), stored[owner]
        if here is None:
            if tied:
                parameters[owner].aliases = (alias,)
        elif tied or (here.file, here.offset) == (there.file, there.offset):
            if here.shape != there.shape or here.dtype != there.dtype:
                raise InconsistentError(f"{alias} and {owner} are tied, but have different shapes or dtypes")
            atom = parameters[owner].atoms[WEIGHT]
            copies = () if (here.file, here.offset) == (there.file, there.offset) else (_copy(here),)
            parameters[owner].atoms[WEIGHT] = Atom(
                owner, WEIGHT, atom.shape, atom.dtype, atom.fragments, tuple((copy,) for copy in copies)
            )
            parameters[owner].aliases = (alias,)
            del parameters[alias]


def _copy(tensor: _HuggingFaceTensor) -> Fragment:
    return Fragment(Region.all_of(tensor.shape), tensor.file, tensor.offset, tensor.dtype, strides=tensor.strides)


def _config(path: Path) -> dict[str, Any]:
    content = read_json(path, _LARGEST_INDEX, _RESTORE) if path.is_file() else {}
    return content if isinstance(content, dict) else {}


def _framework(config: Mapping[str, Any]) -> str:
    version = config.get("transformers_version")
    return f"transformers {version}" if isinstance(version, str) else "Hugging Face"


def _is_adapter(files: Sequence[str]) -> bool:
    """Whether the weights are those of an adapter, to be added to another model."""
    return all(file.startswith("adapter_model.") for file in files)


def _details(config: Mapping[str, Any], stored: Mapping[str, _HuggingFaceTensor]) -> dict[str, Any]:
    sizes: dict[str, int] = {}
    for tensor in stored.values():
        if tensor.dtype.family == "float":
            sizes[tensor.dtype.name] = sizes.get(tensor.dtype.name, 0) + 1
    kind = config.get("model_type")
    details: dict[str, Any] = {"dtype": max(sizes, key=lambda name: sizes[name])} if sizes else {}
    return {**details, **({"model": kind} if isinstance(kind, str) else {})}


def _is_state(name: str) -> bool:
    """Whether a file contains the optimizer or scheduler of a trainer."""
    return name.endswith((".bin", ".pt")) and name.startswith(("optimizer", "scheduler"))


def _is_pickle(name: str) -> bool:
    return name.endswith((".bin", ".pt", ".pth", ".pkl", ".safetensors", ".msgpack", ".h5"))
