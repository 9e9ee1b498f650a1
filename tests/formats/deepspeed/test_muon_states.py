"""States that ranks keep for whole parameters although their partition ends inside one: Muon's momentum."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

import ucp
from tests.formats.deepspeed.synthetic import GROUPS, SHAPES, array, flat_optim, model_state, read, save

MODEL = "mp_rank_00_model_states.pt"


def momentum(name: str) -> torch.Tensor:
    rows, columns = SHAPES[name]
    return torch.arange(rows * columns, dtype=torch.float32) + 1000 * len(name)


def kept_by(rank: int, dp: int) -> list[str]:
    """Matrices with an element in the rank's partition, computed from the sizes."""
    sizes = [SHAPES[name][0] * SHAPES[name][1] for name in GROUPS[0]]
    ends = list(accumulate(sizes))
    per = -(-ends[-1] // (2 * dp)) * 2
    low, high = rank * per, (rank + 1) * per
    return [name for name, size, end in zip(GROUPS[0], sizes, ends, strict=True) if end > low and end - size < high]


def saved(folder: Path, dp: int) -> Path:
    """ZeRO-1: Muon for the matrices, Adam for the rest."""
    files: dict[str, Any] = {MODEL: model_state(dp_world_size=dp)}
    for rank in range(dp):
        optim = flat_optim(dp, rank)
        base = optim["optimizer_state_dict"]["base_optimizer_state"]
        base["state"][0] = {"momentum_buffer": torch.cat([momentum(name) for name in kept_by(rank, dp)])}
        base["param_groups"][0]["use_muon"] = True
        files[f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = optim
    return save(folder, files)


@pytest.mark.parametrize("dp, new", [(2, 3), (3, 2), (1, 4)])
def test_muons_momentum_is_read_whole_and_written_whole(tmp_path: Path, dp: int, new: int) -> None:
    source = saved(tmp_path / "c", dp)
    checkpoint = read(source)
    for name in GROUPS[0]:
        atom = checkpoint.parameters[name].atoms["momentum_buffer"]
        assert array(checkpoint, atom).tobytes() == momentum(name).numpy().tobytes()
    assert ucp.verify(source, level="deep").ok
    ucp.convert(source, tmp_path / "new", to="deepspeed", dp=new)
    assert ucp.diff(source, tmp_path / "new").same
    for rank in range(new):
        path = tmp_path / f"new/global_step7/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        state = torch.load(path, weights_only=False)["optimizer_state_dict"]["base_optimizer_state"]["state"]
        expected = torch.cat([momentum(name) for name in kept_by(rank, new)])
        assert torch.equal(state[0]["momentum_buffer"], expected), rank


def test_copies_that_differ_are_found(tmp_path: Path) -> None:
    source = saved(tmp_path / "c", 2)
    path = source / "global_step7/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    tree = torch.load(path, weights_only=False)
    tree["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["momentum_buffer"][0] += 1
    torch.save(tree, path)
    report = ucp.verify(source)
    assert {finding.check for finding in report.findings} == {"replicas"}
