"""Encodings are lossless for any bit patterns."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ucp.core.dtypes import BFLOAT16, BY_NAME, FLOAT16, FLOAT32, DType
from ucp.errors import UcpError
from ucp.log import codecs
from ucp.log.codecs import Encoding
from ucp.log.frames import BadBytesError

DTYPES = st.sampled_from([BFLOAT16, FLOAT16, FLOAT32, BY_NAME["float64"], BY_NAME["uint8"]])


@st.composite
def blocks(draw: st.DrawFn) -> tuple[DType, np.ndarray]:
    """A dtype and bit patterns: arbitrary ones, mostly zero ones, and floats that were bfloat16 once."""
    dtype = draw(DTYPES)
    kind = codecs.bits_type(dtype)
    some = st.integers(0, 2 ** (8 * kind.itemsize) - 1)
    elements = draw(st.sampled_from([some, st.one_of(st.just(0), st.just(0), st.just(0), some), st.just(0)]))
    bits = draw(arrays.arrays(kind, st.integers(0, 300), elements=elements))
    if dtype is FLOAT32 and draw(st.booleans()):
        bits &= np.uint32(0xFFFF0000)
    return dtype, bits


@given(blocks(), st.booleans())
def test_a_block_survives_a_round_trip(block: tuple[DType, np.ndarray], compress: bool) -> None:
    dtype, bits = block
    encoding, data = codecs.encode(bits, dtype, compress=compress)
    assert np.array_equal(codecs.decode(encoding, data, dtype, len(bits)), bits)
    assert data.nbytes <= bits.nbytes


@given(blocks())
def test_every_encoding_is_lossless(block: tuple[DType, np.ndarray]) -> None:
    dtype, bits = block
    for encoding, data in (
        (Encoding.RAW, bits.view(np.uint8)),
        (Encoding.PLANES, codecs.encode_planes(bits)),
        (Encoding.SPARSE, codecs.encode_sparse(bits)),
    ):
        assert np.array_equal(codecs.decode(encoding, data, dtype, len(bits)), bits)


@given(blocks(), st.randoms(use_true_random=False))
def test_differences_lead_from_old_to_new_and_add_up(block: tuple[DType, np.ndarray], random: object) -> None:
    del random
    dtype, old = block
    rng = np.random.default_rng(len(old))
    middle = old + rng.integers(0, 3, len(old)).astype(old.dtype)
    new = rng.permutation(old)
    one = codecs.decode(*codecs.encode_difference(old, middle), dtype, len(old))
    two = codecs.decode(*codecs.encode_difference(middle, new), dtype, len(old))
    assert np.array_equal(codecs.apply_difference(old, one), middle)
    assert np.array_equal(codecs.apply_difference(old, codecs.apply_difference(one, two)), new)


def test_unchanged_states_take_no_bytes() -> None:
    bits = np.arange(100, dtype="<u4")
    assert codecs.encode_difference(bits, bits)[0] == Encoding.UNCHANGED
    assert codecs.encode(np.zeros(100, "<u4"), FLOAT32)[0] == Encoding.ZERO
    assert codecs.encode(np.full(100, 0x8000, "<u2"), BFLOAT16)[0] == Encoding.RAW, "-0.0 is not nothing"


def test_small_differences_take_less_than_the_states() -> None:
    old = np.random.default_rng(0).normal(size=10_000).astype(np.float32).view("<u4")
    new = old + np.random.default_rng(1).integers(0, 50, 10_000).astype("<u4")
    encoding, data = codecs.encode_difference(old, new)
    assert encoding == Encoding.DELTA
    assert data.nbytes < old.nbytes / 3


def test_only_float32_that_fits_bfloat16_is_narrowed() -> None:
    bits = np.random.default_rng(0).normal(size=1000).astype(np.float32).view("<u4")
    assert codecs.encode(bits, FLOAT32)[0] == Encoding.RAW
    narrow = bits & np.uint32(0xFFFF0000)
    encoding, data = codecs.encode(narrow, FLOAT32)
    assert (encoding, data.nbytes) == (Encoding.NARROWED, 2000)
    narrow[999] |= 1
    assert codecs.encode(narrow, FLOAT32)[0] == Encoding.RAW


@pytest.mark.parametrize("how", ["compress", "sparse"])
def test_few_values_are_stored_sparsely(how: str) -> None:
    bits = np.zeros(10_000, "<u2")
    bits[np.random.default_rng(0).choice(10_000, 100, replace=False)] = np.random.default_rng(1).integers(1, 2**16, 100)
    encoding, data = codecs.encode(bits, BFLOAT16, **{how: True})
    assert encoding == Encoding.SPARSE
    assert data.nbytes < 100 * 4
    dense = np.arange(1, 10_001).astype("<u2")
    assert codecs.encode(dense, BFLOAT16, sparse=True)[0] == Encoding.RAW


@given(arrays.arrays(np.uint64, st.integers(0, 50), elements=st.integers(0, 2**62)))
def test_varints_survive_a_round_trip(numbers: np.ndarray) -> None:
    assert np.array_equal(codecs.unpack_varints(codecs.pack_varints(numbers), len(numbers)), numbers)


@given(st.binary(max_size=60), st.sampled_from(list(Encoding)), DTYPES, st.integers(0, 100))
def test_random_bytes_are_refused_or_decode_to_the_right_length(
    data: bytes, encoding: Encoding, dtype: DType, count: int
) -> None:
    try:
        bits = codecs.decode(encoding, np.frombuffer(data, np.uint8), dtype, count)
    except (BadBytesError, UcpError):
        return
    assert len(bits) == count


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32], ids=str)
def test_float32_values_are_those_of_torch(dtype: DType) -> None:
    torch = pytest.importorskip("torch")
    bits = np.random.default_rng(0).integers(0, 2 ** (8 * dtype.itemsize), 5000, codecs.bits_type(dtype))
    there = torch.from_numpy(bits.view(f"<i{dtype.itemsize}")).view(getattr(torch, dtype.name)).float().numpy()
    here = codecs.to_float32(bits, dtype)
    known = ~np.isnan(there)
    assert np.array_equal(np.isnan(here), ~known)
    assert np.array_equal(here[known].view(np.uint32), there[known].view(np.uint32))
