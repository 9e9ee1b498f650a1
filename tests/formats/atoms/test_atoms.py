"""Atoms written and read back: same tensors, same extras; damage is noticed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

import ucp
from tests.engine.shards import Cut, values_of, write_shards
from ucp.containers.inert import InertOrderedDict, new_class
from ucp.core.checkpoint import Atom, Checkpoint, Extras, Fragment, Mesh, Note, Parameter, ParamGroup
from ucp.core.dtypes import BFLOAT16, FLOAT32, INT64, UINT8
from ucp.core.region import Region
from ucp.core.rules import Rule
from ucp.engine.plan import Plan
from ucp.errors import IntegrityError, NotUnderstoodError, UsageError
from ucp.formats.registry import ReadOptions, WriteOptions, make_writer, open_checkpoint
from ucp.read.atom_reader import read_array


@pytest.fixture
def source(tmp_path: Path) -> tuple[Checkpoint, dict[tuple[str, str], np.ndarray]]:
    """Three parameters over four ranks, with hostile names, and extras with a tensor."""
    root = tmp_path / "source"
    root.mkdir()
    cut = Cut(Rule("split", dim=1), 2, (300, 700))
    values, parameters = {}, {}
    for number, name in enumerate(["layer.0.weight", "Layer.0.weight", "../escape"]):
        atoms = {}
        for kind, dtype in (("weight", BFLOAT16), ("master", FLOAT32), ("exp_avg", FLOAT32)):
            values[name, kind] = values_of((6, 4), dtype, number)
            atom = write_shards(root, values[name, kind], dtype, cut, name=f"p{number}", kind=kind)
            atoms[kind] = Atom(name, kind, atom.shape, dtype, atom.fragments, atom.replicas)
        inline = Fragment(Region.all_of(()), "", 0, INT64, inline=(3).to_bytes(8, "little"))
        atoms["step"] = Atom(name, "step", (), INT64, (inline,))
        parameters[name] = Parameter(
            name,
            (6, 4),
            atoms=atoms,
            rule=cut.rule,
            rule_origin="test",
            group=0,
            aliases=(f"{name}.tied",),
            padded_shape=(8, 4),
        )
    (root / "rng").write_bytes(bytes(range(16)))
    (root / "config.json").write_text("{}")
    rng = Atom("rng:0", "extra", (16,), UINT8, (Fragment(Region.all_of((16,)), "rng", 0, UINT8),))
    namespace = new_class("argparse", "Namespace")()
    namespace.state = {"lr": 1e-3}
    extras = Extras(
        {
            "rank0": {"iteration": 3, "args": namespace, "rng": rng, "shared": InertOrderedDict({"a": (1, 2)})},
            "rank1": {"iteration": 3, "args": namespace, "rng": None, "shared": InertOrderedDict({"a": (1, 2)})},
        },
        {"config.json": "config.json"},
    )
    checkpoint = Checkpoint(
        "test",
        root,
        Mesh(tp=2, dp=3, zero=1),
        parameters,
        framework="Test 1.0",
        step=3,
        groups=[ParamGroup({"lr": 0.1, "betas": (0.9, 0.95), "eps": float("inf")}, list(parameters))],
        extras=extras,
        notes=[Note("n", "text")],
        sizes={p.name: p.stat().st_size for p in root.iterdir()},
        details={"dtype": "bfloat16"},
    )
    return checkpoint, values


def write(checkpoint: Checkpoint, path: Path, *, link: bool = False) -> Checkpoint:
    writer = make_writer("atoms", checkpoint, WriteOptions(link=link))
    Plan(checkpoint, writer, writer.target(), path).run(jobs=2)
    return open_checkpoint(path, ReadOptions())


@pytest.mark.parametrize("link", [False, True])
def test_a_round_trip_keeps_everything(source: tuple[Checkpoint, dict], tmp_path: Path, link: bool) -> None:
    checkpoint, values = source
    back = write(checkpoint, tmp_path / "atoms", link=link)
    assert list(back.parameters) == list(checkpoint.parameters)
    for name, parameter in back.parameters.items():
        original = checkpoint.parameters[name]
        for field in ("shape", "role", "rule", "rule_origin", "group", "aliases", "padded_shape", "stages", "expert"):
            assert getattr(parameter, field) == getattr(original, field)
        assert set(parameter.atoms) == {"weight", "master", "exp_avg", "step"}
        for kind in ("master", "exp_avg"):
            assert read_array(back.root, parameter.atoms[kind]).tobytes() == values[name, kind].tobytes()
        assert read_array(back.root, parameter.atoms["step"]) == 3
    assert (back.step, back.mesh, back.framework, back.notes) == (3, checkpoint.mesh, "Test 1.0", checkpoint.notes)
    assert back.groups == checkpoint.groups
    trees = back.extras.trees
    assert trees["rank1"]["shared"] == {"a": (1, 2)}
    assert trees["rank0"]["args"].state == {"lr": 1e-3}
    assert read_array(back.root, trees["rank0"]["rng"]).tobytes() == bytes(range(16))
    assert (back.root / back.extras.files["config.json"]).read_text() == "{}"


def test_atoms_of_atoms_are_the_same_atoms(source: tuple[Checkpoint, dict], tmp_path: Path) -> None:
    once = write(source[0], tmp_path / "once")
    linked = write(once, tmp_path / "linked", link=True)
    for origin, name in ((once, "twice"), (linked, "from-link")):
        write(origin, tmp_path / name)
        for folder in ("atoms", "extras"):
            for file in (tmp_path / "once" / folder).rglob("*"):
                if file.is_file():
                    copy = tmp_path / name / file.relative_to(tmp_path / "once")
                    assert copy.read_bytes() == file.read_bytes()


def test_files_are_plain_safetensors(source: tuple[Checkpoint, dict], tmp_path: Path) -> None:
    checkpoint, values = source
    write(checkpoint, tmp_path / "atoms")
    files = sorted(p.name for p in (tmp_path / "atoms" / "atoms").iterdir())
    assert files == ["%2E.%2Fescape.safetensors", "%4Cayer.0.weight.safetensors", "layer.0.weight.safetensors"]
    loaded = load_file(tmp_path / "atoms" / "atoms" / "layer.0.weight.safetensors")
    assert loaded["master"].numpy().tobytes() == values["layer.0.weight", "master"].tobytes()
    assert loaded["step"] == 3


def test_linked_atoms_copy_nothing(source: tuple[Checkpoint, dict], tmp_path: Path) -> None:
    write(source[0], tmp_path / "view", link=True)
    assert not (tmp_path / "view" / "atoms").exists()


def test_a_changed_source_of_linked_atoms_is_noticed(source: tuple[Checkpoint, dict], tmp_path: Path) -> None:
    checkpoint, _ = source
    write(checkpoint, tmp_path / "view", link=True)
    victim = checkpoint.root / "p0.master.0"
    victim.write_bytes(victim.read_bytes())
    os.utime(victim, ns=(1, 1))
    with pytest.raises(IntegrityError, match=r"p0\.master\.0: changed since"):
        open_checkpoint(tmp_path / "view", ReadOptions())
    victim.unlink()
    with pytest.raises(IntegrityError, match=r"p0\.master\.0"):
        open_checkpoint(tmp_path / "view", ReadOptions())


def test_a_changed_manifest_is_noticed(source: tuple[Checkpoint, dict], tmp_path: Path) -> None:
    write(source[0], tmp_path / "atoms")
    path = tmp_path / "atoms" / "ucp.json"
    content = json.loads(path.read_bytes())
    for change, error in (
        ({"step": 4}, IntegrityError),
        ({"version": 99}, NotUnderstoodError),
        ({"format": "other"}, NotUnderstoodError),
    ):
        path.write_text(json.dumps({**content, **change}))
        with pytest.raises(error):
            open_checkpoint(tmp_path / "atoms", ReadOptions())
    path.write_text("{")
    with pytest.raises(IntegrityError, match="not valid JSON"):
        open_checkpoint(tmp_path / "atoms", ReadOptions())


def test_opening_and_converting_from_python(source: tuple[Checkpoint, dict], tmp_path: Path) -> None:
    checkpoint, values = source
    write(checkpoint, tmp_path / "atoms")
    opened = ucp.open(tmp_path / "atoms")
    view = opened["layer.0.weight.tied"]
    assert view.name == "layer.0.weight"
    assert view.kinds == ["weight", "master", "exp_avg", "step"]
    assert np.array_equal(
        view.read("master", rows=slice(1, 3)), values["layer.0.weight", "master"][1:3], equal_nan=True
    )
    assert list(opened) == list(opened.parameters)
    with pytest.raises(UsageError, match="exp_avg_sq"):
        view.read("exp_avg_sq")
    ucp.convert(tmp_path / "atoms", tmp_path / "weights", only="weights", dtype="fp16", include=["layer*"])
    small = ucp.open(tmp_path / "weights")
    assert list(small) == ["layer.0.weight"]
    assert small["layer.0.weight"].kinds == ["weight"]
    with np.errstate(over="ignore"):
        expected = values["layer.0.weight", "master"].astype(np.float16)
    assert np.array_equal(small["layer.0.weight"].read("weight"), expected, equal_nan=True)
    ucp.convert(tmp_path / "atoms", tmp_path / "optimizer", only="optimizer", exclude=["layer*", "Layer*"])
    assert ucp.open(tmp_path / "optimizer")["../escape"].kinds == ["master", "exp_avg", "step"]
    with pytest.raises(UsageError, match="matches none"):
        ucp.convert(tmp_path / "atoms", tmp_path / "none", include=["nothing*"])
