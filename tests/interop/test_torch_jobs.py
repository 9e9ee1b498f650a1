"""`ucp.load_into` and `ucp.save` without DeepSpeed: DDP, FSDP2 on every kind of mesh, and between frameworks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import ucp
from tests.interop.deepspeed_jobs import assert_tiled, state, unequal
from tests.interop.spec import Spec
from tests.training.worlds import Worlds

pytestmark = [pytest.mark.slow, pytest.mark.interop]

TORCH = "tests.training.torch_ranks:"
RANKS = "tests.training.deepspeed_ranks:"
# Rows long enough to be read one by one; an odd vocabulary and a parameter of one element for uneven shards.
SPEC = Spec(dtype="fp32", frozen=("pos",), hidden=256, ffn=508, layers=1)
OTHER = replace(SPEC, seed=5, lr=0.3)
WORLD = {"ddp": 2, "fsdp": 2, "hsdp": 4, "fsdp+tp": 4}

Source = Callable[[str], tuple[Path, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def source(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Source:
    """A job of a kind that left `dcp` (by torch) and `atoms` (by ucp), and what its ranks reported; made once."""
    made: dict[str, tuple[Path, list[dict[str, Any]]]] = {}

    def make(kind: str) -> tuple[Path, list[dict[str, Any]]]:
        if kind not in made:
            out = tmp_path_factory.mktemp("torch") / "run"
            results = worlds.run(
                WORLD[kind], TORCH + "train_and_save", out, spec=asdict(SPEC), kind=kind, steps=2, more=2
            )
            made[kind] = out, results
        return made[kind]

    return make


@pytest.mark.parametrize("form", ["dcp", "atoms"])
@pytest.mark.parametrize("kind", WORLD)
def test_the_same_world_trains_on_bit_for_bit(
    worlds: Worlds, source: Source, tmp_path: Path, kind: str, form: str
) -> None:
    saved, before = source(kind)
    out = tmp_path / "run"
    results = worlds.run(
        *(WORLD[kind], TORCH + "load", out),
        spec=asdict(OTHER),
        kind=kind,
        path=saved / form,
        first=2,
        steps=2,
        used=1,
    )
    for rank, result in enumerate(results):
        assert unequal(state(saved, "reference", rank), state(out, "loaded", rank)) == []
        assert result["losses"] == before[rank]["losses_after"]
        assert [group["weight_decay"] for group in result["hyper"]] == [0.1, 0.0]
        assert [group["lr"] for group in result["hyper"]] == [0.01, 0.01]
        report = result["report"]
        assert report["not_restored"] == []
        assert 0 < report["bytes_read"] <= 1.05 * report["bytes_held"]


@pytest.mark.parametrize("kind", WORLD)
def test_atoms_of_a_torch_job_are_ordinary(source: Source, kind: str) -> None:
    saved, _ = source(kind)
    checkpoint = ucp.open(saved / "atoms")
    reference = state(saved, "reference", 0)
    assert unequal(reference, {f"{n}|{k}": checkpoint[n].read(k, as_torch=True) for n, k in split(reference)}) == []
    assert checkpoint.index.parameters["pos.weight"].role == "frozen"
    assert checkpoint.index.parameters["embed.weight"].aliases == ("head.weight",)
    assert_tiled(saved / "atoms")
    assert ucp.verify(saved / "atoms", level="deep").ok


def split(keys: Any) -> list[tuple[str, str]]:
    return [tuple(key.rsplit("|", 1)) for key in keys]


@pytest.mark.parametrize(
    "kind, form, target, world",
    [
        ("fsdp", "dcp", "fsdp", 4),
        ("fsdp", "atoms", "fsdp", 3),
        ("fsdp+tp", "dcp", "fsdp", 3),
        ("ddp", "atoms", "fsdp+tp", 4),
        ("hsdp", "dcp", "plain", 1),
    ],
)
def test_another_mesh_holds_the_same_state(
    worlds: Worlds, source: Source, tmp_path: Path, kind: str, form: str, target: str, world: int
) -> None:
    saved, _ = source(kind)
    out = tmp_path / "run"
    results = worlds.run(world, TORCH + "load", out, spec=asdict(OTHER), kind=target, path=saved / form, steps=1)
    for rank, result in enumerate(results):
        assert unequal(state(saved, "reference", 0), state(out, "loaded", rank)) == []
        assert result["report"]["bytes_read"] <= 1.05 * result["report"]["bytes_held"]


@pytest.mark.parametrize("form", ["dcp", "atoms"])
def test_fsdp_goes_on_under_deepspeed(worlds: Worlds, source: Source, tmp_path: Path, form: str) -> None:
    saved, _ = source("fsdp")
    out = tmp_path / "run"
    spec = replace(OTHER, zero=2)
    results = worlds.run(2, RANKS + "load", out, spec=asdict(spec), path=saved / form, steps=1)
    loaded = state(out, "loaded", 1)
    masters = {key.replace("|fp32", "|weight"): value for key, value in loaded.items() if key.endswith("|fp32")}
    assert unequal(state(saved, "reference", 0), {k: v for k, v in loaded.items() if not k.endswith("|fp32")}) == []
    assert unequal(masters, {key: loaded[key] for key in masters}) == []
    assert results[0]["loaded"]["global_steps"] == 2
    assert "LR scheduler: not in the checkpoint" in results[0]["report"]["not_restored"]


def test_deepspeed_goes_on_under_fsdp(worlds: Worlds, tmp_path: Path) -> None:
    out = tmp_path / "source"
    worlds.run(
        *(2, RANKS + "train_and_save", out),
        spec=asdict(replace(SPEC, zero=3)),
        steps=2,
        saved=out / "saved",
    )
    worlds.run(4, TORCH + "load", tmp_path / "run", spec=asdict(OTHER), kind="fsdp", path=out / "saved", steps=1)
    reference = {key: value for key, value in state(out, "reference", 0).items() if not key.endswith("|fp32")}
    assert unequal(reference, state(tmp_path / "run", "loaded", 3)) == []
