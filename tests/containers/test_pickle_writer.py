"""What is read from a pickle can be written again, and torch loads the same real objects from it."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import fractions
import functools
import io
import os
import pickle
import pickletools
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.containers.likeness import differences
from tests.paths import CORPUS, FIXTURES, variants
from ucp.containers.inert import (
    Inert,
    InertDefaultDict,
    InertOrderedDict,
    NumpyArray,
    Size,
    StorageRef,
    TensorRef,
    new_class,
)
from ucp.containers.pickle_reader import read_pickle
from ucp.containers.pickle_writer import NewTensor, bare_object, called_object, write_pickle
from ucp.containers.torch_file import TorchFile
from ucp.core.checkpoint import Atom
from ucp.core.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT64
from ucp.errors import NotUnderstoodError, UnsafeError


def again(tree: Any) -> Any:
    return read_pickle(write_pickle(tree, "test"), "test")


# Inert trees -------------------------------------------------------------------------------------------------------

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(1 << 2100), 1 << 2100),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(), max_size=20),
    st.text(st.characters(categories=["Cs"]), max_size=2),
    st.binary(max_size=20),
    st.binary(max_size=20).map(bytearray),
    st.sampled_from([FLOAT16, BFLOAT16, new_class("builtins", "int"), new_class("a.b", "C"), new_class("a", "B.C.D")]),
    st.lists(st.integers(0, 1 << 40), max_size=5).map(Size),
    st.sets(st.one_of(st.text(), st.integers(), st.none()), max_size=5),
    st.frozensets(st.floats(allow_nan=False), max_size=5),
    st.builds(NumpyArray, st.just("<f4"), st.just((2,)), st.binary(min_size=8, max_size=8), st.booleans()),
)


def make_object(cls: tuple[str, str], called: bool, args: list[Any], state: Any, items: list[Any], pairs: Any) -> Inert:
    kind = new_class(*cls)
    made: Inert = kind(*args) if called else kind.__new__(kind, *args)
    made.state = state
    made.items.extend(items)
    made.pairs.extend(pairs.items())
    return made


def make_ordered(content: dict[Any, Any], attributes: Any) -> InertOrderedDict:
    made = InertOrderedDict(content)
    made.attributes = attributes
    return made


def make_default(content: dict[Any, Any], factory: Any) -> InertDefaultDict:
    made = InertDefaultDict(factory)
    made.update(content)
    return made


keys = st.one_of(st.text(max_size=3), st.integers(), st.tuples(st.integers(), st.text(max_size=2)))
paths = st.sampled_from([("argparse", "Namespace"), ("m", "Outer.Inner"), ("deepspeed.x", "Y")])
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=5).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.builds(make_ordered, st.dictionaries(keys, inner, max_size=4), inner),
        st.builds(make_default, st.dictionaries(keys, inner, max_size=4), st.sampled_from([None, new_class("m", "F")])),
        st.builds(
            make_object,
            paths,
            st.booleans(),
            st.lists(inner, max_size=3),
            inner,
            st.lists(inner, max_size=3),
            st.dictionaries(keys, inner, max_size=2),
        ),
    ),
    max_leaves=25,
)


@given(trees)
def test_trees_are_written_and_read_back_alike(tree: Any) -> None:
    assert differences(tree, again(tree)) == []


@given(trees)
def test_equal_trees_give_equal_bytes(tree: Any) -> None:
    written = write_pickle(tree, "test")
    assert write_pickle(again(tree), "test") == written
    assert {op.proto for op, _, _ in pickletools.genops(written)} <= {0, 1, 2}


def test_sets_are_written_in_one_order_in_every_process() -> None:
    script = (
        "from ucp.containers.pickle_writer import write_pickle; print(write_pickle(set(map(str, range(99))), '').hex())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": seed}, check=True, capture_output=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1


def test_shared_objects_stay_shared() -> None:
    shared: list[Any] = [1]
    tree = again({"a": shared, "b": (shared, shared), "c": bare_object("m", "C", shared)})
    assert tree["a"] is tree["b"][0] is tree["b"][1] is tree["c"].state


def test_cycles() -> None:
    loop: list[Any] = []
    loop.append((loop, 1))
    back = again(loop)
    assert back[0][0] is back
    thing = called_object("m", "C", held := [])
    held.append(thing)
    thing.state = {"self": thing}
    back = again([thing])[0]
    assert back.args[0] == [back]
    assert back.state["self"] is back
    twice = (held, (pair := ([],)))
    pair[0].append(pair)
    assert differences(again(twice), again(twice)) == []


def test_more_than_a_batch_and_more_than_a_byte_of_memo() -> None:
    tree = {f"key {i}": [str(i)] * 2 for i in range(2500)}
    assert again(tree) == tree
    assert again(list(range(3001))) == list(range(3001))


def test_values_that_cannot_be_written_are_named_with_their_path() -> None:
    atom = Atom("w", "extra", (1,), FLOAT32, ())
    with pytest.raises(NotUnderstoodError, match=r"f\.pt: \['args'\]\[1\]\['w'\] cannot be written: .* Atom"):
        write_pickle({"args": (1, {"w": atom})}, "f.pt")
    with pytest.raises(NotUnderstoodError, match="structured"):
        write_pickle([NumpyArray("structured", (1,), b"x")], "f.pt")
    with pytest.raises(NotUnderstoodError, match="the name"):
        write_pickle(new_class("os\nsystem", "x"), "f.pt")
    with pytest.raises(NotUnderstoodError, match="a float16 tensor in a storage of float32"):
        write_pickle(TensorRef(StorageRef("0", FLOAT32, 1, "cpu"), 0, (1,), (1,), FLOAT16), "f.pt")


def test_infinite_nesting_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(UnsafeError, match="nested too deeply"):
        write_pickle(deep, "f.pt")


# Real objects ------------------------------------------------------------------------------------------------------


def rewritten(data: bytes) -> bytes:
    """A torch archive whose data.pkl was read and written by ucp."""
    source = zipfile.ZipFile(io.BytesIO(data))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as target:
        for entry in source.infolist():
            content = source.read(entry)
            if entry.filename.endswith("/data.pkl"):
                tree = read_pickle(content, "test")
                content = write_pickle(tree, "test")
                assert differences(tree, read_pickle(content, "test")) == []
            target.writestr(entry.filename, content)
    return out.getvalue()


def load(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False, map_location="cpu")


def saved(value: Any, protocol: int = 2) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, pickle_protocol=protocol)
    return out.getvalue()


@dataclass
class Point:
    x: int
    y: Any = None


class Pair(collections.namedtuple("Pair", "left right")):
    __slots__ = ()


class Constructed:
    """Its constructor takes arguments that its pickle does not contain."""

    def __init__(self, needed: int) -> None:
        self.doubled = 2 * needed


class Rebuilt:
    """Is restored by a call with arguments."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.constructed = True

    def __reduce__(self) -> Any:
        return Rebuilt, self.args


