"""Read a Hugging Face folder: weights in safetensors or `pytorch_model.bin` files, complete or in shards."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ucp.containers.config_files import read_json
from ucp.containers.inert import TensorRef, check_no_foreign_tensor
from ucp.containers.safetensors_file import read_safetensors
from ucp.containers.torch_file import TorchFile
from ucp.core.checkpoint import WEIGHT, Atom, Checkpoint, Extras, Fragment, Mesh, Note, Parameter, Role
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
_PICKLES: Final = (".bin", ".pt", ".pth", ".pkl", ".safetensors", ".msgpack", ".h5")  # and other files of weights
_RESTORE: Final = "download or copy the folder again"


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
    stored: dict[str, Atom] = {}
    for file in files:
        for name, atom in _weights(root, file):
            if name in stored:
                raise InconsistentError(
                    f"{root}: {name} is in {stored[name].fragments[0].file} and in {file}",
                    hint="remove the file that is left over",
                )
            stored[name] = atom
    _check_index(root, stored)
    sizes = {child.name: child.stat().st_size for child in sorted(root.iterdir()) if child.is_file()}
    beside = [] if path.is_file() else [name for name in sizes if name not in files and name not in _INDEXES]
    content = read_json(root / CONFIG, _LARGEST_INDEX, _RESTORE) if (root / CONFIG).is_file() else {}
    config: dict[str, Any] = content if isinstance(content, dict) else {}
    left = [name for name in beside if name.endswith((".bin", ".pt")) and name.startswith(("optimizer", "scheduler"))]
    notes = [Note("left-behind", f"only weights are read, not {', '.join(left)}")] if left else []
    quantization = config.get("quantization_config")
    if isinstance(quantization, dict):
        method = str(quantization.get("quant_method", "an unknown method"))
        text = f"the weights are quantized ({method}): they and their scales are copied unchanged, and cannot be cast"
        notes.append(Note("quantized", text))
    parameters: dict[str, Parameter] = {}
    for name, atom in stored.items():
        role: Role = "trained" if atom.dtype.family == "float" else "buffer"
        parameters[name] = Parameter(name, atom.shape, role, {WEIGHT: atom})
        named = options.rules.find(name) if options.rules is not None else None
        if named is not None:
            rule = resolve(named.rule, [atom.shape], name)
            if rule.cut == "vocab" and rule.true_size is None:
                rule = replace(rule, true_size=atom.shape[rule.dim])  # it is not padded
            parameters[name].rule, parameters[name].rule_origin = rule, named.origin
    _tie(parameters, stored, config)
    dtypes = Counter(atom.dtype.name for atom in stored.values() if atom.dtype.family == "float")
    details: dict[str, Any] = {"dtype": dtypes.most_common(1)[0][0]} if dtypes else {}
    if isinstance(config.get("model_type"), str):
        details["model"] = config["model_type"]
    if all(file.startswith("adapter_model.") for file in files):  # to be added to another model
        details["adapter"] = True
    version = config.get("transformers_version")
    return Checkpoint(
        format=FORMAT,
        root=root,
        mesh=Mesh(),
        parameters=parameters,
        framework=f"transformers {version}" if isinstance(version, str) else "Hugging Face",
        extras=Extras({}, {name: name for name in beside if not name.endswith(_PICKLES)}),
        notes=notes,
        sizes=sizes,
        details=details,
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


def _check_index(root: Path, stored: Mapping[str, Atom]) -> None:
    """Check that every tensor of an index is in the file that the index names."""
    files = {name: atom.fragments[0].file for name, atom in stored.items()}
    for name in _INDEXES:
        if not (root / name).is_file() or not any(file.endswith(name.split(".")[1]) for file in files.values()):
            continue
        for tensor, file in _weight_map(root / name).items():
            if files.get(tensor) != file:
                raise InconsistentError(
                    f"{root / name}: lists {tensor} in {file}, which does not contain it", hint=_RESTORE
                )


def _weights(root: Path, file: str) -> Iterator[tuple[str, Atom]]:
    path = root / file
    if file.endswith(".safetensors"):
        for entry in read_safetensors(path).entries.values():
            fragment = Fragment(Region.all_of(entry.shape), file, entry.start, entry.dtype)
            yield entry.name, Atom(entry.name, WEIGHT, entry.shape, entry.dtype, (fragment,))
        return
    archive = TorchFile(path)
    tree = archive.tree
    if not isinstance(tree, dict):
        raise NotUnderstoodError(f"{path}: does not contain a dict of tensors")
    for name, ref in tree.items():
        check_no_foreign_tensor(ref, str(name), path)
        if isinstance(name, str) and isinstance(ref, TensorRef):
            strides = None if ref.is_contiguous else ref.strides
            fragment = Fragment(Region.all_of(ref.shape), file, archive.position(ref), ref.dtype, strides=strides)
            yield name, Atom(name, WEIGHT, ref.shape, ref.dtype, (fragment,))


def _tie(parameters: dict[str, Parameter], stored: Mapping[str, Atom], config: Mapping[str, Any]) -> None:
    """Make one parameter of two names if the model ties them, or if they are the same bytes of a file."""
    for alias, owner in _TIED:
        if owner not in parameters:
            continue
        default = config.get("model_type") == "gpt2"
        tied = config.get("tie_word_embeddings", default) is True
        here, there = stored.get(alias), stored[owner]
        is_same = here is not None and here.fragments[0][1:3] == there.fragments[0][1:3]  # file and offset
        if here is None:
            if tied:
                parameters[owner].aliases = (alias,)
        elif tied or is_same:
            if here.shape != there.shape or here.dtype != there.dtype:
                raise InconsistentError(f"{alias} and {owner} are tied, but have different shapes or dtypes")
            if not is_same:
                parameters[owner].atoms[WEIGHT] = replace(there, replicas=(here.fragments,))
            parameters[owner].aliases = (alias,)
            del parameters[alias]
