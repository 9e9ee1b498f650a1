"""Output of the writer as torch itself reads it: keys, values, chunks and checksums."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ucp
import ucp.api
from tests.formats.dcp.state_dicts import flat, load_all, same, save, small_state
from tests.paths import FIXTURES
from ucp import settings
from ucp.core.box import Box, coverage
from ucp.errors import UsageError
from ucp.formats.dcp import writer


@pytest.fixture(autouse=True)
def cut_small_tensors_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "SMALLEST_SPLIT_BYTES", 8)


def rich_state() -> dict[str, Any]:
    """A state dict with everything that it may contain besides model and optimizer."""
    import torch

    return {
        **small_state(groups=2),
        "step": 12,
        "note": "text",
        "nothing": None,
        "raw": b"bytes",
        "scheduler": {"last_epoch": 3, "base_lrs": [0.1, 0.2], "_deep": {"a": (1, 2.5, "x")}},
        "rng": torch.arange(50, dtype=torch.uint8),
        "nested": {"list": [1, [2]], "tensors": [torch.ones(3, dtype=torch.float16), torch.zeros(2, 2)]},
        "pair": (torch.arange(4), {"t": torch.tensor([[0.5]])}),
        "seen": {"0": torch.tensor(7)},
    }


def assert_same(expected: dict[str, Any], got: dict[str, Any]) -> None:
    expected, got = flat(expected), flat(got)
    # A tuple with tensors in it is one value, and compares by its parts.
    for tree in (expected, got):
        for index, part in enumerate(tree.pop("pair", ())):
            tree.update(flat(part, f"pair.{index}"))
    assert expected.keys() == got.keys()
    assert [key for key in expected if not same(expected[key], got[key])] == []


@pytest.mark.parametrize("files", [1, 3, 50])
def test_nothing_is_lost_or_changed(tmp_path: Path, files: int) -> None:
    """dcp → dcp: torch reads the same state dict, including values that ucp does not interpret."""
    state = rich_state()
    ucp.convert(save(state, tmp_path / "a"), tmp_path / "b", to="dcp", dp=files)
    got = load_all(tmp_path / "b", tmp_path / "b.pt")
    assert got.pop("ucp") == {"step": 2, "buffers": ["1.running_mean", "1.running_var", "1.num_batches_tracked"]}
    for group in (*state["optim"]["param_groups"], *got["optim"]["param_groups"]):
        group.setdefault("initial_lr", group["lr"])  # written for jobs with a scheduler
    assert_same(state, got)


def test_elements_of_large_archives_are_page_aligned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "ALIGNED_ARCHIVE_BYTES", 1024)
    state = small_state(groups=2)
    conversion = ucp.api.plan(save(state, tmp_path / "a"), tmp_path / "b", to="dcp", dp=2)
    items = [item for file in conversion.target.files for item in file.items]
    assert sum(item.offset % 4096 == 0 for item in items) > len(items) // 2
    conversion.run()
    got = load_all(tmp_path / "b", tmp_path / "b.pt")
    got.pop("ucp")
    for group in (*state["optim"]["param_groups"], *got["optim"]["param_groups"]):
        group.setdefault("initial_lr", group["lr"])
    assert_same(state, got)
    assert not ucp.verify(tmp_path / "b", level="deep").findings
    for file in conversion.target.files:
        damage(tmp_path / "b" / file.path, max(item.offset for item in file.items))
    assert [finding.check for finding in ucp.verify(tmp_path / "b", level="deep").findings] == ["zip-crc"] * 2


def damage(path: Path, offset: int) -> None:
    """Flip the lowest bit of a number."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_round_trip_through_atoms(tmp_path: Path) -> None:
    """dcp → atoms → dcp equals dcp → dcp, byte for byte."""
    save(rich_state(), tmp_path / "a")
    ucp.convert(tmp_path / "a", tmp_path / "direct", to="dcp", dp=2)
    ucp.convert(tmp_path / "a", tmp_path / "atoms")
    ucp.convert(tmp_path / "atoms", tmp_path / "b", to="dcp", dp=2)
    direct, by_atoms = (load_all(tmp_path / name, tmp_path / f"{name}.pt") for name in ("direct", "b"))
    assert_same(direct, by_atoms)


def test_round_trip_through_virtual_atoms(tmp_path: Path) -> None:
    save(rich_state(), tmp_path / "a")
    ucp.convert(tmp_path / "a", tmp_path / "links", link=True)
    ucp.convert(tmp_path / "links", tmp_path / "b", to="dcp", dp=2)
    ucp.convert(tmp_path / "a", tmp_path / "direct", to="dcp", dp=2)
    for file in ("__0_0.distcp", "__1_0.distcp", ".metadata"):
        assert (tmp_path / "b" / file).read_bytes() == (tmp_path / "direct" / file).read_bytes(), file


