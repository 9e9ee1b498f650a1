"""Damaged, incomplete and hostile folders: each is refused with a message that helps."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ucp
from tests.formats.dcp.state_dicts import save, small_state
from ucp import errors, settings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(small_state(), tmp_path / "saved")


def metadata(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


def rewrite(folder: Path, changed: Any) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(changed))


def read_everything(folder: Path) -> None:
    for parameter in ucp.open(folder).parameters.values():
        for kind in parameter.kinds:
            parameter.read(kind)


def test_whole_folder_is_read(folder: Path) -> None:
    """Without this the other tests of this module prove nothing."""
    rewrite(folder, metadata(folder))
    read_everything(folder)


def test_unfinished_save(folder: Path) -> None:
    (folder / ".metadata").unlink()
    with pytest.raises(errors.InconsistentError, match=r"no \.metadata.*incomplete"):
        ucp.open(folder)


def test_a_run_of_unfinished_saves(folder: Path) -> None:
    """The error names what the newest one lacks; an older complete one is read instead."""
    older, newer = folder.parent / "run/step-2", folder.parent / "run/step-10"
    older.parent.mkdir()
    folder.rename(newer)
    (newer / ".metadata").rename(newer.parent / "kept")
    with pytest.raises(errors.InconsistentError, match=r"step-10: .*no \.metadata.*incomplete"):
        ucp.open(newer.parent)
    save(small_state(), older)
    assert ucp.open(newer.parent).index.root == older


def test_missing_data_file(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(errors.InconsistentError, match=r"__0_0\.distcp: is missing; it contains "):
        ucp.open(folder)


def test_truncated_data_file(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(errors.IntegrityError, match=r"__0_0\.distcp: has \d+ bytes, but .* should be at bytes \["):
        ucp.open(folder)


def test_metadata_of_another_save(tmp_path: Path) -> None:
    """Every chunk has the same size, but tensors have other shapes."""
    import torch

    a = save({"model": {"w": torch.ones(6, 4), "v": torch.ones(4, 6)}}, tmp_path / "a")
    b = save({"model": {"w": torch.ones(4, 6), "v": torch.ones(6, 4)}}, tmp_path / "b")
    (a / ".metadata").write_bytes((b / ".metadata").read_bytes())
    with pytest.raises(errors.IntegrityError, match=r"should contain .* of model\.w .* but contain float32 \[6, 4\]"):
        read_everything(a)


def test_damaged_metadata(folder: Path) -> None:
    data = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(data[: len(data) // 2])
    with pytest.raises(errors.IntegrityError, match=r"\.metadata: its pickle is damaged"):
        ucp.open(folder)


def test_metadata_truncated_anywhere_is_refused(folder: Path) -> None:
    data = (folder / ".metadata").read_bytes()
    for size in range(0, len(data), max(1, len(data) // 40)):
        (folder / ".metadata").write_bytes(data[:size])
        with pytest.raises(errors.UcpError):
            ucp.open(folder)


def test_flipped_bytes_never_crash(folder: Path) -> None:
    """With a changed byte, the result is another valid index or a UcpError."""
    data = (folder / ".metadata").read_bytes()
    for position in range(0, len(data), max(1, len(data) // 150)):
        changed = bytearray(data)
        changed[position] ^= 0x15
        (folder / ".metadata").write_bytes(changed)
        try:
            read_everything(folder)
        except errors.UcpError:
            continue


class _Runs:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def test_metadata_that_runs_code(folder: Path, tmp_path: Path) -> None:
    rewrite(folder, _Runs(tmp_path / "ran"))
    with pytest.raises(errors.UnsafeError, match="nothing was run"):
        ucp.open(folder)
    assert not (tmp_path / "ran").exists()


def test_object_that_runs_code(tmp_path: Path) -> None:
    """torch itself loads object entries with `weights_only=False`."""
    folder = save({**small_state(), "trap": _Runs(tmp_path / "ran")}, tmp_path / "saved")
    with pytest.raises(errors.UnsafeError, match="nothing was run"):
        ucp.open(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("path", ["../saved/__0_0.distcp", "/etc/hostname", ""])
def test_data_outside_the_folder(folder: Path, path: str) -> None:
    changed = metadata(folder)
    next(iter(changed.storage_data.values())).relative_path = path
    rewrite(folder, changed)
    with pytest.raises(errors.UnsafeError, match="outside the folder"):
        ucp.open(folder)


def shifted(chunks: list[Any], by: int) -> None:
    import torch

    chunks[0].__dict__["offsets"] = torch.Size([chunks[0].offsets[0] + by, *chunks[0].offsets[1:]])


def test_chunk_outside_its_tensor(folder: Path) -> None:
    changed = metadata(folder)
    shifted(changed.state_dict_metadata["model.0.weight"].chunks, 3)
    rewrite(folder, changed)
    with pytest.raises(errors.InconsistentError, match=r"of model\.0\.weight is outside its shape \[7, 5\]"):
        ucp.open(folder)


def test_gap_and_overlap(folder: Path) -> None:
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

    changed = metadata(folder)
    entry = changed.state_dict_metadata["model.0.weight"]
    entry.chunks[0].__dict__["sizes"] = torch.Size([4, 5])
    rewrite(folder, changed)
    with pytest.raises(errors.InconsistentError, match=r"no chunk contains \[4:7, 0:5\] of model\.0\.weight \[7, 5\]"):
        ucp.open(folder)
    entry.chunks.append(ChunkStorageMetadata(torch.Size([3, 0]), torch.Size([4, 5])))
    first = changed.storage_data[MetadataIndex("model.0.weight", torch.Size([0, 0]))]
    changed.storage_data[MetadataIndex("model.0.weight", torch.Size([3, 0]))] = first
    rewrite(folder, changed)
    with pytest.raises(errors.InconsistentError, match=r"several chunks contain \[3:4, 0:5\] of model\.0\.weight"):
        ucp.open(folder)


def test_chunk_without_data(folder: Path) -> None:
    changed = metadata(folder)
    changed.storage_data = {k: v for k, v in changed.storage_data.items() if k.fqn != "model.2.weight"}
    rewrite(folder, changed)
    with pytest.raises(errors.IntegrityError, match=r"has no location for chunk .* of model\.2\.weight"):
        ucp.open(folder)


def test_transformed_storage(folder: Path) -> None:
    changed = metadata(folder)
    next(iter(changed.storage_data.values())).transform_descriptors = ["zstd"]
    rewrite(folder, changed)
    with pytest.raises(errors.NotUnderstoodError, match="zstd"):
        ucp.open(folder)


def test_metadata_of_absurd_size(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "MAX_PICKLE_BYTES", 100)
    with pytest.raises(errors.UnsafeError, match="the limit is 100"):
        ucp.open(folder)


def test_a_file_that_is_not_metadata(folder: Path) -> None:
    rewrite(folder, {"state": io.BytesIO is None})
    with pytest.raises(errors.NotUnderstoodError, match="is not the metadata"):
        ucp.open(folder)


def test_reading_does_not_import_torch(folder: Path) -> None:
    code = "import sys, ucp; found = [list(atom.fragments) for atom in ucp.open(sys.argv[1]).index.atoms()];"
    code += "print(len(found), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["23", "False"]
