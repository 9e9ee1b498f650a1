"""`--only weights` needs the files that contain weights; others may be lost or damaged."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ucp as library
from tests.cli.command import ucp
from tests.paths import fixture

# Checkpoints, and the files without weights of which one is lost.
SOURCES = [
    ("z1_bf16_tp2_dp2", "*pp_rank_1_mp_rank_01_optim_states.pt"),
    ("z2_bf16_roundrobin_dp3", "*pp_rank_0*optim_states.pt"),
    ("pp2_z1_bf16_tied_dp2", "*pp_rank_1_mp_rank_01_optim_states.pt"),
    ("z1_bf16_moe4_ep2_dp4", "*pp_rank_3*optim_states.pt"),
    ("megatron_deepspeed/mds_gpt_tp2_dp2_z1_nopipe_bf16", "*optim_states.pt"),
    ("megatron/gpt_tp2_dp2_do_torch", "distrib_optim.pt"),
    ("huggingface/accelerate_llama_fsdp2/ckpt", "optimizer_0/*.distcp"),
]


def copy(name: str, folder: Path) -> Path:
    target = folder / "source"
    shutil.copytree(fixture(name), target, ignore=shutil.ignore_patterns("reference"))
    return target


@pytest.mark.parametrize("damage", ["missing", "truncated"])
@pytest.mark.parametrize("name, pattern", SOURCES, ids=[name for name, _ in SOURCES])
def test_weights_without_the_optimizer(name: str, pattern: str, damage: str, tmp_path: Path) -> None:
    source = copy(name, tmp_path)
    whole = tmp_path / "whole"
    library.convert(source, whole, only="weights")
    victim = max(source.rglob(pattern))
    if damage == "missing":
        victim.unlink()
    else:
        victim.write_bytes(victim.read_bytes()[:-200])
    refused = ucp("inspect", source)
    assert refused.returncode in (1, 4), refused.stderr
    assert "add --only weights: all weights survive" in refused.stderr
    done = ucp("convert", source, tmp_path / "weights", "--only", "weights")
    assert done.returncode == 0, done.stderr
    assert "note: only the weights are read; lost files contain none of them: " in done.stderr
    assert victim.name in done.stderr
    assert library.diff(whole, tmp_path / "weights", only="weights").identical
    shown = ucp("inspect", source, "--only", "weights")
    assert shown.returncode == 0
    assert victim.name in shown.stderr
    assert "exp_avg" not in shown.stdout
    assert {kind for each in library.open(source, only="weights").parameters.values() for kind in each.kinds} == {
        "weight"
    }


def test_a_universal_folder_with_a_damaged_state(tmp_path: Path) -> None:
    source = copy("universal_z1_bf16_tp2", tmp_path)
    library.convert(source, tmp_path / "whole", only="weights")
    victim = max(source.rglob("exp_avg.pt"))
    victim.write_bytes(victim.read_bytes()[:-200])
    assert "all weights survive" in ucp("inspect", source).stderr
    assert ucp("convert", source, tmp_path / "weights", "--only", "weights").returncode == 0
    assert library.diff(tmp_path / "whole", tmp_path / "weights").identical


def test_lost_weights_are_refused(tmp_path: Path) -> None:
    """ZeRO-3 has its weights in the optimizer files."""
    for name, pattern in (("z3_fp32_dp3", "*optim_states.pt"), ("z1_bf16_tp2_dp2", "mp_rank_01_model_states.pt")):
        source = copy(name, tmp_path / name)
        max(source.rglob(pattern)).unlink()
        refused = ucp("convert", source, tmp_path / "out", "--only", "weights")
        assert refused.returncode == 1
        assert "all weights survive" not in refused.stderr
        assert not (tmp_path / "out").exists()
