"""What extras carry of two rank files: the same only where it is, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.containers.likeness import differences
from ucp.containers.inert import InertOrderedDict, StorageRef, TensorRef, new_class
from ucp.core.dtypes import FLOAT32
from ucp.formats.deepspeed.read.carry_extras import TreeComparison


def tensor(numel: int = 3) -> TensorRef:
    return TensorRef(StorageRef("0", FLOAT32, numel, "cpu"), 0, (numel,), (1,), FLOAT32)


def alike(a: Any, b: Any, taken: bool = True) -> bool:
    return TreeComparison(lambda _: taken).are(a, b)


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3)
trees = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=2) | st.integers(0, 3), inner, max_size=3)
        | st.builds(lambda state: scaler(state), inner)
    ),
    max_leaves=8,
)


def scaler(state: Any) -> Any:
    made = new_class("some.module", "LossScaler")(1)
    made.state = state
    return made


@given(a=trees, b=trees)
def test_trees_are_alike_where_they_do_not_differ(a: Any, b: Any) -> None:
    assert alike(a, a)
    if alike(a, b):
        assert not differences(a, b)
        assert repr(a) == repr(b) or "LossScaler" in repr(a)


@pytest.mark.parametrize(
    "a, b",
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ([1, 2], (1, 2)),
        ([1, 2], [1, 2, 3]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": [0.0]}, {"a": [-0.0]}),
        ({1: "a"}, {True: "a"}),
        (InertOrderedDict(), {}),
        ([tensor()], [3]),
    ],
)
def test_small_differences_count(a: Any, b: Any) -> None:
    assert not alike(a, b)
    assert not alike({"x": [a, "y"]}, {"x": [b, "y"]})


def test_tensors_count_where_they_are_carried() -> None:
    a, b = {"x": tensor(3), "n": 1}, {"x": tensor(4), "n": 1}
    assert alike(a, b), "both have become atoms"
    assert not alike(a, b, taken=False)


def test_values_inside_themselves_and_shared_without_end() -> None:
    a: list[Any] = [1, "x"]
    b: list[Any] = [1, "x"]
    a.append(a)
    b.append(b)
    assert alike(a, b)
    for _ in range(60):  # 2⁶⁰ paths lead to the first
        a, b = [a, a], [b, b]
    assert alike(a, b)


def test_deep_trees_are_left_to_others() -> None:
    a: Any = []
    b: Any = []
    for _ in range(5000):
        a, b = [a], [b]
    assert not alike(a, b)
