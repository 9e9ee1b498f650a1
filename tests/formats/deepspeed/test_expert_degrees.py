"""Mixtures of experts whose layers have different expert-parallel degrees, with an optimizer group for each."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import ucp
from tests.formats.deepspeed.synthetic import model_state, read, save
from ucp.formats.deepspeed.experts import layer_degrees

WIDE = "a.deepspeed_moe.experts.deepspeed_experts"  # ep 2
NARROW = "b.deepspeed_moe.experts.deepspeed_experts"  # ep 1
NAMES = ("dense.weight", f"{WIDE}.0.up", f"{WIDE}.1.up", f"{NARROW}.0.up", f"{NARROW}.1.up")


def value(name: str) -> torch.Tensor:
    return torch.arange(4, dtype=torch.float32) + 10 * NAMES.index(name)


def saved(folder: Path) -> Path:
    """Two ranks, ZeRO-1, masters alone. Both have the narrow experts; each has one of the wide ones."""
    local = [["dense.weight"], [f"{NARROW}.0.up", f"{NARROW}.1.up"], [f"{WIDE}.0.up"]]
    groups = [
        {"lr": 0.1, "name": "all", "params": [0]},
        {"lr": 0.1, "name": "ep_size_1", "moe": True, "params": [1]},
        {"lr": 0.1, "name": "ep_size_2", "moe": True, "params": [2]},
    ]
    shapes = [OrderedDict((name, (4,)) for name in group) for group in local]
    module = OrderedDict({"dense.weight": value("dense.weight").bfloat16()})
    files: dict[str, Any] = {
        "mp_rank_00_model_states.pt": model_state(module, param_shapes=shapes, num_experts=[2, 2]),
    }
    for rank in range(2):
        flat = [value("dense.weight").chunk(2)[rank], value(f"{NARROW}.{rank}.up"), value(f"{WIDE}.{rank}.up")]
        optim = {
            "zero_stage": 1,
            "base_optimizer_state": {"state": {}, "param_groups": groups},
            "single_partition_of_fp32_groups": [part.clone() for part in flat],
            "group_paddings": [0, 0, 0],
            "partition_count": [2, 2, 1],
            "ds_version": "0.0.1",
        }
        files[f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = {"optimizer_state_dict": optim}
    for layer, prefix in enumerate((WIDE, NARROW)):
        for expert in range(2):
            name = f"{prefix}.{expert}.up"
            files[f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"] = {name: value(name).bfloat16()}
    return save(folder, files)


@pytest.mark.parametrize(
    "options, partitions, named",
    [
        ({"dp": 4}, [4, 4, 2], ["all", "ep_size_1", "ep_size_2"]),
        ({"dp": 3, "ep": 1}, [3, 3], ["all", "ep_size_1"]),
    ],
)
def test_layers_keep_a_smaller_degree_and_share_a_group_if_degrees_are_equal(
    tmp_path: Path, options: dict[str, int], partitions: list[int], named: list[str]
) -> None:
    source = saved(tmp_path / "c")
    assert read(source).mesh.ep == 2
    assert ucp.verify(source).ok
    ucp.convert(source, tmp_path / "new", to="deepspeed", **options)
    assert ucp.diff(source, tmp_path / "new").same
    again = ucp.open(tmp_path / "new")
    for name in NAMES:
        assert torch.equal(again[name].read("master", as_torch=True), value(name)), name
    path = tmp_path / "new/global_step7/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    optim = torch.load(path, weights_only=False)["optimizer_state_dict"]
    assert optim["partition_count"] == partitions
    assert [group["name"] for group in optim["base_optimizer_state"]["param_groups"]] == named


EXPERTS = {WIDE: 4, NARROW: 2}


def number(name: str) -> torch.Tensor:
    """The value of a parameter and of its states, derived from its name."""
    return torch.full((4,), float(sum(map(ord, name))))


def unsharded(folder: Path, wide_first: bool) -> Path:
    """Two ranks without ZeRO, in fp32: one optimizer file per rank, numbers instead of names, all of one shape."""
    files: dict[str, Any] = {
        "mp_rank_00_model_states.pt": model_state(
            {"dense.weight": number("dense.weight")}, num_experts=[4, 2], param_shapes=None
        )
    }
    for layer, (prefix, count) in enumerate(EXPERTS.items()):
        for expert in range(count):
            name = f"{prefix}.{expert}.up"
            files[f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"] = {name: number(name)}
    for rank in range(2):
        local = {2: [f"{WIDE}.{2 * rank + n}.up" for n in range(2)], 1: [f"{NARROW}.{n}.up" for n in range(2)]}
        names = ["dense.weight"]
        groups: list[dict[str, Any]] = [{"lr": 0.1, "name": "all", "params": [0]}]
        for degree in sorted(local, reverse=wide_first):
            numbers = [len(names), len(names) + 1]
            names += local[degree]
            groups.append({"lr": 0.1, "name": f"ep_size_{degree}", "moe": True, "params": numbers})
        state = {at: {"exp_avg": number(name)} for at, name in enumerate(names)}
        tree = {"optimizer": {"state": state, "param_groups": groups}}
        files[f"expp_rank_{rank}_mp_rank_00_optim_states.pt"] = tree
    return save(folder, files)


@pytest.mark.parametrize("wide_first", [True, False])
def test_degrees_of_layers_without_zero(tmp_path: Path, wide_first: bool) -> None:
    """The degree of each layer follows from the number of parameters in the groups of each degree."""
    opened = ucp.open(unsharded(tmp_path / "c", wide_first))
    for name in ("dense.weight", *(f"{prefix}.{n}.up" for prefix, count in EXPERTS.items() for n in range(count))):
        assert torch.equal(opened[name].read("exp_avg", as_torch=True), number(name)), name
    assert ucp.verify(tmp_path / "c", "deep").ok


@pytest.mark.parametrize(
    "slots, degrees",
    [
        ({2: 2, 1: 2}, {"a": 2, "b": 1}),  # four experts over two ranks, two on every rank
        ({2: 3}, {"a": 2, "b": 2}),
        ({4: 1, 2: 1}, {"a": 4, "b": 2}),
        ({}, {"a": 2, "b": 2}),  # groups without names
        ({3: 7}, {"a": 2, "b": 2}),  # nothing fits
    ],
)
def test_degrees_from_counts(slots: dict[int, int], degrees: dict[str, int]) -> None:
    layers = {key: f"{key}.deepspeed_moe.experts.deepspeed_experts." for key in ("a", "b")}
    names = [f"{layers['a']}{n}.up" for n in range(4)] + [f"{layers['b']}{n}.up" for n in range(2)]
    assert layer_degrees(names, slots, 2) == {layers[key]: degree for key, degree in degrees.items()}
