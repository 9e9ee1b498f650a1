"""Archives that torch writes, damaged archives, and malicious ones."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.containers.hostile import glob, text
from ucp import settings as ucp_settings
from ucp.containers.inert import StorageRef, TensorRef
from ucp.containers.torch_file import TorchFile
from ucp.core.dtypes import FLOAT32, UINT8
from ucp.errors import IntegrityError, NotUnderstoodError, StorageError, UcpError, UnsafeError

GIB = 1 << 30


def tensor_pickle(numel: int, key: str = "0") -> bytes:
    """data.pkl of one float32 vector, as torch writes it."""
    storage = b"(" + text("storage") + glob("torch", "FloatStorage") + text(key) + text("cpu") + integer(numel) + b"tQ"
    rest = b"K\x00" + integer(numel) + b"\x85K\x01\x85\x89" + glob("collections", "OrderedDict") + b")R"
    return b"\x80\x02" + glob("torch._utils", "_rebuild_tensor_v2") + b"(" + storage + rest + b"tR."


def integer(value: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", value)


def make_archive(path: Path, entries: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return path


def plain_entries(numel: int = 4) -> dict[str, bytes]:
    return {
        "archive/data.pkl": tensor_pickle(numel),
        "archive/data/0": bytes(range(4 * numel)),
        "archive/version": b"3\n",
    }


def bytes_read() -> int:
    """Bytes that this process has read from files so far, as Linux counts them."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


def read_all(path: Path) -> int:
    """Index the file and find every tensor, as a format's reader does."""
    file = TorchFile(path)
    position = file.position(file.tree)
    for entry in file.entries.values():
        file.payload(entry)
    return position


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return make_archive(tmp_path / "x.pt", plain_entries())


def change(path: Path, edit: Callable[[bytearray], None]) -> Path:
    data = bytearray(path.read_bytes())
    edit(data)
    path.write_bytes(data)
    return path


def test_archives_of_other_writers(archive: Path) -> None:
    position = read_all(archive)
    assert archive.read_bytes()[position : position + 16] == bytes(range(16))


def test_entries_agree_with_zipfile(archive: Path) -> None:
    file = TorchFile(archive)
    with zipfile.ZipFile(archive) as known:
        for info in known.infolist():
            entry = file.entries[info.filename]
            assert (entry.name, entry.header_offset, entry.size) == (info.filename, info.header_offset, info.file_size)
            assert (entry.crc, entry.stored) == (info.CRC, True)
            start = file.payload(entry)
            assert archive.read_bytes()[start : start + entry.size] == known.read(info)


def test_comment_at_the_end(archive: Path) -> None:
    position = read_all(archive)
    with zipfile.ZipFile(archive, "a") as known:
        known.comment = b"PK\x05\x06" + b"c" * 60_000
    assert read_all(archive) == position


def test_many_entries(tmp_path: Path) -> None:
    """The directory is larger than the first look at the end of the file."""
    entries = plain_entries() | {f"archive/data/{i}": b"x" for i in range(1, 2000)}
    file = TorchFile(make_archive(tmp_path / "x.pt", entries))
    assert len(file.entries) == len(entries)
    assert list(file.entries) == list(entries)


@pytest.mark.parametrize("numel", [GIB + 1, 3 * GIB])
def test_files_over_4_gb(numel: int, tmp_path: Path) -> None:
    """A sparse file with torch's layout: the tensor, an entry after it, and a zip64 directory."""
    path = tmp_path / "large.pt"
    write_sparse_archive(path, tensor_pickle(numel), 4 * numel)
    before = bytes_read()
    file = TorchFile(path)
    assert file.size > 4 * numel > 1 << 32
    ref = file.tree
    assert ref.numel == numel
    start = file.position(ref)
    assert bytes_read() - before < 1 << 20  # whatever the size of the tensor
    with path.open("rb") as raw:
        raw.seek(start)
        assert raw.read(5) == b"first"
        raw.seek(start + ref.nbytes - 4)
        assert raw.read(4) == b"last"
        behind = file.entries["archive/data/1"]
        raw.seek(file.payload(behind))
        assert raw.read(behind.size) == b"behind"
    with zipfile.ZipFile(path) as known:
        assert [info.file_size for info in known.infolist()] == [entry.size for entry in file.entries.values()]


