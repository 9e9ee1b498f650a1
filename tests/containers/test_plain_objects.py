"""Harmless pickles of every protocol are read as the same data, or as stand-ins that contain all of it."""

from __future__ import annotations

import argparse
import collections
import copy
import datetime
import enum
import pathlib
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucp.containers.inert import (
    Inert,
    InertDefaultDict,
    InertOrderedDict,
    NumpyArray,
    NumpyScalar,
    StorageRef,
    TensorRef,
    class_path,
    is_class,
)
from ucp.containers.pickle_reader import read_pickle
from ucp.core.dtypes import BFLOAT16, FLOAT32
from ucp.errors import NotUnderstoodError

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
each_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)


class Stage(enum.IntEnum):
    ONE = 1


class Outer:
    class Inner:
        def __init__(self) -> None:
            self.field = [1]

    class Kind(enum.Enum):
        A = "a"


class Slotted:
    __slots__ = ("x",)

    def __init__(self) -> None:
        self.x = 7


class WithArguments(tuple[int, ...]):
    __slots__ = ()

    def __new__(cls, *args: int) -> WithArguments:
        return super().__new__(cls, args)

    def __getnewargs_ex__(self) -> tuple[tuple[int, ...], dict[str, Any]]:
        return tuple(self), {}


class Bag(list[int]):
    pass


def through(value: object, protocol: int = 2) -> Any:
    return read_pickle(pickle.dumps(value, protocol), "a test")


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=False)
    | st.text(max_size=300)
    | st.binary(max_size=300)
    | st.complex_numbers(allow_nan=False)
)
KEYS = SCALARS | st.tuples(SCALARS, SCALARS) | st.frozensets(SCALARS, max_size=3)
TREES = st.recursive(
    SCALARS | st.frozensets(SCALARS, max_size=3) | st.sets(SCALARS, max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.just([[]] * 3)
    ),
    max_leaves=20,
)


@given(TREES, st.sampled_from(PROTOCOLS))
def test_plain_data_is_read_as_plain_data(tree: object, protocol: int) -> None:
    assert through(tree, protocol) == tree


@each_protocol
def test_shared_objects_stay_shared(protocol: int) -> None:
    shared = {"betas": (0.9, 0.95)}
    first, second = through([shared, shared], protocol)
    assert first is second


@each_protocol
def test_cycles_are_read(protocol: int) -> None:
    ring: list[Any] = []
    ring.append(ring)
    found = through(ring, protocol)
    assert found[0] is found


@each_protocol
def test_many_shared_tuples_are_fine(protocol: int) -> None:
    """More shared tuples than the fast check allows: the stack simulation must accept them."""
    shapes = [(i, i + 1) for i in range(40)]
    tree = {(shape, shape): [shape] * 10 for shape in shapes}
    assert through(tree, protocol) == tree


@each_protocol
def test_namespace(protocol: int) -> None:
    found = through(argparse.Namespace(lr=1e-3, layers=[1, 2]), protocol)
    assert found.path == "argparse.Namespace"
    assert found.get("lr") == 1e-3
    assert found.get("nothing", 5) == 5


@each_protocol
def test_enum_member(protocol: int) -> None:
    found = through(Stage.ONE, protocol)
    assert isinstance(found, Inert)
    assert found.path == f"{__name__}.Stage"
    assert found.args == (1,)


@each_protocol
def test_nested_classes_keep_their_qualname(protocol: int) -> None:
    """Protocols below 4 write `getattr(Outer, "Inner")`, which is resolved by name only."""
    found = through(Outer.Inner(), protocol)
    assert found.path == f"{__name__}.Outer.Inner"
    assert found.get("field") == [1]
    assert through(Outer.Kind.A, protocol).path == f"{__name__}.Outer.Kind"


@each_protocol
def test_class_as_value(protocol: int) -> None:
    found = through([Outer, int, len], protocol)
    assert all(is_class(value) for value in found)
    assert [class_path(value) for value in found] == [f"{__name__}.Outer", "builtins.int", "builtins.len"]
    assert class_path(through(type(None), protocol)) == "builtins.NoneType"


@pytest.mark.parametrize("protocol", range(2, 6))
def test_slots_become_state(protocol: int) -> None:
    found = through(Slotted(), protocol)
    assert found.state == (None, {"x": 7})
    assert found.get("x") == 7


@pytest.mark.parametrize("protocol", range(2, 6))
def test_constructor_arguments(protocol: int) -> None:
    assert through(WithArguments(4, 5), protocol).args == (4, 5)


