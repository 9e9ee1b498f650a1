"""Parameters that an optimizer lists but does not train: frozen and empty parameters, and empty groups."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import ucp
from tests.formats.deepspeed.synthetic import (
    GROUPS,
    SHAPES,
    STATES,
    STEP,
    even_optim,
    flat_optim,
    model_state,
    read,
    save,
    save_flat,
    tree_differences,
    value,
)
from ucp.formats.deepspeed.write.writer import DeepSpeedWriter
from ucp.formats.registry import WriteOptions

MODEL = "mp_rank_00_model_states.pt"
FP32 = {"zero_optimization": {"stage": 0}}


def adam(groups: list[list[str]], stateless: tuple[str, ...] = ()) -> dict[str, Any]:
    """The state dict of a torch optimizer with these groups."""
    numbers = {name: i for i, name in enumerate(name for group in groups for name in group)}
    return {
        "state": {
            number: {"step": torch.tensor(float(STEP)), **{kind: value(name, kind) for kind in STATES}}
            for name, number in numbers.items()
            if name not in stateless
        },
        "param_groups": [{"lr": 0.1 * g, "params": [numbers[n] for n in group]} for g, group in enumerate(groups, 1)],
    }


def zero_off(folder: Path, optimizer: dict[str, Any], **more: torch.Tensor) -> Path:
    """An fp32 checkpoint with ZeRO off."""
    module = OrderedDict((name, value(name, "master")) for name in SHAPES)
    module.update(more)
    return save(folder, {MODEL: model_state(module, optimizer=optimizer, param_shapes=None, ds_config=FP32)})


def loaded(folder: Path, name: str) -> Any:
    return torch.load(folder / "global_step7" / name, weights_only=False)


def test_frozen_parameters_that_the_optimizer_lists(tmp_path: Path) -> None:
    """`Adam(model.parameters())`: ZeRO omits frozen ones from its buffers; without ZeRO they are listed."""
    saved = zero_off(tmp_path / "c", adam([list(SHAPES)], stateless=("up.weight", "up.bias")))
    checkpoint = read(saved)
    roles = {name: parameter.role for name, parameter in checkpoint.parameters.items()}
    assert roles == {name: "frozen" if name.startswith("up") else "trained" for name in SHAPES}
    assert any(note.id == "frozen-inferred" and "up.bias" in note.text for note in checkpoint.notes)
    assert ucp.verify(saved).ok

    ucp.convert(saved, tmp_path / "sharded", to="deepspeed", zero=2, dp=3)
    model = loaded(tmp_path / "sharded", MODEL)
    assert [list(group) for group in model["param_shapes"]] == [["embed.weight", "down.weight", "norm.weight"]]
    assert list(model["frozen_param_shapes"]) == ["up.weight", "up.bias"]

    ucp.convert(saved, tmp_path / "off", to="deepspeed", dp=5)
    optimizer = loaded(tmp_path / "off", MODEL)["optimizer"]
    assert [group["params"] for group in optimizer["param_groups"]] == [[0, 1, 2, 3, 4]]
    assert sorted(optimizer["state"]) == [0, 3, 4]


def test_empty_parameters_are_not_in_flat_buffers(tmp_path: Path) -> None:
    optimizer = adam([list(SHAPES)])
    optimizer["state"][5] = {"step": torch.tensor(float(STEP)), **{kind: torch.zeros(0, 4) for kind in STATES}}
    optimizer["param_groups"][0]["params"].append(5)
    saved = zero_off(tmp_path / "c", optimizer, nothing=torch.zeros(0, 4))
    ucp.convert(saved, tmp_path / "sharded", to="deepspeed", zero=1, dp=2)
    model = loaded(tmp_path / "sharded", MODEL)
    assert list(model["param_shapes"][0]) == list(SHAPES)
    assert model["module"]["nothing"].shape == (0, 4)
    optim = loaded(tmp_path / "sharded", "zero_pp_rank_0_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
    assert optim["param_alignment_paddings"] == [[0] * len(SHAPES)]


def test_a_group_for_every_parameter_is_in_the_order_of_the_module(tmp_path: Path) -> None:
    optimizer = adam([[name] for name in SHAPES])
    optimizer["state"][5] = {kind: torch.ones(4, 3) for kind in STATES}  # as up.weight: shapes alone leave a choice
    optimizer["param_groups"].append({"lr": 0.6, "params": [5]})
    checkpoint = read(zero_off(tmp_path / "c", optimizer, **{"twin.weight": torch.ones(4, 3)}))
    assert [group.names for group in checkpoint.groups] == [[name] for name in (*SHAPES, "twin.weight")]
    assert any(
        note.id == "names-inferred" and "every parameter has a group of its own" in note.text
        for note in checkpoint.notes
    )


def test_a_group_for_every_parameter_but_frozen_ones(tmp_path: Path) -> None:
    """They are in the module only, and the shapes allow only one way to skip them."""
    optimizer = adam([[name] for name in SHAPES])
    more = {"frozen.weight": torch.ones(2, 3), "frozen.bias": torch.ones(2)}
    checkpoint = read(zero_off(tmp_path / "c", optimizer, **more))
    assert [group.names for group in checkpoint.groups] == [[name] for name in SHAPES]
    roles = {name: parameter.role for name, parameter in checkpoint.parameters.items()}
    assert roles == {**dict.fromkeys(SHAPES, "trained"), **dict.fromkeys(more, "frozen")}


@pytest.mark.parametrize("momentum", [False, True])
def test_factored_states_distinguish_matrices_from_vectors(tmp_path: Path, momentum: bool) -> None:
    """As in transformers' Adafactor. Those of a square matrix have equal shapes, and that of the bias."""
    square = {"q.weight": torch.ones(3, 3), "q.bias": torch.ones(3)}
    shapes = {**SHAPES, **{name: tuple(tensor.shape) for name, tensor in square.items()}}
    numbers = {name: number for number, name in enumerate(sorted(shapes, key=lambda name: len(shapes[name]) < 2))}
    state: dict[int, dict[str, Any]] = {}
    for name, number in numbers.items():
        shape = shapes[name]
        sums = {"row": shape[:-1], "col": shape[1:]} if len(shape) > 1 else {"sq": shape}
        state[number] = {"step": STEP, "RMS": torch.tensor(0.5), **{kind: torch.ones(s) for kind, s in sums.items()}}
        if momentum:
            state[number]["exp_avg"] = torch.ones(shape)
    groups = [[n for n in numbers if len(shapes[n]) > 1], [n for n in numbers if len(shapes[n]) < 2]]
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": [numbers[n] for n in g]} for g in groups]}
    checkpoint = read(zero_off(tmp_path / "c", optimizer, **square))
    assert [group.names for group in checkpoint.groups] == groups


