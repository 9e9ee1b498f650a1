"""Transposed matrices are read as numpy transposes them, whatever the sizes of slabs, strips and tiles."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucp import settings as ucp_settings
from ucp.core.box import Box, slabs, whole
from ucp.core.checkpoint import Atom, Fragment
from ucp.core.dtypes import BFLOAT16, FLOAT32, DType
from ucp.core.region import Region
from ucp.core.remap import BlockMap, remapped_atom
from ucp.read import strided_reader
from ucp.read.atom_reader import AtomReader
from ucp.storage.local import SourceFiles

KINDS = {FLOAT32: np.dtype(np.float32), BFLOAT16: np.dtype(np.uint16)}


@st.composite
def turned(draw: st.DrawFn) -> tuple[list[int], int, int, DType]:
    """Rows of the new matrix in blocks, each from different columns of the stored one: lengths, order and width."""
    lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=6))
    return lengths, draw(st.integers(1, 9)), draw(st.integers(0, 999)), draw(st.sampled_from([FLOAT32, BFLOAT16]))


@given(
    case=turned(),
    slab=st.integers(1, 40),
    strips=st.integers(1, 300),
    gap=st.sampled_from([1, 8, 1 << 20]),
    front=st.integers(0, 50),
    tile=st.integers(1, 5),
)
@settings(max_examples=150, deadline=None)
def test_blocks_of_columns_become_rows(
    case: tuple[list[int], int, int, DType], slab: int, strips: int, gap: int, front: int, tile: int
) -> None:
    lengths, width, seed, dtype = case
    total, kind = sum(lengths), KINDS[dtype]
    stored = np.arange(width * total, dtype=kind).reshape(width, total)
    order = np.random.default_rng(seed).permutation(len(lengths))
    starts = np.cumsum([0, *lengths])
    tiles, expected, at = [], [], 0
    for block in order:
        lo, n = int(starts[block]), lengths[block]
        tiles.append(BlockMap("s", Box((0, lo), (width, n)), Box((at, 0), (n, width)), transposed=True))
        expected.append(stored[:, lo : lo + n].T)
        at += n
    file = Fragment(Region.of((whole((width, total)),)), "data", front, dtype)
    source = Atom("s", "weight", (width, total), dtype, (file,))
    atom = remapped_atom("t", tiles, (total, width), {"s": source})
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        (Path(folder) / "data").write_bytes(b"x" * front + stored.tobytes())
        patch.setattr(ucp_settings, "SLAB_BYTES", slab * kind.itemsize)
        patch.setattr(ucp_settings, "TRANSPOSE_BUFFER_BYTES", strips)
        patch.setattr(strided_reader, "_GAP_BYTES", gap)
        patch.setattr(strided_reader, "_TILE_LENGTH", tile)
        with SourceFiles(Path(folder)) as files:
            reader = AtomReader(files, atom, flat=False)
            found = []
            for part in slabs((total, width), slab):
                out = np.empty(part.shape, kind)
                reader.read(part, out)
                found.append(out.reshape(-1))
    assert (np.concatenate(found) == np.concatenate(expected).reshape(-1)).all()


def test_the_stored_matrix_is_not_read_again_for_every_slab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three interleaved parts, like q, k and v of GPT-2: every byte is read a few times at most."""
    width, heads, rows = 32, 16, 4
    total = 3 * heads * rows
    stored = np.arange(width * total, dtype=np.float32).reshape(width, total)
    (tmp_path / "data").write_bytes(stored.tobytes())
    tiles = []
    for head in range(heads):
        for part in range(3):
            lo = (part * heads + head) * rows
            box = Box(((head * 3 + part) * rows, 0), (rows, width))
            tiles.append(BlockMap("s", Box((0, lo), (width, rows)), box, transposed=True))
    fragment = Fragment(Region.of((whole(stored.shape),)), "data", 0, FLOAT32)
    source = Atom("s", "weight", stored.shape, FLOAT32, (fragment,))
    atom = remapped_atom("t", tiles, (total, width), {"s": source})
    monkeypatch.setattr(ucp_settings, "TRANSPOSE_BUFFER_BYTES", stored.nbytes)
    read = 0
    with SourceFiles(tmp_path) as files:
        original = files.read_into

        def counted(file: str, at: int, target: memoryview) -> None:
            nonlocal read
            read += len(target)
            original(file, at, target)

        monkeypatch.setattr(files, "read_into", counted)
        reader = AtomReader(files, atom, flat=False)
        for part in slabs((total, width), width * rows):
            reader.read(part, np.empty(part.shape, np.float32))
    assert read < 12 * stored.nbytes < total // rows * stored.nbytes