def write_sparse_archive(path: Path, pickled: bytes, size: int) -> None:
    """`data/0` has `size` bytes, of which only the first and last few are written."""
    with path.open("wb") as raw, zipfile.ZipFile(raw, "w", allowZip64=True) as archive:
        archive.writestr("archive/data.pkl", pickled)
        header = zipfile.ZipInfo("archive/data/0")
        header.file_size = header.compress_size = size
        header.CRC = 0
        header.header_offset = raw.tell()
        raw.write(header.FileHeader(zip64=True) + b"first")
        raw.seek(size - len(b"first") - len(b"last"), os.SEEK_CUR)
        raw.write(b"last")
        archive.filelist.append(header)
        archive.NameToInfo[header.filename] = header
        archive.start_dir = raw.tell()
        archive.writestr("archive/data/1", b"behind")


def test_view_beyond_4_gb(tmp_path: Path) -> None:
    numel = GIB + GIB // 2
    path = tmp_path / "large.pt"
    write_sparse_archive(path, tensor_pickle(numel), 4 * numel)
    file = TorchFile(path)
    whole = file.tree
    tail = TensorRef(whole.storage, numel - 1, (1,), (1,), FLOAT32)
    assert file.position(tail) == file.position(whole) + 4 * (numel - 1)


# Not an archive of torch --------------------------------------------------------------------------------------------


def test_old_torch_format(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"a": torch.ones(2)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(NotUnderstoodError, match="old torch format") as caught:
        TorchFile(tmp_path / "x.pt")
    assert "torch.save(torch.load(" in str(caught.value)


def test_oldest_torch_format(tmp_path: Path) -> None:
    import tarfile

    with tarfile.open(tmp_path / "x.pt", "w", format=tarfile.USTAR_FORMAT) as tar:
        for name in ("sys_info", "pickle", "tensors", "storages"):
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(NotUnderstoodError, match="old torch format"):
        TorchFile(tmp_path / "x.pt")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)).save(str(tmp_path / "x.pt"))
    with pytest.raises(NotUnderstoodError, match="TorchScript"):
        TorchFile(tmp_path / "x.pt")