def test_empty_parameters_are_not_aliases(tmp_path: Path) -> None:
    """DeepSpeed treats them as shared: it compares addresses, and they have none."""
    module = {name: value(name, "master").bfloat16() for name in SHAPES}
    module.update({"none": torch.zeros(0, 4), "void": torch.zeros(2, 0), "nil": torch.zeros(0)})
    files: dict[str, Any] = {MODEL: model_state(module, shared_params={"void": "none", "nil": "none"})}
    files.update({f"bf16_zero_pp_rank_{r}_mp_rank_00_optim_states.pt": flat_optim(2, r) for r in range(2)})
    checkpoint = read(save(tmp_path / "c", files))
    shapes = {name: parameter.shape for name, parameter in checkpoint.parameters.items()}
    assert shapes == {**SHAPES, "none": (0, 4), "void": (2, 0), "nil": (0,)}


def test_names_recorded_in_groups_are_used(tmp_path: Path) -> None:
    """An optimizer created from `named_parameters()`, in an order that shapes do not reveal."""
    frozen = {"frozen.weight": torch.ones(SHAPES["up.weight"])}
    names = list(reversed(SHAPES))
    optimizer = adam([names])
    optimizer["param_groups"][0]["param_names"] = names
    checkpoint = read(zero_off(tmp_path / "c", optimizer, **frozen))
    assert [group.names for group in checkpoint.groups] == [names]
    assert checkpoint.parameters["frozen.weight"].role == "frozen"
    assert not any(note.id == "names-inferred" for note in checkpoint.notes)
    optimizer["param_groups"][0]["param_names"] = list(reversed(names))  # shapes contradict them
    assert not read(zero_off(tmp_path / "d", optimizer, **frozen)).groups


