"""The structure of a torch archive: every flipped bit is found, and no writer's conventions count as damage."""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path

import pytest
import torch

from tests.checks.sharded_checkpoint import flip
from ucp.checks.spans import archive_ranges
from ucp.checks.zip_structure import ZipDefect, structure_bytes, structure_defects
from ucp.containers.torch_file import TorchFile
from ucp.errors import UcpError


def defects(path: Path) -> list[ZipDefect]:
    data = path.read_bytes()

    def read(offset: int, size: int) -> bytes:
        assert offset + size <= len(data)
        return data[offset : offset + size]

    return [
        defect
        for start, stop in archive_ranges(path)
        for defect in structure_defects(read, TorchFile(path, start, stop), start, stop)
    ]


def members_are_whole(path: Path) -> bool:
    archive, data = TorchFile(path), path.read_bytes()
    starts = [(archive.payload(entry), entry) for entry in archive.entries.values()]
    return all(zlib.crc32(data[start : start + entry.size]) == entry.crc for start, entry in starts)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "saved.pt"
    torch.save({"a": torch.arange(5), "none": torch.empty(0), "b": torch.ones(64)}, path)
    return path


def test_every_flipped_bit_of_the_structure_is_found(saved: Path) -> None:
    """A bit of every byte that is not data of a member: an error to open it, a wrong CRC, or a defect."""
    archive = TorchFile(saved)
    data = {at for e in archive.entries.values() for at in range(archive.payload(e), archive.payload(e) + e.size)}
    frame = [at for at in range(archive.size) if at not in data]
    assert len(frame) == structure_bytes(archive, 0, archive.size) > 800
    unseen = []
    for at in frame:
        flip(saved, at, at % 8)
        try:
            if members_are_whole(saved) and not defects(saved):
                unseen.append(at)
        except UcpError:
            pass
        flip(saved, at, at % 8)
    assert unseen == []


def test_a_defect_is_where_the_damage_is(saved: Path) -> None:
    archive = TorchFile(saved)
    entry = next(e for name, e in archive.entries.items() if name.endswith("/data/0"))
    for at, what in (
        (archive.payload(entry) - 1, "the alignment before"),
        (archive.payload(entry) + entry.size + 5, "the CRC or sizes after"),
        (entry.header_offset + 11, "the header of"),
        (archive.size - 85, "the records after the directory"),
    ):
        flip(saved, at)
        (defect,) = defects(saved)
        assert defect.what.startswith(what)
        assert defect.start <= at < defect.stop
        flip(saved, at)


def test_archives_of_other_writers_have_no_defects(tmp_path: Path, saved: Path) -> None:
    """zipfile writes dates, no alignment, sizes in the headers; to a stream it writes sizes after the data."""

    class Stream(io.BytesIO):
        def tell(self) -> int:
            raise OSError

        def seekable(self) -> bool:
            return False

    stored = zipfile.ZipFile(saved)
    for kind in (io.BytesIO, Stream):
        buffer = kind()
        with zipfile.ZipFile(buffer, "w") as other:
            for name in stored.namelist():
                other.writestr(zipfile.ZipInfo(name, (2024, 5, 17, 8, 30, 0)), stored.read(name))
        path = tmp_path / f"{kind.__name__}.pt"
        path.write_bytes(buffer.getvalue())
        assert defects(path) == []


def test_archives_without_crcs_have_no_defects(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(torch.ones(9), tmp_path / "saved.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    assert defects(tmp_path / "saved.pt") == []


def test_archives_end_to_end_have_no_defects(tmp_path: Path, saved: Path) -> None:
    (tmp_path / "joined").write_bytes(saved.read_bytes() * 3)
    assert len(archive_ranges(tmp_path / "joined")) == 3
    assert defects(tmp_path / "joined") == []


def test_real_archives_have_no_defects(project: Path) -> None:
    files = sorted((project / "fixtures").rglob("*.pt"))
    assert len(files) > 30
    assert {str(file): defects(file) for file in files if defects(file)} == {}
