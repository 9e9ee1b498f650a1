"""Folders of atoms, real and virtual: files, sizes, headers, checksums, sources."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.checks.atom_folder import ATOM, write
from tests.checks.expected_findings import only
from tests.checks.sharded_checkpoint import flip
from ucp import settings
from ucp.checks.runner import verify
from ucp.core.findings import Level


@pytest.fixture(params=[1 << 26, 20], ids=["one part", "many parts"])
def atoms(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(settings, "COPY_TASK_BYTES", request.param)
    return write(tmp_path, link=False)


@pytest.fixture
def virtual(tmp_path: Path) -> Path:
    return write(tmp_path, link=True)


def test_valid_atoms_have_no_findings(atoms: Path) -> None:
    for level in Level:
        report = verify(atoms, level)
        assert report.findings == []
        assert report.format == "atoms"
    assert report.bytes_read >= sum(path.stat().st_size for path in atoms.rglob("*.safetensors"))


def test_valid_virtual_atoms_have_no_findings(virtual: Path) -> None:
    for level in Level:
        assert verify(virtual, level).findings == []


def test_a_flipped_bit_fails_its_part(atoms: Path) -> None:
    flip(atoms / ATOM, 4096 + 50)
    report = verify(atoms, "deep")
    errors = [finding for finding in report.findings if finding.check == "manifest-checksums"]
    assert len(errors) == 1
    assert (errors[0].file, errors[0].parameter) == (ATOM, "layer.weight")
    assert errors[0].byte_range is not None
    assert errors[0].byte_range[0] <= 4096 + 50 < errors[0].byte_range[1]
    assert report.exit_code == 4


def test_a_flipped_bit_of_extras_fails_its_part(atoms: Path) -> None:
    flip(atoms / "extras/extras.json", 2, 1)
    report = verify(atoms, "deep")
    assert report.exit_code == 4


def test_a_missing_file_is_named_at_every_level(atoms: Path) -> None:
    (atoms / ATOM).unlink()
    for level in Level:
        report = verify(atoms, level)
        assert report.findings[0].check == "manifest-files"
        assert report.findings[0].file == ATOM
        assert report.exit_code == 4


def test_a_file_of_another_size_is_named(atoms: Path) -> None:
    with (atoms / ATOM).open("ab") as file:
        file.write(b"\0")
    assert only(verify(atoms, "quick"), "manifest-files").message.endswith("bytes, not 4,436")


def test_an_unlisted_file_is_a_warning(atoms: Path) -> None:
    (atoms / "atoms" / "stray.safetensors").write_bytes(b"x")
    report = verify(atoms, "quick")
    assert only(report, "manifest-files").severity == "warning"
    assert report.exit_code == 0


def test_swapped_files_contradict_the_manifest(atoms: Path) -> None:
    one, other = atoms / ATOM, atoms / "atoms/norm.weight.safetensors"
    size = one.stat().st_size
    one.write_bytes(other.read_bytes() + bytes(size - other.stat().st_size))
    findings = verify(atoms).findings
    assert {finding.check for finding in findings} >= {"headers"}
    assert all(finding.exit_code == 4 for finding in findings if finding.check == "headers")


def test_a_header_with_another_name_is_found(atoms: Path) -> None:
    data = (atoms / ATOM).read_bytes()
    (atoms / ATOM).write_bytes(data.replace(b'"layer.weight"', b'"later.weight"'))
    finding = only(verify(atoms), "headers")
    assert "later.weight" in finding.message


def test_a_changed_manifest_is_an_integrity_error(atoms: Path) -> None:
    text = (atoms / "ucp.json").read_text()
    (atoms / "ucp.json").write_text(text.replace('"step": 3', '"step": 4'))
    report = verify(atoms, "quick")
    assert only(report, "readable").exit_code == 4
    assert report.exit_code == 4


def test_a_changed_source_of_virtual_atoms_is_named(virtual: Path) -> None:
    changed = virtual.parent / "made" / "norm.weight.master.tp1.1"
    os.utime(changed, ns=(0, 0))
    gone = virtual.parent / "made" / "norm.weight.master.tp1.0"
    gone.unlink()
    report = verify(virtual, "quick")
    found = {finding.file for finding in report.findings if finding.check == "source-unchanged"}
    assert found == {str(changed), str(gone)}
    assert report.exit_code == 4
