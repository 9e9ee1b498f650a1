"""Skeletons of torch files: byte for byte what torch writes around the same tensors, also if zip64 is needed."""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ucp.containers import torch_file_writer
from ucp.containers.crc32 import crc32_of_zeros
from ucp.containers.inert import StorageRef, TensorRef
from ucp.containers.pickle_writer import NewTensor
from ucp.containers.torch_file import TorchFile
from ucp.containers.torch_file_writer import (
    NewStorage,
    PickledTree,
    RegionContent,
    TorchSkeleton,
    ZeroContent,
    new_tensor,
    torch_file,
)
from ucp.core.checkpoint import Atom
from ucp.core.dtypes import BFLOAT16, BY_NAME, FLOAT16, FLOAT32, INT64
from ucp.core.region import Region
from ucp.core.target import OutputFile


def assembled(file: OutputFile) -> bytes:
    """The bytes of a file without write items; every byte is written exactly once."""
    out, seen = bytearray(file.size), bytearray(file.size)
    literals = list(file.literals)
    for zero in file.zeros:
        seen[zero.offset : zero.offset + zero.nbytes] = b"\1" * zero.nbytes
    for literal in file.literals:
        out[literal.offset : literal.offset + len(literal.data)] = literal.data
    if file.trailer is not None:
        spans = [bytes(out[offset : offset + nbytes]) for offset, nbytes in file.trailer.spans]
        literals += file.trailer.build([zlib.crc32(span) for span in spans])
    for literal in literals:
        place = slice(literal.offset, literal.offset + len(literal.data))
        assert not any(seen[place])
        out[place] = literal.data
        seen[place] = b"\1" * len(literal.data)
    assert all(seen)
    return bytes(out)


def storage_of(tensor: torch.Tensor) -> NewStorage:
    untyped = bytes(tensor.untyped_storage())
    return NewStorage(BY_NAME[str(tensor.dtype).removeprefix("torch.")], (untyped,) if untyped else ())


