"""Files with a known pickle are recognised, and no others."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.paths import PROJECT
from ucp.errors import UcpError
from ucp.formats.deepspeed.read import rank_files
from ucp.formats.deepspeed.read.rank_files import RankFiles

TENSOR_PARALLEL = PROJECT / "fixtures" / "z1_bf16_tp2_dp2" / "global_step3"
OPTIMIZER = "bf16_zero_pp_rank_{dp}_mp_rank_{tp:02d}_optim_states.pt"


def test_tensor_parallel_ranks_share_a_tree_and_data_parallel_ones_do_not() -> None:
    files = RankFiles(TENSOR_PARALLEL)
    trees = {(dp, tp): files.open(OPTIMIZER.format(dp=dp, tp=tp)).tree for dp in range(2) for tp in range(2)}
    assert trees[0, 0] is trees[0, 1]
    assert trees[1, 0] is trees[1, 1]
    assert trees[0, 0] is not trees[1, 0]


def test_tensors_of_a_shared_tree_are_located_in_each_file() -> None:
    files = RankFiles(TENSOR_PARALLEL)
    first, second = (files.open(OPTIMIZER.format(dp=0, tp=tp)) for tp in range(2))
    ref = first.mapping("optimizer_state_dict")["single_partition_of_fp32_groups"][0]
    held = [
        (TENSOR_PARALLEL / file.name).read_bytes()[(at := file.position(ref)) : at + 64] for file in (first, second)
    ]
    assert held[0] != held[1]


def test_the_cache_of_pickles_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_files, "_CACHED_PICKLES", 1)
    files = RankFiles(TENSOR_PARALLEL)
    trees = [files.open(OPTIMIZER.format(dp=dp, tp=tp)).tree for dp, tp in ((0, 0), (1, 0), (0, 1))]
    assert trees[0] is not trees[2]


def test_a_file_that_ends_early_is_not_recognised(tmp_path: Path) -> None:
    names = [OPTIMIZER.format(dp=0, tp=tp) for tp in range(2)]
    for name in names:
        shutil.copy(TENSOR_PARALLEL / name, tmp_path / name)
    with (tmp_path / names[1]).open("r+b") as file:
        file.truncate(file.seek(0, 2) - 30)
    files = RankFiles(tmp_path)
    files.open(names[0])
    with pytest.raises(UcpError, match="mp_rank_01"):
        files.open(names[1])
