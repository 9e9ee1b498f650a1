"""The deep pass over real torch files: CRCs, NaN, negative second moments, padding."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.checks.expected_findings import only
from tests.checks.sharded_checkpoint import flip
from ucp import settings
from ucp.checks.runner import verify
from ucp.checks.spans import archive_ranges
from ucp.containers.inert import TensorRef
from ucp.containers.torch_file import TorchFile
from ucp.core.checkpoint import Atom, Checkpoint, Fragment, Mesh, Parameter, ParamGroup
from ucp.core.region import Region

FILE = "rank0.pt"


@dataclass
class Saved:
    """A torch file with one storage per kind: `p` in its first 40 elements, followed by 8 of padding."""

    checkpoint: Checkpoint
    archive: TorchFile

    @property
    def path(self) -> Path:
        return self.archive.path

    def offset(self, kind: str) -> int:
        return self.checkpoint.parameters["p"].atoms[kind].fragments[0].offset


def save(root: Path, tensors: dict[str, torch.Tensor]) -> Saved:
    torch.save({kind: tensor.clone() for kind, tensor in tensors.items()}, root / FILE)
    archive = TorchFile(root / FILE)
    atoms = {}
    for kind, ref in archive.tree.items():
        assert isinstance(ref, TensorRef)
        fragment = Fragment(Region.all_of((40,)), FILE, archive.position(ref), ref.dtype)
        atoms[kind] = Atom("p", kind, (40,), ref.dtype, (fragment,))
    parameters = {"p": Parameter("p", (40,), atoms=atoms)}
    return Saved(Checkpoint("made", root, Mesh(), parameters, sizes={FILE: archive.size}), archive)


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    values = torch.randn(3, 48, generator=random)
    values[2] = values[2].abs()
    values[:, 40:] = 0
    return dict(zip(("master", "exp_avg", "exp_avg_sq"), values.to(dtype), strict=True))


@pytest.fixture(params=[1 << 20, 16], ids=["one block", "many blocks"])
def root(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(settings, "SLAB_BYTES", request.param)
    return tmp_path


def test_every_byte_is_read_once(root: Path) -> None:
    saved = save(root, tensors())
    report = verify(saved.checkpoint, "deep")
    assert report.findings == []
    assert report.bytes_read == saved.archive.size


def test_a_flipped_bit_of_a_storage_fails_its_crc(root: Path) -> None:
    saved = save(root, tensors())
    at = saved.offset("exp_avg")
    flip(saved.path, at + 21)
    report = verify(saved.checkpoint, "deep")
    finding = only(report, "zip-crc")
    assert (finding.file, finding.parameter, finding.kind) == (FILE, "p", "exp_avg")
    assert finding.byte_range == (at, at + 48 * 4)
    assert report.exit_code == 4
    assert verify(saved.checkpoint).exit_code == 0


@pytest.mark.parametrize("member", ["data.pkl", "version", "byteorder"])
def test_a_flipped_bit_of_any_member_fails_its_crc(root: Path, member: str) -> None:
    saved = save(root, tensors())
    (entry,) = (entry for name, entry in saved.archive.entries.items() if name.endswith(f"/{member}"))
    flip(saved.path, saved.archive.payload(entry))
    assert member in only(verify(saved.checkpoint, "deep"), "zip-crc").message


def test_a_file_saved_without_crcs_is_noted(root: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        saved = save(root, tensors())
    finally:
        torch.serialization.set_crc32_options(before)
    report = verify(saved.checkpoint, "deep")
    assert only(report, "zip-crc").severity == "note"
    assert report.exit_code == 0


def test_a_single_crc_of_zero_is_damage(root: Path) -> None:
    saved = save(root, tensors())
    name, entry = next((n, e) for n, e in saved.archive.entries.items() if n.endswith("/data/0"))
    data = saved.path.read_bytes()
    in_directory = data.rindex(entry.crc.to_bytes(4, "little"))
    saved.path.write_bytes(data[:in_directory] + bytes(4) + data[in_directory + 4 :])
    findings = verify(saved.checkpoint, "deep").findings
    assert [finding.check for finding in findings] == ["zip-crc", "zip-structure"]  # which finds it after the data
    assert all(finding.severity == "error" and name in finding.message for finding in findings)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_counted(root: Path, dtype: torch.dtype, bad: float) -> None:
    values = tensors()
    values["exp_avg"][[5, 39]] = bad
    saved = save(root, {kind: value.to(dtype) for kind, value in values.items()})
    report = verify(saved.checkpoint, "deep")
    finding = only(report, "finite")
    at = saved.offset("exp_avg") + 5 * dtype.itemsize
    assert finding.byte_range == (at, at + dtype.itemsize)
    assert (finding.parameter, finding.kind, finding.severity) == ("p", "exp_avg", "warning")
    assert "2 of 40 elements" in finding.message
    assert report.exit_code == 0


def test_the_largest_finite_numbers_are_finite(root: Path) -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn):
        values = tensors(dtype)
        values["exp_avg"][:2] = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min], dtype=dtype)
        assert verify(save(root, values).checkpoint, "deep").findings == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_negative_second_moments_are_found(root: Path, dtype: torch.dtype) -> None:
    values = tensors(dtype)
    values["exp_avg_sq"][7] = -1e-30
    values["exp_avg_sq"][8] = -0.0
    finding = only(verify(save(root, values).checkpoint, "deep"), "second-moments")
    assert "1 of 40 elements" in finding.message
    assert finding.kind == "exp_avg_sq"


def test_padding_that_is_not_zero_is_found(root: Path) -> None:
    values = tensors()
    values["exp_avg"][44] = 1.0
    saved = save(root, values)
    finding = only(verify(saved.checkpoint, "deep"), "padding")
    at = saved.offset("exp_avg") + 44 * 4 + 2
    assert finding.byte_range == (at, at + 1)
    assert finding.severity == "warning"


def test_padding_of_stage_3_is_whatever_was_in_memory(root: Path) -> None:
    """In the masters; weight decay (in the gradient, as in SGD) carries it into the states."""
    values = tensors()
    values["momentum_buffer"] = values.pop("exp_avg")
    values["momentum_buffer"][44] = 2.4e-39
    checkpoint = save(root, values).checkpoint
    assert only(verify(checkpoint, "deep"), "padding")
    checkpoint.mesh = Mesh(zero=3)
    assert "padding" not in {finding.check for finding in verify(checkpoint, "deep").findings}


def test_padding_of_states_that_are_never_zero_is_not_checked(root: Path) -> None:
    """Adamax takes the largest gradient, and adds its eps even without one."""
    exp_inf = torch.full((48,), 1e-8)
    report = verify(save(root, {"exp_inf": exp_inf}).checkpoint, "deep")
    assert "padding" not in {finding.check for finding in report.findings}


def test_adafactor_adds_its_eps_in_padding_too(root: Path) -> None:
    values = tensors()
    values["exp_avg_sq"][40:] = 1e-30
    checkpoint = save(root, values).checkpoint
    checkpoint.groups = [ParamGroup({"eps": [None, 1e-3]}, ["p"])]
    assert only(verify(checkpoint, "deep"), "padding")
    checkpoint.groups = [ParamGroup({"eps": [1e-30, 1e-3]}, ["p"])]
    assert "padding" not in {finding.check for finding in verify(checkpoint, "deep").findings}


def test_a_file_that_became_shorter_is_an_integrity_error(root: Path) -> None:
    saved = save(root, tensors())
    saved.path.write_bytes(saved.path.read_bytes()[:-40])
    report = verify(saved.checkpoint, "deep")
    assert report.exit_code == 4
    assert only(report, "zip-crc").severity == "error"


def test_archives_end_to_end_are_separated(tmp_path: Path) -> None:
    for number in range(3):
        torch.save(torch.arange(10 * number), tmp_path / f"{number}.pt")
    parts = [(tmp_path / f"{number}.pt").read_bytes() for number in range(3)]
    (tmp_path / "joined").write_bytes(b"".join(parts))
    edges = [0, len(parts[0]), len(parts[0] + parts[1]), sum(map(len, parts))]
    assert archive_ranges(tmp_path / "joined") == list(pairwise(edges))
    assert archive_ranges(tmp_path / "1.pt") == [(0, len(parts[1]))]


@pytest.mark.parametrize("gaps", [(0, 1, 4095), (4095, 0, 700)])
def test_archives_with_zeros_before_them_are_separated(tmp_path: Path, gaps: tuple[int, ...]) -> None:
    data, ranges = b"", []
    for number, gap in enumerate(gaps):
        torch.save(torch.arange(10 * number), tmp_path / "one.pt")
        part = (tmp_path / "one.pt").read_bytes()
        ranges.append((len(data) + gap, len(data) + gap + len(part)))
        data += bytes(gap) + part
    (tmp_path / "joined").write_bytes(data)
    assert archive_ranges(tmp_path / "joined") == ranges
    (tmp_path / "joined").write_bytes(data[: ranges[2][0] - 1] + b"x" + data[ranges[2][0] :])
    assert archive_ranges(tmp_path / "joined") == ([(0, len(data))] if gaps[2] else ranges)


def test_a_flipped_bit_of_any_archive_of_a_file_is_found(tmp_path: Path) -> None:
    saved = save(tmp_path, tensors())
    data = saved.path.read_bytes()
    saved.path.write_bytes(data + data)
    assert verify(saved.checkpoint, "deep").findings == []
    for archive in (0, 1):
        saved.path.write_bytes(data + data)
        flip(saved.path, archive * len(data) + saved.offset("master"))
        assert only(verify(saved.checkpoint, "deep"), "zip-crc").file == FILE


def test_values_of_files_without_checksums_are_scanned(root: Path) -> None:
    """A Hugging Face folder has none. Its tensors may start at any byte, and blocks must not split elements."""
    held = {"odd": torch.ones(3, dtype=torch.uint8), "a": torch.ones(40), "b": torch.ones(9, dtype=torch.float64)}
    save_file(held, root / "model.safetensors")
    report = verify(root, "deep")
    assert (report.findings, report.bytes_read) == ([], 3 + 40 * 4 + 9 * 8)
    held |= {"mask": torch.full((8, 8), -math.inf).triu(1), "shift": torch.zeros(2)}
    save_file(held, root / "model.safetensors")
    assert (
        verify(root, "deep").findings == []
    )  # it does not mark buffers: attention masks are recognised by their values
    held["a"][31], held["b"][8] = math.nan, math.inf
    header = {
        name: {"dtype": dtype, "shape": [len(held[name])], "data_offsets": [start, stop]}
        for name, dtype, start, stop in (("odd", "U8", 0, 3), ("a", "F32", 3, 163), ("b", "F64", 163, 235))
    }
    text = json.dumps(header).encode()
    data = b"".join(held[name].numpy().tobytes() for name in header)
    (root / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    report = verify(root, "deep")
    assert report.bytes_read == len(data)
    found = {finding.parameter: finding for finding in report.findings}
    assert {finding.check for finding in found.values()} == {"finite"}
    at = 8 + len(text) + 3
    assert found["a"].byte_range == (at + 31 * 4, at + 32 * 4)
    assert found["b"].byte_range == (at + 160 + 8 * 8, at + 160 + 9 * 8)