class NewArguments:
    """Is restored by `__new__` with arguments; its constructor would refuse them."""

    value: int

    def __new__(cls, value: int) -> NewArguments:
        self = super().__new__(cls)
        self.value = value
        return self

    def __init__(self, value: int) -> None:
        if value == 7:
            raise AssertionError("the constructor must not be called again")

    def __getnewargs__(self) -> tuple[int]:
        return (7,)


class Slotted:
    __slots__ = ("a",)


class Listy(list[Any]):
    pass


class Dicty(dict[Any, Any]):
    pass


class Outer:
    class Inner:
        def __init__(self) -> None:
            self.deep = "yes"


def a_function() -> None:
    pass


def slotted() -> Slotted:
    made = Slotted()
    made.a = [1]
    return made


def listy() -> Listy:
    made = Listy([1, 2])
    made.note = "on a list"  # type: ignore[attr-defined]
    return made


def ordered_with_metadata() -> Any:
    made = collections.OrderedDict([("b", 1), ("a", 2)])
    made._metadata = collections.OrderedDict(version=1)  # type: ignore[attr-defined]
    return made


OBJECTS: dict[str, Any] = {
    "numbers": [0, 1, 255, 256, 65535, 65536, -1, 1 << 31, -(1 << 31), 10**30, -(10**700), 0.5, float("inf"), True],
    "nan": [float("nan"), -0.0],
    "texts": ["", "é", "\ud800", "x" * 300, b"", b"\x80\xff", bytearray(b"ab"), bytearray()],
    "containers": [[], {}, (), (1,), (1, 2, 3, 4), {1, 2}, frozenset({"a"}), {(1, 2): [3]}],
    "namespace": argparse.Namespace(lr=1e-3, betas=(0.9, 0.95), name=None),
    "ordered dict": ordered_with_metadata(),
    "default dict": collections.defaultdict(int, {"a": 1}),
    "default dict of none": collections.defaultdict(None, {"a": 1}),
    "deque, counter": [collections.deque([1, 2], 5), collections.Counter("aab")],
    "dataclass": Point(1, [Point(2)]),
    "named tuple": Pair(1, [2]),
    "constructor with arguments": Constructed(4),
    "rebuilt": Rebuilt(1, "a"),
    "rebuilt without arguments": Rebuilt(),
    "new arguments": NewArguments(3),
    "slots": slotted(),
    "list subclass": listy(),
    "dict subclass": Dicty(a=1),
    "nested class": [Outer.Inner, Outer.Inner()],
    "classes": [int, Point, type(None), collections.OrderedDict, torch.nn.Linear, a_function, torch.optim.AdamW],
    "partial": functools.partial(a_function, 1, k=2),
    "standard library": [
        datetime.datetime(2024, 1, 2, tzinfo=datetime.timezone.utc),
        datetime.timedelta(3),
        decimal.Decimal("1.5"),
        fractions.Fraction(1, 3),
        complex(1, -2),
        Path("a/b"),
        range(3),
        slice(1, None),
    ],
    "torch": [torch.float16, torch.bfloat16, torch.bool, torch.Size([2, 3]), torch.Size([]), torch.device("cpu")],
    "numpy": [
        np.arange(6, dtype=np.float64).reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype=">i4").reshape(2, 3)),
        np.array(3, np.uint8),
        np.array([True]),
        np.array(["abc", "d"]),
        np.array([b"xy"]),
        np.array([1, "a", None], object),
        np.empty((0, 2), np.float16),
        np.float32(1.5),
        np.int64(-3),
        np.bool_(True),
        np.str_("text"),
        np.datetime64("2024-01-02T03:04:05"),
        np.array(["2024-01-02", "NaT"], "datetime64[D]"),
        np.timedelta64(-3, "25us"),
        np.array([7], ">m8"),
        np.dtype("<f8"),
        np.random.RandomState(0).get_state(),
    ],
}


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("protocol", [2, 4])
def test_real_objects_survive_a_round_trip(name: str, protocol: int) -> None:
    data = saved(OBJECTS[name], protocol)
    assert differences(load(data), load(rewritten(data))) == []


