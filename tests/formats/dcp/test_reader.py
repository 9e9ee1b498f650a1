"""Reading folders that real torch writes, with every structure of keys and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ucp
from tests.formats.dcp.state_dicts import save, small_state
from ucp.core.checkpoint import Atom, Checkpoint
from ucp.errors import UsageError


def index_of(path: Path) -> Checkpoint:
    return ucp.open(path).index


def assert_holds(path: Path, state: dict[str, Any]) -> None:
    """Check every tensor of `small_state` by name."""
    import torch

    opened = ucp.open(path)
    assert list(opened) == list(state["model"])
    for name, value in state["model"].items():
        assert torch.equal(opened[name].read("weight", as_torch=True), value), name
    for name, states in state["optim"]["state"].items():
        for kind, value in states.items():
            assert torch.equal(opened[name].read(kind, as_torch=True), value), (name, kind)


def test_top_level_names_are_free(tmp_path: Path) -> None:
    """The optimizer is recognised by its groups, the model by the optimizer's names."""
    state = small_state(groups=2)
    nested = {"app": {"net": state["model"], "opt": state["optim"]}, "epoch": 4}
    path = save(nested, tmp_path / "saved")
    assert_holds(path, state)
    index = index_of(path)
    assert index.step == 2
    assert [group.hyper["weight_decay"] for group in index.groups] == [0.5, 0.01]
    assert [group.names for group in index.groups] == [["0.weight", "0.bias"], ["1.weight", "1.bias", "2.weight"]]
    assert index.groups[0].hyper["betas"] == (0.9, 0.999)
    assert index.extras.trees == {".metadata": {"epoch": 4}}
    assert {p.name: p.role for p in index.parameters.values() if p.role != "trained"} == {
        "1.running_mean": "buffer",
        "1.running_var": "buffer",
        "1.num_batches_tracked": "buffer",
    }


def test_a_model_with_a_module_called_state(tmp_path: Path) -> None:
    """A module named `state` is not an optimizer."""
    import torch

    state = small_state()
    state["model"] = {**state["model"], "state.rho": torch.ones(3), "state.sigma.step": torch.zeros(2)}
    assert_holds(save(state, tmp_path / "saved"), state)


@pytest.mark.parametrize("form", ["nested", "flattened", "no paths", "weights"])
def test_a_model_with_a_module_called_param_groups(tmp_path: Path, form: str) -> None:
    """It is not an optimizer, whichever dictionaries have its weights, its moments and its extra state."""
    import torch

    state = small_state()
    plain = state["optim"]["param_groups"][0]
    renamed = {"0.weight": "param_groups.0.weight", "0.bias": "param_groups.lr", "1.weight": "state.weight"}
    state["model"] = {renamed.get(name, name): value for name, value in state["model"].items()}
    moments = {renamed.get(name, name): value for name, value in state["optim"]["state"].items()}
    names = [renamed.get(name, name) for name in plain["params"]]
    groups = [{**plain, "params": names}]
    state["optim"] = {"state": moments, "param_groups": groups}
    saved = {**state, "model": {**state["model"], "param_groups._extra_state": "3"}}
    if form == "weights":
        state["optim"]["state"] = {}
        saved = saved["model"]
    elif form == "flattened":
        fields = {f"param_groups.{name}.{key}": plain[key] for name in names for key in plain if key != "params"}
        states = {f"state.{name}.{kind}": value for name, held in moments.items() for kind, value in held.items()}
        saved["optim"] = {**states, **fields}
    elif form == "no paths":
        flat_model = {f"model.{name}": value for name, value in saved["model"].items()}
        states = {f"optim.state.{name}.{kind}": value for name, held in moments.items() for kind, value in held.items()}
        fields = {f"optim.param_groups.0.{key}": value for key, value in groups[0].items()}
        saved = {**flat_model, **states, **fields}
    path = save(saved, tmp_path / "saved", flatten=form != "no paths")
    assert_holds(path, state)
    index = index_of(path)
    assert [group.names for group in index.groups] == ([] if form == "weights" else [names])
    assert torch.is_tensor(state["model"]["param_groups.lr"])
    assert [note.id for note in index.notes] == []


