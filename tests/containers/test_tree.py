"""Trees of inert values: every leaf is visited, copies change nothing else, and equal means to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.containers.likeness import differences
from ucp.containers.inert import Inert, InertDefaultDict, InertOrderedDict, Size, StorageRef, TensorRef, new_class
from ucp.containers.tree import DROP, equal, map_leaves, walk
from ucp.core.dtypes import FLOAT32
from ucp.errors import UnsafeError


def tensor(numel: int = 3) -> TensorRef:
    return TensorRef(StorageRef("0", FLOAT32, numel, "cpu"), 0, (numel,), (1,), FLOAT32)


def is_tensor(value: Any) -> bool:
    return isinstance(value, TensorRef)


def is_equal(a: Any, b: Any, ignore_tensors: bool = True) -> bool:
    return equal(a, b, lambda one, _: ignore_tensors and is_tensor(one))


def scaler(state: Any) -> Any:
    made = new_class("some.module", "LossScaler")(1)
    made.state = state
    return made


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


# walk -----------------------------------------------------------------------------------------------------------------


def test_walk_visits_every_leaf_and_shared_branches_once() -> None:
    shared = [tensor(1), tensor(2)]
    tree = {"a": shared, "b": (shared, {"c": scaler({"d": tensor(3)})}), "e": {"text"}}
    assert sorted(leaf.numel for leaf in walk(tree) if is_tensor(leaf)) == [1, 2, 3]
    assert sorted(leaf.numel for leaf in walk(tree, into_objects=False) if is_tensor(leaf)) == [1, 2]
    assert "text" in list(walk(tree))
    seen: set[int] = set()
    assert list(walk(shared, seen=seen))
    assert not list(walk(shared, seen=seen))


def test_walk_ends_in_a_tree_that_contains_itself() -> None:
    tree: list[Any] = [1]
    tree.append(tree)
    assert list(walk(tree)) == [1]


# map_leaves -----------------------------------------------------------------------------------------------------------


@given(tree=trees)
def test_a_copy_without_new_leaves_is_the_tree_itself(tree: Any) -> None:
    assert map_leaves(tree, is_tensor, lambda leaf, _: leaf) is tree


def test_leaves_are_replaced_and_named_by_their_path() -> None:
    ordered = InertOrderedDict({"w": tensor()})
    ordered.attributes = {"_metadata": tensor()}
    default = InertDefaultDict(new_class("builtins", "list"))
    default["k"] = tensor()
    thing = scaler({"s": tensor()})
    thing.append(tensor())
    thing["key"] = tensor()
    tree = {"l": [0, tensor()], "t": (tensor(), Size((1, 2))), "o": ordered, "d": default, "x": thing, "n": {"p": 1}}
    made = map_leaves(tree, is_tensor, lambda _, path: path, path="file")
    assert made["l"] == [0, "file/l/1"]
    assert made["t"] == ("file/t/0", Size((1, 2)))
    assert made["o"] == {"w": "file/o/w"}
    assert made["o"].attributes == {"_metadata": "file/o/attributes/_metadata"}
    assert type(made["o"]) is InertOrderedDict
    assert type(made["d"]) is InertDefaultDict
    assert made["d"] == {"k": "file/d/k"}
    assert made["d"].factory is default.factory
    assert isinstance(made["x"], Inert)
    assert made["x"].path == "some.module.LossScaler"
    assert made["x"].called
    assert made["x"].args == (1,)
    assert made["x"].state == {"s": "file/x/state/s"}
    assert made["x"].items == ["file/x/items/0"]
    assert made["x"].pairs == [("key", "file/x/pairs/0/1")]
    assert made["n"] is tree["n"]
    assert is_tensor(ordered["w"])


def test_shared_branches_and_leaves_stay_shared() -> None:
    leaf = tensor()
    branch = [leaf, leaf]
    made = map_leaves({"a": branch, "b": branch}, is_tensor, lambda *_: object())
    assert made["a"] is made["b"]
    assert made["a"][0] is made["a"][1]


def test_dropped_leaves_leave_no_empty_branches() -> None:
    tree = {"gone": {"x": [tensor()]}, "list": [1, tensor()], "kept": {"x": tensor(), "n": 1}, "empty": {}}
    made = map_leaves(tree, is_tensor, lambda *_: DROP)
    assert made == {"list": [1, None], "kept": {"n": 1}, "empty": {}}
    assert map_leaves([tensor()], is_tensor, lambda *_: DROP) is DROP


def test_a_tree_that_contains_itself_is_refused() -> None:
    tree: list[Any] = [tensor()]
    tree.append(tree)
    with pytest.raises(UnsafeError, match=r"some file: is nested more than \d+ levels deep, or in itself"):
        map_leaves(tree, is_tensor, lambda *_: 0, where="some file")


# equal ----------------------------------------------------------------------------------------------------------------


@given(a=trees, b=trees)
def test_equal_trees_do_not_differ(a: Any, b: Any) -> None:
    assert is_equal(a, a)
    if is_equal(a, b):
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
    assert not is_equal(a, b)
    assert not is_equal({"x": [a, "y"]}, {"x": [b, "y"]})


def test_the_caller_compares_other_leaves() -> None:
    a, b = {"x": tensor(3), "n": 1}, {"x": tensor(4), "n": 1}
    assert is_equal(a, b)
    assert not is_equal(a, b, ignore_tensors=False)


def test_equal_ends_in_trees_that_contain_themselves_or_share_a_lot() -> None:
    a: list[Any] = [1, "x"]
    b: list[Any] = [1, "x"]
    a.append(a)
    b.append(b)
    assert is_equal(a, b)
    for _ in range(60):  # 2⁶⁰ paths lead to the first
        a, b = [a, a], [b, b]
    assert is_equal(a, b)


def test_trees_that_are_too_deep_are_not_equal() -> None:
    a: Any = []
    b: Any = []
    for _ in range(5000):
        a, b = [a], [b]
    assert not is_equal(a, b)
