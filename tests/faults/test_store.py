"""A mapped store on a system that fails once, at every kind of call: the old generation is whole, or the new one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.faults.injection import CALLS, REAL, Injector, points
from tests.training.store.stores import fill, is_of_one_step, schema
from ucp.errors import UcpError
from ucp.training.store import Store, load_store


def make_and_write(path: Path, injector: Injector) -> tuple[bool, int]:
    """Make a store and write two generations on the system of `injector`; whether it is made, and the last step."""
    made, step = False, 0
    injector.install()
    try:
        with Store.create(path, schema()) as store:
            made = True
            for number in (1, 2):
                fill(store, number)
                store.commit()
                step = number
        with Store.open(path) as store:
            fill(store, 3)
            store.commit()
            step = 3
    except UcpError:
        pass  # reported, and nothing more is there
    finally:
        for name in CALLS:
            setattr(os, name, REAL[name])
    return made, step


@pytest.mark.parametrize("kind", ["short", "EIO", "ENOSPC"])
def test_one_fault_leaves_one_whole_generation(tmp_path: Path, kind: str) -> None:
    recorded = Injector()
    assert make_and_write(tmp_path / "recorded", recorded) == (True, 3)
    tried = points(recorded.calls, kind)
    assert tried
    for at in tried:
        path = tmp_path / str(at) / "store"
        path.parent.mkdir()
        made, step = make_and_write(path, Injector(kind, at))
        if kind == "short":
            assert (made, step) == (True, 3), recorded.calls[at]
        if not path.exists():
            assert not made, recorded.calls[at]
            assert list(path.parent.iterdir()) == [], "nothing half-made is left"
            continue
        if step:
            assert load_store(path).step >= step, recorded.calls[at]
            assert is_of_one_step(load_store(path)), recorded.calls[at]
        with Store.open(path) as store:  # and it continues
            fill(store, 4)
            store.commit()
        assert load_store(path).step == 4
        assert is_of_one_step(load_store(path))