@pytest.mark.parametrize("core", ["numpy.core", "numpy._core"])
def test_numpy_values_keep_the_module_name_of_their_writer(core: str) -> None:
    """A loader with an allow-list, such as Megatron's, accepts only the module name of its own numpy."""
    name = f"{core}.multiarray".encode()
    data = pickle.dumps([np.arange(3), np.float64(2)], 2).replace(b"numpy._core.multiarray", name)
    back = write_pickle(read_pickle(data, "test"), "test")
    assert back.count(name) == data.count(name) == 2
    assert back.count(b".multiarray") == 2


def test_how_an_object_was_created_is_kept() -> None:
    back = load(rewritten(saved([Rebuilt(), NewArguments(3)])))
    assert back[0].constructed
    assert back[1].value == 3
    old = pickle.dumps(Constructed(4), 0)
    assert pickle.loads(write_pickle(read_pickle(old, "test"), "test")).doubled == 8


class Labelled(torch.Tensor):
    """A user-defined tensor class."""


def tensors() -> dict[str, Any]:
    base = torch.arange(24, dtype=torch.float32)
    tensor_with_attributes = torch.ones(3)
    tensor_with_attributes.ds_id = 7  # type: ignore[attr-defined]
    parameter_with_attributes = torch.nn.Parameter(torch.ones(2))
    parameter_with_attributes.tensor_model_parallel = True  # type: ignore[attr-defined]
    return {
        "views of one storage": [base[3:9], base[2:14].view(3, 4).t(), base, base.view(4, 6)],
        "one tensor twice": [base, base],
        "kinds": [torch.zeros(3, dtype=d) for d in (torch.bfloat16, torch.int8, torch.bool, torch.complex64)],
        "young kinds": [torch.ones(3).to(torch.float8_e4m3fn), torch.ones(3, dtype=torch.uint16)],
        "scalars and empties": [torch.tensor(3.5), torch.empty(0), torch.empty(0, 5), torch.tensor(1)],
        "parameters": torch.nn.ParameterList([torch.ones(2, 2), torch.nn.Parameter(torch.ones(1), False)]),
        "gradients": torch.ones(2, requires_grad=True),
        "attributes": [tensor_with_attributes, parameter_with_attributes],
        "subclass": torch.ones(2).as_subclass(Labelled),  # type: ignore[arg-type]
    }


