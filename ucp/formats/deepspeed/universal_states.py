"""`zero/<parameter>/<state>.pt` of a universal folder: one whole state a file, with a few words on how it was cut."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Final

from ucp.errors import NotUnderstoodError, StorageError
from ucp.files.inert import TensorRef
from ucp.files.paths import scan
from ucp.formats.deepspeed.fragments import scalar_fragments
from ucp.formats.deepspeed.scalars import stored_scalar
from ucp.formats.deepspeed.shards import RankFile, RankFiles, describe
from ucp.formats.deepspeed.states import kind_of
from ucp.model.box import Shape
from ucp.model.checkpoint import MASTER, STEP, Atom, Fragment
from ucp.model.layout import Rank
from ucp.model.region import Region

MASTER_FILE: Final = "fp32"
SUFFIX: Final = ".pt"
_MAX_DEPTH: Final = 8  # folders in folders: more are no name of a parameter, but links that lead back


@dataclass(slots=True)
class StateFolder:
    """The state files of one name. `kinds` maps our kind of state to the file's name below the root."""

    name: str
    kinds: dict[str, str] = field(default_factory=dict)

    @property
    def has_moments(self) -> bool:
        """Whether an optimizer kept anything here. Without, the name need not be a trained parameter's."""
        return bool(self.kinds.keys() - {MASTER})


def state_folders(root: Path, states: str) -> dict[str, StateFolder]:
    """Every folder of states below `root/states`, by parameter name, sorted. Names with `/` are folders in folders."""
    found: dict[str, StateFolder] = {}
    try:
        _search(root, states, "", found)
    except OSError as error:
        raise StorageError(f"{error.filename}: cannot be read: {error.strerror}") from error
    return found


def _search(root: Path, states: str, above: str, found: dict[str, StateFolder]) -> None:
    with scan(root / states / above) as entries:
        names = sorted(above + entry.name for entry in entries if entry.is_dir())
    for parameter in names:
        with scan(root / states / parameter) as entries:
            files = {entry.name: entry.is_dir() for entry in entries}
        folder = StateFolder(parameter)
        for name in sorted(files):
            if name.endswith(SUFFIX) and not files[name]:
                stem = name.removesuffix(SUFFIX)
                kind = MASTER if stem == MASTER_FILE else kind_of(stem)
                folder.kinds[kind] = f"{states}/{parameter}/{name}"
        has_folders = any(files.values())
        if folder.kinds or not has_folders:
            found[parameter] = folder
        if has_folders and parameter.count("/") < _MAX_DEPTH:
            _search(root, states, f"{parameter}/", found)


def read_state(files: RankFiles, name: str, kind: str, path: str, shape: Shape | None) -> Atom | None:
    """One state file as an atom of `shape` (None: as stored); None when it is a number that no atom can hold.

    A tensor with as many elements but another shape (ZeRO-3 states are flat, fused ones may be viewed) takes `shape`;
    any other shape stays as stored, for the caller to judge, and so does a number, be the parameter one element or not.
    """
    file = files.open(path)
    value = file.tree.get("param") if isinstance(file.tree, dict) else file.tree
    if isinstance(value, TensorRef) and (value.shape or kind != STEP):
        if shape is not None and value.shape and prod(shape) == value.numel and value.is_contiguous:
            return _atom(file, value, name, kind, shape)
        return _atom(file, value, name, kind, value.shape)
    number = stored_scalar(file, value, 0)
    if number is None and not isinstance(value, int):
        raise NotUnderstoodError(f"{path}: expected a tensor or a number, found {describe(value)}")
    return Atom(name, kind, (), number.dtype, scalar_fragments(Rank(), number)) if number is not None else None


def _atom(file: RankFile, ref: TensorRef, name: str, kind: str, shape: Shape) -> Atom:
    strides = None if ref.is_contiguous else ref.strides
    fragments = [Fragment(Region.all_of(shape), file.name, file.spot(ref).offset, ref.dtype, strides=strides)]
    return Atom(name, kind, shape, ref.dtype, fragments if ref.numel else ())
