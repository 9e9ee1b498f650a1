"""Everything that is no parameter state: trees without what became an atom, and the wrapper's neighbours.

Rank files repeat each other: is what extras carry of one what they carry of another?

To find that out takes a third of the time of carrying and writing it down again, for each of a thousand ranks.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

from ucp.containers.inert import Inert, InertDefaultDict, InertOrderedDict, Size, StorageRef, TensorRef, is_class
from ucp.core.checkpoint import Atom, Fragment, LazyFragments
from ucp.core.region import Region
from ucp.errors import NotUnderstoodError, UnsafeError
from ucp.formats.deepspeed.read.rank_files import RankFile
from ucp.formats.deepspeed.read.read_context import ReadContext
from ucp.settings import MIB
from ucp.storage.paths import scan_folder

# Layout tables of the source: the index says the same in its own words.
_LAYOUT_KEYS: Final = frozenset(
    {
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "shared_params",
        "buffer_names",
        "param_slice_mappings",
        "param_alignment_paddings",
    }
)
_PLAIN: Final = frozenset({bool, int, float, str, bytes, type(None)})
_MAX_DEPTH: Final = 200
_MAX_UNKNOWN_SIZE: Final = 16 * MIB  # a larger file of unknown role is reported and left behind

# Beside the step folder of a trainer: state as torch files; files carried as bytes; copies of weights; of no account.
_TREE_PATTERNS: Final = ("scheduler*.pt", "scheduler*.bin", "rng_state*.pth", "random_states*.pkl", "sampler*.bin",
                 "dl_state_dict*.bin", "custom_checkpoint_*.pkl", "scaler.pt")  # fmt: skip
_CARRIED_PATTERNS: Final = ("*.json", "*.txt", "*.md", "*.model", "*.jinja", "*.yaml", "*.yml", "training_args.bin")
_WEIGHT_PATTERNS: Final = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*", "adapter_model.bin")
_IGNORED_PATTERNS: Final = ("latest*", "zero_to_fp32.py", "zero_to_torch.py", ".*")


class _DroppedValue:
    """Marks what is left out of a tree."""


_DROP: Final = _DroppedValue()


def _is_unreadable_tensor(value: Inert) -> bool:
    """A conjugate or negative view, a quantized tensor: what torch makes of memory by a rule that is not read."""
    return any(isinstance(arg, StorageRef) for arg in value.args)


class TreeCarrier:
    """Turns the tree of one file into what extras carry: without the tensors that became atoms, others as atoms."""

    def __init__(self, context: ReadContext, file: RankFile, label: str) -> None:
        self._context = context
        self._file = file
        self._label = label
        self._names: set[str] = set()
        self._done: dict[int, tuple[Any, Any]] = {}  # id → (the value, kept alive; what it became)

    @property
    def made_atoms(self) -> bool:
        """Whether tensors of this file are in what was carried: it then belongs to this file alone."""
        return bool(self._names)

    def carry(self) -> Any:
        """The tree, or None when nothing of it is left."""
        carried = self._walk(without_layout_tables(self._file.tree), self._label, 0)
        return None if carried is _DROP else carried

    def _walk(self, value: Any, path: str, depth: int) -> Any:
        if value is None or isinstance(value, (bool, int, float, str, bytes)):
            return value
        if isinstance(value, TensorRef):
            return _DROP if self._context.is_claimed(value) else self._atom(value, path)
        if isinstance(value, StorageRef) or (isinstance(value, Inert) and _is_unreadable_tensor(value)):
            self._context.note("extra-unreadable", f"{path}: a tensor whose bytes are not its values; left out")
            return _DROP
        if (
            is_class(value)
            or not isinstance(value, (dict, list, tuple, set, frozenset, Inert))
            or isinstance(value, Size)
        ):
            return value
        if depth > _MAX_DEPTH:
            raise UnsafeError(
                f"{self._file.name}: what it stores is nested more than {_MAX_DEPTH} levels deep or in itself"
            )
        known = self._done.get(id(value))
        if known is None:
            known = self._done[id(value)] = (value, self._container(value, path, depth + 1))
        return known[1]

    def _container(self, value: Any, path: str, depth: int) -> Any:
        if isinstance(value, dict):
            return self._dict(value, path, depth)
        if isinstance(value, Inert):
            return self._instance(value, path, depth)
        if isinstance(value, (set, frozenset)):
            return value  # members are hashable: no tensors inside that anyone could reach
        if _PLAIN.issuperset(map(type, value)):
            return value
        items = [self._walk(item, f"{path}/{i}", depth) for i, item in enumerate(value)]
        if items and all(item is _DROP for item in items):
            return _DROP
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        kept = [None if item is _DROP else item for item in items]
        return kept if isinstance(value, list) else tuple(kept)

    def _dict(self, value: dict[Any, Any], path: str, depth: int) -> Any:
        if _PLAIN.issuperset(map(type, value.values())):
            return value
        items = {key: self._walk(item, f"{path}/{key}", depth) for key, item in value.items()}
        if all(items[key] is item for key, item in value.items()):
            return value
        kept = {key: item for key, item in items.items() if item is not _DROP}
        if not kept:
            return _DROP
        if not isinstance(value, InertOrderedDict):
            return kept
        made = InertDefaultDict(value.factory) if isinstance(value, InertDefaultDict) else InertOrderedDict()
        made.update(kept)
        made.attributes = value.attributes
        return made

    def _instance(self, value: Inert, path: str, depth: int) -> Any:
        parts = (value.args, value.kwargs, value.state, value.items, value.pairs)
        names = ("args", "kwargs", "state", "items", "pairs")
        walked = [self._walk(part, f"{path}/{name}", depth) for part, name in zip(parts, names, strict=True)]
        if all(new is old for new, old in zip(walked, parts, strict=True)):
            return value
        args, kwargs, state, items, pairs = (None if part is _DROP else part for part in walked)
        made = object.__new__(type(value))
        made.args, made.kwargs, made.state, made.called = tuple(args or ()), dict(kwargs or {}), state, value.called
        made.items.extend(items or ())
        made.pairs.extend(pairs or ())
        return made

    def _atom(self, ref: TensorRef, path: str) -> Atom:
        known = self._done.get(id(ref))
        if known is None:
            known = self._done[id(ref)] = (ref, extra_atom(self._file, ref, self._unused(path)))
        atom: Atom = known[1]
        return atom

    def _unused(self, path: str) -> str:
        name, number = path, 1
        while name in self._names:
            number += 1
            name = f"{path}#{number}"
        self._names.add(name)
        return name


def without_layout_tables(tree: Any) -> Any:
    """A tree without the tables of the source's layout."""
    if not isinstance(tree, dict):
        return tree
    kept = _without_tables(tree)
    inner = kept.get("optimizer_state_dict")
    if isinstance(inner, dict):
        kept["optimizer_state_dict"] = _without_tables(inner)
    return kept


