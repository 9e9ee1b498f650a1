"""Checkpoints from which keys were deleted: what can be inferred is noted, the rest is an error."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import ucp
from tests.formats.deepspeed.synthetic import SHAPES, read, save_flat, value
from ucp.core.checkpoint import Checkpoint
from ucp.errors import InconsistentError, NotUnderstoodError

Cut = Callable[..., Path]


@pytest.fixture
def cut(project: Path, tmp_path: Path) -> Cut:
    """A copy of a real checkpoint whose model files lack some keys."""

    def copy(name: str, *keys: str) -> Path:
        target = tmp_path / name
        shutil.copytree(project / "fixtures" / name, target, ignore=shutil.ignore_patterns("reference"))
        for path in target.rglob("*model_states.pt"):
            tree = torch.load(path, weights_only=False)
            for key in keys if "module" in tree else ():  # the files of experts hold nothing but experts
                del tree[key]
            torch.save(tree, path)
        return target

    return copy


def notes(checkpoint: Checkpoint, kind: str) -> list[str]:
    return [note.text for note in checkpoint.notes if note.id == kind]


def test_the_wrong_order_of_round_robin_is_reported(cut: Cut) -> None:
    """Only `param_slice_mappings` remains, and it is wrong."""
    with pytest.raises(InconsistentError, match=r"no param_shapes.*25 of 29 parameters.*round_robin_gradients"):
        read(cut("z2_bf16_roundrobin_dp3", "param_shapes"))


@pytest.mark.parametrize("name", ["z1_bf16_dp2", "z2_bf16_paramalign_dp2"])
def test_an_order_confirmed_by_weights_is_used(cut: Cut, project: Path, name: str) -> None:
    assert ucp.diff(cut(name, "param_shapes"), project / "fixtures" / name, strict=True).same


@pytest.mark.parametrize(
    "gone, kept",
    [("frozen_param_shapes", "frozen_param_fragments"), ("frozen_param_fragments", "frozen_param_shapes")],
)
def test_one_of_two_keys_for_frozen_parameters(cut: Cut, gone: str, kept: str) -> None:
    with pytest.raises(InconsistentError, match=rf"has {kept} of 5 frozen parameters \(pos.weight, .*no {gone}"):
        read(cut("z3_bf16_frozen_subgroups_dp2", gone))


def test_frozen_parameters_without_values(cut: Cut) -> None:
    found = read(cut("z3_bf16_frozen_subgroups_dp2", "frozen_param_shapes", "frozen_param_fragments"))
    [text] = notes(found, "weights-missing")
    assert "5 of the parameters that it names (pos.weight, " in text
    assert "pos.weight" not in found.parameters


@pytest.mark.parametrize("name", ["z0_bf16_dp2", "z0_fp32_dp2", "z1_bf16_dp2", "z3_fp32_dp3"])
def test_tensors_that_may_be_buffers(cut: Cut, project: Path, name: str) -> None:
    assert not notes(read(project / "fixtures" / name), "buffers-unlisted")
    [text] = notes(read(cut(name, "buffer_names")), "buffers-unlisted")
    assert "buffer_names is missing" in text
    assert "seen" in text
    assert "blocks.0.attn.mask" in text


def test_tied_weights_of_a_model_with_experts(cut: Cut, project: Path) -> None:
    """DeepSpeed copies a model with experts before saving: tied weights have equal values and separate storages."""
    folder = cut("z1_bf16_moe4_ep2_dp4", "shared_params")
    found = read(folder)
    assert found.parameters["embed.weight"].aliases == ("head.weight",)
    [text] = notes(found, "shared-inferred")
    assert "head.weight equals embed.weight" in text
    assert ucp.diff(folder, project / "fixtures" / "z1_bf16_moe4_ep2_dp4", strict=True).same


def test_a_tied_name_without_values(cut: Cut) -> None:
    [text] = notes(read(cut("z3_fp32_dp3", "shared_params")), "weights-missing")
    assert "(head.weight)" in text
    assert "shared_params is missing" in text


def test_equal_constants_are_not_tied(tmp_path: Path) -> None:
    """Fresh norms are all ones."""
    ones = torch.ones(3, dtype=torch.bfloat16)
    module = {name: value(name, "master").bfloat16() for name in SHAPES} | {"norm.weight": ones, "other": ones.clone()}
    folder = save_flat(tmp_path / "c", module=module)
    path = next(folder.rglob("mp_rank_00_model_states.pt"))
    tree = torch.load(path, weights_only=False)
    del tree["shared_params"]
    torch.save(tree, path)
    assert "other" in read(folder).parameters


def test_an_unconfirmed_order_is_noted(cut: Cut) -> None:
    """No `param_shapes`, and weights that cannot be compared with their masters."""
    folder = cut("z1_bf16_dp2", "param_shapes")
    path = next(folder.rglob("mp_rank_00_model_states.pt"))
    tree = torch.load(path, weights_only=False)
    tree["module"] = {name: tensor.double() for name, tensor in tree["module"].items()}
    torch.save(tree, path)
    [text] = notes(read(folder), "order-unproven")
    assert "taken from param_slice_mappings" in text


def test_numpy_dates_in_client_state(project: Path, tmp_path: Path) -> None:
    """A date keeps its unit; a value that cannot be written is reported with a hint."""
    folder = tmp_path / "c"
    shutil.copytree(project / "fixtures" / "z1_bf16_dp2", folder, ignore=shutil.ignore_patterns("reference"))
    path = next(folder.rglob("mp_rank_00_model_states.pt"))
    tree = torch.load(path, weights_only=False)
    tree["when"] = {"saved": np.datetime64("2024-01-02T03:04:05"), "took": np.array([3, 4], "m8[ms]")}
    torch.save(tree, path)
    ucp.convert(folder, tmp_path / "atoms")
    for source, out in ((folder, "one"), (tmp_path / "atoms", "two")):
        ucp.convert(source, tmp_path / out, to="deepspeed", dp=3)
        again = torch.load(next((tmp_path / out).rglob("mp_rank_00_model_states.pt")), weights_only=False)["when"]
        assert again["saved"] == tree["when"]["saved"]
        assert again["saved"].dtype == tree["when"]["saved"].dtype
        assert again["took"].dtype == np.dtype("m8[ms]")
        assert again["took"].tolist() == tree["when"]["took"].tolist()
    tree["when"] = np.zeros(2, [("a", "i4")])
    torch.save(tree, path)
    with pytest.raises(NotUnderstoodError, match=r"\['when'\] cannot be written") as error:
        ucp.convert(folder, tmp_path / "three", to="deepspeed", dp=3)
    assert "delete the key" in str(error.value)