def as_new(value: Any) -> Any:
    """The tree with every real tensor as a new one; views of one storage share theirs."""
    storages: dict[int, NewStorage] = {}

    def convert(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: convert(item) for key, item in value.items()}
        if isinstance(value, list):
            return [convert(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        storage = storages.setdefault(value.untyped_storage().data_ptr() or id(value), storage_of(value.detach()))
        is_parameter = isinstance(value, torch.nn.Parameter)
        return NewTensor(
            storage,
            storage.dtype,
            tuple(value.shape),
            value.storage_offset(),
            tuple(value.stride()),
            value.requires_grad,
            is_parameter,
        )

    return convert(value)


BASE = torch.arange(40, dtype=torch.float32)
TREES: dict[str, Any] = {
    "nothing": {"step": 3},
    "one scalar": [torch.tensor(2.5)],
    "empty": [torch.empty(0), torch.ones(3)],
    "only empty": [torch.empty(0, 4)],
    "views": [BASE[3:9], BASE.view(5, 8).t(), {"again": BASE}],
    "kinds": [torch.ones(5).to(d) for d in (torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8)],
    "young kinds": [torch.ones(5).to(torch.float8_e5m2), torch.ones(3, dtype=torch.uint32)],
    "parameters": {"w": torch.nn.Parameter(torch.ones(2, 3)), "b": torch.nn.Parameter(torch.ones(3), False)},
    "sizes around the alignment": [torch.full((n,), n, dtype=torch.uint8) for n in (1, 48, 63, 64, 65, 127, 128)],
}


@pytest.mark.parametrize("name", TREES)
def test_byte_for_byte_what_torch_writes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given torch's own data.pkl. One half of the serialization id is a hash of names that only torch can compute."""
    path = tmp_path / "some_model_states.pt"
    torch.save(TREES[name], path)
    real = path.read_bytes()
    pickled = zipfile.ZipFile(path).read("some_model_states/data.pkl")
    our_pickle = torch_file_writer.write_pickle

    def their_pickle(tree: Any, where: str, storage_ref: Callable[[Any], StorageRef]) -> bytes:
        our_pickle(tree, where, storage_ref)
        return pickled

    monkeypatch.setattr(torch_file_writer, "write_pickle", their_pickle)
    ours = assembled(torch_file(f"global_step3/{path.name}", as_new(TREES[name])))
    for data in (mine := bytearray(ours), theirs := bytearray(real)):
        blank_names_hash(data)
    assert mine == theirs
    assert zipfile.ZipFile(io.BytesIO(ours)).testzip() is None


def blank_names_hash(archive: bytearray) -> None:
    """Blank the first half of the serialization id, and the CRC-32 of the whole of it after it and in the directory."""
    entry = zipfile.ZipFile(io.BytesIO(archive)).infolist()[-1]
    payload = archive.index(b"PK\x07\x08", entry.header_offset) - 40
    archive[payload : payload + 20] = bytes(20)
    archive[payload + 44 : payload + 48] = bytes(4)
    central = archive.rindex(b"PK\x01\x02")
    archive[central + 16 : central + 20] = bytes(4)


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("zip64_from", [0xFFFFFFFF, 300, 1])
def test_torch_loads_it(name: str, zip64_from: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the form of files beyond 4 GiB, which small numbers may have too."""
    monkeypatch.setattr(torch_file_writer, "ZIP64_FROM", zip64_from)
    path = tmp_path / "x.pt"
    path.write_bytes(assembled(torch_file("x.pt", as_new(TREES[name]))))
    assert zipfile.ZipFile(path).testzip() is None
    for mmap in (False, True):
        loaded = torch.load(path, weights_only=True, mmap=mmap)
        assert repr(loaded) == repr(TREES[name])
    file = TorchFile(path)
    assert all(file.payload(entry) % 64 == 0 for entry in file.entries.values()), "storages can be mapped"


def test_payloads_are_at_the_listed_offsets() -> None:
    shared = NewStorage(FLOAT32, (b"\1" * 8, ZeroContent(3), b"\2" * 4))
    tree = [NewTensor(shared, FLOAT32, (2,)), NewTensor(shared, FLOAT32, (4,), offset=2), new_tensor(INT64, (0,))]
    skeleton = TorchSkeleton("x", tree, "x.pt")
    data = assembled(skeleton.output_file("x.pt"))
    assert list(skeleton.payloads) == ["0"]
    offset, nbytes = skeleton.payloads["0"]
    assert data[offset : offset + nbytes] == b"\1" * 8 + bytes(12) + b"\2" * 4
    assert len(data) == skeleton.size
    first, second, third = torch.load(io.BytesIO(data))
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert second.tolist()[:3] == [0, 0, 0]
    assert third.dtype == torch.int64


def test_one_pickle_for_several_files() -> None:
    tree = {"w": new_tensor(FLOAT32, (2,), b"\1" * 8), "n": 3}
    pickled = PickledTree(tree, "both")
    for name in ("a.pt", "b.pt"):
        assert assembled(torch_file(name, pickled)) == assembled(torch_file(name, tree))


def test_names_that_torch_does_not_use() -> None:
    assert [literal.data[30:44] for literal in torch_file("a/é.pt", []).literals] == [b"archive/data.p"]
    assert torch_file("a/b.c.pt", []).literals[0].data[30:42] == b"b.c/data.pkl"


def test_wrong_use_fails_an_assertion() -> None:
    atom = Atom("w", "weight", (2,), FLOAT16, ())
    with pytest.raises(AssertionError, match=r"w\|weight: is float16, its new storage bfloat16"):
        NewStorage(BFLOAT16, (RegionContent(atom, Region.all_of((2,))),))
    with pytest.raises(AssertionError, match="3 bytes"):
        NewStorage(BFLOAT16, (b"abc",))
    with pytest.raises(AssertionError, match="another file"):
        torch_file("x.pt", TensorRef(StorageRef("0", FLOAT32, 1, "cpu"), 0, (1,), (1,), FLOAT32))


@pytest.mark.slow
def test_more_entries_than_sixteen_bits_count(tmp_path: Path) -> None:
    path = tmp_path / "many.pt"
    numbers = np.arange(66_000, dtype=np.int64)
    path.write_bytes(assembled(torch_file("many.pt", [new_tensor(INT64, (1,), n.tobytes()) for n in numbers])))
    assert len(zipfile.ZipFile(path).infolist()) == len(TorchFile(path).entries) == 66_006
    reader = torch._C.PyTorchFileReader(str(path))
    assert len(reader.get_all_records()) == 66_006
    assert reader.get_record("data/65999") == numbers[-1].tobytes()


@pytest.mark.slow
def test_a_storage_beyond_four_gigabytes_and_one_after_it(tmp_path: Path) -> None:
    """A sparse file: only what is not zero takes space."""
    count = (1 << 30) + 7
    big, small = NewStorage(FLOAT32, (ZeroContent(count),)), NewStorage(FLOAT32, (b"\0\0\x80?" * 5,))
    tree = [NewTensor(big, FLOAT32, (count,)), NewTensor(small, FLOAT32, (5,))]
    file = torch_file("big.pt", tree)
    assert file.trailer is not None
    path = tmp_path / "big.pt"
    with path.open("wb") as out:
        os.ftruncate(out.fileno(), file.size)
        for literal in (*file.literals, *file.trailer.build([crc32_of_zeros(4 * count), zlib.crc32(b"\0\0\x80?" * 5)])):
            out.seek(literal.offset)
            out.write(literal.data)
    assert path.stat().st_size == file.size
    first, second = torch.load(path, mmap=True)
    assert (first.shape, first[-1].item()) == ((count,), 0)
    assert second.tolist() == [1.0] * 5
    archive = zipfile.ZipFile(path)
    assert archive.read("big/data/1") == b"\0\0\x80?" * 5
    assert crc32_of_zeros(4 * count) == archive.getinfo("big/data/0").CRC
    index = TorchFile(path)
    assert index.position(index.tree[1]) > 1 << 32
