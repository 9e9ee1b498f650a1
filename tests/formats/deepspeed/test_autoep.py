"""AutoEP: experts stacked in one parameter and distributed over ep ranks. Files of real jobs, and damage."""

from __future__ import annotations

import copy
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ucp
from tests.formats.deepspeed.synthetic import read, save
from ucp.errors import InconsistentError, NotUnderstoodError, UsageError
from ucp.formats.deepspeed.experts import expert_placements

W1 = "model.layers.0.mlp.experts.w1"
STACK = "mlp.experts.w1"


@pytest.fixture
def real(project: Path, tmp_path: Path) -> Callable[[int], Path]:
    """A copy of the real checkpoint of a ZeRO stage, to be damaged."""

    def copied(stage: int) -> Path:
        target = tmp_path / "real"
        fixture = project / "fixtures" / f"z{stage}_bf16_autoep4_ep2_dp4"
        shutil.copytree(fixture, target, ignore=shutil.ignore_patterns("reference"))
        return target

    return copied


def expert_file(folder: Path, layer: int, expert: int) -> Path:
    return folder / "global_step3" / f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"


@pytest.mark.parametrize("stage", [1, 3])
def test_experts_are_one_parameter_and_the_degree_is_detected(real: Callable[[int], Path], stage: int) -> None:
    folder = real(stage)
    checkpoint = read(folder)
    assert (checkpoint.mesh.ep, checkpoint.mesh.dp) == (2, 4)
    assert checkpoint.parameters[W1].shape == (4, 6, 8)
    masters = [p.atoms["master"] for name, p in checkpoint.parameters.items() if ".experts." in name]
    # Two experts of a layer on every rank; ranks with the same ones cut them among themselves.
    held = {(f.rank.ep, f.rank.dp) for master in masters for f in master.fragments}
    assert held == {(0, 0), (0, 2), (1, 1), (1, 3)}
    assert all(sum(f.region.numel for f in master.fragments) == 4 * 6 * 8 for master in masters)
    assert ucp.verify(folder).ok
    assert not checkpoint.notes


@pytest.mark.parametrize("stage", [1, 3])
def test_the_router_has_a_second_name(real: Callable[[int], Path], stage: int) -> None:
    """AutoEP keeps it under the name of the router that it replaced, which `shared_params` does not list."""
    checkpoint = read(real(stage))
    assert checkpoint.parameters["model.layers.0.mlp.router.gate.weight"].aliases == (
        "model.layers.0.mlp.gate.gate.weight",
    )


def test_missing_files_of_experts(real: Callable[[int], Path]) -> None:
    folder = real(1)
    expert_file(folder, 1, 3).unlink()
    with pytest.raises(InconsistentError, match=r"expert file layer_1_expert_3_mp_rank_00_model_states\.pt is missing"):
        read(folder)
    for path in (folder / "global_step3").glob("layer_*_expert_*"):
        path.unlink()
    with pytest.raises(InconsistentError, match=r"expert file layer_0_expert_0_mp_rank_00_model_states\.pt is missing"):
        read(folder)


@pytest.mark.parametrize("other", [(0, 3), (1, 0)])
def test_exchanged_files_of_experts(real: Callable[[int], Path], tmp_path: Path, other: tuple[int, int]) -> None:
    folder = real(1)
    one, two = expert_file(folder, 0, 0), expert_file(folder, *other)
    one.rename(tmp_path / "aside")
    two.rename(one)
    (tmp_path / "aside").rename(two)
    found = rf".*layers\.{other[0]}\..*\.{other[1]}:"
    wrong = rf"layer_0_expert_0_.* is named for expert 0 of .*layers\.0.*, but contains {found}"
    with pytest.raises(InconsistentError, match=wrong):
        read(folder, trusted_ranks="file-names")
    with pytest.raises(InconsistentError, match=f"{one.name}: was saved as {two.name}"):
        read(folder)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_missing_rank(real: Callable[[int], Path], stage: int) -> None:
    folder = real(stage)
    missing = "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt"
    (folder / "global_step3" / missing).unlink()
    with pytest.raises(InconsistentError, match=missing):
        read(folder)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("to", ["safetensors", "dcp", "deepspeed-universal"])
