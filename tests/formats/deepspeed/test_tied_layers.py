"""A tied module that several layers use: DeepSpeed writes and expects a file for each of them."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

import ucp
from tests.formats.deepspeed.synthetic import model_state, read, save

SIZES = {"tied_modules.norm.weight": 3, "1.weight": 4, "2.weight": 5, "4.weight": 6}
FILES = {0: "tied_modules.norm.weight", 1: "1.weight", 2: "2.weight", 3: "tied_modules.norm.weight", 4: "4.weight"}


def value(name: str) -> torch.Tensor:
    return torch.arange(SIZES[name], dtype=torch.float32) + 100 * list(SIZES).index(name)


def saved(folder: Path) -> Path:
    """One stage, one rank, ZeRO-1 with masters alone."""
    masters = torch.cat([value(name) for name in SIZES])
    optim = {
        "zero_stage": 1,
        "base_optimizer_state": {"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "single_partition_of_fp32_groups": [masters],
        "group_paddings": [0],
        "partition_count": [1],
        "ds_version": "0.0.1",
    }
    shapes = [OrderedDict((name, torch.Size([size])) for name, size in SIZES.items())]
    files: dict[str, Any] = {
        "mp_rank_00_model_states.pt": {**model_state(dp_world_size=1, param_shapes=shapes), "module": None},
        "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt": {"optimizer_state_dict": optim, "ds_version": "0.0.1"},
    }
    for layer, name in FILES.items():
        files[f"layer_{layer:02d}-model_states.pt"] = OrderedDict(weight=value(name).bfloat16())
    return save(folder, files)


def test_every_use_of_a_tied_module_is_written_to_its_file(tmp_path: Path) -> None:
    source = saved(tmp_path / "c")
    assert set(read(source).parameters) == set(SIZES)
    assert ucp.verify(source).ok
    ucp.convert(source, tmp_path / "new", to="deepspeed", dp=2)
    for layer, name in FILES.items():
        tree = torch.load(tmp_path / f"new/global_step7/layer_{layer:02d}-model_states.pt", weights_only=False)
        assert torch.equal(tree["weight"], value(name).bfloat16()), layer


def test_stages_have_the_modules_that_their_layers_use(tmp_path: Path) -> None:
    """The last stage does not use a tied module, so it has no copy of one."""
    ucp.convert(saved(tmp_path / "c"), tmp_path / "new", to="deepspeed", pp=3, stages=[0, 2, 4])
    held = [
        {
            name
            for group in torch.load(
                tmp_path / f"new/global_step7/mp_rank_{stage:02d}_model_states.pt", weights_only=False
            )["param_shapes"]
            for name in group
        }
        for stage in range(3)
    ]
    tied = "tied_modules.norm.weight"
    assert held == [{tied, "1.weight"}, {tied, "2.weight"}, {"4.weight"}]