def test_averaged_copies_are_extras(tmp_path: Path) -> None:
    state = small_state()
    ema = {name: value * 2 if value.dtype.is_floating_point else value for name, value in state["model"].items()}
    path = save({"ema": ema, **state}, tmp_path / "saved")
    assert_holds(path, state)
    assert isinstance(index_of(path).extras.trees[".metadata"]["ema"]["0.weight"], Atom)


@pytest.mark.parametrize("form", ["named", "numbered", "weights"])
@pytest.mark.parametrize("places", [("ema_model", "model"), ("teacher", "net"), ("model_avg", "x")])
def test_a_copy_that_comes_first_is_not_the_model(tmp_path: Path, places: tuple[str, str], form: str) -> None:
    """Averages have the names and shapes of the model, maybe in a wider dtype; a note names the one that was read."""
    state = small_state()
    first, own = places
    average = {name: value.double() * 2 for name, value in state["model"].items()}
    saved = {first: average, own: state["model"], "optim": state["optim"]}
    if form == "numbered":
        saved["optim"] = _numbered(state["optim"])
    elif form == "weights":
        del saved["optim"]
        state["optim"]["state"] = {}
    path = save(saved, tmp_path / "saved")
    assert_holds(path, state)
    (note,) = (note for note in index_of(path).notes if note.id == "model-copies")
    assert note.text.startswith(f"the model is {own}; tensors like its own are in {first} too")


