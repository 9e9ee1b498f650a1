"""A store in one process: contents are restored, slots are leased and reused, and errors name the mistake."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import numpy as np
import pytest

from tests.training.store.stores import ENTRIES, fill, flip_bit, is_of_one_step, root_offsets, schema
from ucp.errors import IntegrityError, NotUnderstoodError, StorageError, UsageError
from ucp.formats.store.generations import StoreBusyError
from ucp.formats.store.store_layout import StoreSchema
from ucp.training.store import Store, load_store

torch = pytest.importorskip("torch")


def test_every_dtype_is_restored_bit_for_bit(tmp_path: Path) -> None:
    torch.manual_seed(1)
    tensors = {
        "a": {"weight": torch.randn(300, 500).bfloat16(), "exp_avg": torch.randn(300, 500), "step": torch.tensor(7.0)},
        "b": {"weight": torch.randn(64, 32).t(), "mask": torch.rand(5) > 0.5},
        "c": {"weight": torch.empty(0, 4), "count": torch.tensor(-3), "small": torch.randn(9).to(torch.float8_e4m3fn)},
        "d": {"weight": np.arange(12, dtype=np.float64).reshape(3, 4)[:, ::2], "z": torch.randn(3, dtype=torch.cfloat)},
        "e": {"weight": torch.nn.Parameter(torch.tensor([float("nan"), -0.0, float("inf")]))},
    }
    with Store.create(tmp_path / "store", StoreSchema.of(tensors)) as store:
        assert store.durability in ("msync", "msync on DAX", "pmem_persist")
        store.begin(41)
        for name, states in tensors.items():
            for kind, tensor in states.items():
                store.write(name, kind, tensor)
        assert store.commit({"epoch": 3}) == 1
    loaded = load_store(tmp_path / "store")
    assert (loaded.step, loaded.sequence, loaded.notes) == (41, 1, {"epoch": 3})
    loaded.check()
    for name, states in tensors.items():
        for kind, tensor in states.items():
            found = loaded.tensor(name, kind)
            wanted = (
                torch.as_tensor(np.ascontiguousarray(tensor)) if isinstance(tensor, np.ndarray) else tensor.detach()
            )
            assert found.dtype == wanted.dtype
            assert found.shape == wanted.shape
            same = wanted.contiguous().reshape(-1).view(torch.uint8)
            assert torch.equal(found.reshape(-1).view(torch.uint8), same), (name, kind)


def test_loading_copies_nothing(tmp_path: Path) -> None:
    with Store.create(tmp_path / "store", schema()) as store:
        fill(store, 1)
        store.commit()
    loaded = load_store(tmp_path / "store")
    array, tensor = loaded.array("big", "weight"), loaded.tensor("big", "weight")
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("/store")]
    ranges = [tuple(int(edge, 16) for edge in line.split()[0].split("-")) for line in mapped]
    for address in (array.ctypes.data, tensor.data_ptr()):
        assert any(start <= address and address + array.nbytes <= stop for start, stop in ranges)
    before = (tmp_path / "store").read_bytes()
    tensor.fill_(3.0)  # copy on write: the file stays
    assert (tmp_path / "store").read_bytes() == before
    assert array[5, 5] == 3.0


def test_slots_alternate_and_older_generations_can_be_loaded(tmp_path: Path) -> None:
    with Store.create(tmp_path / "store", schema(), slots=3) as store:
        for step in range(1, 8):
            fill(store, step)
            store.commit()
            assert is_of_one_step(load_store(tmp_path / "store"))
            assert load_store(tmp_path / "store").step == step
            for earlier in range(max(1, step - 2), step):
                assert is_of_one_step(load_store(tmp_path / "store", step=earlier))
            gc.collect()
        with pytest.raises(UsageError, match="no generation of step 2") as caught:
            load_store(tmp_path / "store", step=2)
        assert "7, 6, 5" in str(caught.value)


def test_views_are_views_of_the_slot(tmp_path: Path) -> None:
    with Store.create(tmp_path / "store", StoreSchema.of({"a": {"weight": np.zeros(5000, np.float32)}})) as store:
        store.begin(1)
        store.view("a", "weight").view(np.float32)[:] = np.arange(5000)
        store.commit()
    loaded = load_store(tmp_path / "store")
    loaded.check()
    assert np.array_equal(loaded["a", "weight"], np.arange(5000, dtype=np.float32))


def test_the_newest_generation_and_leased_ones_are_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with Store.create(path, schema()) as store:
        for step in (1, 2):
            fill(store, step)
            store.commit()
        held = load_store(path, step=1)
        with pytest.raises(StoreBusyError, match="readers hold"):
            store.begin(3)
        assert is_of_one_step(held)
        array = held.array("big", "weight")
        del held
        gc.collect()
        with pytest.raises(StoreBusyError):  # an array is enough to hold it
            store.begin(3, wait=0.01)
        del array
        gc.collect()
        fill(store, 3)
        assert load_store(path).step == 2  # until it is committed
        store.commit()
        assert load_store(path).step == 3
        with pytest.raises(StoreBusyError, match="another process is writing"):
            Store.open(path)
    Store.open(path).close()


def test_an_aborted_generation_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with Store.create(path, schema()) as store:
        fill(store, 1)
        store.commit()
        fill(store, 2)
        store.abort()
        assert load_store(path).step == 1
        store.begin(5)
    with Store.open(path) as store:
        assert store.sequence == 1
        assert is_of_one_step(load_store(path))
        fill(store, 2)
        assert store.commit() == 2


def test_errors_name_the_mistake(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with pytest.raises(StorageError):
        Store.create(tmp_path / "no" / "folder", schema())
    store = Store.create(path, schema(notes_bytes=100))
    with pytest.raises(IntegrityError, match="no generation yet"):
        load_store(path)
    with pytest.raises(UsageError, match="exists already"):
        Store.create(path, schema())
    with pytest.raises(UsageError, match="no generation was started"):
        store.write("big", "weight", b"")
    fill(store, 1)
    with pytest.raises(UsageError, match="is not committed"):
        store.begin(2)
    with pytest.raises(UsageError, match=r"does not contain big, master"):
        store.write("big", "master", b"")
    with pytest.raises(UsageError, match=r"is float64 \[128, 256\], but the schema has float32"):
        store.write("big", "weight", np.zeros((128, 256)))
    with pytest.raises(UsageError, match="the notes have"):
        store.commit({"long": "x" * 100})
    store.commit()
    store.begin(2)
    store.write("count", "weight", torch.tensor(4))
    with pytest.raises(UsageError, match=r"7 of 8 atoms were not written in the generation of step 2: embed"):
        store.commit()
    store.close()
    with pytest.raises(UsageError, match="closed"):
        store.begin(3)
    assert load_store(path).step == 1


def made(path: Path, steps: int = 3) -> None:
    with Store.create(path, schema()) as store:
        for step in range(1, steps + 1):
            fill(store, step)
            store.commit()


def test_damage_is_detected_or_an_older_generation_is_used(tmp_path: Path) -> None:
    made(tmp_path / "whole")
    superblock, header, atom = root_offsets(tmp_path / "whole")
    for at, what in ((100, "head"), (3 * 4096 + 5, "schema")):
        path = tmp_path / what
        path.write_bytes((tmp_path / "whole").read_bytes())
        flip_bit(path, at)
        with pytest.raises(IntegrityError, match=what):
            load_store(path)
    for at in (superblock, header):  # the older generation is there
        path = tmp_path / f"at{at}"
        path.write_bytes((tmp_path / "whole").read_bytes())
        flip_bit(path, at)
        loaded = load_store(path)
        assert loaded.step == 2
        assert is_of_one_step(loaded)
        with Store.open(path) as store:  # and the next one goes into the damaged place
            fill(store, 9)
            assert store.commit() >= 3
        assert load_store(path).step == 9
    flip_bit(tmp_path / "whole", atom + 77)
    with pytest.raises(IntegrityError, match=r"embed\.weight, weight"):
        load_store(tmp_path / "whole").check()
    with (tmp_path / "whole").open("r+b") as file:
        file.truncate(8 * mmap.PAGESIZE)
    with pytest.raises(IntegrityError, match="bytes instead of"):
        load_store(tmp_path / "whole")
    (tmp_path / "other").write_bytes(b"something else")
    with pytest.raises(NotUnderstoodError):
        load_store(tmp_path / "other")


def test_the_loss_of_both_superblocks_is_reported(tmp_path: Path) -> None:
    made(tmp_path / "store")
    flip_bit(tmp_path / "store", 4096)
    flip_bit(tmp_path / "store", 8192)
    with pytest.raises(IntegrityError, match="both superblocks are damaged"):
        load_store(tmp_path / "store")


def test_the_number_of_atoms_must_match_the_schema(tmp_path: Path) -> None:
    made(tmp_path / "store")
    loaded = load_store(tmp_path / "store")
    assert list(loaded) == [(entry.name, entry.kind) for entry in ENTRIES]
    assert len(loaded) == len(ENTRIES)
    assert {loaded.atom_step(*key) for key in loaded} == {3}
