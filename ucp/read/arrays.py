"""Atoms as numpy arrays and torch tensors, for interactive use and for tests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ucp import settings
from ucp.core.box import Shape, flat_index, slabs
from ucp.core.checkpoint import Atom, ComputedFiles
from ucp.errors import UsageError
from ucp.read.atom_reader import AtomReader
from ucp.read.casting import RawArray, raw_dtype, widen
from ucp.storage.local import SourceFiles

if TYPE_CHECKING:
    import torch


def read_array(
    root: Path, atom: Atom, rows: slice | None = None, computed: ComputedFiles | None = None
) -> np.ndarray[Any, Any]:
    """The atom, or rows of its first dimension, as a numpy array; bfloat16 is widened to float32."""
    raw = _read_raw(root, atom, rows, computed)
    if raw.dtype.kind == "u" and atom.dtype.family == "float" and atom.dtype.name != "bfloat16":
        raise UsageError(f"{atom}: numpy has no {atom.dtype}", hint="read it with as_torch=True")
    return widen(raw, atom.dtype)


def read_tensor(
    root: Path, atom: Atom, rows: slice | None = None, computed: ComputedFiles | None = None
) -> torch.Tensor:
    """The atom, or rows of its first dimension, as a torch tensor of exactly its dtype."""
    import torch

    raw = _read_raw(root, atom, rows, computed)
    dtype: torch.dtype = getattr(torch, atom.dtype.name)
    if raw.size == 0:
        return torch.empty(raw.shape, dtype=dtype)
    # Through bytes, because torch and numpy do not share all types.
    flat = torch.from_numpy(np.ascontiguousarray(raw).reshape(-1).view(np.uint8))
    return flat.view(dtype).reshape(raw.shape)


def _read_raw(root: Path, atom: Atom, rows: slice | None, computed: ComputedFiles | None) -> RawArray:
    if rows is not None and not atom.shape:
        raise UsageError(f"{atom}: is a scalar and has no rows")
    start, stop, step = (rows or slice(None)).indices(atom.shape[0] if atom.shape else 1)
    if step != 1:
        raise UsageError(f"{atom}: rows are read in steps of 1, not {step}")
    shape: Shape = (max(0, stop - start), *atom.shape[1:]) if atom.shape else ()
    corner = (start, *(0,) * (len(shape) - 1)) if shape else ()
    out = np.empty(shape, raw_dtype(atom.dtype))
    if out.size == 0:
        return out
    with SourceFiles(root, computed=computed) as files:
        reader = AtomReader(files, atom, flat=False)
        for slab in slabs(shape, max(1, settings.SLAB_BYTES // atom.dtype.itemsize)):
            position = flat_index(slab.start, shape)
            target = out.reshape(-1)[position : position + slab.numel].reshape(slab.shape)
            reader.read(slab.shift(corner), target)
    return out
