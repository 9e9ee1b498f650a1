"""CRC-32s of parts combine to that of the whole, as zlib computes it."""

from __future__ import annotations

import sys
import types
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucp.containers import crc32 as ucp_crc32
from ucp.containers.crc32 import crc32, crc32_combine, crc32_of_zeros


@given(st.lists(st.binary(max_size=300), max_size=8))
def test_parts_combine_to_the_whole(parts: list[bytes]) -> None:
    total = 0
    for part in parts:
        total = crc32_combine(total, crc32(part, 0), len(part))
    assert total == zlib.crc32(b"".join(parts))


@given(st.binary(max_size=100), st.binary(max_size=100))
def test_blocks_continue_a_stream(first: bytes, second: bytes) -> None:
    assert crc32(memoryview(second), crc32(first, 0)) == zlib.crc32(first + second)


@given(st.integers(0, 100_000))
def test_zeros(count: int) -> None:
    assert crc32_of_zeros(count) == zlib.crc32(bytes(count))


def test_runs_of_zeros_larger_than_memory() -> None:
    """2**40 zeros are 2**20 times 2**20 zeros, put together by doubling."""
    run, length = zlib.crc32(bytes(1 << 20)), 1 << 20
    for _ in range(20):
        run, length = crc32_combine(run, run, length), 2 * length
    assert run == crc32_of_zeros(1 << 40)
    block = zlib.crc32(bytes(1 << 24))
    for _ in range(2**8 - 1):
        block = zlib.crc32(bytes(1 << 24), block)
    assert block == crc32_of_zeros(1 << 32)


def test_combining_takes_one_step_per_bit_of_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    crc32_combine(1, 2, (1 << 40) - 1)  # makes the tables
    steps = 0
    real = ucp_crc32._apply

    def counting(*arguments: Any) -> int:
        nonlocal steps
        steps += 1
        return real(*arguments)

    monkeypatch.setattr(ucp_crc32, "_apply", counting)
    crc32_combine(0x12345678, 0x9ABCDEF0, (1 << 36) - 1)
    assert 0 < steps <= 2 * 36


def test_isal_is_used_if_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "isal", types.ModuleType("isal"))
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", types.SimpleNamespace(crc32="fast"))
    assert ucp_crc32._fastest.__wrapped__() == "fast"
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    assert ucp_crc32._fastest.__wrapped__() is zlib.crc32


@pytest.mark.parametrize("nbytes", [0, 1, ucp_crc32._LARGE - 1, ucp_crc32._LARGE, ucp_crc32._LARGE + 1])
def test_blocks_of_any_size(nbytes: int) -> None:
    data = bytes(range(256)) * (nbytes // 256 + 1)
    assert ucp_crc32.crc32(memoryview(data)[:nbytes], 7) == zlib.crc32(data[:nbytes], 7)
