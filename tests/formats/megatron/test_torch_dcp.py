"""`torch_dcp`: one state dict of Megatron in torch's own files, with an optimizer that numbers its parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ucp
from tests.formats.megatron import legacy_model
from ucp.api import convert, diff
from ucp.errors import InconsistentError
from ucp.formats.registry import ReadOptions, open_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state_dict() -> dict[str, Any]:
    """A state dict as in a rank file, with random states and the learning-rate schedule as separate entries."""
    tree = legacy_model.rank_tree(1, 1, 0, 0)
    tree["opt_param_scheduler"] = {"num_steps": 16, "max_lr": 0.1}
    tree["rng_state"] = [{"torch_rng_state": torch.arange(8, dtype=torch.uint8), "random_rng_state": (3, (1,), None)}]
    return tree


def save(root: Path, tree: dict[str, Any]) -> Path:
    dcp.save(tree, checkpoint_id=root / "iter_0000007", no_dist=True)
    (root / "latest_checkpointed_iteration.txt").write_text("7")
    return root


def test_it_has_the_states_of_rank_files(tmp_path: Path) -> None:
    tree = state_dict()
    theirs = legacy_model.save(tmp_path / "legacy", {"mp_rank_00": tree})
    source = save(tmp_path / "source", tree)
    assert diff(theirs, source).identical
    convert(source, tmp_path / "out", to="megatron", tp=2, pp=2)
    convert(tmp_path / "out", tmp_path / "back", to="torch-dist", tp=1, pp=1)
    assert diff(theirs, tmp_path / "back").identical
    convert(source, tmp_path / "again", to="megatron")
    again = torch.load(tmp_path / "again/iter_0000007/mp_rank_00/model_optim_rng.pt", weights_only=False)
    assert again["opt_param_scheduler"] == tree["opt_param_scheduler"]
    assert torch.equal(again["rng_state"][0]["torch_rng_state"], tree["rng_state"][0]["torch_rng_state"])
    assert again["rng_state"][0]["random_rng_state"] == (3, (1,), None)


def test_single_precision_has_no_masters(tmp_path: Path) -> None:
    tree = state_dict()
    tree["args"].bf16 = False
    tree["model"] = {name: value if value is None else value.float() for name, value in tree["model"].items()}
    tree["optimizer"] = tree["optimizer"]["optimizer"]
    theirs = legacy_model.save(tmp_path / "legacy", {"mp_rank_00": tree})
    assert diff(theirs, save(tmp_path / "source", tree)).identical


def test_states_of_other_shapes_are_refused(tmp_path: Path) -> None:
    tree = state_dict()
    state = tree["optimizer"]["optimizer"]["state"]
    state[0], state[1] = state[1], state[0]
    with pytest.raises(InconsistentError, match=r"the parameter of this number, is \[12, 4\]"):
        ucp.open(save(tmp_path, tree))


def test_groups_of_the_source_are_not_a_second_optimizer(tmp_path: Path) -> None:
    """Megatron keeps them inside a wrapper of the optimizer, or in a list of optimizers."""
    tree = state_dict()
    theirs = legacy_model.save(tmp_path / "legacy", {"mp_rank_00": tree})
    convert(theirs, tmp_path / "out", to="dcp")
    found = open_checkpoint(tmp_path / "out", ReadOptions())
    assert [len(group.names) for group in found.groups] == [10, 3]
    assert not diff(theirs, tmp_path / "out").settings
