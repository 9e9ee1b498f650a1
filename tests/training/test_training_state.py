"""Plain data is stored in extras and restored; everything else is reported."""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ucp.containers.inert import NumpyArray, new_class
from ucp.containers.pickle_writer import bare_object
from ucp.core.checkpoint import Atom
from ucp.errors import UsageError
from ucp.training.training_state import NOT_RESTORED, to_inert, to_live

torch = pytest.importorskip("torch")


def no_tensor(path: str, _: Any) -> Atom:
    raise AssertionError(path)


def test_plain_data_is_restored_unchanged(tmp_path: Path) -> None:
    value = {
        "numbers": [1, 2.5, None, True, 1j],
        "text": ("a", b"b"),
        3: {"deep": OrderedDict(z=1, a=2)},
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "set": {1, 2},
    }
    left: list[str] = []
    again = to_live(to_inert(value, "v", no_tensor), tmp_path, "v", left)
    assert again == value
    assert type(again[3]["deep"]) is OrderedDict
    assert list(again[3]["deep"]) == ["z", "a"]
    assert left == []


def test_arrays_are_restored_as_copies(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    inert = to_inert(array, "v", no_tensor)
    assert isinstance(inert, NumpyArray)
    again = to_live(inert, tmp_path, "v", [])
    assert np.array_equal(again, array)
    assert again.flags.writeable
    assert to_inert(np.float32(2.5), "v", no_tensor) == 2.5


def test_tensors_are_kept_by_name() -> None:
    kept = {}

    def keep(path: str, tensor: Any) -> Atom:
        kept[path] = tensor
        return Atom(path, "extra", (), None, ())  # type: ignore[arg-type]

    to_inert({"a": [torch.zeros(2)]}, "client_state", keep)
    assert list(kept) == ["client_state.a[0]"]


def test_other_classes_are_reported_as_not_restored(tmp_path: Path) -> None:
    tree = {
        "args": bare_object("argparse", "Namespace", {"lr": 1}),
        "list": [1, bare_object("some.module", "Thing")],
        "class": new_class("some.module", "Thing"),
        "kept": 1,
    }
    left: list[str] = []
    assert to_live(tree, tmp_path, "client_state", left) == {"kept": 1}
    assert left == [
        "client_state.args: an object of argparse.Namespace is not plain data",
        "client_state.list[1]: an object of some.module.Thing is not plain data",
        "client_state.class: the class some.module.Thing is not plain data",
    ]
    assert to_live(tree["args"], tmp_path, "x", []) is NOT_RESTORED


def test_values_that_cannot_be_saved_are_refused_with_their_path() -> None:
    with pytest.raises(UsageError, match=r"client_state.a\[0\] is a pathlib.*Path, which is not plain data"):
        to_inert({"a": [Path("x")]}, "client_state", no_tensor)
    assert to_inert(Namespace(lr=1), "v", no_tensor).get("lr") == 1