def test_empty_groups_keep_their_position(tmp_path: Path) -> None:
    """A group whose parameters are all frozen: ZeRO-3 writes it empty and expects the same number of groups."""
    files: dict[str, Any] = {}
    groups = [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": []}, {"lr": 0.3, "params": [1]}]
    for rank in range(2):
        empty = {name: torch.zeros(0, dtype=torch.bfloat16) for name in SHAPES}
        files[f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"] = model_state(empty)
        optim = even_optim(2, rank)
        optim["optimizer_state_dict"]["optimizer_state_dict"]["param_groups"] = groups
        files[f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = optim
    saved = save(tmp_path / "c", files)
    assert [group.names for group in read(saved).groups] == [GROUPS[0], [], GROUPS[1]]
    ucp.convert(saved, tmp_path / "new", to="deepspeed", dp=3)
    optim = loaded(tmp_path / "new", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
    assert optim["optimizer_state_dict"]["param_groups"] == groups


def elastic(folder: Path, config: dict[str, Any]) -> Path:
    """A list of states instead of torch's state dict, without hyper-parameters."""
    zero = {"zero_optimization": {"stage": 1, "elastic_checkpoint": True}, "bf16": {"enabled": True}}
    files: dict[str, Any] = {MODEL: model_state(ds_config={**zero, **config})}
    for rank in range(2):
        optim = flat_optim(2, rank)
        state = optim["optimizer_state_dict"]["base_optimizer_state"]["state"]
        optim["optimizer_state_dict"]["base_optimizer_state"] = [state[g] for g in range(len(GROUPS))]
        files[f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = optim
    return save(folder, files)


def test_a_job_keeps_its_hyper_parameters_if_the_source_has_none(tmp_path: Path) -> None:
    """In the elastic form DeepSpeed loads no groups. It pads every state, even the step, by the stored number: 0."""
    saved = elastic(tmp_path / "c", {})
    assert any("keeps its own" in note.text for note in DeepSpeedWriter(read(saved), WriteOptions(dp=3)).notes)
    ucp.convert(saved, tmp_path / "new", to="deepspeed", dp=3)
    assert ucp.verify(tmp_path / "new", level="deep").ok
    assert ucp.diff(saved, tmp_path / "new").same
    for rank in range(3):
        optim = loaded(tmp_path / "new", f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
        assert (optim["group_paddings"], optim["base_optimizer_state_step"]) == ([0, 0], STEP)
        for g, state in enumerate(optim["base_optimizer_state"]):
            master = optim["single_partition_of_fp32_groups"][g]
            assert {kind: tensor.shape for kind, tensor in state.items() if kind != "step"} == dict.fromkeys(
                STATES, master.shape
            )


def test_missing_hyper_parameters_are_noted(tmp_path: Path) -> None:
    """ZeRO-3 has no such form, and torch's optimizers fail without them: the configuration is used."""
    config = {"optimizer": {"type": "Adam", "params": {"lr": 0.25, "betas": [0.8, 0.9], "torch_adam": True}}}
    for given, expected in ((config, {"lr": 0.25, "betas": [0.8, 0.9]}), ({}, {})):
        saved = elastic(tmp_path / f"c{len(expected)}", given)
        (note,) = [n for n in DeepSpeedWriter(read(saved), WriteOptions(zero=3)).notes if n.id == "no-hyper-parameters"]
        assert ("configuration" in note.text) == bool(expected)
        ucp.convert(saved, tmp_path / f"new{len(expected)}", to="deepspeed", zero=3)
        optim = loaded(tmp_path / f"new{len(expected)}", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt")
        groups = optim["optimizer_state_dict"]["optimizer_state_dict"]["param_groups"]
        assert groups == [{**expected, "params": [g]} for g in range(len(GROUPS))]


def test_client_tensors_of_an_unsupported_form_are_dropped(tmp_path: Path) -> None:
    """A conjugate view cannot be carried: it is noted and dropped, the rest is kept."""
    client = {"view": torch.ones(3, dtype=torch.complex64).conj(), "list": [torch.ones(2).untyped_storage(), 5]}
    saved = save_flat(tmp_path / "c", client=client)
    left = [note.text for note in read(saved).notes if note.id == "extra-unreadable"]
    assert len(left) == 2
    assert any("client/view" in text for text in left)
    ucp.convert(saved, tmp_path / "new", to="deepspeed", dp=3)
    assert loaded(tmp_path / "new", MODEL)["client"] == {"list": [None, 5]}


def test_an_unnamed_optimizer_is_copied_if_only_the_number_of_ranks_changes(tmp_path: Path) -> None:
    optimizer = adam([["norm.weight", "embed.weight"], ["up.bias", "down.weight", "up.weight"]])  # in no order
    twin = {"twin.weight": torch.ones(4, 3)}
    saved = zero_off(tmp_path / "c", optimizer, **twin)
    assert {note.id for note in read(saved).notes} >= {"optimizer-unnamed"}
    ucp.convert(saved, tmp_path / "atoms")
    for source in (saved, tmp_path / "atoms"):
        new = tmp_path / f"new of {source.name}"
        ucp.convert(source, new, to="deepspeed", zero=0, dp=6)
        assert tree_differences(optimizer, loaded(new, MODEL)["optimizer"]) == []
    assert not DeepSpeedWriter(read(saved), WriteOptions(zero=0)).notes
    (note,) = DeepSpeedWriter(read(saved), WriteOptions(zero=1)).notes
    assert "have no names" in note.text
