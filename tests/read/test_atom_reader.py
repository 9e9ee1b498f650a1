"""Boxes of an atom are read element by element, whatever the layout on disk."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.shards import DTYPES, Cut, cuts, index_of, shapes, values_of, write_shards
from ucp import settings
from ucp.core.box import Box, flat_index, is_contiguous_in, slabs
from ucp.core.checkpoint import Atom, Fragment
from ucp.core.dtypes import BFLOAT16, FLOAT32, INT64
from ucp.core.region import Region
from ucp.core.rules import Rule
from ucp.errors import InconsistentError, IntegrityError, UsageError
from ucp.read.atom_reader import AtomReader, read_array, read_tensor
from ucp.read.casting import cast, raw_dtype
from ucp.storage.local import SourceFiles


def read_by_slabs(folder: Path, atom: Atom, limit: int, flat: bool | None) -> np.ndarray:
    with SourceFiles(folder) as files:
        reader = AtomReader(files, atom, flat=flat)
        out = np.empty(reader.shape, raw_dtype(atom.dtype))
        for slab in slabs(reader.shape, limit):
            at = flat_index(slab.start, reader.shape)
            reader.read(slab, out.reshape(-1)[at : at + slab.numel].reshape(slab.shape))
    return out.reshape(atom.shape)


@given(data=st.data())
def test_any_layout_reads_back_the_whole_atom(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    cut = data.draw(cuts(shape))
    dtype = data.draw(st.sampled_from(DTYPES))
    limit = data.draw(st.integers(1, 64))
    values = values_of(shape, dtype)
    with tempfile.TemporaryDirectory() as folder:
        atom = write_shards(Path(folder), values, dtype, cut)
        assert read_by_slabs(Path(folder), atom, limit, None).tobytes() == values.tobytes()
        assert read_by_slabs(Path(folder), atom, limit, False).tobytes() == values.tobytes()


@given(data=st.data())
def test_rows_are_rows_of_the_whole(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    cut = data.draw(cuts(shape))
    values = values_of(shape, INT64)
    rows = slice(data.draw(st.integers(0, shape[0])), data.draw(st.integers(0, shape[0])))
    with tempfile.TemporaryDirectory() as folder:
        atom = write_shards(Path(folder), values, INT64, cut)
        assert np.array_equal(read_array(Path(folder), atom, rows), values[rows])


def test_vocabulary_padding_is_left_out(tmp_path: Path) -> None:
    padded = values_of((8, 3), FLOAT32)
    atom = write_shards(tmp_path, padded, FLOAT32, Cut(Rule("split", dim=0), 4, (500,)))
    assert read_array(tmp_path, replace(atom, shape=(5, 3))).tobytes() == padded[:5].tobytes()


def test_a_gap_is_an_error_that_names_the_parameter(tmp_path: Path) -> None:
    atom = write_shards(tmp_path, values_of((8, 3), FLOAT32), FLOAT32, Cut(Rule("split", dim=0), 2, ()))
    with pytest.raises(InconsistentError, match=r"p, weight: 12 of 24"):
        read_array(tmp_path, replace(atom, fragments=atom.fragments[:1]))


def test_a_file_that_ends_early_is_named(tmp_path: Path) -> None:
    atom = write_shards(tmp_path, values_of((8, 3), FLOAT32), FLOAT32, Cut(Rule("replicated"), 1, ()))
    (tmp_path / "p.weight.0").write_bytes(b"short")
    with pytest.raises(IntegrityError, match=r"p\.weight\.0: ends at byte 5"):
        read_array(tmp_path, atom)


def test_strided_tensors_read_in_logical_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = values_of((5, 6, 7), FLOAT32)
    (tmp_path / "t").write_bytes(b"xx" + stored.tobytes())
    view = stored.transpose(2, 0, 1)
    strides = tuple(s // 4 for s in view.strides)
    fragment = Fragment(Region.all_of(view.shape), "t", 2, FLOAT32, strides=strides)
    atom = Atom("t", "weight", view.shape, FLOAT32, (fragment,))
    for limit in (4, 64, 1 << 20):
        monkeypatch.setattr(settings, "SLAB_BYTES", limit)
        assert read_array(tmp_path, atom).tobytes() == np.ascontiguousarray(view).tobytes()


def test_cast_average_scale_and_inline(tmp_path: Path) -> None:
    one, two = values_of((4, 6), INT64).astype(np.float32), values_of((4, 6), INT64, 1).astype(np.float32)
    cut = Cut(Rule("split", dim=1), 2, (300,))
    first = write_shards(tmp_path, one, FLOAT32, cut, name="a")
    second = write_shards(tmp_path, two, FLOAT32, cut, name="b")
    assert read_array(tmp_path, replace(first, dtype=BFLOAT16)).tobytes() == (
        (cast(one, FLOAT32, BFLOAT16).astype(np.uint32) << 16).tobytes()
    )
    average = replace(first, replicas=(second.fragments,), combine="average")
    assert np.array_equal(read_array(tmp_path, average), (one + two) / np.float32(2))
    halved = replace(first, fragments=tuple(f._replace(scale=0.5) for f in first.fragments))
    assert np.array_equal(read_array(tmp_path, halved), one * 2)
    step = Atom("s", "step", (), INT64, (Fragment(Region.all_of(()), "", 0, INT64, inline=(7).to_bytes(8, "little")),))
    assert read_array(tmp_path, step) == 7


def test_torch_gets_the_exact_dtype(tmp_path: Path) -> None:
    import torch

    values = values_of((4, 6), BFLOAT16)
    atom = write_shards(tmp_path, values, BFLOAT16, Cut(Rule("replicated"), 1, ()))
    tensor = read_tensor(tmp_path, atom)
    assert tensor.dtype == torch.bfloat16
    assert tensor.view(torch.uint8).numpy().tobytes() == values.tobytes()


def test_rows_of_a_scalar_are_refused(tmp_path: Path) -> None:
    step = Atom("s", "step", (), INT64, (Fragment(Region.all_of(()), "", 0, INT64, inline=bytes(8)),))
    with pytest.raises(UsageError, match="scalar"):
        read_array(tmp_path, step, slice(0, 1))


@given(data=st.data())
def test_contiguity_agrees_with_numpy(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    box = Box(start, tuple(data.draw(st.integers(1, n - a)) for a, n in zip(start, shape, strict=True)))
    positions = np.arange(np.prod(shape)).reshape(shape)[index_of(box)]
    assert is_contiguous_in(box, shape) == bool(np.all(np.diff(positions.reshape(-1)) == 1))


def test_more_files_than_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "MAX_OPEN_FILES", 2)
    values = values_of((12, 3), FLOAT32)
    atom = write_shards(tmp_path, values, FLOAT32, Cut(Rule("split", dim=0), 4, (250, 500, 750)))
    assert len(atom.fragments) > 10
    assert read_array(tmp_path, atom).tobytes() == values.tobytes()
