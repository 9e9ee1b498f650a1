"""Extras: the trees of rank files without the tensors that became atoms, and the files that a trainer adds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatch
from itertools import count
from pathlib import Path
from typing import Any, Final

from ucp.containers.inert import Inert, StorageRef, TensorRef
from ucp.containers.tree import DROP, map_leaves
from ucp.core.checkpoint import Atom, Fragment, LazyFragments
from ucp.core.region import Region
from ucp.errors import NotUnderstoodError
from ucp.formats.deepspeed.read.rank_files import RankFile
from ucp.formats.deepspeed.read.read_context import ReadContext
from ucp.settings import MIB
from ucp.storage.paths import scan_folder

# Tables that describe the layout of the source: the index contains the same information.
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
_MAX_UNKNOWN_SIZE: Final = 16 * MIB  # larger files with an unknown role are noted and not carried

# Next to the step folder of a trainer: state in torch files; files carried as bytes; copies of weights; ignored files.
_TREE_PATTERNS: Final = ("scheduler*.pt", "scheduler*.bin", "rng_state*.pth", "random_states*.pkl", "sampler*.bin",
                 "dl_state_dict*.bin", "custom_checkpoint_*.pkl", "scaler.pt")  # fmt: skip
_CARRIED_PATTERNS: Final = ("*.json", "*.txt", "*.md", "*.model", "*.jinja", "*.yaml", "*.yml", "training_args.bin")
_WEIGHT_PATTERNS: Final = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*", "adapter_model.bin")
_IGNORED_PATTERNS: Final = ("latest*", "zero_to_fp32.py", "zero_to_torch.py", ".*")


class TreeCarrier:
    """Converts the tree of one file for extras: drops the tensors that became atoms, and turns others into atoms."""

    def __init__(self, context: ReadContext, file: RankFile, label: str) -> None:
        self._context = context
        self._file = file
        self._label = label
        self._names: set[str] = set()

    @property
    def made_atoms(self) -> bool:
        """Whether the carried tree contains tensors of this file, so that other files cannot share it."""
        return bool(self._names)

    def carry(self) -> Any:
        """The converted tree, or None if nothing remains."""

        def is_leaf(value: Any) -> bool:
            if isinstance(value, (TensorRef, StorageRef)):
                return True
            # A conjugate or negative view or a quantized tensor: its bytes are not its values.
            return isinstance(value, Inert) and any(isinstance(arg, StorageRef) for arg in value.args)

        tree = without_layout_tables(self._file.tree)
        carried = map_leaves(tree, is_leaf, self._carry_leaf, path=self._label, where=self._file.name)
        return None if carried is DROP else carried

    def _carry_leaf(self, value: Any, path: str) -> Any:
        if not isinstance(value, TensorRef):
            self._context.note(
                "extra-unreadable", f"{path}: a tensor whose values are not stored directly; not carried"
            )
            return DROP
        if self._context.is_claimed(value):
            return DROP
        name = next(name for i in count(1) if (name := path if i == 1 else f"{path}#{i}") not in self._names)
        self._names.add(name)
        return extra_atom(self._file, value, name)


def without_layout_tables(tree: Any) -> Any:
    """A tree without the tables that describe the layout of the source."""
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
    """A tensor that is not a parameter state, as an atom of kind `extra`."""

    def make() -> Any:
        if ref.numel:
            strides = None if ref.is_contiguous else ref.strides
            yield Fragment(Region.all_of(ref.shape), file.name, file.locate(ref).offset, ref.dtype, strides=strides)

    return Atom(name, "extra", ref.shape, ref.dtype, LazyFragments(make, 1 if ref.numel else 0))


def carry_neighbours(context: ReadContext, root: Path, trees: dict[str, Any], files: dict[str, str]) -> None:
    """Carry what a trainer keeps next to the step folder: scheduler, RNG and loader states as trees, else as bytes."""
    with scan_folder(root) as entries:
        names = sorted(entry.name for entry in entries if entry.is_file())
    for name in names:
        if _matches_any(name, _IGNORED_PATTERNS):
            continue
        if _matches_any(name, _WEIGHT_PATTERNS):
            context.note(
                "weights-beside",
                f"{name}: a copy of the weights for inference; not carried, the master weights are exact",
            )
        elif _matches_any(name, _TREE_PATTERNS):
            try:
                tree = TreeCarrier(context, context.files.open(name), name).carry()
            except NotUnderstoodError:
                files[name] = name  # a bare pickle or a file of an older torch, which is not interpreted
            else:
                trees.update({} if tree is None else {name: tree})
        elif _matches_any(name, _CARRIED_PATTERNS):
            files[name] = name
        else:
            _carry_unknown_file(context, name, name, root / name, files)


def carry_unknown_files(context: ReadContext, step: Path, names: Collection[str], files: dict[str, str]) -> None:
    """Carry the files of the step folder that DeepSpeed does not write."""
    for name in sorted(names):
        if not _matches_any(name, _IGNORED_PATTERNS):
            _carry_unknown_file(context, name, context.prefix + name, step / name, files)


def _carry_unknown_file(context: ReadContext, name: str, where: str, path: Path, files: dict[str, str]) -> None:
    size = path.stat().st_size
    if size <= _MAX_UNKNOWN_SIZE:
        files[name] = where
        context.note("file-unknown", f"{name}: not a file that DeepSpeed writes; carried unchanged")
    else:
        context.note("file-unknown", f"{name}: not a file that DeepSpeed writes; not carried, it has {size} bytes")


def _matches_any(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