def test_output_is_deterministic(tmp_path: Path) -> None:
    save(rich_state(), tmp_path / "a")
    for name, jobs in (("b", 1), ("c", 4)):
        ucp.convert(tmp_path / "a", tmp_path / name, to="dcp", dp=3, jobs=jobs)
    for file in sorted(path.name for path in (tmp_path / "b").iterdir()):
        assert (tmp_path / "b" / file).read_bytes() == (tmp_path / "c" / file).read_bytes(), file


def test_every_archive_is_valid(tmp_path: Path) -> None:
    """Each item is a separate zip archive, with correct checksums, aligned data and torch's layout."""
    import pickle

    ucp.convert(save(rich_state(), tmp_path / "a"), tmp_path / "b", to="dcp", dp=2)
    stored = pickle.loads((tmp_path / "b/.metadata").read_bytes()).storage_data
    ends: dict[str, int] = {}
    for info in sorted(stored.values(), key=lambda info: (info.relative_path, info.offset)):
        assert info.offset == ends.get(info.relative_path, 0)
        ends[info.relative_path] = info.offset + info.length
        data = (tmp_path / "b" / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        item = tmp_path / "item.zip"
        item.write_bytes(data)
        with zipfile.ZipFile(item) as archive:
            assert archive.testzip() is None
            assert "archive/data.pkl" in archive.namelist()
    assert ends == {path.name: path.stat().st_size for path in (tmp_path / "b").glob("*.distcp")}


def test_output_contains_no_local_paths(tmp_path: Path) -> None:
    """torch records the path of the save; ucp does not."""
    ucp.convert(save(small_state(), tmp_path / "a"), tmp_path / "b", to="dcp")
    for path in (tmp_path / "b").iterdir():
        assert str(tmp_path).encode() not in path.read_bytes()
        assert b"PosixPath" not in path.read_bytes()


def test_accelerate_keeps_its_two_folders(corpus: Path, tmp_path: Path) -> None:
    source = corpus / "huggingface/accelerate_llama_fsdp2/ckpt"
    ucp.convert(source, tmp_path / "b", to="dcp", dp=3)
    for folder in ("pytorch_model_fsdp_0", "optimizer_0"):
        got = load_all(tmp_path / "b" / folder, tmp_path / "y.pt")
        assert got.pop("ucp", {"step": 3}) == {"step": 3}
        assert_same(load_all(source / folder, tmp_path / "x.pt"), got)
    assert (tmp_path / "b/scheduler.bin").read_bytes() == (source / "scheduler.bin").read_bytes()


def test_deepspeed_in_the_layout_of_accelerate(corpus: Path, tmp_path: Path) -> None:
    like = corpus / "huggingface/accelerate_llama_fsdp2/ckpt"
    ucp.convert(corpus / "huggingface/accelerate_llama_z2_bf16/ckpt", tmp_path / "b", to="dcp", like=like)
    wanted = {
        key
        for folder in ("pytorch_model_fsdp_0", "optimizer_0")
        for key in flat(load_all(like / folder, tmp_path / "x.pt"))
    }
    got = {
        key
        for folder in ("pytorch_model_fsdp_0", "optimizer_0")
        for key in flat(load_all(tmp_path / "b" / folder, tmp_path / "y.pt"))
    }
    assert wanted - got == set()


def test_missing_group_fields_get_torchs_defaults(tmp_path: Path) -> None:
    """A job loads every field of its optimizer: those that the source lacks get torch's defaults."""
    from ucp.api import plan

    state = small_state()
    for name in ("foreach", "maximize", "decoupled_weight_decay", "fused"):
        del state["optim"]["param_groups"][0][name]
    for states in state["optim"]["state"].values():
        del states["step"]
    state["step"] = 9
    save(state, tmp_path / "a")
    conversion = plan(tmp_path / "a", tmp_path / "b", to="dcp")
    conversion.run()
    assert {note.id for note in conversion.writer.notes} == {"hyper-filled-in"}
    got = load_all(tmp_path / "b", tmp_path / "b.pt")["optim"]
    assert got["param_groups"][0]["decoupled_weight_decay"] is True
    assert got["param_groups"][0]["maximize"] is False
    step = got["state"]["0.weight"]["step"]
    assert (step.item(), step.shape, str(step.dtype)) == (9.0, (), "torch.float32")


@pytest.mark.parametrize("kind", ["NAdam", "Muon"])
def test_nothing_is_filled_in_for_optimizers_with_other_fields(tmp_path: Path, kind: str) -> None:
    import torch

    from ucp.api import plan

    model = torch.nn.Linear(3, 2, bias=False)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.5)
    model(torch.randn(2, 3)).square().sum().backward()
    optimizer.step()
    save({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "a")
    conversion = plan(tmp_path / "a", tmp_path / "b", to="dcp")
    conversion.run()
    assert conversion.writer.notes == []
    (before,), (after,) = ucp.open(tmp_path / "a").index.groups, ucp.open(tmp_path / "b").index.groups
    assert {**before.hyper, "initial_lr": 0.5} == after.hyper


@pytest.mark.parametrize("variant", ["z0_bf16_dp2", "universal_z1_bf16_tp2"])
def test_groups_of_another_framework_are_not_a_second_optimizer(tmp_path: Path, variant: str) -> None:
    """They are in its own files too, and not only as groups."""
    source = FIXTURES / variant
    ucp.convert(source, tmp_path / "b", to="dcp")
    before, after = ucp.open(source).index, ucp.open(tmp_path / "b").index
    assert [group.names for group in after.groups] == [group.names for group in before.groups]
    assert after.parameters.keys() == before.parameters.keys()


def test_weights_alone_through_files_with_empty_groups(tmp_path: Path) -> None:
    save({"model": small_state()["model"]}, tmp_path / "a")
    ucp.convert(tmp_path / "a", tmp_path / "engine", to="deepspeed", zero=1)
    ucp.convert(tmp_path / "engine", tmp_path / "b", to="dcp")
    assert ucp.open(tmp_path / "b").index.parameters.keys() == ucp.open(tmp_path / "a").index.parameters.keys()


def test_step_and_buffers_survive(tmp_path: Path) -> None:
    """Float buffers look like frozen parameters, and SGD counts no steps; folders that ucp writes record both."""
    source = FIXTURES / "z1_bf16_sgd_dp2"
    ucp.convert(source, tmp_path / "b", to="dcp")
    before, after = ucp.open(source).index, ucp.open(tmp_path / "b").index
    assert after.step == before.step == 3
    assert {n: p.role for n, p in after.parameters.items()} == {n: p.role for n, p in before.parameters.items()}
    assert "buffer" in {p.role for p in after.parameters.values()}


def test_two_values_with_one_key_are_refused(tmp_path: Path) -> None:
    import torch

    save({"model": {"a": torch.ones(2)}, "other": {"b": torch.ones(1)}}, tmp_path / "a")
    save({"other": {"a": torch.ones(2)}}, tmp_path / "like")
    save({"model": {"b": torch.ones(2)}, "other": {"b": torch.ones(1)}}, tmp_path / "twice")
    ucp.convert(tmp_path / "a", tmp_path / "good", to="dcp", like=tmp_path / "like")
    with pytest.raises(UsageError, match=r"two values would have the key other\.b"):
        ucp.convert(tmp_path / "twice", tmp_path / "bad", to="dcp", like=tmp_path / "like")


def test_degrees_that_do_not_apply_are_refused(tmp_path: Path) -> None:
    save(small_state(), tmp_path / "a")
    with pytest.raises(UsageError, match="--tp 2 does not apply"):
        ucp.convert(tmp_path / "a", tmp_path / "b", to="dcp", tp=2)
    with pytest.raises(UsageError, match="dp=0: must be at least 1"):
        ucp.convert(tmp_path / "a", tmp_path / "b", to="dcp", dp=0)


def test_writing_does_not_import_torch(tmp_path: Path) -> None:
    save(rich_state(), tmp_path / "a")
    code = "import sys, ucp; ucp.convert(sys.argv[1], sys.argv[2], to='dcp', dp=2); print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, str(tmp_path / "a"), str(tmp_path / "b")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"


@given(
    st.lists(st.integers(0, 40), max_size=4).map(tuple),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 9),
    st.integers(1, 200),
)
def test_chunks_tile_every_tensor(shape: tuple[int, ...], itemsize: int, files: int, largest: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "LARGEST_CHUNK_BYTES", largest)
        patch.setattr(writer, "SMALLEST_SPLIT_BYTES", 8)
        chunks = list(writer.row_chunks(shape, itemsize, files))
    assert list(coverage(shape, [box for _, box in chunks])) == []
    assert sum(box.numel for _, box in chunks) == prod(shape)
    assert all(number is None or 0 <= number < files for number, _ in chunks)
    rows = prod(shape[1:]) * itemsize
    assert all(number is None or box.numel * itemsize <= max(largest, rows) for number, box in chunks)
    if 0 in shape:
        assert chunks == [(None, Box((0,) * len(shape), shape))]