def test_other_formats_have_the_same_values(real: Callable[[int], Path], tmp_path: Path, to: str, stage: int) -> None:
    folder = real(stage)
    ucp.convert(folder, tmp_path / "out", to=to)
    source, target = ucp.open(folder), ucp.open(tmp_path / "out")
    for name, parameter in source.parameters.items():
        for kind in target[name].kinds:
            # Formats with a single copy of a parameter keep the precise one.
            said = "master" if kind == "weight" and "master" not in target[name].kinds else kind
            if said == "weight" and said not in parameter.kinds:
                continue  # ZeRO-3 saves none: it was made of the master
            assert torch.equal(parameter.read(said, as_torch=True), target[name].read(kind, as_torch=True)), name
        assert target[name].kinds
    assert ("exp_avg" in target[W1].kinds) == (to != "safetensors")


def test_a_universal_folder_marks_experts(real: Callable[[int], Path], tmp_path: Path) -> None:
    """Also from atoms: AutoEP's loader slices marked parameters, and would otherwise load all experts on every rank."""
    ucp.convert(real(1), tmp_path / "atoms")
    ucp.convert(tmp_path / "atoms", tmp_path / "out", to="deepspeed-universal")
    folder = tmp_path / "out" / "global_step3_universal" / "zero"
    for state in ("fp32", "exp_avg", "exp_avg_sq"):
        tree = torch.load(folder / W1 / f"{state}.pt")
        assert tree["param"].shape == (4, 6, 8)
        assert {key: value for key, value in tree.items() if key != "param"} == {
            "cat_dim": 0,
            "is_expert_param": True,
            "ep_num_experts": 4,
        }
    assert "is_expert_param" not in torch.load(folder / "lm_head.weight" / "fp32.pt")


def test_files_of_an_auto_ep_job_are_not_written(real: Callable[[int], Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"AutoEP.*cannot be written(.|\n)*--to deepspeed-universal"):
        ucp.convert(real(1), tmp_path / "out", to="deepspeed")
    assert not (tmp_path / "out").exists()


# ----------------------------------------------------------------------------------------------------------------------
# Made by hand: placements and statements that no release of today writes


def layer(experts: list[list[int]], ep_rank: int = 0) -> dict[str, Any]:
    """An entry of `ds_autoep_layers`."""
    total = max(n for held in experts for n in held) + 1
    ranks = [{"rank": rank, "experts": held} for rank, held in enumerate(experts)]
    return {
        "moe_layer_id": 0,
        "module_path": "mlp",
        "expert_key_prefix": "mlp.experts",
        "num_experts": total,
        "num_local_experts": len(experts[ep_rank]),
        "ep_size": len(experts),
        "ep_rank": ep_rank,
        "expert_placement": {"version": 1, "num_experts": total, "ep_size": len(experts), "ranks": ranks},
    }


def whole(weight: str) -> torch.Tensor:
    """Four experts of 3 × 2; every value identifies its expert."""
    start = 100 * int(weight[-1])
    return torch.arange(24, dtype=torch.float32).reshape(4, 3, 2) + start


WEIGHTS = ("w1", "w2", "w3")
DENSE = torch.arange(5, dtype=torch.float32)


def model(experts: list[list[int]], stage: int, ep_rank: int = 0) -> dict[str, Any]:
    names = [f"mlp.experts.{weight}" for weight in WEIGHTS]
    module = {"norm": DENSE.bfloat16() if stage < 3 else torch.empty(0, dtype=torch.bfloat16)}
    return {
        "module": OrderedDict(module),
        "buffer_names": [],
        "param_shapes": [
            OrderedDict(norm=torch.Size([5])),
            OrderedDict((name, torch.Size([len(experts[0]), 3, 2])) for name in names),
        ],
        "shared_params": {},
        "global_steps": 7,
        "dp_world_size": 4,
        "mp_world_size": 1,
        "num_experts": [4],
        "ds_autoep_layers": [layer(experts, ep_rank)],
        "ds_config": {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}},
    }


def local(experts: list[int]) -> torch.Tensor:
    """The flat group of the ranks that have these experts."""
    return torch.cat([whole(weight)[experts].flatten() for weight in WEIGHTS])