def _without_tables(tree: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in tree.items() if key not in _LAYOUT_KEYS}


def extra_atom(file: RankFile, ref: TensorRef, name: str) -> Atom:
    """A tensor that is no parameter state, as an atom of kind `extra`."""

    def make() -> Any:
        if ref.numel:
            strides = None if ref.is_contiguous else ref.strides
            yield Fragment(Region.all_of(ref.shape), file.name, file.locate(ref).offset, ref.dtype, strides=strides)

    return Atom(name, "extra", ref.shape, ref.dtype, LazyFragments(make, 1 if ref.numel else 0))


def carry_neighbours(context: ReadContext, root: Path, trees: dict[str, Any], files: dict[str, str]) -> None:
    """What a trainer keeps beside the step folder: scheduler, RNG and loader states as trees, the rest as bytes."""
    for name in _files_in(root):
        if _matches_any(name, _IGNORED_PATTERNS):
            continue
        if _matches_any(name, _WEIGHT_PATTERNS):
            context.note(
                "weights-beside", f"{name}: a copy of the weights for inference; left behind, the masters are exact"
            )
        elif _matches_any(name, _TREE_PATTERNS):
            _carry_tree(context, name, trees, files)
        elif _matches_any(name, _CARRIED_PATTERNS):
            files[name] = name
        else:
            _carry_unknown_file(context, name, name, root / name, files)


