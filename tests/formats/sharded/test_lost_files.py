"""A tolerant reader indexes a checkpoint with a lost file as it was, and names the file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import ucp
from tests.paths import FIXTURES
from ucp.core.checkpoint import Checkpoint
from ucp.errors import UcpError
from ucp.formats.registry import ReadOptions, open_checkpoint
from ucp.formats.sharded.lost_files import nearest

TOLERANT = ReadOptions(tolerant=True)

# DeepSpeed checkpoints, and which of their files can be replaced without loss of structure.
RANK_FILES = {
    "z1_bf16_tp2_dp2": "*_states.pt",  # ZeRO-1 with tensor-parallel ranks: everything has a sibling
    "z2_bf16_roundrobin_dp3": "*_optim_states.pt",
    "z3_fp32_dp3": "*_states.pt",
    "z1_bf16_moe4_ep2_dp4": "*_states.pt",
    "z1_bf16_elastic_dp2": "*_optim_states.pt",  # the last partition is shorter
    "z1_bf16_tp2_nouc_dp1": "*_states.pt",  # rules are inferred from bytes
    "pp2_tp2_z1_bf16_untied_dp1": "*_states.pt",
    "z3_bf16_autoep4_ep2_dp4": "*_states.pt",
}
ALONE = {"z1_bf16_moe4_ep2_dp4": "mp_rank_00_model_states.pt"}  # the only model file, next to files of experts
MEGATRON = {
    "megatron/gpt_tp2_dp2_do_torch": "*.pt",
    "megatron/llama_tp2_pp2_torch": "*.pt",
    "megatron/moe_tp2_ep2_etp2_torch": "*.pt",
    "megatron/gpt_tp2_pp2_torchdist": "*.distcp",
    "megatron/llama_tp2_dp2_do_dpresh_torchdist": "*.distcp",
    "dcp/fsdp2_dp4": "*.distcp",
    "dcp/titan_dp2": "*.distcp",
}


def described(checkpoint: Checkpoint) -> dict[str, Any]:
    """Everything about the atoms but the offsets, which a lost file does not have."""
    return {
        str(atom): (
            atom.shape,
            [[(f.region, f.file, f.rank) for f in cover] for cover in (atom.fragments, *atom.replicas)],
        )
        for atom in checkpoint.atoms()
    }


def check_losses(folder: Path, pattern: str) -> None:
    intact = open_checkpoint(folder, ReadOptions())
    expected = described(intact)
    tolerant = open_checkpoint(folder, TOLERANT)
    assert (described(tolerant), tolerant.lost) == (expected, {})
    victims = [path for path in sorted(folder.rglob(pattern)) if path.name != "common.pt"]
    assert len(victims) > 1
    for victim in victims:
        if victim.name == ALONE.get(folder.name):
            continue
        data = victim.read_bytes()
        for damage in ("missing", "truncated"):
            victim.unlink() if damage == "missing" else victim.write_bytes(data[: len(data) * 2 // 3])
            with pytest.raises(UcpError):
                ucp.convert(folder, folder.parent / "copy", to="atoms")  # only a tolerant reader accepts it
            found = open_checkpoint(folder, TOLERANT)
            assert found.mesh == intact.mesh
            assert any(file.endswith(victim.name) for file in found.lost), victim
            assert described(found) == expected, victim
            victim.write_bytes(data)


def copy_of(source: Path, target: Path) -> Path:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("reference*"))
    return target


@pytest.mark.parametrize("name", RANK_FILES)
def test_a_lost_rank_file_of_deepspeed(name: str, tmp_path: Path) -> None:
    check_losses(copy_of(FIXTURES / name, tmp_path / name), RANK_FILES[name])


@pytest.mark.parametrize("name", MEGATRON)
def test_a_lost_file_of_megatron_or_torch(name: str, corpus: Path, tmp_path: Path) -> None:
    check_losses(copy_of(corpus / name, tmp_path / "checkpoint"), MEGATRON[name])


def test_a_lost_file_of_a_folder_that_ucp_wrote(tmp_path: Path) -> None:
    ucp.convert(FIXTURES / "z1_bf16_tp2_swiglu_untied_dp1", tmp_path / "dcp", to="dcp", dp=3)
    check_losses(tmp_path / "dcp", "*.distcp")


def test_the_only_model_file_is_known_from_the_optimizer(tmp_path: Path) -> None:
    folder = copy_of(FIXTURES / "z2_bf16_paramalign_dp2", tmp_path / "checkpoint")
    intact = open_checkpoint(folder, ReadOptions())
    sizes = {name: p.numel for name, p in intact.parameters.items() if p.role == "trained"}
    (model,) = folder.rglob("mp_rank_00_model_states.pt")
    model.unlink()
    found = open_checkpoint(folder, TOLERANT)
    assert {name: p.numel for name, p in found.parameters.items()} == sizes
    for parameter in found.parameters.values():
        (weight,) = parameter.atoms["weight"].fragments
        assert weight.file in found.lost, "the values are gone"
        assert not {f.file for f in parameter.atoms["master"].fragments} & set(found.lost)


def test_a_lost_pipeline_stage_keeps_the_numbers_of_the_layers(corpus: Path, tmp_path: Path) -> None:
    folder = copy_of(corpus / "megatron" / "gpt_tp1_pp2_vpp2_torch", tmp_path / "checkpoint")
    intact = described(open_checkpoint(folder, ReadOptions()))
    shutil.rmtree(next(folder.rglob("mp_rank_00_001")))
    found = open_checkpoint(folder, TOLERANT)
    assert found.mesh.pp == 2
    assert list(found.lost) == ["mp_rank_00_001/model_optim_rng.pt"]
    assert 0 < len(found.parameters) < len({key.partition("|")[0] for key in intact})
    assert all(shape == intact[key][0] for key, (shape, _) in described(found).items())


def test_the_nearest_survivor() -> None:
    survivors = [(0, 1, 0), (1, 0, 0), (1, 1, 1)]  # free: first the last number, then the middle one
    assert nearest((1, 1, 0), survivors, (2, 1)) == (1, 1, 1)
    assert nearest((1, 1, 0), survivors[:2], (2, 1)) == (1, 0, 0)
    assert nearest((0, 0, 0), survivors[1:], (2, 1)) is None
