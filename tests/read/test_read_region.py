"""Any region of an atom can be read from any layout, and only its own bytes are read."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.shards import DTYPES, Cut, cuts, pick, shapes, values_of, write_shards
from tests.engine.shards import regions as regions_of
from ucp import settings
from ucp.core.box import Box
from ucp.core.checkpoint import Atom, Fragment
from ucp.core.dtypes import BFLOAT16, FLOAT32, INT64
from ucp.core.region import Region
from ucp.core.rules import Rule
from ucp.errors import InconsistentError
from ucp.read.atom_reader import AtomReader
from ucp.read.casting import cast, raw_dtype
from ucp.storage.local import SourceFiles


class Counting(SourceFiles):
    """Counts the bytes that are read."""

    read_bytes = 0

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        self.read_bytes += len(target)
        super().read_into(file, offset, target)


def read(folder: Path, atom: Atom, region: Region) -> tuple[np.ndarray[Any, Any], int]:
    out = np.full(region.numel, 1, raw_dtype(atom.dtype))
    with Counting(folder) as files:
        AtomReader(files, atom, flat=False).read_region(region, out)
        return out, files.read_bytes


@contextmanager
def limits(short: int, slab: int) -> Iterator[None]:
    before = settings.SHORT_RUN_BYTES, settings.SLAB_BYTES
    settings.SHORT_RUN_BYTES, settings.SLAB_BYTES = short, slab
    try:
        yield
    finally:
        settings.SHORT_RUN_BYTES, settings.SLAB_BYTES = before


@given(data=st.data())
def test_any_region_of_any_layout(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    source, target = data.draw(cuts(shape)), data.draw(cuts(shape))
    dtype = data.draw(st.sampled_from(DTYPES))
    values = values_of(shape, dtype)
    short, slab = data.draw(st.integers(0, 64)), data.draw(st.integers(1, 128))
    with tempfile.TemporaryDirectory() as folder, limits(short, slab):
        atom = write_shards(Path(folder), values, dtype, source)
        for region in regions_of(target, shape):
            found, nbytes = read(Path(folder), atom, region)
            assert found.tobytes() == pick(values, region).tobytes()
            if short == 0:
                assert nbytes == region.numel * dtype.itemsize


@given(data=st.data())
def test_other_dtypes_are_cast(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    source, target = data.draw(cuts(shape)), data.draw(cuts(shape))
    values = values_of(shape, BFLOAT16)
    with tempfile.TemporaryDirectory() as folder, limits(0, data.draw(st.integers(1, 128))):
        atom = replace(write_shards(Path(folder), values, BFLOAT16, source), dtype=FLOAT32)
        for region in regions_of(target, shape):
            found, _ = read(Path(folder), atom, region)
            assert found.tobytes() == pick(cast(values, BFLOAT16, FLOAT32), region).tobytes()


def test_padding_outside_the_atom_is_zero(tmp_path: Path) -> None:
    values = values_of((5, 3), INT64)
    atom = write_shards(tmp_path, values, INT64, Cut(Rule("replicated"), 1, (400,)))
    padded = Region.of([Box((3, 0), (3, 3))]).cut(1, 9)
    found, nbytes = read(tmp_path, atom, padded)
    assert found.tolist() == [*values[3:].reshape(-1).tolist()[1:], 0, 0, 0]
    assert nbytes == 5 * 8
    assert read(tmp_path, atom, Region.of([Box((6, 0), (2, 3))]))[0].tolist() == [0] * 6


def test_means_and_strided_tensors_are_read_too(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    (tmp_path / "a").write_bytes(values.tobytes())
    (tmp_path / "b").write_bytes((values + 2).tobytes())
    (tmp_path / "t").write_bytes(np.ascontiguousarray(values.T).tobytes())
    one, two = (Fragment(Region.all_of((4, 6)), file, 0, FLOAT32) for file in "ab")
    turned = Fragment(Region.all_of((4, 6)), "t", 0, FLOAT32, strides=(1, 4))
    region = Region.of([Box((1, 2), (3, 2))]).cut(1, 6)
    expected = values[1:4, 2:4].reshape(-1)[1:]
    with limits(0, 32):
        mean, _ = read(tmp_path, Atom("p", "w", (4, 6), FLOAT32, (one,), ((two,),), "average"), region)
        assert mean.tolist() == (expected + 1).tolist()
        assert read(tmp_path, Atom("p", "w", (4, 6), FLOAT32, (turned,)), region)[0].tolist() == expected.tolist()
        scaled = Atom("p", "w", (4, 6), FLOAT32, (one._replace(scale=2.0),))
        assert read(tmp_path, scaled, region)[0].tolist() == (expected / 2).tolist()


def test_a_scalar_may_be_in_the_index_itself(tmp_path: Path) -> None:
    number = Fragment(Region.all_of(()), "", 0, INT64, inline=np.int64(7).tobytes())
    atom = Atom("p", "step", (), FLOAT32, (number,))
    assert read(tmp_path, atom, Region.all_of(()))[0].tolist() == [7.0]


def test_a_gap_is_an_error(tmp_path: Path) -> None:
    values = values_of((4, 2), INT64)
    atom = write_shards(tmp_path, values, INT64, Cut(Rule("replicated"), 1, (500,)))
    half = replace(atom, fragments=atom.fragments[:1])
    assert read(tmp_path, half, Region.of([Box((0, 0), (2, 2))]))[0].tolist() == values[:2].reshape(-1).tolist()
    with pytest.raises(InconsistentError, match="parameter p, weight: 4 of 8 elements"):
        read(tmp_path, half, Region.all_of((4, 2)))