def _numbered(optim: dict[str, Any]) -> dict[str, Any]:
    """The form of `optimizer.state_dict()`."""
    names = [name for group in optim["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in optim["param_groups"]]
    return {"state": {numbers[name]: held for name, held in optim["state"].items()}, "param_groups": groups}


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize("places", [("netG", "netD", "optD", "optG"), ("a", "b", "b_optimizer", "a_optimizer")])
def test_two_models_with_the_same_names(tmp_path: Path, places: tuple[str, ...], numbered: bool) -> None:
    """Each optimizer trains its own model: the one with the more similar name."""
    import torch

    first, second = small_state(), small_state(steps=5)
    optims = [_numbered(one["optim"]) if numbered else one["optim"] for one in (second, first)]
    path = save(dict(zip(places, (first["model"], second["model"], *optims), strict=True)), tmp_path / "saved")
    opened = ucp.open(path)
    for place, state in zip(places, (first, second), strict=False):
        for name, value in state["model"].items():
            assert torch.equal(opened[f"{place}.{name}"].read("weight", as_torch=True), value)
        for name, states in state["optim"]["state"].items():
            for kind, value in states.items():
                assert torch.equal(opened[f"{place}.{name}"].read(kind, as_torch=True), value)
    assert {note.id for note in index_of(path).notes} <= {"states-by-order"}


def test_two_models_with_an_optimizer_each(tmp_path: Path) -> None:
    import torch

    first, second = small_state(), small_state(steps=5)
    second["model"] = {f"d.{name}": value for name, value in second["model"].items()}
    second["optim"]["state"] = {f"d.{name}": value for name, value in second["optim"]["state"].items()}
    second["optim"]["param_groups"][0]["params"] = [f"d.{n}" for n in second["optim"]["param_groups"][0]["params"]]
    state = {"g": first["model"], "g_opt": first["optim"], "d": second["model"], "d_opt": second["optim"]}
    opened = ucp.open(save(state, tmp_path / "saved"))
    assert torch.equal(opened["g.0.weight"].read("weight", as_torch=True), first["model"]["0.weight"])
    moment = second["optim"]["state"]["d.0.weight"]["exp_avg"]
    assert torch.equal(opened["d.d.0.weight"].read("exp_avg", as_torch=True), moment)


def test_optimizer_saved_alone(tmp_path: Path) -> None:
    import torch

    state = small_state()
    opened = ucp.open(save(state["optim"], tmp_path / "saved"))
    assert opened.index.parameters["0.weight"].shape == (7, 5)
    got = opened["0.weight"].read("exp_avg", as_torch=True)
    assert torch.equal(got, state["optim"]["state"]["0.weight"]["exp_avg"])
    for number, options in enumerate(
        ({"to": "deepspeed", "zero": 0}, {"to": "deepspeed", "zero": 1}, {"to": "deepspeed", "zero": 3})
    ):
        with pytest.raises(UsageError, match="the source has no weight for it"):
            ucp.convert(tmp_path / "saved", tmp_path / f"out{number}", **options)
    with pytest.raises(UsageError, match="the source has no weight for it"):
        ucp.convert(tmp_path / "saved", tmp_path / "weights", to="safetensors")


def raw_state(*, groups: int = 1) -> dict[str, Any]:
    """A common way to save: `optimizer.state_dict()` with numbers, and DDP's `module.` in the names."""
    state = small_state(groups=groups)
    names = [name for group in state["optim"]["param_groups"] for name in group["params"]]
    optim = {
        "state": {i: state["optim"]["state"][name] for i, name in enumerate(names)},
        "param_groups": [
            {**group, "params": [names.index(name) for name in group["params"]]}
            for group in state["optim"]["param_groups"]
        ],
    }
    return {"model": {f"module.{name}": value for name, value in state["model"].items()}, "optimizer": optim}


@pytest.mark.parametrize("groups", [1, 2])
def test_numbered_parameters(tmp_path: Path, groups: int) -> None:
    path = save(raw_state(groups=groups), tmp_path / "saved")
    assert_holds(path, small_state(groups=groups))
    assert {note.id for note in index_of(path).notes} == {"states-by-order", "wrapper-names"}


def test_numbered_parameters_of_any_shape(tmp_path: Path) -> None:
    """A 0-d parameter, biases and norms in the first group, a buffer, and a tied weight under both its names."""
    import torch

    model: dict[str, Any] = {
        "temperature": torch.tensor(0.5),
        "scores": torch.arange(6.0),
        "embed.weight": torch.randn(5, 3),
        "norm.weight": torch.randn(3),
        "up.weight": torch.randn(4, 3),
        "up.bias": torch.randn(4),
    }
    listed = ["temperature", "norm.weight", "up.bias", "embed.weight", "up.weight"]
    numbered = {
        i: {"step": torch.tensor(3.0), **{kind: torch.randn_like(model[name]) for kind in ("exp_avg", "exp_avg_sq")}}
        for i, name in enumerate(listed)
    }
    groups = [{"lr": 0.5, "params": [0, 1, 2]}, {"lr": 0.25, "params": [3, 4]}]
    model["head.weight"] = model["embed.weight"]
    state = {"model": model, "optimizer": {"state": numbered, "param_groups": groups}}
    path = save(state, tmp_path / "saved")
    index = index_of(path)
    assert [group.names for group in index.groups] == [listed[:3], listed[3:]]
    assert index.parameters["embed.weight"].aliases == ("head.weight",)
    opened = ucp.open(path)
    for i, name in enumerate(listed):
        for kind, value in numbered[i].items():
            assert torch.equal(opened[name].read(kind, as_torch=True), value), (name, kind)


def test_groups_without_names_are_not_lost(tmp_path: Path) -> None:
    state = raw_state()
    numbered = state["optimizer"]["state"]
    numbered[0], numbered[4] = numbered[4], numbered[0]
    path = save(state, tmp_path / "saved")
    ucp.convert(path, tmp_path / "again", to="dcp")
    before, after = index_of(path), index_of(tmp_path / "again")
    assert after.parameters.keys() == before.parameters.keys()
    groups = after.extras.trees[".metadata"]["optimizer"]["param_groups"]
    assert groups == before.extras.trees[".metadata"]["optimizer"]["param_groups"]
    assert groups[0]["weight_decay"] == state["optimizer"]["param_groups"][0]["weight_decay"]


def test_numbers_without_states(tmp_path: Path) -> None:
    """SGD without momentum keeps no states, so numbers appear only in its groups."""
    import torch

    model = small_state()["model"]
    names = [name for name in model if "running" not in name and "num_batches" not in name]
    groups = [{"lr": 0.5, "params": list(range(len(names)))}]
    state = {
        "model": model,
        "optimizer": {"state": {}, "param_groups": groups},
        "seen": {"lengths": [torch.ones(1), torch.ones(2)]},
    }
    index = index_of(save(state, tmp_path / "saved"))
    assert list(index.parameters) == list(model)
    assert index.groups[0].names == names
    assert index.extras.trees[".metadata"].keys() == {"seen"}


def test_names_next_to_numbers(tmp_path: Path) -> None:
    """An optimizer made from `named_parameters()` numbers its parameters, in any order, and names them too."""
    import torch

    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3, bias=False) for _ in range(3)))
    optimizer = torch.optim.AdamW(reversed(list(model.named_parameters())), lr=0.5)
    model(torch.randn(2, 3)).square().sum().backward()
    optimizer.step()
    path = save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved")
    opened = ucp.open(path)
    assert opened.index.groups[0].names == ["2.weight", "1.weight", "0.weight"]
    assert not opened.index.notes
    for name, parameter in model.named_parameters():
        assert torch.equal(opened[name].read("exp_avg", as_torch=True), optimizer.state[parameter]["exp_avg"]), name


