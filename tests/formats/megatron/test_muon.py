"""Muon for matrices and Adam for the rest: two chained optimizers, possibly with whole parameters assigned to ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ucp
from tests.formats.megatron import legacy_model
from ucp.api import convert, diff
from ucp.errors import InconsistentError, UsageError
from ucp.formats.registry import ReadOptions, open_checkpoint

MUON = {"momentum_beta": 0.9, "lr": 0.02}
ADAM = {"betas": (0.9, 0.95), "lr": 0.1, "foreach": None}
ENDS = ("embedding.word_embeddings.weight", "output_layer.weight")


def chain(names: list[list[str]], values: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """The optimizers of a rank with these parameters in three groups: Muon's, Adam's with weight decay, the others."""
    trees: list[dict[str, Any]] = []
    for groups in ([(MUON, 1.0, names[0])], [(ADAM, 1.0, names[1]), (ADAM, 0.0, names[2])]):
        listed: list[dict[str, Any]] = []
        state: dict[int, dict[str, torch.Tensor]] = {}
        for hyper, decay, mine in groups:
            first = len(state)
            for name in mine:
                value = values[name]
                moments = {"step": torch.tensor(7.0), "exp_avg": value / 2, "exp_avg_sq": value**2}
                state[len(state)] = {"momentum_buffer": value / 4} if hyper is MUON else moments
            numbers = list(range(first, len(state)))
            listed.append({**hyper, "wd_mult": decay, "is_expert_parallel": False, "params": numbers})
        masters = [[values[name] for name in mine] for _, _, mine in groups]
        trees.append({"optimizer": {"state": state, "param_groups": listed}, "fp32_from_fp16_params": masters})
    return trees


def groups_of(names: list[str], values: dict[str, torch.Tensor]) -> list[list[str]]:
    of_muon = [name for name in names if values[name].ndim == 2 and name not in ENDS]
    ends = [name for name in names if name in ENDS]
    return [of_muon, ends, [name for name in names if values[name].ndim == 1]]


def save(root: Path, tree: dict[str, Any], dp: int, optimizer: str) -> Path:
    tree["args"] = legacy_model.arguments(1, 1, optimizer=optimizer, world_size=dp, use_distributed_optimizer=False)
    return legacy_model.save(root, {"mp_rank_00": tree})


def saved(root: Path) -> Path:
    """A job of one rank."""
    tree = legacy_model.rank_tree(1, 1, 0, 0, optimizer=False)
    values = {name: tensor.float() for name, tensor in tree["model"].items() if tensor is not None}
    return save(root, {**tree, "optimizer": chain(groups_of(list(values), values), values)}, 1, "muon")


def saved_layer_wise(root: Path, dp: int) -> Path:
    """Whole parameters assigned to `dp` ranks as by megatron-core: by size, in alternating direction."""
    tree = legacy_model.rank_tree(1, 1, 0, 0, optimizer=False)
    values = {name: tensor.float() for name, tensor in tree["model"].items() if tensor is not None}
    listed = [name for group in groups_of(list(values), values) for name in group]
    loop = [*range(dp), *reversed(range(dp))]
    dealt: list[list[str]] = [[] for _ in range(dp)]
    for i, name in enumerate(sorted(listed, key=lambda name: values[name].numel())):
        dealt[loop[i % len(loop)]].append(name)
    shares = [chain(groups_of(mine, values), values) for mine in dealt]
    save(root, {**tree, "optimizer": shares[0]}, dp, "dist_muon")
    for i, share in enumerate(shares):
        torch.save(share, root / f"iter_0000007/mp_rank_00/layer_wise_optimizer_{i}.pt")
    return root


def check(root: Path) -> None:
    """Check that states belong to their parameter, and groups to their optimizer."""
    found = open_checkpoint(root, ReadOptions())
    for name, whole in legacy_model.whole_model().items():
        rows = found.parameters[name].shape[0]
        held = ucp.open(root)[name]
        is_of_muon = whole.ndim == 2 and name not in ENDS
        kinds = {"momentum_buffer": 4} if is_of_muon else {"exp_avg": 2}
        assert set(kinds) <= set(held.kinds)
        assert ("step" in held.kinds) is not is_of_muon
        for kind, divisor in kinds.items():
            assert (held.read(kind) == (whole[:rows] / divisor).numpy()).all()
        group = found.parameters[name].group
        assert group is not None
        assert found.groups[group].hyper["lr"] == (0.02 if is_of_muon else 0.1)
    assert len(found.groups) == 3


@pytest.mark.parametrize("to", ["megatron", "torch-dist"])
def test_each_optimizer_keeps_its_own_states(tmp_path: Path, to: str) -> None:
    source = saved(tmp_path / "source")
    check(source)
    convert(source, tmp_path / "out", to=to, tp=2, pp=2)
    check(tmp_path / "out")
    convert(tmp_path / "out", tmp_path / "back", to="megatron", tp=1, pp=1)
    assert diff(source, tmp_path / "back").identical
    tree = torch.load(tmp_path / "back/iter_0000007/mp_rank_00/model_optim_rng.pt", weights_only=False)
    muon, adam = tree["optimizer"]
    assert [len(group["params"]) for group in muon["optimizer"]["param_groups"]] == [8]
    assert [len(group["params"]) for group in adam["optimizer"]["param_groups"]] == [2, 3]


@pytest.mark.parametrize("dp", [2, 3])
def test_parameters_are_assigned_to_ranks_as_in_the_job(tmp_path: Path, dp: int) -> None:
    source = saved_layer_wise(tmp_path / "source", dp)
    check(source)
    convert(source, tmp_path / "out", to="megatron", dp=5 - dp)
    expected = saved_layer_wise(tmp_path / "expected", 5 - dp)
    for i in range(5 - dp):
        name = f"iter_0000007/mp_rank_00/layer_wise_optimizer_{i}.pt"
        ours, theirs = (torch.load(root / name, weights_only=False) for root in (tmp_path / "out", expected))
        assert [len(one["fp32_from_fp16_params"][0]) for one in ours] == [
            len(one["fp32_from_fp16_params"][0]) for one in theirs
        ]
    check(tmp_path / "out")
    convert(tmp_path / "out", tmp_path / "sharded", to="torch-dist", tp=2)
    check(tmp_path / "sharded")


def test_a_missing_layer_wise_file_is_named(tmp_path: Path) -> None:
    source = saved_layer_wise(tmp_path / "source", 2)
    (source / "iter_0000007/mp_rank_00/layer_wise_optimizer_1.pt").unlink()
    with pytest.raises(InconsistentError, match=r"layer_wise_optimizer_1\.pt is missing"):
        open_checkpoint(source, ReadOptions())


def test_the_distributed_optimizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="supports Adam, but not Muon"):
        convert(saved(tmp_path / "source"), tmp_path / "out", to="megatron", optimizer="distributed")
