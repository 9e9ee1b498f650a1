"""Extras are compared by path, across formats, if both sides have them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import ucp
from tests.compare.edited_atoms import index
from tests.formats.megatron import legacy_model
from ucp.cli.main import cli
from ucp.compare.comparison import CompareOptions, compare
from ucp.core.checkpoint import Checkpoint

SCHEDULE = {"max_lr": 0.1, "num_steps": 28, "lr_decay_style": "cosine"}


def save(root: Path, change: Callable[[dict[str, Any]], Any] = dict.copy) -> Path:
    """A Megatron job of two stages with a schedule, random states and a note; every file is changed alike."""
    import torch

    trees = legacy_model.all_ranks(1, 2)
    for number, tree in enumerate(trees.values()):
        tree["opt_param_scheduler"] = dict(SCHEDULE)
        tree["rng_state"] = [
            {"random_rng_state": (3, tuple(range(50)), None), "torch_rng_state": torch.arange(9 + number)}
        ]
        tree["notes"] = {"weather": ["rain", {"since": 3}]}
        change(tree)
    return legacy_model.save(root, trees)


def paths(a: Path | Checkpoint, b: Path | Checkpoint, **options: Any) -> dict[str, tuple[Any, Any]]:
    one, other = (side if isinstance(side, Checkpoint) else index(side) for side in (a, b))
    found = compare(one, other, CompareOptions(**options))
    assert not found.atoms
    return {extra.path: (extra.a, extra.b) for extra in found.counted_extras}


@pytest.mark.parametrize("to", ["megatron", "torch-dist", "atoms"])
def test_a_conversion_keeps_the_extras(tmp_path: Path, to: str) -> None:
    source = save(tmp_path / "source")
    ucp.convert(source, tmp_path / "out", to=to)
    found = ucp.diff(source, tmp_path / "out")
    assert found.same, found.to_json()
    assert not [extra for extra in found.extras if extra.topic in ("lr_scheduler", "random", "notes", "iteration")]


@pytest.mark.parametrize(
    "change, path, values",
    [
        (lambda t: t["opt_param_scheduler"].update(num_steps=29), "lr_scheduler.num_steps", (28, 29)),
        (lambda t: t["notes"]["weather"][1].update(since=4), "notes.weather[1].since", (3, 4)),
        (lambda t: t["notes"]["weather"].__setitem__(0, "sun"), "notes.weather[0]", ("rain", "sun")),
    ],
    ids=["schedule", "deep in client state", "text"],
)
def test_a_difference_is_named_by_its_path(tmp_path: Path, change: Any, path: str, values: tuple[Any, Any]) -> None:
    """Also between the files of ranks and a sharded folder."""
    source = save(tmp_path / "source")
    ucp.convert(save(tmp_path / "other", change), tmp_path / "sharded", to="torch-dist")
    assert paths(source, tmp_path / "sharded") == {path: values}
    assert paths(source, tmp_path / "sharded", extras=False) == {}
    assert paths(source, tmp_path / "sharded", only="weights") == {}


def test_random_states_are_compared_rank_by_rank(tmp_path: Path) -> None:
    def change(tree: dict[str, Any]) -> None:
        if any(name.startswith("output_layer") for name in tree["model"]):
            tree["rng_state"][0]["torch_rng_state"][4] = 77

    source = save(tmp_path / "source")
    other = save(tmp_path / "other", change)
    ((path, (a, b)),) = paths(source, other).items()
    assert path == "random.tp 0 pp 1[0].torch_rng_state"
    assert a.startswith("tensor of int64 [10], xxh3 ")
    assert a != b
    ucp.convert(other, tmp_path / "one", to="megatron", pp=1)
    found = ucp.diff(source, tmp_path / "one")
    assert found.same
    assert "other-ranks" in {note.id for note in found.notes}


def test_one_sided_extras_and_launch_settings_do_not_count(tmp_path: Path) -> None:
    def change(tree: dict[str, Any]) -> None:
        tree["more"] = 1
        tree["args"].save = "elsewhere"

    source, other = save(tmp_path / "source"), save(tmp_path / "other", change)
    found = ucp.diff(source, other)
    assert found.same
    assert {(extra.path, extra.one_sided, extra.started) for extra in found.extras} == {
        ("more", True, False),
        ("args.save", True, True),
    }
    assert any(note.id == "extras-aside" and "args, more" in note.text for note in found.notes)
    assert set(paths(source, other, strict=True)) == {"more", "args.save"}


def test_the_command_shows_them(tmp_path: Path) -> None:
    source = save(tmp_path / "source")
    other = save(tmp_path / "other", lambda tree: tree["opt_param_scheduler"].update(num_steps=29))
    said = CliRunner().invoke(cli, ["diff", str(source), str(other)])
    assert said.exit_code == 1
    assert "lr_scheduler.num_steps  28  29" in said.output
    assert "DIFFERENT: 1 extra differing" in said.output
    assert CliRunner().invoke(cli, ["diff", str(source), str(other), "--no-extras"]).exit_code == 0
    told = json.loads(CliRunner().invoke(cli, ["diff", str(source), str(other), "--json"]).stdout)
    assert told["extras"] == [
        {"path": "lr_scheduler.num_steps", "a": 28, "b": 29, "one_sided": False, "started": False}
    ]