@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flattened"])
def test_parameters_without_a_gradient_are_frozen(tmp_path: Path, flatten: bool) -> None:
    """An optimizer may be given frozen parameters too, and keeps no state of them: the checkpoint is not damaged."""
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.randn(2, 3)).square().sum().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    own, optim = get_state_dict(model, optimizer, options=options)
    path = save({"model": own, "optim": optim}, tmp_path / "saved")
    index = index_of(path)
    assert {name: p.role for name, p in index.parameters.items()} == {
        **dict.fromkeys(("0.weight", "0.bias"), "frozen"),
        **dict.fromkeys(("1.weight", "1.bias"), "trained"),
    }
    assert index.groups[0].names == list(own)
    assert [note.id for note in index.notes] == ["idle-parameters"]
    assert [found for found in ucp.verify(path, level="deep").findings if found.severity != "note"] == []
    ucp.convert(path, tmp_path / "zero", to="deepspeed", zero=1, dp=2)
    assert ucp.open(tmp_path / "zero").index.parameters["0.weight"].role == "frozen"


def test_bytes_that_are_not_values(tmp_path: Path) -> None:
    import torch

    from ucp.errors import NotUnderstoodError

    view = torch.randn(3, dtype=torch.complex64).conj()
    path = save({"model": {"rotation": view}}, tmp_path / "saved")
    with pytest.raises(NotUnderstoodError, match=r"model\.rotation is stored in a form .* conjugate"):
        ucp.open(path)["rotation"].read("weight")


def test_numbers_that_fit_no_order_stay_extras(tmp_path: Path) -> None:
    state = raw_state()
    numbered = state["optimizer"]["state"]
    numbered[0], numbered[4] = numbered[4], numbered[0]
    index = index_of(save(state, tmp_path / "saved"))
    assert "states-unnamed" in {note.id for note in index.notes}
    assert index.parameters["0.weight"].atoms.keys() == {"weight"}
    assert isinstance(index.extras.trees[".metadata"]["optimizer"]["state"]["0"]["exp_avg"], Atom)


def test_without_paths(tmp_path: Path) -> None:
    """Flat state dicts saved without flattening: only the text of the keys is known."""
    state = small_state(groups=2)
    keys: dict[str, Any] = {f"model.{name}": value for name, value in state["model"].items()}
    for name, states in state["optim"]["state"].items():
        keys.update({f"optim.state.{name}.{kind}": value for kind, value in states.items()})
    for number, group in enumerate(state["optim"]["param_groups"]):
        keys.update({f"optim.param_groups.{number}.{key}": value for key, value in group.items()})
    save(keys, tmp_path / "saved", flatten=False)
    assert_holds(tmp_path / "saved", state)
    assert len(index_of(tmp_path / "saved").groups) == 2