@each_protocol
def test_containers_of_unknown_class_keep_their_items(protocol: int) -> None:
    found = through(Bag([1, 2, 3]), protocol)
    assert found.path == f"{__name__}.Bag"
    assert (found.items or list(found.args[0])) == [1, 2, 3]
    queue = through(collections.deque([1, 2], maxlen=5), protocol)
    assert queue.items == [1, 2]
    counter = through(collections.Counter("aab"), protocol)
    assert counter.args == ({"a": 2, "b": 1},)


@each_protocol
def test_ordered_and_default_dicts(protocol: int) -> None:
    ordered = through(collections.OrderedDict(b=1, a=2), protocol)
    assert type(ordered) is InertOrderedDict
    assert list(ordered) == ["b", "a"]
    assert ordered.attributes is None
    default = collections.defaultdict(list, {"x": [1]})
    found = through(default, protocol)
    assert type(found) is InertDefaultDict
    assert found == {"x": [1]}
    assert class_path(found.factory) == "builtins.list"
    with pytest.raises(KeyError):
        found["missing"]


@each_protocol
def test_ordered_dict_with_attributes(protocol: int) -> None:
    ordered: Any = collections.OrderedDict(w=1)
    ordered._metadata = {"version": 1}
    assert through(ordered, protocol).attributes == {"_metadata": {"version": 1}}


@each_protocol
def test_other_library_objects(protocol: int) -> None:
    moment = datetime.datetime(2024, 5, 6, 7, 8)
    assert through(moment, protocol).path == "datetime.datetime"
    assert through(pathlib.PurePosixPath("/a/b"), protocol).path.startswith("pathlib.")
    assert through(range(1, 9, 2), protocol).args == (1, 9, 2)
    assert through(slice(1, 2), protocol).args == (1, 2, None)
    assert through(bytearray(b"abc"), protocol) == bytearray(b"abc")


def test_sets_of_tuples() -> None:
    """If the set would be created by a call, its elements are kept in the list that the file contains."""
    assert through({(1, 2)}, protocol=4) == {(1, 2)}
    found = through({(1, 2)}, protocol=2)
    assert (found.path, found.args) == ("builtins.set", ([(1, 2)],))


@each_protocol
def test_numpy_arrays_and_scalars(protocol: int) -> None:
    np = pytest.importorskip("numpy")
    for array in (
        np.arange(6, dtype="<f4").reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(3, dtype=">i4"),
        np.array([True, False]),
        np.array(["ab", "c"]),
        np.zeros((0, 3)),
        np.array(5, dtype=np.uint8),
        np.arange(10)[::2],
    ):
        found = through(array, protocol)
        assert isinstance(found, NumpyArray)
        again = found.to_numpy()
        assert again.dtype == array.dtype
        assert again.shape == array.shape
        assert np.array_equal(again, array)
    for scalar in (np.float64(1.5), np.float32(2.5), np.int64(-3), np.bool_(True), np.complex64(1 + 2j), np.str_("x")):
        found = through(scalar, protocol)
        value = found.to_python() if isinstance(found, NumpyScalar) else found.args[0]
        assert value == scalar.item()


@each_protocol
def test_numpy_objects_and_structures_are_not_created(protocol: int) -> None:
    np = pytest.importorskip("numpy")
    for array in (np.array([{"a": 1}], dtype=object), np.zeros(2, dtype=[("a", "f4")]), np.zeros(2, dtype="M8[s]")):
        with pytest.raises(NotUnderstoodError):
            through(array, protocol).to_numpy()


def test_references_can_be_copied_and_sent() -> None:
    """The disabled setters must not prevent ucp from copying or pickling what it has read."""
    ref = TensorRef(StorageRef("0", FLOAT32, 4, "cpu"), 0, (4,), (1,), FLOAT32, attributes={"a": 1})
    for value in (ref, BFLOAT16, NumpyScalar("<f4", b"1234"), NumpyArray("<f4", (1,), b"1234")):
        assert copy.deepcopy(value) == value
        assert pickle.loads(pickle.dumps(value)) == value
    assert hash(ref) == hash(copy.deepcopy(ref))


@pytest.mark.parametrize(
    "shape,strides,expected",
    [
        ((), (), True),
        ((3,), (1,), True),
        ((2, 3), (3, 1), True),
        ((2, 3), (1, 2), False),
        ((2, 3), (4, 1), False),
        ((1, 3), (99, 1), True),
        ((0, 3), (7, 7), True),
        ((1, 1), (5, 5), True),
        ((2,), (0,), False),
    ],
)
def test_contiguity(shape: tuple[int, ...], strides: tuple[int, ...], expected: bool) -> None:
    ref = TensorRef(StorageRef("0", FLOAT32, 100, "cpu"), 0, shape, strides, FLOAT32)
    assert ref.is_contiguous is expected
