"""Two checkpoints compared, whatever their formats and layouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.compare.edited_atoms import atoms, index, peek, poke
from ucp import settings
from ucp.compare.comparison import CompareOptions, Comparison, compare
from ucp.compare.elements import Tolerance
from ucp.core.checkpoint import Checkpoint
from ucp.errors import IntegrityError, UsageError


def diff(a: Path | Checkpoint, b: Path | Checkpoint, **options: object) -> Comparison:
    a, b = (side if isinstance(side, Checkpoint) else index(side) for side in (a, b))
    return compare(a, b, CompareOptions(**options))  # type: ignore[arg-type]


@pytest.fixture
def source(project: Path) -> Path:
    return project / "fixtures" / "z1_bf16_tp2_dp2"


@pytest.fixture
def copy(source: Path, tmp_path: Path) -> Path:
    return atoms(source, tmp_path / "atoms")


@pytest.mark.parametrize("to", ["atoms", "deepspeed", "dcp"])
@pytest.mark.parametrize(
    "fixture", ["z1_bf16_tp2_dp2", "z1_bf16_moe4_ep2_dp4", "pp2_z1_bf16_tied_dp2", "z3_fp32_dp3", "z0_fp32_dp2"]
)
def test_a_conversion_is_identical(project: Path, tmp_path: Path, fixture: str, to: str) -> None:
    source = project / "fixtures" / fixture
    found = diff(source, atoms(source, tmp_path / "out", to=to))
    assert found.identical, found.to_json()
    assert found.compared >= sum(1 for _ in index(source).atoms())


def test_another_layout_is_identical(source: Path, tmp_path: Path) -> None:
    resharded = atoms(source, tmp_path / "out", to="deepspeed", tp=1, dp=3, zero=3)
    found = diff(source, resharded)
    assert found.identical, found.to_json()
    assert any("master only" in note.text for note in found.notes), "ZeRO-3 stores no weights"
    strict = diff(source, resharded, strict=True)
    assert not strict.same
    assert {kind for _, kind in strict.only_a} == {"weight"}
    assert not strict.atoms


def test_tiny_slabs_find_the_same(source: Path, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poke(copy, "embed.weight", "exp_avg", (40, 3), 7.5)
    poke(copy, "embed.weight", "exp_avg", (41, 0), -9.0)
    whole = diff(source, copy).to_json()
    monkeypatch.setattr(settings, "SLAB_BYTES", 64)
    monkeypatch.setattr(settings, "COPY_TASK_BYTES", 128)
    assert diff(source, copy).to_json() == whole
    (atom,) = whole["differences"]
    assert (atom["first"], atom["differing"]) == ([40, 3], 2)


def test_one_changed_element_is_named(source: Path, copy: Path) -> None:
    before = peek(copy, "blocks.0.attn.proj.weight", "master")[3, 5]
    poke(copy, "blocks.0.attn.proj.weight", "master", (3, 5), np.nextafter(before, np.float32(9)))
    found = diff(source, copy)
    (atom,) = found.atoms
    assert (atom.name, atom.kind, atom.differing, atom.outside) == ("blocks.0.attn.proj.weight", "master", 1, 1)
    assert (atom.first, atom.worst, atom.max_ulp) == ((3, 5), (3, 5), 1)
    assert found.exit_code == 1
    within = diff(source, copy, tolerance=Tolerance(ulp=1))
    assert within.same
    assert not within.identical
    assert [atom.name for atom in within.within] == ["blocks.0.attn.proj.weight"]
    assert diff(source, copy, tolerance=Tolerance(relative=1e-6)).same
    assert diff(source, copy, only="weights").identical
    assert diff(source, copy, exclude=("blocks.0.attn.*",)).identical
    assert not diff(source, copy, include=("blocks.0.attn.proj.*",)).same


@pytest.mark.parametrize("zero", [1, 3])
def test_weights_in_the_precision_of_masters(source: Path, tmp_path: Path, zero: int) -> None:
    job = atoms(source, tmp_path / "job", to="deepspeed", zero=zero)
    weights = atoms(source, tmp_path / "weights", to="safetensors")
    found = diff(job, weights)
    assert {kind for _, kind in found.only_a} == {"exp_avg", "exp_avg_sq"}
    assert "B has no optimizer states; --only weights compares just the weights" in [n.text for n in found.notes]
    for a, b in ((job, weights), (weights, job)):
        assert diff(a, b, only="weights").identical
    assert diff(job, job, only="weights").compared == len(index(job).parameters), "masters of both are not looked at"
    before = peek(weights, "pos.weight", "weight")[0, 0]
    poke(weights, "pos.weight", "weight", (0, 0), np.nextafter(before, np.float32(9)))
    assert [(atom.name, atom.kind) for atom in diff(job, weights, only="weights").atoms] == [("pos.weight", "master")]


def test_missing_states_and_parameters_on_either_side(source: Path, tmp_path: Path) -> None:
    few = atoms(source, tmp_path / "few", only="weights", exclude=["pos.weight"])
    found = diff(source, few)
    assert ("pos.weight", "weight") in found.only_a
    assert ("embed.weight", "exp_avg") in found.only_a
    assert ("embed.weight", "weight") not in found.only_a
    assert found.only_b == []
    assert diff(few, source).only_b == found.only_a
    assert not found.same


def test_other_shapes_are_a_difference(source: Path, project: Path) -> None:
    found = diff(source, project / "fixtures" / "z1_bf16_dp2", include=("blocks.0.mlp.up.bias",))
    assert {(atom.shapes, atom.differing) for atom in found.atoms} == {(((10,), (26,)), None)}


def test_other_dtypes_of_equal_numbers(source: Path, tmp_path: Path) -> None:
    wide = atoms(source, tmp_path / "wide", dtype="fp32", only="weights")
    narrow = atoms(source, tmp_path / "narrow", only="weights")
    found = diff(narrow, wide)
    assert {atom.dtypes for atom in found.atoms} == {("bfloat16", "float32")}
    assert {atom.max_ulp for atom in found.atoms} == {0}, "the weight is the rounded master"
    assert diff(narrow, wide, tolerance=Tolerance(ulp=1)).same
    assert not diff(narrow, wide, tolerance=Tolerance(ulp=1), strict=True).same


def test_tied_parameters_are_found_under_any_name(source: Path, copy: Path) -> None:
    one, other = index(source), index(copy)
    tied = other.parameters.pop("embed.weight")
    assert tied.aliases == ("head.weight",)
    other.parameters["head.weight"] = replace(tied, name="head.weight", aliases=("embed.weight",))
    assert diff(one, other).identical
    untied = index(copy)
    untied.parameters["head.weight"] = replace(tied, name="head.weight", aliases=())
    untied.parameters["embed.weight"] = replace(tied, aliases=())
    found = diff(one, untied)
    assert found.identical
    assert any(note.id == "tying" for note in found.notes)
    assert not diff(one, untied, strict=True).same
    poke(copy, "embed.weight", "master", (0, 0), 5.0)
    assert {atom.kind for atom in diff(one, untied).atoms} == {"master"}


def test_settings(source: Path, copy: Path) -> None:
    one, other = index(source), index(copy)
    assert one.step is not None
    other.step = one.step + 1
    other.groups[0].hyper["lr"] = 0.5
    other.groups[0].hyper["betas"] = list(other.groups[0].hyper["betas"])  # a list is as good as a tuple
    other.groups[1].hyper["novelty"] = True
    for checkpoint, parted in ((one, True), (other, False)):  # of the layout: experts on ranks of their own, or not
        checkpoint.groups[0].hyper["is_expert_parallel"] = parted
    found = diff(one, other)
    assert [(s.key, s.b) for s in found.settings] == [("step", one.step + 1), ("lr", 0.5)]
    assert set(found.settings[1].names) == set(one.groups[0].names)
    assert any("novelty" in note.text for note in found.notes)
    assert "novelty" in [s.key for s in diff(one, other, strict=True).settings]
    # Groups in another order are the same groups.
    again = index(copy)
    again.groups.reverse()
    for parameter in again.parameters.values():
        if parameter.group is not None:
            parameter.group = 1 - parameter.group
    assert diff(one, again).identical


def test_patterns_that_match_nothing_are_refused(source: Path, copy: Path) -> None:
    with pytest.raises(UsageError, match=r"nothing\.\*"):
        diff(source, copy, include=("nothing.*",))
    assert diff(source, copy, include=("head.weight",)).compared == 5, "an alias is a name"


def test_a_truncated_file_is_an_error_not_a_difference(source: Path, copy: Path) -> None:
    one, other = index(source), index(copy)
    victim = copy / other.parameters["embed.weight"].atoms["master"].fragments[0].file
    victim.write_bytes(victim.read_bytes()[:5000])
    with pytest.raises(IntegrityError, match=victim.name):
        compare(one, other, jobs=2)


def test_updates(source: Path, copy: Path) -> None:
    name = "blocks.1.mlp.up.weight"
    before = peek(copy, name, "master")
    for i in range(3):
        poke(copy, name, "master", (i, 0), float(before[i, 0]) + 1.0)
    found = diff(source, copy, updates=True).updates
    assert found is not None
    moved = {update.name: update for update in found.parameters}
    assert moved[name].change == pytest.approx(3**0.5, rel=1e-5)
    assert moved[name].norm == pytest.approx(float(np.linalg.norm(before.astype(np.float64))), rel=1e-9)
    assert moved[name].relative == pytest.approx(moved[name].change / moved[name].norm)
    assert {update.name for update in found.parameters if update.change} == {name}
    layers = {update.name: update for update in found.layers}
    assert list(layers)[:3] == ["scale", "embed", "pos"]
    assert layers["blocks.1"].change == pytest.approx(moved[name].change)
    in_layer = [update.norm for update in found.parameters if update.name.startswith("blocks.1.")]
    assert layers["blocks.1"].norm == pytest.approx(float(np.linalg.norm(in_layer)))
    assert layers["blocks.0"].relative == 0
    assert found.total.change == pytest.approx(moved[name].change)
