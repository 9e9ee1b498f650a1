"""Rank files in the place of another rank's file stop every command that reads them, unless one of both is trusted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ucp
from ucp.cli.main import run
from ucp.errors import InconsistentError, UsageError
from ucp.formats.sharded.rank_identity import misplaced_ranks

DEEPSPEED = {  # fixture, two files of it that are exchanged
    "optimizer of ZeRO-1, tensor-parallel ranks": ("z1_bf16_tp2_dp2", "*zero_pp_rank_0_mp_rank_0[01]_optim*"),
    "optimizer of ZeRO-1, data-parallel ranks": ("z1_bf16_dp2", "*zero_pp_rank_[01]_mp_rank_00_optim*"),
    "models of ZeRO-1": ("z1_bf16_tp2_dp2", "mp_rank_0[01]_model_states.pt"),
    "optimizer of ZeRO-3": ("z3_fp32_dp3", "*zero_pp_rank_[01]_mp_rank_00_optim*"),
}


def exchange(one: Path, other: Path) -> None:
    one.rename(one.with_name("aside"))
    other.rename(one)
    one.with_name("aside").rename(other)


@pytest.fixture(params=DEEPSPEED)
def exchanged(request: pytest.FixtureRequest, project: Path, tmp_path: Path) -> tuple[Path, Path, Path, Path]:
    """A sound checkpoint, a copy of it with two files exchanged, and these files."""
    name, pattern = DEEPSPEED[request.param]
    folder = tmp_path / "exchanged"
    shutil.copytree(project / "fixtures" / name, folder)
    one, other = sorted(folder.glob(f"*/{pattern}"))
    exchange(one, other)
    return project / "fixtures" / name, folder, one, other


def test_exchanged_files_stop_a_conversion(
    exchanged: tuple[Path, Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sound, folder, one, other = exchanged
    for arguments in (
        ["convert", folder, tmp_path / "out", "--to", "safetensors"],
        ["convert", folder, tmp_path / "out", "--to", "deepspeed", "--dp", "3"],
        ["diff", sound, folder],
        ["verify", "--quick", folder],
        ["inspect", folder],
    ):
        assert run(list(map(str, arguments))) == 1
        printed = capsys.readouterr()
        text = printed.out + printed.err
        assert f"{one.name}: was saved as {other.name}" in text
        assert f"{other.name}: was saved as {one.name}" in text
    assert not (tmp_path / "out").exists()


def test_recorded_ranks_that_are_trusted(exchanged: tuple[Path, Path, Path, Path]) -> None:
    sound, folder, *_ = exchanged
    assert ucp.diff(sound, folder, trust_recorded_ranks=True).identical
    assert ucp.verify(folder, "deep", trust_recorded_ranks=True).ok


@pytest.mark.parametrize("exchanged", list(DEEPSPEED)[:3:2], indirect=True)
def test_file_names_that_are_trusted(exchanged: tuple[Path, Path, Path, Path]) -> None:
    sound, folder, one, other = exchanged
    (note,) = [
        note for note in ucp.open(folder, trust_file_names=True).index.notes if note.id == "saved-under-other-names"
    ]
    assert f"{one.name} was saved as {other.name}, and 1 more" in note.text
    assert not ucp.diff(sound, folder, trust_file_names=True).identical


def test_only_one_of_both_can_be_trusted(project: Path) -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        ucp.open(project / "fixtures" / "z1_bf16_dp2", trust_file_names=True, trust_recorded_ranks=True)


@pytest.mark.parametrize("kind", DEEPSPEED)
def test_a_file_that_was_copied_over_another(kind: str, project: Path, tmp_path: Path) -> None:
    """Also if it was saved again, under the right name: then its tensors prove it."""
    name, pattern = DEEPSPEED[kind]
    folder = tmp_path / "copied"
    shutil.copytree(project / "fixtures" / name, folder)
    one, other = sorted(folder.glob(f"*/{pattern}"))
    shutil.copy(one, other)
    with pytest.raises(InconsistentError, match=f"{other.name}: was saved as {one.name}"):
        ucp.open(folder)
    with pytest.raises(InconsistentError, match=r"were saved as the same file: one is a copy of the other"):
        ucp.open(folder, trust_recorded_ranks=True)
    if "optimizer of ZeRO-1, tensor" in kind:
        return  # a partition may have nothing that is split: verify compares it with the weights
    torch.save(torch.load(one, weights_only=False), other)
    with pytest.raises(InconsistentError, match=f"{other.name}: has the same tensors as .*{one.name}"):
        ucp.open(folder)
    assert ucp.open(folder, trust_file_names=True).parameters


@pytest.mark.parametrize(
    "ranks, misplaced",
    [
        ({(0, 0): 0, (1, 0): 1, (0, 1): 2, (1, 1): 3}, {}),
        ({(0, 0): 0, (1, 0): 4, (0, 1): 1, (1, 1): 5}, {}),  # another order of the job's ranks
        ({(0, 0): 1, (1, 0): 0, (0, 1): 2, (1, 1): 3}, {(0, 0): 0, (1, 0): 1}),
        ({(0, 0): 2, (1, 0): 1, (0, 1): 0, (1, 1): 3}, {(0, 0): 0, (0, 1): 2}),  # and not their neighbours
        ({(0,): 0, (1,): 2, (2,): 1, (3,): 3}, {(1,): 1, (2,): 2}),
    ],
)
def test_ranks_in_the_place_of_others(ranks: dict[tuple[int, ...], int], misplaced: dict[tuple[int, ...], int]) -> None:
    assert dict(misplaced_ranks(ranks)) == misplaced


MEGATRON = ["gpt_tp2_pp2_torch", "gpt_tp1_pp2_vpp2_torch", "gpt_tp2_dp2_do_torch", "moe_ep2_dp2_do_torch"]


@pytest.fixture
def megatron(corpus: Path, tmp_path: Path) -> Callable[[str], tuple[Path, list[Path]]]:
    """A copy of a Megatron checkpoint in the legacy layout, and its rank folders."""

    def copy(name: str) -> tuple[Path, list[Path]]:
        folder = tmp_path / name
        shutil.copytree(corpus / "megatron" / name, folder)
        return folder, sorted(folder.glob("iter_*/mp_rank_*"))

    return copy


@pytest.mark.parametrize("name", MEGATRON)
def test_rank_folders_of_megatron_that_were_exchanged(name: str, megatron, corpus: Path, tmp_path: Path) -> None:
    folder, ranks = megatron(name)
    exchange(ranks[0], ranks[-1])
    with pytest.raises(InconsistentError, match=r"was written by rank \d, where a file of rank \d belongs"):
        ucp.convert(folder, tmp_path / "out")
    report = ucp.verify(folder, "quick")
    assert {finding.check for finding in report.findings} == {"grid"}
    assert len(report.findings) == 2
    assert ucp.diff(corpus / "megatron" / name, folder, trust_recorded_ranks=True).identical


@pytest.mark.parametrize("name", MEGATRON)
@pytest.mark.parametrize("first, second", [(0, -1), (-1, 0)])
def test_a_model_file_of_megatron_that_was_copied_over_another(
    name: str, first: int, second: int, megatron, tmp_path: Path
) -> None:
    folder, ranks = megatron(name)
    shutil.copy(ranks[first] / "model_optim_rng.pt", ranks[second] / "model_optim_rng.pt")
    with pytest.raises(InconsistentError, match="one is a copy of the other"):
        ucp.convert(folder, tmp_path / "out")
    assert not ucp.verify(folder, "quick").ok


@pytest.mark.parametrize("name", ["gpt_tp2_dp2_do_torch", "moe_ep2_dp2_do_torch"])
def test_an_optimizer_file_of_megatron_that_was_copied_over_another(name: str, megatron) -> None:
    folder, ranks = megatron(name)
    shutil.copy(ranks[0] / "distrib_optim.pt", ranks[1] / "distrib_optim.pt")
    with pytest.raises(InconsistentError):
        ucp.open(folder)
