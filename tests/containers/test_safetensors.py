"""safetensors headers agree with the real library in both directions, and every claim is checked."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ucp import settings as ucp_settings
from ucp.containers.safetensors_file import build_header, read_safetensors
from ucp.core.dtypes import BY_NAME, BY_TAG, FLOAT32, UINT8, DType
from ucp.errors import IntegrityError, NotUnderstoodError, StorageError, UcpError, UnsafeError, UsageError

TAGGED = sorted(BY_TAG.values(), key=str)
# The format has this type, but its torch binding does not.
NOT_IN_BINDING = {"F8_E8M0"}
each_type = pytest.mark.parametrize("dtype", [d for d in TAGGED if d.tag not in NOT_IN_BINDING], ids=str)


def write(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def claim(start: int, stop: int, shape: list[int], tag: str = "U8") -> dict[str, Any]:
    return {"dtype": tag, "shape": shape, "data_offsets": [start, stop]}


def sample(torch: Any, dtype: DType, shape: tuple[int, ...]) -> Any:
    count = dtype.itemsize
    for length in shape:
        count *= length
    raw = torch.arange(count, dtype=torch.int64).to(torch.uint8)
    if dtype.name == "bool":
        raw %= 2
    return raw.view(getattr(torch, dtype.name)).reshape(shape)


def raw_bytes(torch: Any, tensor: Any) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()) if tensor.numel() else b""


@each_type
def test_files_of_the_library(dtype: DType, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("safetensors.torch")
    tensors = {"a": sample(torch, dtype, (2, 3)), "b": sample(torch, dtype, ()), "c": sample(torch, dtype, (0, 4))}
    path = tmp_path / "x.safetensors"
    library.save_file(tensors, path, metadata={"format": "pt", "ü": "→"})
    found = read_safetensors(path)
    assert found.metadata == {"format": "pt", "ü": "→"}
    assert found.size == path.stat().st_size
    assert set(found.entries) == set(tensors)
    for key, tensor in tensors.items():
        entry = found.entries[key]
        assert (entry.name, entry.dtype, entry.shape) == (key, dtype, tuple(tensor.shape))
        assert path.read_bytes()[entry.start : entry.stop] == raw_bytes(torch, tensor)


@each_type
@pytest.mark.parametrize("alignment", [8, 4096])
def test_library_reads_what_we_lay_out(dtype: DType, alignment: int, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("safetensors")
    tensors = {"z": sample(torch, dtype, (3, 2)), "ü/..": sample(torch, dtype, ()), "e": sample(torch, dtype, (4, 0))}
    layout = build_header([(key, dtype, tuple(t.shape)) for key, t in tensors.items()], {"who": "us"}, alignment)
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write(layout.header)
        for key, tensor in tensors.items():
            file.seek(layout.offsets[key])
            file.write(raw_bytes(torch, tensor))
    assert len(layout.header) % alignment == 0
    assert path.stat().st_size == layout.size
    with library.safe_open(path, framework="pt") as opened:
        assert opened.metadata() == {"who": "us"}
        assert set(opened.keys()) == set(tensors)
        for key, tensor in tensors.items():
            assert raw_bytes(torch, opened.get_tensor(key)) == raw_bytes(torch, tensor)
            assert opened.get_tensor(key).dtype == tensor.dtype


@pytest.mark.parametrize("dtype", TAGGED, ids=str)
def test_the_library_supports_every_tag(dtype: DType) -> None:
    library = pytest.importorskip("safetensors")
    header = build_header([("a", dtype, (2,))], {}).header
    ((name, found),) = library.deserialize(header + bytes(2 * dtype.itemsize))
    assert (name, found["dtype"], found["shape"]) == ("a", dtype.tag, [2])


SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
TENSORS = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(
        lambda name: name != "__metadata__"
    ),
    st.tuples(st.sampled_from(TAGGED), SHAPES),
    max_size=6,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tensors=TENSORS,
    metadata=st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])), st.text(st.characters(exclude_categories=["Cs"])), max_size=3
    ),
    alignment=st.sampled_from([1, 8, 64, 4096]),
)
def test_written_headers_read_back(
    tensors: dict[str, tuple[DType, tuple[int, ...]]], metadata: dict[str, str], alignment: int, tmp_path: Path
) -> None:
    layout = build_header([(name, *rest) for name, rest in tensors.items()], metadata, alignment)
    path = tmp_path / "x.safetensors"
    path.write_bytes(layout.header)
    os.truncate(path, layout.size)
    found = read_safetensors(path)
    assert found.data_start == len(layout.header)
    assert found.data_start % alignment == 0
    assert found.metadata == metadata
    assert {name: (entry.dtype, entry.shape) for name, entry in found.entries.items()} == tensors
    assert {name: entry.start for name, entry in found.entries.items()} == layout.offsets


def test_header_without_tensors(tmp_path: Path) -> None:
    layout = build_header([], {})
    (tmp_path / "x.safetensors").write_bytes(layout.header)
    assert read_safetensors(tmp_path / "x.safetensors").entries == {}


def test_files_over_4_gb(tmp_path: Path) -> None:
    layout = build_header([("a", FLOAT32, (1 << 30, 2)), ("b", UINT8, (3,))], {}, 4096)
    path = tmp_path / "x.safetensors"
    path.write_bytes(layout.header)
    os.truncate(path, layout.size)
    assert read_safetensors(path).entries["b"].start == 4096 + (1 << 33)


def test_requests_that_cannot_be_written() -> None:
    with pytest.raises(UsageError, match="complex128"):
        build_header([("a", BY_NAME["complex128"], (1,))], {})
    with pytest.raises(UsageError, match="twice"):
        build_header([("a", UINT8, (1,)), ("a", UINT8, (1,))], {})
    with pytest.raises(UsageError, match="reserved"):
        build_header([("__metadata__", UINT8, (1,))], {})


LIES = {
    "not an object": ([1], b"", NotUnderstoodError),
    "no JSON": (b"{nonsense", b"", IntegrityError),
    "not text": (b'{"\xff": 1}', b"", IntegrityError),
    "NaN": (b'{"a": NaN}', b"", IntegrityError),
    "same name twice": (
        b'{"a": %s, "a": %s}' % ((json.dumps(claim(0, 1, [1])).encode(),) * 2),
        b"x",
        IntegrityError,
    ),
    "same field twice": (
        b'{"a": {"dtype": "U8", "shape": [2], "shape": [1], "data_offsets": [0, 1]}}',
        b"x",
        IntegrityError,
    ),
    "deeply nested": (b"{" + b'"a":[' * 100_000 + b"]" * 100_000 + b"}", b"", IntegrityError),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, b"", IntegrityError),
    "metadata of a list": ({"__metadata__": ["a"]}, b"", IntegrityError),
    "entry that is a list": ({"a": [0, 1]}, b"x", IntegrityError),
    "entry without shape": ({"a": {"dtype": "U8", "data_offsets": [0, 1]}}, b"x", IntegrityError),
    "entry with more": ({"a": claim(0, 1, [1]) | {"more": 1}}, b"x", IntegrityError),
    "unknown type": ({"a": claim(0, 1, [1], "U7")}, b"x", NotUnderstoodError),
    "type that is a list": ({"a": claim(0, 1, [1]) | {"dtype": ["U8"]}}, b"x", NotUnderstoodError),
    "negative shape": ({"a": claim(0, 1, [-1, -1])}, b"x", IntegrityError),
    "shape of floats": ({"a": claim(0, 1, [1.0])}, b"x", IntegrityError),  # type: ignore[list-item]
    "shape of booleans": ({"a": claim(0, 1, [True])}, b"x", IntegrityError),
    "shape that overflows": ({"a": claim(0, 0, [1 << 62, 1 << 62])}, b"", IntegrityError),
    "too many dimensions": ({"a": claim(0, 1, [1] * 1000)}, b"x", IntegrityError),
    "offsets backwards": ({"a": claim(1, 0, [1])}, b"x", IntegrityError),
    "three offsets": ({"a": claim(0, 1, [1]) | {"data_offsets": [0, 1, 2]}}, b"x", IntegrityError),
    "shape that needs more": ({"a": claim(0, 1, [2])}, b"x", IntegrityError),
    "past the end": ({"a": claim(0, 9, [9])}, b"x", IntegrityError),
    "bytes left over": ({"a": claim(0, 1, [1])}, b"xx", IntegrityError),
    "gap": ({"a": claim(0, 1, [1]), "b": claim(2, 3, [1])}, b"xxx", IntegrityError),
    "gap at the start": ({"a": claim(1, 2, [1])}, b"xx", IntegrityError),
    "overlap": ({"a": claim(0, 2, [2]), "b": claim(1, 3, [2])}, b"xxx", IntegrityError),
    "same bytes twice": ({"a": claim(0, 1, [1]), "b": claim(0, 1, [1])}, b"x", IntegrityError),
}


@pytest.mark.parametrize("name", LIES)
def test_headers_that_contradict_the_file_are_refused(name: str, tmp_path: Path) -> None:
    header, data, error = LIES[name]
    path = write(tmp_path / "x.safetensors", header, data)
    with pytest.raises(error, match=r"x\.safetensors"):
        read_safetensors(path)


def test_header_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.safetensors"
    for content in (b"", b"\0" * 7, struct.pack("<Q", 3) + b"{}", struct.pack("<Q", 5000) + b"{}"):
        path.write_bytes(content)
        with pytest.raises(IntegrityError):
            read_safetensors(path)
    path.write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    with pytest.raises(UnsafeError, match="claims a header"):
        read_safetensors(path)
    write(path, {"a": claim(0, 1, [1])}, b"x")
    monkeypatch.setattr(ucp_settings, "MAX_SAFETENSORS_HEADER_BYTES", 10)
    with pytest.raises(UnsafeError, match="the limit is 10"):
        read_safetensors(path)


def test_order_of_the_header_does_not_matter(tmp_path: Path) -> None:
    header = {"b": claim(2, 3, [1]), "empty": claim(2, 2, [0]), "a": claim(0, 2, [2])}
    found = read_safetensors(write(tmp_path / "x.safetensors", header, b"xyz"))
    assert list(found.entries) == ["a", "empty", "b"]


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.safetensors", tmp_path):
        with pytest.raises(StorageError, match="cannot be read"):
            read_safetensors(path)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_raises_only_errors_of_ucp(data: st.DataObject, tmp_path: Path) -> None:
    whole = bytearray(build_header([("weight", FLOAT32, (2, 3)), ("bias", UINT8, (4,))], {"a": "b"}).header + bytes(28))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "x.safetensors"
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)) | st.just(len(whole)))])
    said = str(path)
    try:
        read_safetensors(path)
    except UcpError as error:
        said = error.what
    assert str(path) in said
