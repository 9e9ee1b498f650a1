"""The fast check of a pickle accepts only what the stack simulation accepts, and accepts what torch writes."""

from __future__ import annotations

import io
import pickle
import zipfile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.containers.hostile import glob, text
from ucp.containers import pickle_guard
from ucp.containers.pickle_guard import _is_plain, check_opcodes, simulate_stack
from ucp.errors import IntegrityError, UcpError, UnsafeError


def pickle_of(value: object) -> bytes:
    torch = pytest.importorskip("torch")
    buffer = io.BytesIO()
    torch.save(value, buffer)
    with zipfile.ZipFile(buffer) as archive:
        return archive.read("archive/data.pkl")


def big_state() -> dict[str, Any]:
    """A state with everything that could mislead the fast check: long texts, long runs, more than one window."""
    torch = pytest.importorskip("torch")
    shared = (0.9, 0.95)
    return {
        "tensors": {f"layers.{i}.{'deep.' * (i % 60)}weight": torch.zeros(1) for i in range(700)},
        "groups": [{"betas": shared, "lr": 0.1} for _ in range(10)],
        "long": ["x" * n for n in (255, 256, 257, 70_000)],
        "bytes": bytes(range(256)) * 400,
        "run": [None] * 5000,
        "numbers": [*range(300), 2**31, 2**40, -1, 2**64, 2**600],
        "ints": tuple(range(3000)),
    }


def test_what_torch_writes_is_plain() -> None:
    data = pickle_of(big_state())
    assert len(data) > 3 * pickle_guard._WINDOW
    assert _is_plain(data)
    simulate_stack(data, "x")


@pytest.mark.parametrize("window", [600, 601, 613, 1000, 4099])
def test_windows_do_not_matter(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = pickle_of(big_state())
    monkeypatch.setattr(pickle_guard, "_WINDOW", window)
    assert _is_plain(data)
    assert not _is_plain(data[:-1])
    bomb = b"\x80\x02(" + b"K\x01" * (window // 2 - 4) + b")\x85r\xff\xff\xff\x7ft."
    for shift in range(12):
        assert not _is_plain(bomb[:3] + b"N" * shift + bomb[3:])


def test_a_few_shared_tuples_are_plain_and_many_are_not() -> None:
    def sharing(uses: int) -> bytes:
        pair = (1, 2)
        return pickle.dumps([pair] + [pair] * uses, protocol=2)

    assert _is_plain(sharing(16))
    assert not _is_plain(sharing(17))
    check_opcodes(sharing(10_000), "x")


@pytest.mark.parametrize(
    "odd",
    [
        b"N\x85q\x00h\x00q\x01",  # a GET that is given a second name
        b"N\x85(uq\x00",  # a name after nothing was set
        b"N\x85(eq\x00",
        b"N\x852",  # DUP
        b"N\x85N0q\x00",  # a name after a POP
        b"N\x85\x94",  # MEMOIZE
        b"N\x85\x80\x02q\x00",  # a second PROTO
        b"N\x85p0\n",  # a name in digits
        b"I1\n",
        b"Pabc\n",
    ],
)
def test_other_ways_to_share_are_left_to_the_stack_simulation(odd: bytes) -> None:
    assert not _is_plain(b"\x80\x02" + odd + b".")


FRAGMENTS = st.sampled_from(
    [
        *(b"(", b")", b"]", b"}", b"N", b"K\x01", b"K)", b"K\x85", b"M\x01\x02", b"J\x01\x02\x03\x04", b"G12345678"),
        *(
            b"t",
            b"\x85",
            b"\x86",
            b"\x87",
            b"\x91",
            b"R",
            b"a",
            b"b",
            b"e",
            b"s",
            b"u",
            b"0",
            b"1",
            b"2",
            b"Q",
            b"l",
            b"d",
        ),
        *(b"q\x00", b"q\x01", b"q\x02", b"qt", b"h\x00", b"h\x01", b"h\x02", b"ht", b"r\x01\0\0\0", b"j\x01\0\0\0"),
        *(b"r\xff\xff\xff\x0f", b"j\xff\xff\xff\x0f", b"\x94", b"\x8a\x01\x05", b"\x8f", b"\x90", b"\x80\x02"),
        *(text("ab"), text("q\x00"), text("x" * 300), glob("a", "B"), b"\x82\x01", b"."),
    ]
)


@settings(max_examples=600)
@given(st.lists(FRAGMENTS, max_size=40))
def test_plain_is_never_unsafe(fragments: list[bytes]) -> None:
    data = b"\x80\x02" + b"".join(fragments) + b"."
    verdict: UcpError | None = None
    try:
        simulate_stack(data, "x")
    except UcpError as error:
        verdict = error
    if _is_plain(data):
        assert not isinstance(verdict, UnsafeError)
        check_opcodes(data, "x")


@given(
    st.recursive(
        st.none() | st.integers() | st.text() | st.floats(),
        lambda inner: st.lists(inner) | st.lists(inner, max_size=5).map(tuple) | st.dictionaries(st.text(), inner),
    ),
    st.sampled_from(range(pickle.HIGHEST_PROTOCOL + 1)),
)
def test_the_stack_simulation_accepts_what_pickle_writes(value: object, protocol: int) -> None:
    simulate_stack(pickle.dumps(value, protocol), "x")


@settings(max_examples=300)
@given(st.binary(max_size=60))
def test_any_bytes(data: bytes) -> None:
    for start in (b"", b"\x80\x02", b"\x80\x04"):
        try:
            check_opcodes(start + data, "the file")
        except (IntegrityError, UnsafeError) as error:
            said = error.what
        else:
            said = "the file"
        assert said.startswith("the file")