def test_groups_in_one_object(tmp_path: Path) -> None:
    """Before torch 2.4, containers without tensors were stored as one object."""
    state = small_state(groups=2)
    keys: dict[str, Any] = dict(state["model"].items())
    for name, states in state["optim"]["state"].items():
        keys.update({f"optim.state.{name}.{kind}": value for kind, value in states.items()})
    keys["optim.param_groups"] = state["optim"]["param_groups"]
    save(keys, tmp_path / "saved", flatten=False)
    assert_holds(tmp_path / "saved", state)
    assert [group.hyper["weight_decay"] for group in index_of(tmp_path / "saved").groups] == [0.5, 0.01]


def test_transposed_and_typed_tensors(tmp_path: Path) -> None:
    """Archives keep strides, and every dtype has its own storage."""
    import torch

    tensors = {
        "transposed": torch.arange(12.0).reshape(3, 4).t(),
        "sliced": torch.arange(40).reshape(5, 8)[1:4, ::2],
        "bf16": torch.randn(9).to(torch.bfloat16),
        "fp8": torch.randn(8).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
    }
    opened = ucp.open(save({"model": tensors}, tmp_path / "saved"))
    for name, value in tensors.items():
        got = opened[name].read("weight", as_torch=True)
        assert got.dtype == value.dtype
        assert got.shape == value.shape
        raw = [tensor.contiguous().flatten().view(torch.uint8) for tensor in (got, value)]
        assert torch.equal(*raw), name


def test_tensors_inside_objects(tmp_path: Path) -> None:
    """Tuples are stored as one object: their tensors are in its archive."""
    import numpy as np
    import torch

    from ucp.read.atom_reader import read_array

    state = {**small_state(), "pair": (torch.arange(3), {"deep": [torch.tensor([[1.5]])]}, "text")}
    index = index_of(save(state, tmp_path / "saved"))
    first, nested, text = index.extras.trees[".metadata"]["pair"]
    assert text == "text"
    assert np.array_equal(read_array(index.root, first, None), [0, 1, 2])
    assert np.array_equal(read_array(index.root, nested["deep"][0], None), [[1.5]])


def test_learning_rate_as_tensor_and_plain_steps(tmp_path: Path) -> None:
    import torch

    state = small_state()
    state["optim"]["param_groups"][0]["lr"] = torch.tensor(0.25)
    for states in state["optim"]["state"].values():
        states["step"] = 7
    index = index_of(save(state, tmp_path / "saved"))
    assert index.groups[0].hyper["lr"] == 0.25
    assert index.step == 7
    assert ucp.open(tmp_path / "saved")["0.weight"].read("step") == 7


def test_the_newest_finished_step_of_a_run(tmp_path: Path) -> None:
    for number in (5, 40):
        save({**small_state(), "train_state": {"step": number}}, tmp_path / f"step-{number}")
    save(small_state(), tmp_path / "step-100")
    (tmp_path / "step-100" / ".metadata").unlink()
    assert index_of(tmp_path).root.name == "step-40"
    assert ucp.open(tmp_path, tag="step-5").index.extras.trees[".metadata"]["train_state"]["step"] == 5


def test_files_next_to_the_data_are_carried(tmp_path: Path) -> None:
    save(small_state(), tmp_path / "saved")
    (tmp_path / "saved" / "config.json").write_text("{}")
    (tmp_path / "saved" / "__8_0.distcp").touch()  # of a rank whose tensors others wrote
    (tmp_path / "saved" / "__9_0.distcp").write_bytes(b"of another save")
    index = index_of(tmp_path / "saved")
    assert index.extras.files == {"config.json": "config.json"}
    assert next(note.text for note in index.notes if note.id == "left-behind").endswith(": __9_0.distcp")
