"""Extras survive as JSON: every inert value survives a round trip, and hostile JSON is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucp import settings
from ucp.containers.inert import InertOrderedDict, NumpyArray, NumpyScalar, Size, class_path, new_class
from ucp.containers.inert_json import InertEncoder, decode
from ucp.core.checkpoint import Atom
from ucp.core.dtypes import BFLOAT16, FLOAT32
from ucp.errors import IntegrityError, UnsafeError

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(max_size=20),
    st.complex_numbers(allow_nan=False),
    st.sampled_from(
        [BFLOAT16, Size((2, 3)), Size(()), NumpyScalar("<i8", bytes(8)), NumpyArray("<f4", (2,), bytes(8))]
    ),
)
keys = st.one_of(st.text(), st.integers(), st.booleans(), st.tuples(st.integers(), st.text()))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(InertOrderedDict),
        st.frozensets(st.integers(), max_size=4).map(set),
    ),
    max_leaves=20,
)


def round_trip(value: Any, tensors: dict[str, Atom] | None = None) -> Any:
    return decode(json.loads(json.dumps(InertEncoder().encode(value))), tensors or {})


def types(value: Any) -> Any:
    """The shape of a tree in types, because `(1,) == Size((1,))` and `1 == True`."""
    if isinstance(value, dict):
        return type(value), [(types(k), types(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [types(v) for v in value]
    return type(value)


@given(trees)
def test_trees_survive_a_round_trip(tree: Any) -> None:
    back = round_trip(tree)
    assert back == tree
    assert types(back) == types(tree)


def test_numbers_that_json_lacks() -> None:
    assert math.isnan(round_trip(float("nan")))
    assert round_trip([float("inf"), float("-inf")]) == [float("inf"), float("-inf")]
    assert math.copysign(1, round_trip(-0.0)) == -1


@pytest.mark.parametrize("core", ["numpy.core", "numpy._core"])
def test_numpy_values_keep_the_numpy_version_of_the_file(core: str) -> None:
    values = [NumpyArray("<f4", (2,), bytes(8), core=core), NumpyScalar("<i8", bytes(8), core)]
    assert [value.core for value in round_trip(values)] == [core, core]


def test_objects_keep_how_they_were_created() -> None:
    cls = new_class("argparse", "Namespace")
    assert round_trip(cls()).called
    assert not round_trip(cls.__new__(cls)).called


def test_objects_keep_class_arguments_and_state() -> None:
    made = new_class("argparse", "Namespace")(1, "two", three=3)
    made.state = {"lr": 0.1, "nested": [new_class("enum", "Color.RED")]}
    made.items.append(5)
    made.pairs.append(("k", "v"))
    back = round_trip(made)
    assert (back.path, back.args, back.kwargs) == ("argparse.Namespace", (1, "two"), {"three": 3})
    assert back.state["lr"] == 0.1
    assert class_path(back.state["nested"][0]) == "enum.Color.RED"
    assert (back.items, back.pairs) == ([5], [("k", "v")])


def test_ordered_dict_attributes() -> None:
    made = InertOrderedDict({"w": 1})
    made.attributes = {"_metadata": {"version": 1}}
    assert round_trip(made).attributes == {"_metadata": {"version": 1}}


def test_keys_that_look_like_tags_are_safe() -> None:
    assert round_trip({"$tuple": [1]}) == {"$tuple": [1]}


def test_tensors_go_to_the_tensor_file() -> None:
    atom = Atom("rng:0", "extra", (4,), FLOAT32, ())
    encoder = InertEncoder()
    node = encoder.encode({"rng": [atom]})
    assert encoder.tensors == {"rng:0": atom}
    assert decode(node, {"rng:0": atom}) == {"rng": [atom]}
    with pytest.raises(IntegrityError, match="tensor"):
        decode(node, {})


def test_shared_values_cannot_cause_exponential_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "MAX_EXTRAS_NODES", 10_000)
    tree: list[Any] = [0]
    for _ in range(100):
        tree = [tree, tree]
    with pytest.raises(UnsafeError):
        InertEncoder().encode(tree)
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UnsafeError):
        InertEncoder().encode(loop)


@pytest.mark.parametrize(
    "node", [{"$dict": 5}, {"$what": 1}, {"$dict": [[[1], 2]]}, {"$object": ["a"]}, {"$float": "x"}]
)
def test_damaged_nodes_are_named(node: Any) -> None:
    with pytest.raises(IntegrityError, match=r"\$"):
        decode(node, {})
