"""Real DeepSpeed checkpoints, intact and damaged: what a user sees when a copy went wrong."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest
import torch

import ucp
from tests.checks.sharded_checkpoint import flip
from tests.paths import FIXTURES, variants
from ucp.api import convert
from ucp.checks.render import render
from ucp.checks.runner import verify
from ucp.checks.verify_report import Report
from ucp.containers.torch_file import TorchFile
from ucp.core.findings import Finding
from ucp.formats.registry import ReadOptions
from ucp.formats.sharded.shard_fragments import RankFragments

SOUND = sorted(path.parent.name for path in FIXTURES.glob("*/reference"))
STEP = "global_step3"


@pytest.fixture
def copy(tmp_path: Path) -> object:
    """A function that copies a fixture, so that it can be damaged."""

    def make(name: str) -> Path:
        shutil.copytree(FIXTURES / name, tmp_path / name)
        return tmp_path / name

    return make


def errors(report: Report, check: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.check == check and finding.severity == "error"]


def alarms(report: Report) -> list[str]:
    """Everything but notes."""
    return [str(finding) for finding in report.findings if finding.severity != "note"]


@pytest.mark.parametrize("name", SOUND)
def test_an_intact_fixture_has_no_findings(name: str) -> None:
    report = verify(FIXTURES / name, "deep")
    assert alarms(report) == []
    assert report.exit_code == 0
    assert report.atoms > 0


def test_intact_checkpoints_of_other_frameworks_have_no_findings() -> None:
    sources = variants("deepspeed", "megatron_deepspeed")
    sources += sorted(path.parent for folder in variants("huggingface") for path in folder.rglob("latest"))
    found = {str(source): alarms(verify(source, "deep")) for source in sources}
    assert len(found) > 20
    assert {source: texts for source, texts in found.items() if texts} == {}


def test_intact_atoms_of_a_fixture_have_no_findings(tmp_path: Path) -> None:
    convert(FIXTURES / "z1_bf16_tp2_dp2", tmp_path / "atoms")
    convert(FIXTURES / "z1_bf16_tp2_dp2", tmp_path / "view", link=True)
    for folder in ("atoms", "view"):
        assert alarms(verify(tmp_path / folder, "deep")) == []


def test_wrong_slice_mappings_are_noted() -> None:
    report = verify(FIXTURES / "z2_bf16_roundrobin_dp3", "quick")
    assert [finding.severity for finding in report.findings if finding.check == "slice-mappings"] == ["note"]


@pytest.mark.parametrize(
    "name, file",
    [
        ("z1_bf16_dp2", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("z1_bf16_tp2_dp2", "mp_rank_01_model_states.pt"),
        ("z3_fp32_dp3", "zero_pp_rank_1_mp_rank_00_model_states.pt"),
        ("pp2_tp2_z1_bf16_untied_dp1", "layer_02-model_01-model_states.pt"),
    ],
)
def test_a_missing_rank_file_is_named(copy, name: str, file: str) -> None:
    folder = copy(name)
    (folder / STEP / file).unlink()
    report = verify(folder, "quick")
    assert f"{STEP}/{file}" in {finding.file for finding in errors(report, "grid")}, alarms(report)
    assert [finding.check for finding in report.findings if finding.severity == "error"] == ["grid"]
    assert report.exit_code == 1


def test_missing_optimizer_files_of_all_ranks_are_reported(copy) -> None:
    folder = copy("z1_bf16_dp2")
    for path in (folder / STEP).glob("*optim_states.pt"):
        path.unlink()
    report = verify(folder, "quick")
    assert report.exit_code == 1
    assert errors(report, "grid"), alarms(report)


def test_a_missing_only_optimizer_file_is_reported(copy) -> None:
    folder = copy("pp2_tp2_z1_bf16_untied_dp1")
    for path in (folder / STEP).glob("*optim_states.pt"):
        path.unlink()
    report = verify(folder, "quick")
    (finding,) = errors(report, "grid")
    assert "ZeRO stage 1" in finding.message
    assert report.exit_code == 1


def test_a_missing_file_of_all_megatron_ranks_is_reported(corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(corpus / "megatron/moegg_ep2_torchdist", tmp_path / "m")
    folder = tmp_path / "m/iter_0000002"
    folder.chmod(0o755)
    (folder / "common.pt").unlink()
    (finding,) = errors(verify(tmp_path / "m", "quick"), "grid")
    assert finding.file == "common.pt"


def test_missing_files_of_megatrons_distributed_optimizer_are_reported(corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(corpus / "megatron/llama_tp2_dp2_do_torch", tmp_path / "m")
    for file in (tmp_path / "m").rglob("distrib_optim.pt"):
        file.parent.chmod(0o755)
        file.unlink()
    report = verify(tmp_path / "m", "quick")
    (finding,) = errors(report, "grid")
    assert "distrib_optim.pt" in finding.message
    assert report.exit_code == 1
    assert "optimizer-missing" in {note.id for note in ucp.open(tmp_path / "m").index.notes}


def test_a_stray_file_is_a_warning(copy) -> None:
    folder = copy("z1_bf16_dp2")
    shutil.copy(folder / STEP / "mp_rank_00_model_states.pt", folder / STEP / "mp_rank_00_model_states.old.pt")
    report = verify(folder, "quick")
    (finding,) = (finding for finding in report.findings if finding.check == "grid")
    assert (finding.severity, finding.file) == ("warning", f"{STEP}/mp_rank_00_model_states.old.pt")
    assert report.exit_code == 0


@pytest.mark.parametrize(
    "name, other, left",
    [
        ("z3_fp32_dp3", "z1_bf16_tp2_dp2", "mp_rank_01_model_states.pt"),
        ("z1_bf16_dp2", "z3_fp32_dp3", "zero_pp_rank_0_mp_rank_00_model_states.pt"),
        ("z0_bf16_dp2", "z3_fp32_dp3", "zero_pp_rank_0_mp_rank_00_model_states.pt"),
    ],
)
def test_a_model_file_of_another_stage_is_a_warning_and_not_read(copy, name: str, other: str, left: str) -> None:
    folder = copy(name)
    sound = ucp.open(folder).index
    shutil.copy(FIXTURES / other / STEP / left, folder / STEP / left)
    report = verify(folder, "deep")
    (alarm,) = (finding for finding in report.findings if finding.severity != "note")
    assert (alarm.check, alarm.severity, alarm.file) == ("grid", "warning", f"{STEP}/{left}")
    index = ucp.open(folder).index
    assert (index.mesh, list(index.extras.trees)) == (sound.mesh, list(sound.extras.trees))
    assert ucp.diff(FIXTURES / name, folder).identical
    (note,) = (note for note in index.notes if note not in sound.notes)
    assert (note.id, left in note.text) == ("file-foreign", True)
    (folder / STEP / left).unlink()
    assert ucp.open(folder).index.notes == sound.notes


def test_a_rank_of_another_world_size_is_inconsistent(copy) -> None:
    folder = copy("z1_bf16_dp2")
    like = folder / STEP / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(like, folder / STEP / "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt")
    report = verify(folder, "quick")
    assert report.exit_code == 1
    assert errors(report, "readable")


@pytest.mark.parametrize("name", ["z1_bf16_dp2", "z1_fp16_dp2", "z1_bf16opt_dp3"])
def test_swapped_ranks_are_found(copy, name: str) -> None:
    folder = copy(name)
    first, second = sorted((folder / STEP).glob("*zero_pp_rank_[01]_*optim_states.pt"))
    first.rename(folder / "aside")
    second.rename(first)
    (folder / "aside").rename(second)
    report = verify(folder)
    assert report.exit_code == 1
    found = errors(report, "grid")
    assert [finding.rank.dp for finding in found] == [0, 1], alarms(report)
    assert all(other.name in finding.message for other, finding in zip((second, first), found, strict=True))


def test_a_changed_replica_is_found(copy) -> None:
    folder = copy("z1_bf16_tp2_dp2")
    sound = verify_index(folder)
    atom = next(a for a in sound.atoms() if a.replicas and a.kind == "exp_avg" and a.numel > 4)
    fragment = atom.replicas[0][0]
    flip(folder / fragment.file, fragment.offset + 3)
    report = verify(folder)
    (finding,) = errors(report, "replicas")
    assert (finding.parameter, finding.kind, finding.file) == (atom.name, "exp_avg", fragment.file)
    assert finding.rank == fragment.rank
    assert errors(verify(folder, "deep"), "zip-crc")
    assert verify(folder, "deep").exit_code == 4


def test_a_flipped_bit_of_a_moment_is_found_by_its_crc_alone(copy) -> None:
    folder = copy("z3_fp32_dp3")
    atom = next(a for a in verify_index(folder).atoms() if a.kind == "exp_avg_sq" and len(a.fragments) > 1)
    fragment = atom.fragments[1]
    flip(folder / fragment.file, fragment.offset)
    assert verify(folder).exit_code == 0
    report = verify(folder, "deep")
    (finding,) = errors(report, "zip-crc")
    assert finding.file == fragment.file
    assert finding.byte_range is not None
    assert finding.byte_range[0] <= fragment.offset < finding.byte_range[1]
    assert atom.name in finding.message
    assert report.exit_code == 4


@pytest.mark.parametrize("cut", [1, 100, 5000])
def test_a_truncated_file_is_an_integrity_error(copy, cut: int) -> None:
    folder = copy("z1_bf16_dp2")
    path = folder / STEP / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    os.truncate(path, path.stat().st_size - cut)
    report = verify(folder, "quick")
    assert report.exit_code == 4
    assert [finding.check for finding in report.findings] == ["readable"]
    assert path.name in report.findings[0].message


def test_only_files_of_the_requested_checkpoint_are_diagnosed(copy, tmp_path: Path) -> None:
    """Neither other steps of a save folder, nor the neighbours of a path that does not exist or is not a checkpoint."""
    folder = copy("z1_bf16_dp2")
    shutil.copytree(folder / STEP, folder / "global_step1")
    for step in (STEP, "global_step1"):
        path = folder / step / "mp_rank_00_model_states.pt"
        os.truncate(path, path.stat().st_size - 1)
    report = verify(folder, "deep")
    assert [finding.check for finding in report.findings] == ["readable"]
    assert STEP in report.findings[0].message
    ranks = (folder / STEP).glob("bf16_zero_*")
    assert report.bytes_read == sum(path.stat().st_size for path in ranks)
    for path in (folder / "nowhere", folder / "latest", folder.parent / "nowhere"):
        report = verify(path, "deep")
        assert [finding.check for finding in report.findings] == ["readable"]
        assert report.bytes_read == 0
    (tmp_path / "plain").mkdir()
    shutil.copy(folder / STEP / "mp_rank_00_model_states.pt", tmp_path / "plain/weights.pt")
    assert verify(tmp_path / "plain", "deep").bytes_read == 0


def test_the_report_lists_the_root_and_the_checks_that_ran(copy, tmp_path: Path) -> None:
    """A report has the root of the files in its findings, and only the checks that ran."""
    folder = copy("z1_bf16_dp2")
    (tmp_path / "out").mkdir()
    folder = folder.rename(tmp_path / "out/checkpoint-3")
    lost = folder / STEP / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    stray = lost.rename(folder / STEP / "stray.pt")
    report = verify(tmp_path / "out")
    told = report.to_json()
    (hole,) = (finding for finding in told["findings"] if finding["check"] == "grid")
    assert Path(told["root"], hole["file"]) == lost
    assert "coverage" not in report.checks
    assert f"file={lost}," in render(report, "github")
    assert lost.as_uri() in render(report, "sarif")
    assert "the checkpoint could not be opened" in render(report, "junit")
    shutil.copy(stray, lost)
    told = verify(tmp_path / "out").to_json()
    assert Path(told["root"], told["findings"][0]["file"]) == stray
    assert "coverage" in [check["id"] for check in told["checks"]]


def test_a_path_without_status_is_an_io_error(copy, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy("z1_bf16_dp2") / STEP

    def refused(path: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refused)
    report = verify(folder)
    assert report.exit_code == 5
    assert [finding.message for finding in report.findings] == [f"{folder}: cannot be read: Permission denied"]


def test_a_damaged_pickle_is_reported_as_damaged_bytes(copy) -> None:
    """Whatever a flipped bit turns the pickle into, the CRC shows the damage."""
    folder = copy("z1_bf16_dp2")
    path = folder / STEP / "mp_rank_00_model_states.pt"
    archive = TorchFile(path)
    (entry,) = (entry for name, entry in archive.entries.items() if name.endswith("/data.pkl"))
    start = archive.payload(entry)
    whole = path.read_bytes()
    unreadable = 0
    for offset in range(0, entry.size, max(1, entry.size // 20)):
        path.write_bytes(whole)
        flip(path, start + offset, 4)
        report = verify(folder, "deep")
        assert report.exit_code == 4, (offset, alarms(report))
        unreadable += bool(errors(report, "readable"))
        quick = verify(folder, "quick")
        assert quick.exit_code == (4 if errors(report, "readable") else 0)
        assert not quick.findings or quick.findings[0].check == "zip-crc"
        assert any("data.pkl" in finding.message for finding in errors(report, "zip-crc"))
    assert unreadable  # at any level the small members of such a file are looked at


def test_files_of_two_steps_are_inconsistent(copy) -> None:
    """The optimizer file of one rank is three steps ahead."""
    folder = copy("z1_bf16_dp2")
    path = folder / STEP / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    saved = torch.load(path, weights_only=False)
    for state in saved["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        state["step"] += 3
    torch.save(saved, path)
    report = verify(folder)
    assert report.exit_code == 1
    assert any("step" in finding.message and path.name in finding.message for finding in report.findings), alarms(
        report
    )


def test_a_dropped_state_is_inconsistent(copy) -> None:
    folder = copy("z1_bf16_dp2")
    path = folder / STEP / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    saved = torch.load(path, weights_only=False)
    for state in saved["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        del state["exp_avg"]
    torch.save(saved, path)
    report = verify(folder, "quick")
    assert report.exit_code == 1
    assert any("exp_avg" in finding.message for finding in report.findings)


def test_a_pickle_that_runs_something_is_unsafe(copy, tmp_path: Path) -> None:
    folder = copy("z1_bf16_dp2")
    path = folder / STEP / "mp_rank_00_model_states.pt"

    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, (f"touch {tmp_path}/sprung",)

    buffer = io.BytesIO()
    torch.save({"module": {}, "trap": Trap()}, buffer, pickle_module=pickle)
    path.write_bytes(buffer.getvalue())
    assert zipfile.is_zipfile(path)
    report = verify(folder, "deep")
    assert not (tmp_path / "sprung").exists()
    assert report.exit_code == 6
    assert errors(report, "readable")


def test_a_folder_that_is_not_a_checkpoint(tmp_path: Path) -> None:
    report = verify(tmp_path)
    assert [finding.check for finding in report.findings] == ["readable"]
    assert report.exit_code == 3


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    report = verify(tmp_path / "nothing", "deep")
    assert report.exit_code == 5
    assert "no such file" in report.findings[0].message


def verify_index(folder: Path):
    """The index of an intact checkpoint, to find bytes that are worth damaging."""
    from ucp.formats.registry import open_checkpoint

    return open_checkpoint(folder, ReadOptions())


@pytest.mark.parametrize("name", ["z1_bf16_tp2_dp2", "z3_fp32_dp3", "z1_bf16_moe4_ep2_dp4"])
def test_outlines_used_by_quick_agree_with_the_fragments(name: str) -> None:
    covers = [cover for atom in verify_index(FIXTURES / name).atoms() for cover in (atom.fragments, *atom.replicas)]
    outlined = 0
    for cover in covers:
        outline = cover.outline(set()) if isinstance(cover, RankFragments) else None
        if outline is not None:
            uncut = list(outline)
            outlined += 1
            assert sum(whole.region.numel for whole in uncut) == sum(fragment.region.numel for fragment in cover)
            assert {whole.dtype for whole in uncut} == {fragment.dtype for fragment in cover}
            boxes = {whole.region.boxes for whole in uncut}
            assert {fragment.region.boxes for fragment in cover if fragment.region.numel} <= boxes
    assert outlined > 50


def test_quick_locates_every_tensor(copy) -> None:
    """A rank's file with the right pickle, but without the storages that it refers to."""
    folder = copy("z3_fp32_dp3")
    path = folder / STEP / "zero_pp_rank_2_mp_rank_00_optim_states.pt"
    with zipfile.ZipFile(path) as sound:
        members = {name: sound.read(name) for name in sound.namelist()}
    largest = max(members, key=lambda name: len(members[name]) if "/data/" in name else 0)
    with zipfile.ZipFile(path, "w") as short:
        for name, data in members.items():
            short.writestr(name, data[:-4] if name == largest else data)
    report = verify(folder, "quick")
    assert report.exit_code == 4
    assert any(path.name in finding.message for finding in errors(report, "readable")), alarms(report)