@pytest.mark.parametrize("name", tensors())
def test_tensors_survive_a_round_trip(name: str) -> None:
    data = saved(tensors()[name])
    assert differences(load(data), load(rewritten(data))) == []


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_bare_storages_survive_a_round_trip() -> None:
    back = load(rewritten(saved(torch.tensor([3, 4], dtype=torch.uint8).untyped_storage())))
    assert list(back) == [3, 4]


def test_state_dicts_load_with_weights_only() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    data = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()})
    back = torch.load(io.BytesIO(rewritten(data)), weights_only=True)
    assert differences(load(data), back) == []
    model.load_state_dict(back["model"])


def test_new_tensors_share_storages_by_key() -> None:
    refs = {"x": StorageRef("5", INT64, 10, "cuda:0")}
    tree = [NewTensor("x", INT64, (2, 3)), NewTensor("x", INT64, (2,), offset=8, parameter=True, requires_grad=True)]
    first, second = read_pickle(write_pickle(tree, "test", refs.__getitem__), "test")
    assert first == TensorRef(refs["x"], 0, (2, 3), (3, 1), INT64)
    assert second == TensorRef(refs["x"], 8, (2,), (1,), INT64, True, True)


def test_objects_of_a_writer() -> None:
    enum, scaler = again([called_object("m", "Stage", 2), bare_object("m", "LossScaler", {"cur_scale": 1.0})])
    assert (enum.path, enum.args, enum.called) == ("m.Stage", (2,), True)
    assert (scaler.args, scaler.called, scaler.state) == ((), False, {"cur_scale": 1.0})


# Real files --------------------------------------------------------------------------------------------------------


def test_every_file_of_the_corpus_survives_a_round_trip(corpus: Path) -> None:
    roots = [corpus, FIXTURES, *([CORPUS] if CORPUS else [])]
    files = [file for root in roots for file in sorted(root.rglob("*.pt"))]
    assert len(files) > 300
    wrong = []
    for file in files:
        tree = TorchFile(file).tree
        if differences(tree, again(tree)):
            wrong.append(str(file))
    assert wrong == []


def torch_files() -> list[Path]:
    roots = [FIXTURES, *variants("deepspeed", "megatron_deepspeed")]
    return [file for root in roots for file in sorted(root.rglob("*states.pt"))]


@pytest.mark.slow
@pytest.mark.interop
@pytest.mark.filterwarnings("ignore")  # of the frameworks that the files name, when they are imported
@pytest.mark.parametrize("shard", range(4))
def test_torch_makes_the_same_objects_of_deepspeed_files(shard: int) -> None:
    """With DeepSpeed installed: enums, loss scalers, fragment addresses and all."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    files = torch_files()[shard::4]
    assert files
    wrong = {}
    compared = 0
    for file in files:
        data = file.read_bytes()
        try:
            original = load(data)
        except ModuleNotFoundError:
            continue  # Megatron's arguments, if Megatron is not installed
        compared += 1
        if found := differences(original, load(rewritten(data))):
            wrong[str(file)] = found[:3]
    assert wrong == {}
    assert compared > 20
