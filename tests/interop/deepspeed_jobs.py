"""Configurations and states of real DeepSpeed jobs, shared by the tests that run them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.interop.jobs import JobResult
from tests.interop.spec import Spec
from tests.references import Place, RankState, bits
from ucp.formats.atoms import manifest


def zero(stage: int, **options: Any) -> dict[str, Any]:
    """DeepSpeed configuration of a ZeRO stage with options."""
    return {"zero_optimization": {"stage": stage, **options}}


BF16_OPTIMIZER = {"data_types": {"grad_accum_dtype": "fp32"}}


def state(out: Path, when: str, rank: int) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(out / when / f"rank{rank:02d}.safetensors")


def unequal(one: dict[str, Any], two: dict[str, Any]) -> list[str]:
    """Keys under which two states differ in any bit."""
    import torch

    keys = sorted({*one, *two})
    return [
        key
        for key in keys
        if key not in one
        or key not in two
        or one[key].dtype != two[key].dtype
        or one[key].shape != two[key].shape
        or not torch.equal(bits(one[key]), bits(two[key]))
    ]


def places(results: list[dict[str, Any]], out: Path, when: str, experts: int = 0) -> list[RankState]:
    return [
        RankState(Place(at["tp_rank"], at["tp"], at["ep_rank"], at["ep"], experts), state(out, when, at["rank"]))
        for at in results
    ]


def auto_ep(ep: int, **options: Any) -> Spec:
    """A Hugging Face mixture of four experts, which AutoEP spreads over `ep` ranks."""
    return Spec(autoep=True, experts=4, ep=ep, hidden=8, ffn=6, tied=False, **options)


def loaded_states(run: JobResult, spec: Spec) -> list[RankState]:
    return [
        RankState(
            Place(at["tp_rank"], at["tp"], at["ep_rank"], at["ep"], spec.experts), run.state(at["rank"], "loaded")
        )
        for at in run.ranks
    ]


def world_of(spec: Spec, dp: int) -> int:
    return spec.tp * spec.pp * dp


def assert_tiled(folder: Path) -> None:
    """The parts of every file lie end to end and cover it."""
    files = manifest.load_manifest(folder)["files"]
    assert files
    for name, entry in files.items():
        at = 0
        for offset, length, _ in entry["parts"]:
            assert offset == at, name
            at += length
        assert at == entry["bytes"] == (folder / name).stat().st_size, name