def carry_unknown_files(context: ReadContext, step: Path, names: Collection[str], files: dict[str, str]) -> None:
    """Files of the step folder that DeepSpeed does not write."""
    for name in sorted(names):
        if not _matches_any(name, _IGNORED_PATTERNS):
            _carry_unknown_file(context, name, context.prefix + name, step / name, files)


def _carry_tree(context: ReadContext, name: str, trees: dict[str, Any], files: dict[str, str]) -> None:
    try:
        file = context.files.open(name)
    except NotUnderstoodError:
        files[name] = name  # a bare pickle or a file of an older torch: not ours to interpret
        return
    tree = TreeCarrier(context, file, name).carry()
    if tree is not None:
        trees[name] = tree


def _carry_unknown_file(context: ReadContext, name: str, where: str, path: Path, files: dict[str, str]) -> None:
    size = path.stat().st_size
    if size <= _MAX_UNKNOWN_SIZE:
        files[name] = where
        context.note("file-unknown", f"{name}: not a file that DeepSpeed writes; carried as it is")
    else:
        context.note("file-unknown", f"{name}: not a file that DeepSpeed writes; left behind, it has {size} bytes")


def _files_in(folder: Path) -> list[str]:
    with scan_folder(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_file())


def _matches_any(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


_PLAIN_TYPES: Final = frozenset({bool, int, float, str, bytes, type(None)})
_MAX_COMPARED_DEPTH: Final = 100
_MARSHAL_VERSION: Final = 2  # a version of marshal's format that says the values and nothing else


class TreeComparison:
    """Compares two trees. Tensors for which `is_claimed` is true have become atoms: neither tree carries them."""

    def __init__(self, is_claimed: Callable[[TensorRef], bool]) -> None:
        self._is_claimed = is_claimed
        self._compared: set[tuple[int, int]] = set()

    def are(self, a: Any, b: Any, depth: int = 0) -> bool:
        """Whether two values carry the same; False may also mean that it is not known."""
        if a is b:
            return True
        kind = type(a)
        if kind is not type(b) or depth > _MAX_COMPARED_DEPTH:
            return False
        if kind in _PLAIN_TYPES:
            return _is_identical(a, b)
        if kind is TensorRef:
            return self._is_claimed(a) and self._is_claimed(b)
        pair = (id(a), id(b))
        if pair in self._compared:  # or being compared: then the rest decides
            return True
        self._compared.add(pair)
        if kind in (dict, InertOrderedDict, InertDefaultDict):
            return self._dicts(a, b, depth + 1)
        if kind in (list, tuple):
            return self._lists(a, b, depth + 1)
        if kind is Size:
            return bool(a == b)
        if is_class(a) or not isinstance(a, Inert):
            return a is b
        return (
            a.called is b.called
            and len(a.args) == len(b.args)
            and all(map(self.are, _parts(a), _parts(b), (depth + 1,) * 5))
        )

    def _dicts(self, a: dict[Any, Any], b: dict[Any, Any], depth: int) -> bool:
        if not self._lists(list(a), list(b), depth):
            return False
        if isinstance(a, InertOrderedDict) and isinstance(b, InertOrderedDict):
            if not self.are(a.attributes, b.attributes, depth):
                return False
            if isinstance(a, InertDefaultDict) and isinstance(b, InertDefaultDict) and a.factory is not b.factory:
                return False
        return self._lists(list(a.values()), list(b.values()), depth)

    def _lists(self, a: Any, b: Any, depth: int) -> bool:
        if len(a) != len(b):
            return False
        if _PLAIN_TYPES.issuperset(map(type, a)):
            return _PLAIN_TYPES.issuperset(map(type, b)) and _is_identical(a, b)
        return all(self.are(one, other, depth) for one, other in zip(a, b, strict=True))


def _parts(value: Inert) -> Iterable[Any]:
    return value.args, value.kwargs, value.state, value.items, value.pairs


def _is_identical(a: Any, b: Any) -> bool:
    """Whether plain values, or lists of them, are the same to the last bit: `1`, `1.0` and `True` are not."""
    return marshal.dumps(a, _MARSHAL_VERSION) == marshal.dumps(b, _MARSHAL_VERSION)
