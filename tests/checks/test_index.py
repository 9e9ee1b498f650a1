"""Checks of the index alone: coverage, states, shapes, dtypes, notes. Each finds its defect."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.checks.expected_findings import only
from tests.checks.sharded_checkpoint import make
from ucp import settings
from ucp.checks.runner import verify
from ucp.core.checkpoint import Checkpoint, Note
from ucp.core.dtypes import BFLOAT16
from ucp.core.region import Region
from ucp.errors import UsageError


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return make(tmp_path / "made")


@pytest.mark.parametrize("level", ["quick", "default", "deep"])
def test_a_valid_checkpoint_has_no_findings(checkpoint: Checkpoint, level: str) -> None:
    report = verify(checkpoint, level)
    assert report.findings == []
    assert report.exit_code == 0
    assert (report.parameters, report.atoms) == (2, 10)
    assert (report.bytes_read > 0) is (level != "quick")


def test_a_gap_names_box_and_neighbour(checkpoint: Checkpoint) -> None:
    atoms = checkpoint.parameters["layer.weight"].atoms
    first, _, *rest = atoms["exp_avg"].fragments
    atoms["exp_avg"] = replace(atoms["exp_avg"], fragments=(first, *rest))
    finding = only(verify(checkpoint, "quick"), "coverage")
    assert (finding.parameter, finding.kind, finding.severity) == ("layer.weight", "exp_avg", "error")
    assert "7 of 24 elements are stored nowhere: [2:3, 1:2], [3:6, 0:2]" in finding.message
    assert finding.file == "layer.weight.exp_avg.tp0.0"


def test_an_overlap_names_both_owners(checkpoint: Checkpoint) -> None:
    atoms = checkpoint.parameters["norm.weight"].atoms
    first, second = atoms["master"].fragments
    wider = second._replace(region=Region(second.region.boxes, second.region.start - 1, second.region.stop))
    atoms["master"] = replace(atoms["master"], fragments=(first, wider))
    finding = only(verify(checkpoint, "quick"), "coverage")
    assert "[3:4] is stored more than once" in finding.message
    assert first.file in finding.message
    assert second.file in finding.message
    assert verify(checkpoint, "quick").exit_code == 1


def test_a_copy_that_overlaps_itself_is_found(checkpoint: Checkpoint) -> None:
    atoms = checkpoint.parameters["norm.weight"].atoms
    (cover,) = atoms["master"].replicas
    atoms["master"] = replace(atoms["master"], replicas=((*cover, cover[0]),))
    assert "stored more than once" in only(verify(checkpoint, "quick"), "coverage").message


def test_a_partial_copy_is_not_a_gap(checkpoint: Checkpoint) -> None:
    atoms = checkpoint.parameters["norm.weight"].atoms
    (cover,) = atoms["master"].replicas
    atoms["master"] = replace(atoms["master"], replicas=(cover[1:],))
    assert verify(checkpoint, "default").findings == []


def test_a_missing_state_is_named(checkpoint: Checkpoint) -> None:
    del checkpoint.parameters["norm.weight"].atoms["exp_avg"]
    finding = only(verify(checkpoint, "quick"), "states")
    assert (finding.severity, finding.parameter, finding.kind) == ("error", "norm.weight", "exp_avg")


def test_states_of_vectors_and_of_matrices(checkpoint: Checkpoint) -> None:
    """Adafactor keeps a variance of the one, rows and columns of it of the other: neither lacks anything."""
    for parameter in checkpoint.parameters.values():
        second = parameter.atoms.pop("exp_avg_sq")
        parameter.atoms["variance" if len(parameter.shape) < 2 else "row_var"] = second
    assert verify(checkpoint, "quick").findings == []


def test_without_zero_a_missing_state_is_a_warning(checkpoint: Checkpoint) -> None:
    del checkpoint.parameters["norm.weight"].atoms["exp_avg"]
    report = verify(replace(checkpoint, mesh=replace(checkpoint.mesh, zero=0)), "quick")
    assert only(report, "states").severity == "warning"
    assert report.exit_code == 0


def test_a_state_that_a_whole_group_lacks_is_named(checkpoint: Checkpoint) -> None:
    checkpoint.parameters["norm.weight"].group = 1
    checkpoint.groups.append(checkpoint.groups[0])
    assert verify(checkpoint, "quick").findings == []
    del checkpoint.parameters["norm.weight"].atoms["exp_avg"]
    finding = only(verify(checkpoint, "quick"), "states")
    assert "group 1 has exp_avg, which those of group 0 have" in finding.message
    del checkpoint.parameters["norm.weight"].atoms["exp_avg_sq"]
    assert "exp_avg, exp_avg_sq" in only(verify(checkpoint, "quick"), "states").message


def test_a_state_that_one_rank_has_no_copy_of_is_named(checkpoint: Checkpoint) -> None:
    atoms = checkpoint.parameters["norm.weight"].atoms
    atoms["exp_avg_sq"] = replace(atoms["exp_avg_sq"], replicas=())
    finding = only(verify(checkpoint, "quick"), "states")
    assert "2 copies of its master, 1 of its exp_avg_sq, but not on pp 0 tp 1 dp 0" in finding.message
    assert (finding.parameter, finding.kind, finding.severity) == ("norm.weight", "exp_avg_sq", "error")
    atoms["exp_avg_sq"] = replace(atoms["exp_avg_sq"], fragments=atoms["master"].replicas[0])
    assert "but not on pp 0 tp 0 dp 0" in only(verify(checkpoint, "quick"), "states").message


def test_ranks_that_count_as_one_each_have_a_copy(checkpoint: Checkpoint) -> None:
    """Parameters that are not experts have the same rank on all expert-parallel ranks."""
    atoms = checkpoint.parameters["norm.weight"].atoms
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        covers = [tuple(f._replace(rank=f.rank._replace(tp=0)) for f in cover) for cover in atoms[kind].replicas]
        atoms[kind] = replace(atoms[kind], replicas=tuple(covers))
    assert verify(checkpoint, "quick").findings == []
    lost = atoms["exp_avg"].replicas[0]
    atoms["exp_avg"] = replace(atoms["exp_avg"], replicas=())
    finding = only(verify(checkpoint, "quick"), "states")
    assert (finding.kind, finding.rank) == ("exp_avg", lost[0].rank)


def test_groups_with_states_of_their_own_lack_none(checkpoint: Checkpoint) -> None:
    checkpoint.parameters["norm.weight"].group = 1
    atoms = checkpoint.parameters["norm.weight"].atoms
    atoms["momentum_buffer"] = replace(atoms.pop("exp_avg"), kind="momentum_buffer")
    del atoms["exp_avg_sq"]
    assert verify(checkpoint, "quick").findings == []


@pytest.mark.parametrize("kind", ["exp_avg", "exp_avg_sq"])
def test_an_optimizer_that_cannot_do_without_a_moment(checkpoint: Checkpoint, kind: str) -> None:
    for parameter in checkpoint.parameters.values():
        del parameter.atoms[kind]
    assert verify(checkpoint, "quick").findings == []  # the optimizer is unknown
    checkpoint.groups[0].hyper.update(betas=(0.9, 0.95), eps=1e-8)
    assert f"has {kind}, which its optimizer keeps" in only(verify(checkpoint, "quick"), "states").message


def test_frozen_parameters_need_no_states(checkpoint: Checkpoint) -> None:
    parameter = checkpoint.parameters["norm.weight"]
    parameter.role = "frozen"
    parameter.atoms = {"weight": parameter.atoms["weight"]}
    assert verify(checkpoint).findings == []


def test_a_master_of_another_shape_is_found(checkpoint: Checkpoint) -> None:
    checkpoint.parameters["layer.weight"].shape = (4, 6)
    findings = verify(checkpoint, "quick").findings
    assert [(f.check, f.kind) for f in findings if f.severity == "error"] == [
        ("shapes", "master"),
        ("shapes", "weight"),
    ]
    assert "[4, 6]" in findings[0].message
    assert "[6, 4]" in findings[0].message


def test_one_rank_in_another_dtype_is_found(checkpoint: Checkpoint) -> None:
    atoms = checkpoint.parameters["layer.weight"].atoms
    first, *rest = atoms["exp_avg"].fragments
    atoms["exp_avg"] = replace(atoms["exp_avg"], fragments=(first, rest[0]._replace(dtype=BFLOAT16), *rest[1:]))
    finding = only(verify(checkpoint, "quick"), "dtypes")
    assert "bfloat16" in finding.message
    assert finding.rank == rest[0].rank


def test_one_parameter_in_another_dtype_is_a_warning(checkpoint: Checkpoint) -> None:
    atoms = checkpoint.parameters["norm.weight"].atoms
    lower = replace(atoms["weight"], kind="exp_avg")
    atoms["exp_avg"] = lower
    finding = only(verify(checkpoint, "quick"), "dtypes")
    assert finding.severity == "warning"


def test_notes_of_the_reader_are_findings(checkpoint: Checkpoint) -> None:
    checkpoint.notes += [Note("slice-mappings-wrong", "38 of 41 mappings are wrong"), Note("rule-inferred", "a: split")]
    report = verify(checkpoint, "quick")
    assert [(f.check, f.severity) for f in report.findings] == [("slice-mappings", "note"), ("notes", "note")]
    assert report.exit_code == 0


def test_an_unknown_level_is_a_mistake_of_the_caller(checkpoint: Checkpoint) -> None:
    with pytest.raises(UsageError, match="quick, default, deep"):
        verify(checkpoint, "thorough")


def test_quick_samples_very_many_fragments_and_notes_it(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "QUICK_FRAGMENTS", 10)
    for parameter in checkpoint.parameters.values():
        for kind, atom in parameter.atoms.items():
            parameter.atoms[kind] = replace(atom, fragments=atom.fragments[1:])
    found = verify(checkpoint, "quick").findings
    assert 0 < len([finding for finding in found if finding.severity == "error"]) < 10
    assert "one atom in 3 was checked" in found[-1].message
    assert len([f for f in verify(checkpoint, "default").findings if f.check == "coverage"]) == 10
