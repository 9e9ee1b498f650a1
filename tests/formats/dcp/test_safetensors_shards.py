"""Folders of HuggingFaceStorageWriter: shards with offsets, whole files, and the defect of torch's consolidation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import ucp
from ucp.errors import InconsistentError, IntegrityError


def write(path: Path, tensors: dict[str, Any], offsets: dict[str, list[int]] | None) -> None:
    """A shard as torch's writer makes it, without metadata if `offsets` is None."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt", "DCP_VERSION": "1.0"}
    if offsets is not None:
        metadata["DCP_SHARDING_INFO"] = json.dumps({key: {"saved_offsets": at} for key, at in offsets.items()})
    save_file(tensors, path, metadata)


def shard(folder: Path, rank: int) -> Path:
    return folder / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A matrix of 5 × 4 over a grid of ranks, and a vector on two of them."""
    import torch

    whole = torch.arange(20.0).reshape(5, 4)
    cuts = {0: (0, 3, 0, 2), 1: (0, 3, 2, 4), 2: (3, 5, 0, 2), 3: (3, 5, 2, 4)}
    for rank, (a, b, c, d) in cuts.items():
        tensors = {"w": whole[a:b, c:d].contiguous()}
        offsets = {"w": [a, c]}
        if rank < 2:
            tensors["v"], offsets["v"] = torch.full((2 - rank,), float(rank)), [2 * rank]
        write(shard(tmp_path, rank), tensors, offsets)
    return tmp_path


def test_grid_of_shards(folder: Path) -> None:
    opened = ucp.open(folder)
    assert opened["w"].read().tolist() == [[float(4 * r + c) for c in range(4)] for r in range(5)]
    assert opened["v"].read().tolist() == [0.0, 0.0, 1.0]
    assert opened.index.mesh.dp == 4


def test_missing_rank(folder: Path) -> None:
    shard(folder, 1).unlink()
    with pytest.raises(InconsistentError, match="the shards of rank 1 are missing"):
        ucp.open(folder)


def test_missing_last_rank(folder: Path) -> None:
    """File names do not show it, but here the tensor has a gap."""
    shard(folder, 3).unlink()
    with pytest.raises(InconsistentError, match=r"no shard contains \[3:5, 2:4\] of w \[5, 4\]"):
        ucp.open(folder)


def test_shards_that_overlap(folder: Path) -> None:
    import torch

    write(shard(folder, 2), {"w": torch.zeros(3, 2)}, {"w": [2, 0]})
    with pytest.raises(InconsistentError, match=r"several shards contain \[2:3, 0:2\] of w"):
        ucp.open(folder)


@pytest.mark.parametrize("start", [[0], [-1, 0], [0, "1"], None])
def test_invalid_offsets(folder: Path, start: Any) -> None:
    import torch

    write(shard(folder, 2), {"w": torch.zeros(2, 2)}, {"w": start})
    with pytest.raises(IntegrityError, match="the offsets of w"):
        ucp.open(folder)


def test_consolidation_loses_scalars(corpus: Path) -> None:
    """The corpus has a folder that torch damaged: the shards are read, and the damage is noted."""
    opened = ucp.open(corpus / "dcp/hfwriter_dp4_consolidated/step-3")
    assert opened["temperature"].read() == 1.25
    assert [note.id for note in opened.index.notes] == ["consolidated-wrong"]
    assert "temperature" in opened.index.notes[0].text


def test_consolidated_files_next_to_shards(folder: Path) -> None:
    """If both agree, there is no note."""
    import torch

    (folder / "sharded").mkdir()
    for path in list(folder.glob("shard-*")):
        path.rename(folder / "sharded" / path.name)
    whole = {"w": torch.arange(20.0).reshape(5, 4), "v": torch.tensor([0.0, 0.0, 1.0])}
    write(folder / "model-00001-of-00001.safetensors", whole, None)
    opened = ucp.open(folder)
    assert opened.index.notes == []
    assert len(opened.index.parameters["w"].atoms["weight"].replicas) == 1
    write(folder / "model-00001-of-00001.safetensors", {"w": torch.zeros(4, 4)}, None)
    with pytest.raises(InconsistentError, match=r"w is float32 \[4, 4\], but \[5, 4\] in the shards"):
        ucp.open(folder)


def test_consolidated_tensors_without_a_dtype(folder: Path) -> None:
    """torch writes this for a tensor that its mapping names and no shard has; the shards are complete."""
    import torch

    (folder / "sharded").mkdir()
    for path in list(folder.glob("shard-*")):
        path.rename(folder / "sharded" / path.name)
    whole = folder / "model-00001-of-00001.safetensors"
    write(whole, {"w": torch.arange(20.0).reshape(5, 4), "gone": torch.zeros(())}, None)
    whole.write_bytes(whole.read_bytes().replace(b'"gone":{"dtype":"F32"', b'"gone":{"dtype":"   "'))
    opened = ucp.open(folder)
    assert opened.index.notes[0].id == "consolidated-unreadable"
    assert opened["w"].read().tolist() == torch.arange(20.0).reshape(5, 4).tolist()


def test_a_missing_consolidated_file(corpus: Path, tmp_path: Path) -> None:
    source = corpus / "dcp/hfwriter_rank0/step-3"
    for path in source.iterdir():
        shutil.copy(path, tmp_path)
    assert len(ucp.open(tmp_path)) == 40
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(InconsistentError, match="file 2 of 3 is missing"):
        ucp.open(tmp_path)
