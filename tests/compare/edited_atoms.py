"""Checkpoints to compare: real ones as atoms, with single elements changed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import ucp
from ucp.core.box import flat_index
from ucp.core.checkpoint import Atom, Checkpoint
from ucp.formats.registry import ReadOptions, open_checkpoint
from ucp.read.casting import RawArray, raw_dtype


def index(path: Path) -> Checkpoint:
    return open_checkpoint(path, ReadOptions())


def atoms(source: Path, target: Path, **options: object) -> Path:
    """Convert `source` to a folder of atoms, in which every state of a parameter is contiguous."""
    ucp.convert(source, target, **options)
    return target


def stored(folder: Path, name: str, kind: str) -> tuple[Atom, Path, int]:
    atom = index(folder).parameters[name].atoms[kind]
    (fragment,) = atom.fragments
    return atom, folder / fragment.file, fragment.offset


def peek(folder: Path, name: str, kind: str) -> RawArray:
    """All raw elements of a state of a folder of atoms, in its shape."""
    atom, path, offset = stored(folder, name, kind)
    data = path.read_bytes()[offset : offset + atom.nbytes]
    return np.frombuffer(data, raw_dtype(atom.dtype)).reshape(atom.shape).copy()


def poke(folder: Path, name: str, kind: str, at: tuple[int, ...], value: float) -> None:
    """Overwrite one raw element of a state of a folder of atoms."""
    atom, path, offset = stored(folder, name, kind)
    data = bytearray(path.read_bytes())
    start = offset + flat_index(at, atom.shape) * atom.dtype.itemsize
    data[start : start + atom.dtype.itemsize] = np.asarray(value, raw_dtype(atom.dtype)).tobytes()
    path.write_bytes(data)