@pytest.mark.parametrize(
    "content,error,words",
    [
        (b"", IntegrityError, "empty"),
        (b"PK", IntegrityError, "truncated"),
        (b"\0" * 5000, IntegrityError, "zero bytes"),
        (b"\x80\x04N.", NotUnderstoodError, "bare pickle"),
        (b"\x89HDF\r\n\x1a\n" + b"x" * 500, NotUnderstoodError, "torch.save"),
        (b"PK\x03\x04" + b"x" * 5000, IntegrityError, "truncated, the zip directory at the end is missing"),
        (b"PK\x05\x06" + b"\0" * 18, NotUnderstoodError, "torch.save"),
    ],
    ids=lambda value: repr(value[:8]) if isinstance(value, bytes) else None,
)
def test_files_that_are_not_archives(content: bytes, error: type[UcpError], words: str, tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(error, match=words):
        TorchFile(tmp_path / "x.pt")


def test_some_other_zip(tmp_path: Path) -> None:
    path = make_archive(tmp_path / "x.zip", {"readme.txt": b"hello"})
    with pytest.raises(NotUnderstoodError, match=r"no data\.pkl"):
        TorchFile(path)


def test_missing_unreadable_and_special_files(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be opened"):
        TorchFile(tmp_path / "missing.pt")
    with pytest.raises(NotUnderstoodError, match="not a file"):
        TorchFile(tmp_path)
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(NotUnderstoodError, match="not a file"):
        TorchFile(tmp_path / "pipe.pt")


def test_big_endian(tmp_path: Path) -> None:
    file = TorchFile(make_archive(tmp_path / "x.pt", plain_entries() | {"archive/byteorder": b"big"}))
    assert file.byteorder == "big"
    with pytest.raises(NotUnderstoodError, match="big-endian"):
        _ = file.tree


def test_little_endian_is_recorded_or_assumed(tmp_path: Path, archive: Path) -> None:
    assert TorchFile(archive).byteorder == "little"
    said = make_archive(tmp_path / "y.pt", plain_entries() | {"archive/byteorder": b"little"})
    assert TorchFile(said).byteorder == "little"
    assert TorchFile(said).tree.shape == (4,)


# Contradictions -----------------------------------------------------------------------------------------------------


def test_compressed_entries(tmp_path: Path) -> None:
    file = TorchFile(make_archive(tmp_path / "x.pt", plain_entries(), zipfile.ZIP_DEFLATED))
    with pytest.raises(NotUnderstoodError, match="compressed") as caught:
        _ = file.tree
    assert "torch.save" in str(caught.value)


def test_compressed_storage(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", tensor_pickle(4000))
        archive.writestr("archive/data/0", bytes(16_000), zipfile.ZIP_DEFLATED)
    file = TorchFile(path)
    with pytest.raises((NotUnderstoodError, IntegrityError)):
        file.position(file.tree)


def test_duplicate_names(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in plain_entries().items():
            archive.writestr(name, data)
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("archive/data/0", b"other bytes")
    with pytest.raises(UnsafeError, match="appears twice"):
        TorchFile(path)


def test_overlapping_entries(archive: Path) -> None:
    """The trick of zip bombs: two entries of the directory share one local header."""

    def point_both_at_the_first(data: bytearray) -> None:
        second = data.find(b"PK\x01\x02", data.find(b"PK\x01\x02") + 1)
        data[second + 42 : second + 46] = struct.pack("<L", 0)

    with pytest.raises(UnsafeError, match="overlap"):
        TorchFile(change(archive, point_both_at_the_first))


def test_entries_that_overlap_in_part(archive: Path) -> None:
    """The directory claims that the first entry extends into the second."""

    def enlarge_first(data: bytearray) -> None:
        first = data.find(b"PK\x01\x02")
        (size,) = struct.unpack_from("<L", data, first + 20)
        data[first + 20 : first + 28] = struct.pack("<LL", size + 1, size + 1)

    with pytest.raises(UnsafeError, match=r"'archive/data\.pkl' overlaps another"):
        TorchFile(change(archive, enlarge_first))


def test_entry_larger_than_the_file(archive: Path) -> None:
    def enlarge(data: bytearray) -> None:
        first = data.find(b"PK\x01\x02")
        data[first + 20 : first + 28] = struct.pack("<LL", 1 << 30, 1 << 30)

    with pytest.raises(IntegrityError, match="extends beyond"):
        TorchFile(change(archive, enlarge))


def test_entry_that_is_not_there(archive: Path) -> None:
    def rename_local(data: bytearray) -> None:
        at = data.find(b"archive/data/0")
        data[at : at + 14] = b"archive/data/9"

    with pytest.raises(IntegrityError, match="not at the position given in the directory"):
        read_all(change(archive, rename_local))


def test_extra_field_that_moves_the_data(archive: Path) -> None:
    def stretch(data: bytearray) -> None:
        header = data.find(b"archive/data/0") - 30
        data[header + 28 : header + 30] = struct.pack("<H", 500)

    with pytest.raises(IntegrityError, match="overlaps the next entry"):
        read_all(change(archive, stretch))


def test_size_that_contradicts(archive: Path) -> None:
    def shrink_local(data: bytearray) -> None:
        header = data.find(b"archive/data/0") - 30
        data[header + 18 : header + 26] = struct.pack("<LL", 3, 3)

    with pytest.raises(IntegrityError, match="contradicts the directory"):
        read_all(change(archive, shrink_local))


def test_storage_of_the_wrong_size(tmp_path: Path) -> None:
    entries = plain_entries() | {"archive/data/0": b"too short"}
    with pytest.raises(IntegrityError, match="should have 16 bytes, but has 9"):
        read_all(make_archive(tmp_path / "x.pt", entries))


def test_missing_storage(tmp_path: Path) -> None:
    entries = plain_entries()
    del entries["archive/data/0"]
    with pytest.raises(IntegrityError, match="storage '0' is not in the file"):
        read_all(make_archive(tmp_path / "x.pt", entries))


@pytest.mark.parametrize("key", ["../../etc/passwd", "/etc/passwd", "0\0", "", "../data.pkl"])
def test_storage_keys_are_never_paths(key: str, tmp_path: Path) -> None:
    with pytest.raises(UcpError):
        read_all(make_archive(tmp_path / "x.pt", plain_entries() | {"archive/data.pkl": tensor_pickle(4, key)}))


@pytest.mark.parametrize(
    "offset,shape,strides",
    [
        (1, (4,), (1,)),
        (0, (5,), (1,)),
        (0, (2, 2), (3, 1)),
        (0, (2,), (1 << 60,)),
        (1 << 62, (1,), (1,)),
        (0, (1 << 40, 2), (0, 9)),
    ],
)
def test_views_past_their_storage(offset: int, shape: tuple[int, ...], strides: tuple[int, ...], archive: Path) -> None:
    ref = TensorRef(StorageRef("0", FLOAT32, 4, "cpu"), offset, shape, strides, FLOAT32)
    with pytest.raises(IntegrityError, match="extends beyond storage"):
        TorchFile(archive).position(ref)


def test_views_without_elements_may_be_anywhere(archive: Path) -> None:
    ref = TensorRef(StorageRef("0", FLOAT32, 4, "cpu"), 1 << 62, (3, 0), (1 << 60, 1), FLOAT32)
    assert 0 <= TorchFile(archive).position(ref) <= archive.stat().st_size


def test_untyped_storage_counts_bytes(archive: Path) -> None:
    file = TorchFile(archive)
    storage = StorageRef("0", None, 16, "cpu")
    start = file.position(TensorRef(storage, 0, (4,), (1,), FLOAT32))
    assert file.position(TensorRef(storage, 3, (13,), (1,), UINT8)) == start + 3
    with pytest.raises(IntegrityError):
        file.position(TensorRef(storage, 3, (14,), (1,), UINT8))


def test_limits(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = TorchFile(archive)
    monkeypatch.setattr(ucp_settings, "MAX_PICKLE_BYTES", 10)
    with pytest.raises(UnsafeError, match="the limit is 10"):
        _ = file.tree
    monkeypatch.setattr(ucp_settings, "MAX_ZIP_DIRECTORY_BYTES", 10)
    with pytest.raises(UnsafeError, match="the limit is 10"):
        TorchFile(archive)


def test_archives_inside_archives_stay_closed(tmp_path: Path) -> None:
    bomb = make_archive(tmp_path / "bomb.zip", {"zeros": bytes(10_000_000)}, zipfile.ZIP_DEFLATED)
    entries = plain_entries() | {"archive/data/1": bomb.read_bytes(), "archive/more.zip": bomb.read_bytes()}
    read_all(make_archive(tmp_path / "x.pt", entries))


def test_file_that_shrinks_between_reads(archive: Path) -> None:
    file = TorchFile(archive)
    os.truncate(archive, 40)
    with pytest.raises(IntegrityError, match="ends at byte"):
        _ = file.tree


# Damage anywhere ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    torch = pytest.importorskip("torch")
    path = tmp_path_factory.mktemp("real") / "x.pt"
    state = {
        "w": torch.arange(6.0).reshape(2, 3).t(),
        "groups": [{"lr": 0.1, "betas": (0.9, 0.95)}],
        "n": torch.ones(2).bfloat16(),
    }
    torch.save(state, path)
    return path.read_bytes()


def index(path: Path) -> None:
    file = TorchFile(path)
    for value in file.tree.values() if isinstance(file.tree, dict) else ():
        if isinstance(value, TensorRef):
            file.position(value)


def test_truncated_anywhere(real_file: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    for length in range(0, len(real_file), 7):
        path.write_bytes(real_file[:length])
        with pytest.raises(IntegrityError):
            index(path)
    path.write_bytes(real_file)
    index(path)


def test_torn_out_of_the_middle(real_file: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    for start in range(0, len(real_file) - 64, 64):
        path.write_bytes(real_file[:start] + real_file[start + 64 :])
        with pytest.raises(UcpError):
            index(path)


@settings(max_examples=400, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bytes_raise_only_errors_of_ucp(data: st.DataObject, real_file: bytes, tmp_path: Path) -> None:
    """A flipped byte of tensor data is not noticed here (checksums do that); anything else is an error of ucp."""
    damaged = bytearray(real_file)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "x.pt"
    path.write_bytes(damaged)
    said = str(path)
    try:
        index(path)
    except UcpError as error:
        said = error.what
    assert str(path) in said


def test_a_small_number_is_read_together_with_the_headers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    shared = torch.arange(4, dtype=torch.float32)
    saved = {"big": torch.zeros(5000), "step": torch.tensor(7.0), "third": shared[3:], "two": torch.ones(2)}
    torch.save(saved, tmp_path / "file.pt")
    file = TorchFile(tmp_path / "file.pt")
    tree = file.tree
    assert file.number(tree["step"]) == saved["step"].numpy().tobytes()
    assert file.number(tree["third"]) == shared[3:].numpy().tobytes()
    assert file.number(tree["two"]) is None, "not one number"
    assert file.number(tree["big"]) is None