def flat_files(experts: list[list[int]]) -> dict[str, Any]:
    """ZeRO-1 of dp 4: rank r is of ep rank r % ep."""
    ep = len(experts)
    files: dict[str, Any] = {"mp_rank_00_model_states.pt": model(experts, 1)}
    for expert in range(4):
        tree = {f"mlp.experts.{w}.{expert}": whole(w)[expert].bfloat16() for w in WEIGHTS}
        files[f"layer_0_expert_{expert}_mp_rank_00_model_states.pt"] = tree
    dense = torch.cat([DENSE, torch.zeros(3)])
    for rank in range(4):
        mine = local(experts[rank % ep])
        shares = 4 // ep
        per = -(-mine.numel() // (2 * shares)) * 2
        padded = torch.cat([mine, torch.zeros(per * shares - mine.numel())])
        at = rank // ep
        end = min((at + 1) * per, mine.numel())
        masters = [dense[2 * rank : min(2 * rank + 2, 5)], padded[at * per : end]]
        files[f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = {
            "optimizer_state_dict": {
                "zero_stage": 1,
                "single_partition_of_fp32_groups": [master.clone() for master in masters],
                "partition_count": [4, shares],
                "base_optimizer_state": {"state": {}, "param_groups": [{"lr": 0.1}, {"lr": 0.1, "moe": True}]},
            }
        }
    return files


@pytest.mark.parametrize("experts", [[[0, 1], [2, 3]], [[2, 0], [3, 1]], [[0, 1, 3], [2]], [[3], [1], [0], [2]]])
def test_experts_follow_the_placement(tmp_path: Path, experts: list[list[int]]) -> None:
    opened = ucp.open(save(tmp_path / "c", flat_files(experts)))
    for weight in WEIGHTS:
        for kind in ("master", "weight"):
            found = opened[f"mlp.experts.{weight}"].read(kind, as_torch=True)
            assert torch.equal(found.float(), whole(weight).to(found.dtype).float()), (weight, kind)


def even_files(experts: list[list[int]]) -> dict[str, Any]:
    """ZeRO-3 of dp 4: every parameter partitioned on its own."""
    ep = len(experts)
    files: dict[str, Any] = {}
    for rank in range(4):
        sharing = list(range(rank % ep, 4, ep))
        mine = [whole(weight)[experts[rank % ep]].flatten() for weight in WEIGHTS]
        at = sharing.index(rank)
        shares = torch.cat([part.chunk(len(sharing))[at] for part in mine])
        dense = torch.cat([DENSE, torch.zeros(3)])[2 * rank : 2 * rank + 2].clone()
        groups = [
            {"sub_group": 0, "partition_count": 4, "partition_rank": rank, "partition_ranks": [0, 1, 2, 3]},
            {"sub_group": 1, "partition_count": 4 // ep, "partition_rank": at, "partition_ranks": sharing},
        ]
        files[f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"] = model(experts, 3, rank % ep)
        files[f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = {
            "optimizer_state_dict": {
                "zero_stage": 3,
                "partition_count": 4,
                "ds_zero_partition_groups": groups,
                "fp32_flat_groups": [dense, shares],
                "optimizer_state_dict": {"state": {}, "param_groups": [{"params": [0]}, {"params": [1]}]},
            }
        }
    return files


def test_stage_3_partitions_experts_over_the_ranks_that_have_them(tmp_path: Path) -> None:
    opened = ucp.open(save(tmp_path / "c", even_files([[2, 0], [3, 1]])))
    for weight in WEIGHTS:
        assert torch.equal(opened[f"mlp.experts.{weight}"].read("master", as_torch=True), whole(weight))


def test_stage_3_files_of_another_rank(tmp_path: Path) -> None:
    """Their names are right; the ranks recorded inside the files show it."""
    files = even_files([[0, 1], [2, 3]])
    models = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in (0, 1)]
    exchanged = {**files, models[0]: files[models[1]], models[1]: files[models[0]]}
    with pytest.raises(InconsistentError, match=r"rank_0.*of expert-parallel rank 1, expected 0: files were exchanged"):
        read(save(tmp_path / "models", exchanged))
    optims = [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (1, 3)]
    exchanged = {**files, optims[0]: files[optims[1]], optims[1]: files[optims[0]]}
    with pytest.raises(InconsistentError, match=r"rank_1.*has part 1 of sub-group 1.* expected part 0"):
        read(save(tmp_path / "optims", exchanged))


def test_stage_3_files_with_different_placements(tmp_path: Path) -> None:
    files = even_files([[0, 1], [2, 3]])
    files["zero_pp_rank_2_mp_rank_00_model_states.pt"]["ds_autoep_layers"] = [layer([[0, 2], [1, 3]])]
    with pytest.raises(InconsistentError, match=r"zero_pp_rank_2.*places experts differently"):
        read(save(tmp_path / "c", files))


def test_groups_partitioned_for_another_expert_degree(tmp_path: Path) -> None:
    files = flat_files([[0, 1], [2, 3]])
    files["mp_rank_00_model_states.pt"]["ds_autoep_layers"] = [layer([[0], [1], [2], [3]])]
    with pytest.raises(InconsistentError, match="AutoEP distributes its experts over 4 expert-parallel ranks"):
        read(save(tmp_path / "c", files))


def test_experts_of_different_shapes(tmp_path: Path) -> None:
    files = flat_files([[0, 1], [2, 3]])
    files["layer_0_expert_2_mp_rank_00_model_states.pt"]["mlp.experts.w2.2"] = torch.zeros(2, 2).bfloat16()
    with pytest.raises(InconsistentError, match=r"layer_0_expert_2.*w2\.2 is .* \[2, 2\], but expert 0"):
        read(save(tmp_path / "c", files))


def test_autoep_with_tensor_parallelism_is_refused(tmp_path: Path) -> None:
    files = flat_files([[0, 1], [2, 3]])
    for name in [name for name in files if "_mp_rank_00_" in name or name.startswith("mp_rank_00")]:
        tree = copy.deepcopy(files[name])
        files[name.replace("mp_rank_00", "mp_rank_01")] = tree
    for name in ("mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"):
        files[name] |= {"mp_world_size": 2, "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 2}}
    with pytest.raises(NotUnderstoodError, match="AutoEP together with 2 tensor-parallel ranks"):
        read(save(tmp_path / "c", files))


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"expert_key_prefix": None}, "does not name its parameters"),
        ({"ep_size": "2"}, "ep_size is '2'"),
        ({"num_experts": 0}, "num_experts is 0"),
        ({"num_experts": 5, "expert_placement": None}, "5 experts do not divide over 2"),
        ({"checkpoint_format_version": 2}, "files of format 2, which is not supported"),
        ({"expert_placement": [1]}, "expected a dict with ranks"),
        ({"expert_placement": {"version": 2, "ranks": []}}, "version 2, which is not supported"),
        ({"expert_placement": {"version": 1, "ranks": [{"rank": 0, "experts": [0, 0]}]}}, "different numbers below 4"),
        ({"expert_placement": {"version": 1, "ranks": [{"rank": 0, "experts": [4]}]}}, "different numbers below 4"),
        ({"expert_placement": {"version": 1, "ranks": [{"rank": 0, "experts": [0]}]}}, "ep_size is 2"),
        (
            {"expert_placement": {"version": 1, "ranks": [{"rank": r, "experts": [r]} for r in range(2)]}},
            "expert 2, 3 of 4 to no rank",
        ),
    ],
)
def test_invalid_metadata(change: dict[str, Any], complaint: str) -> None:
    entry = {**layer([[0, 1], [2, 3]]), **change}
    with pytest.raises(NotUnderstoodError, match=rf"model\.pt: AutoEP layer 0.*{complaint}"):
        expert_placements({"ds_autoep_layers": [entry]}, "model.pt")


def test_metadata_of_the_first_releases() -> None:
    """Another key, and no placement: equal blocks of experts, in order."""
    entry = {key: value for key, value in layer([[0, 1], [2, 3]]).items() if key != "expert_placement"}
    assert expert_placements({"autoep_layers": [entry]}, "model.pt")[STACK].experts == ((0, 1), (2, 3))


@pytest.mark.parametrize("said", [3, [3], [layer([[0], [1]])] * 2])
def test_layers_that_are_not_a_list(said: Any) -> None:
    with pytest.raises(NotUnderstoodError, match=r"model\.pt"):
        expert_placements({"ds_autoep_layers": said}, "model.pt")
