"""Forms of checkpoints that no small real run writes: old releases, offloading, unusual optimizers and tensors."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ucp
from tests.formats.deepspeed.synthetic import (
    GROUPS,
    MODEL_FILE,
    SHAPES,
    STATES,
    STEP,
    array,
    check_values,
    even_optim,
    flat_group,
    flat_optim,
    flat_padding,
    model_state,
    optim_file,
    read,
    save,
    save_even,
    save_flat,
    value,
)
from ucp.core.checkpoint import Checkpoint
from ucp.errors import InconsistentError, NotUnderstoodError
from ucp.formats.sharded.shard_fragments import RankFragments


def notes(checkpoint: Checkpoint) -> set[str]:
    return {note.id for note in checkpoint.notes}


@pytest.mark.parametrize("dp", [1, 2, 3, 5, 16])
def test_flat_groups_at_any_number_of_ranks(tmp_path: Path, dp: int) -> None:
    checkpoint = read(save_flat(tmp_path / "c", dp))
    check_values(checkpoint)
    assert (checkpoint.mesh.dp, checkpoint.mesh.zero, checkpoint.step) == (dp, 1, STEP)
    for parameter in checkpoint.parameters.values():
        weight = array(checkpoint, parameter.atoms["weight"])
        assert weight.tobytes() == value(parameter.name, "master").bfloat16().view(torch.int16).numpy().tobytes()
        assert float(array(checkpoint, parameter.atoms["step"])) == STEP
    assert [group.hyper for group in checkpoint.groups] == [{"lr": 0.1}, {"lr": 0.2}]
    assert [group.names for group in checkpoint.groups] == [list(group) for group in GROUPS]
    assert checkpoint.parameters["norm.weight"].group == 1


@pytest.mark.parametrize("dp", [1, 2, 3, 7, 13])
def test_even_slices_at_any_number_of_ranks(tmp_path: Path, dp: int) -> None:
    checkpoint = read(save_even(tmp_path / "c", dp))
    check_values(checkpoint)
    assert checkpoint.mesh.zero == 3
    assert all("weight" not in parameter.atoms for parameter in checkpoint.parameters.values())


def test_the_whole_tail_of_padding_on_the_last_rank(tmp_path: Path) -> None:
    """BF16_Optimizer keeps padding in the file and counts all of it on the last rank, more than that rank has."""
    files: dict[str, Any] = {MODEL_FILE: model_state(dp_world_size=4)}
    for rank in range(4):
        state = flat_optim(4, rank, group_paddings=[0, 0] if rank < 3 else [99, 99])
        del state["optimizer_state_dict"]["zero_stage"]
        masters = [flat_group(group, "master", 4)[rank].clone() for group in GROUPS]
        state["optimizer_state_dict"]["single_partition_of_fp32_groups"] = masters
        files[optim_file(rank)] = state
    checkpoint = read(save(tmp_path / "c", files))
    check_values(checkpoint)
    assert checkpoint.details["optimizer_wrapper"] == "BF16_Optimizer"


def test_elastic_has_no_padding_and_no_groups(tmp_path: Path) -> None:
    files: dict[str, Any] = {MODEL_FILE: model_state()}
    for rank in range(2):
        lean = [
            {
                "step": torch.tensor(float(STEP)),
                **{
                    kind: flat_group(group, kind, 2)[rank].clone()[: -flat_padding(group, 2, rank) or None]
                    for kind in STATES
                },
            }
            for group in GROUPS
        ]
        files[optim_file(rank)] = flat_optim(2, rank, base_optimizer_state=lean)
    checkpoint = read(save(tmp_path / "c", files))
    check_values(checkpoint)
    assert [group.hyper for group in checkpoint.groups] == [{}, {}]
    assert checkpoint.details["zero"]["elastic_checkpoint"] is True


def test_very_old_files_keep_shapes_in_the_optimizer_file(tmp_path: Path) -> None:
    shapes = model_state()["param_shapes"]
    model = model_state(param_shapes=None)
    files: dict[str, Any] = {MODEL_FILE: {key: item for key, item in model.items() if key != "buffer_names"}}
    for rank in range(2):
        state = {**flat_optim(2, rank, partition_count=2), "param_shapes": shapes}
        files[f"zero_pp_rank_{rank}_mp_rank_00optim_states.pt"] = state
    check_values(read(save(tmp_path / "c", files)))


def test_alignment_padding_between_parameters(tmp_path: Path) -> None:
    paddings = [[(-int(np.prod(SHAPES[name]))) % 8 for name in group[:-1]] + [0] for group in GROUPS]
    files: dict[str, Any] = {MODEL_FILE: model_state()}
    for rank in range(2):
        state = flat_optim(2, rank, param_alignment_paddings=paddings)
        top = state["optimizer_state_dict"]
        top["single_partition_of_fp32_groups"] = []
        for g, group in enumerate(GROUPS):
            for kind in ("master", *STATES):
                parts = [
                    torch.cat([value(name, kind).reshape(-1), torch.zeros(pad)])
                    for name, pad in zip(group, paddings[g], strict=True)
                ]
                flat = torch.cat(parts)
                flat = torch.cat([flat, torch.zeros(-flat.numel() % 4)]).reshape(2, -1)[rank].clone()
                if kind == "master":
                    top["single_partition_of_fp32_groups"].append(flat)
                else:
                    top["base_optimizer_state"]["state"][g][kind] = flat
        files[optim_file(rank)] = state
    check_values(read(save(tmp_path / "c", files)))


@pytest.mark.parametrize("step", [STEP, np.int64(STEP), float(STEP)])
def test_steps_that_are_plain_numbers(tmp_path: Path, step: Any) -> None:
    files = {MODEL_FILE: model_state(), **{optim_file(rank): flat_optim(2, rank, step=step) for rank in range(2)}}
    checkpoint = read(save(tmp_path / "c", files))
    atom = checkpoint.parameters["up.bias"].atoms["step"]
    assert atom.shape == ()
    assert atom.fragments[0].inline is not None
    assert float(array(checkpoint, atom)) == STEP


def test_states_of_any_name_and_those_that_fit_no_element(tmp_path: Path) -> None:
    files: dict[str, Any] = {MODEL_FILE: model_state()}
    for rank in range(2):
        state = flat_optim(2, rank)
        for g, slot in state["optimizer_state_dict"]["base_optimizer_state"]["state"].items():
            slot["hessian"] = flat_group(GROUPS[g], "exp_avg", 2)[rank].clone()
            slot["worker_error"] = torch.ones(3)
            slot["note"] = "kept"
            slot["master"] = torch.tensor(2.0)
        files[optim_file(rank)] = state
    checkpoint = read(save(tmp_path / "c", files))
    for name, parameter in checkpoint.parameters.items():
        assert array(checkpoint, parameter.atoms["hessian"]).tobytes() == value(name, "exp_avg").numpy().tobytes()
        assert float(array(checkpoint, parameter.atoms["state_master"])) == 2.0
        assert "worker_error" not in parameter.atoms
    assert "state-unplaced" in notes(checkpoint)
    tree = checkpoint.extras.trees[optim_file(1)]["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
    assert tree["note"] == "kept"
    assert array(checkpoint, tree["worker_error"]).tolist() == [1.0, 1.0, 1.0]
    assert "hessian" not in tree


def test_a_number_per_rank_is_not_assigned_to_parameters(tmp_path: Path) -> None:
    """Adafactor (of transformers) keeps the mean square of the tensor it steps, which is a rank's partition."""
    files: dict[str, Any] = {MODEL_FILE: model_state()}
    for rank in range(2):
        files[optim_file(rank)] = flat_optim(2, rank)
        for slot in files[optim_file(rank)]["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            slot["RMS"] = torch.tensor(0.25 + rank)
            slot["mu_product"] = torch.tensor(0.5)
    checkpoint = read(save(tmp_path / "c", files))
    check_values(checkpoint)
    assert any(note.id == "state-unplaced" and "'RMS'" in note.text for note in checkpoint.notes)
    for parameter in checkpoint.parameters.values():
        assert parameter.atoms.keys() == {"weight", "master", *STATES, "step", "mu_product"}


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_states_named_weight_and_master(tmp_path: Path, zero: int) -> None:
    """An optimizer finds them under its own names again."""
    files: dict[str, Any] = {MODEL_FILE: model_state()}
    for rank in range(2):
        files[optim_file(rank)] = flat_optim(2, rank)
        for g, slot in files[optim_file(rank)]["optimizer_state_dict"]["base_optimizer_state"]["state"].items():
            slot["weight"] = flat_group(GROUPS[g], "exp_avg", 2)[rank].clone()
    ucp.convert(save(tmp_path / "c", files), tmp_path / "new", to="deepspeed", zero=zero, dp=1)
    folder = tmp_path / "new" / "global_step7"
    if zero == 0:
        state = torch.load(folder / MODEL_FILE, weights_only=False)["optimizer"]["optimizer_state_dict"]["state"]
    else:
        made = torch.load(folder / optim_file(0), weights_only=False)["optimizer_state_dict"]
        state = made["base_optimizer_state" if zero == 1 else "optimizer_state_dict"]["state"]
    assert all(slot.keys() == {"step", *STATES, "weight"} for slot in state.values())
    assert set(read(tmp_path / "new").parameters["up.bias"].atoms) >= {"state_weight", "master"}


def test_weights_that_are_strided_in_their_file(tmp_path: Path) -> None:
    module = {name: value(name, "master").bfloat16() for name in SHAPES}
    module["up.weight"] = module["up.weight"].t().contiguous().t()
    assert not module["up.weight"].is_contiguous()
    checkpoint = read(save_flat(tmp_path / "c", module=OrderedDict(module)))
    atom = checkpoint.parameters["up.weight"].atoms["weight"]
    assert atom.fragments[0].strides == (1, 4)
    assert array(checkpoint, atom).tobytes() == module["up.weight"].contiguous().view(torch.int16).numpy().tobytes()


def test_views_of_one_storage_and_two_names_of_one_view(tmp_path: Path) -> None:
    flat = torch.cat([value(name, "master").reshape(-1) for name in SHAPES]).bfloat16()
    module, at = OrderedDict(), 0
    for name, shape in SHAPES.items():
        numel = int(np.prod(shape))
        module[name] = flat[at : at + numel].reshape(shape)
        at += numel
    module["head.weight"] = module["embed.weight"]
    checkpoint = read(save_flat(tmp_path / "c", module=module))
    check_values(checkpoint)
    assert checkpoint.parameters["embed.weight"].aliases == ("head.weight",)
    weight = array(checkpoint, checkpoint.parameters["norm.weight"].atoms["weight"])
    assert weight.tobytes() == module["norm.weight"].view(torch.int16).numpy().tobytes()


def test_a_declared_alias_with_a_copy_of_its_own_becomes_a_replica(tmp_path: Path) -> None:
    module = {name: value(name, "master").bfloat16() for name in SHAPES}
    module["head.weight"] = module["embed.weight"].clone()
    checkpoint = read(
        save_flat(tmp_path / "c", module=OrderedDict(module), shared_params={"head.weight": "embed.weight"})
    )
    assert list(checkpoint.parameters) == list(SHAPES)
    atom = checkpoint.parameters["embed.weight"].atoms["weight"]
    assert len(atom.replicas) == 1
    assert array(checkpoint, atom, atom.replicas[0]).tobytes() == array(checkpoint, atom).tobytes()


def test_buffers_and_frozen_parameters(tmp_path: Path) -> None:
    module = {name: value(name, "master").bfloat16() for name in SHAPES}
    module = {**module, "mask": torch.ones(2, 2, dtype=torch.bool), "frozen.weight": torch.arange(6.0).reshape(2, 3)}
    checkpoint = read(save_flat(tmp_path / "c", module=OrderedDict(module), buffer_names=["mask"]))
    assert checkpoint.parameters["mask"].role == "buffer"
    assert checkpoint.parameters["frozen.weight"].role == "frozen"
    assert array(checkpoint, checkpoint.parameters["frozen.weight"].atoms["weight"]).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert list(checkpoint.parameters["mask"].atoms) == ["weight"]


def test_an_unexplained_weight_is_kept_and_noted(tmp_path: Path) -> None:
    module = {**{name: value(name, "master").bfloat16() for name in SHAPES}, "quant.absmax": torch.ones(3)}
    checkpoint = read(save_flat(tmp_path / "c", module=OrderedDict(module)))
    assert "quant.absmax" in checkpoint.parameters
    assert "weight-unexplained" in notes(checkpoint)


def sharded_files(dp: int, **model: Any) -> dict[str, Any]:
    files: dict[str, Any] = {}
    for rank in range(dp):
        empty = {name: torch.zeros(0, dtype=torch.bfloat16) for name in SHAPES}
        files[f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"] = model_state(empty, dp_world_size=dp, **model)
        files[optim_file(rank)] = even_optim(dp, rank)
    return files


def test_frozen_slices_of_stage_3(tmp_path: Path) -> None:
    frozen = torch.arange(7.0, dtype=torch.bfloat16)
    files = sharded_files(2, frozen_param_shapes=OrderedDict(base=torch.Size([7])))
    for rank in range(2):
        state = files[f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"]
        state["module"]["base"] = torch.zeros(0)
        padded = torch.cat([frozen, torch.zeros(1, dtype=torch.bfloat16)])
        state["frozen_param_fragments"] = OrderedDict(base=padded.reshape(2, 4)[rank].clone())
    checkpoint = read(save(tmp_path / "c", files))
    parameter = checkpoint.parameters["base"]
    assert (parameter.role, list(parameter.atoms)) == ("frozen", ["weight"])
    assert array(checkpoint, parameter.atoms["weight"]).tobytes() == frozen.view(torch.int16).numpy().tobytes()


def test_sub_groups_of_stage_3_belong_to_their_groups(tmp_path: Path) -> None:
    sub_groups = [["embed.weight"], ["up.weight", "down.weight"], ["up.bias", "norm.weight"]]
    shapes = [OrderedDict((name, torch.Size(SHAPES[name])) for name in group) for group in sub_groups]
    files = sharded_files(2, param_shapes=shapes)
    for rank in range(2):
        state = even_optim(2, rank, sub_groups)
        groups = [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.2, "params": [2]}]
        state["optimizer_state_dict"]["optimizer_state_dict"]["param_groups"] = groups
        files[optim_file(rank)] = state
    checkpoint = read(save(tmp_path / "c", files))
    check_values(checkpoint)
    assert [group.names for group in checkpoint.groups] == [sub_groups[0] + sub_groups[1], sub_groups[2]]


def test_mics_copies_are_replicas(tmp_path: Path) -> None:
    """Four ranks wrote files, but a parameter is partitioned over two: ranks 2 and 3 repeat the state."""
    files = sharded_files(4)
    for rank in range(4):
        files[optim_file(rank)] = even_optim(2, rank % 2)
    checkpoint = read(save(tmp_path / "c", files))
    check_values(checkpoint)
    atom = checkpoint.parameters["embed.weight"].atoms["exp_avg"]
    assert {fragment.rank.dp for fragment in atom.fragments} == {0, 1}
    assert [{fragment.rank.dp for fragment in replica} for replica in atom.replicas] == [{2, 3}]


def swapped_out(files: dict[str, Any], folder: Path, ranks: int, tagged: bool) -> None:
    """Move every flat tensor of stage 3 into swap files, as NVMe offloading does."""
    for rank in range(ranks):
        top = files[optim_file(rank)]["optimizer_state_dict"]
        swap = folder / "global_step7" / "offloaded_tensors" / f"rank{rank:02d}"
        swap.mkdir(parents=True)
        for g, master in enumerate(top["fp32_flat_groups"]):
            ds_id = f"{10 * g}_{10 * g + 5}"
            (swap / f"{ds_id}.tensor.swp").write_bytes(master.numpy().tobytes() + bytes(512))
            (swap / f"{ds_id}_gradient_0_5.tensor.swp").write_bytes(b"gradients are not state")
            top["fp32_flat_groups"][g] = torch.empty(0)
            if tagged:
                top["fp32_flat_groups"][g].ds_id = ds_id
            for kind in STATES:
                flat = top["optimizer_state_dict"]["state"][g][kind]
                (swap / f"{kind}-{ds_id}.tensor.swp").write_bytes(flat.numpy().tobytes() + bytes(512))
                top["optimizer_state_dict"]["state"][g][kind] = torch.empty(0)


@pytest.mark.parametrize("tagged", [True, False])
def test_state_offloaded_to_nvme_is_found_in_the_swap_files(tmp_path: Path, tagged: bool) -> None:
    files = sharded_files(2)
    swapped_out(files, tmp_path / "c", 2, tagged)
    (tmp_path / "c" / "global_step7").rename(tmp_path / "kept")
    folder = save(tmp_path / "c", files)
    (tmp_path / "kept" / "offloaded_tensors").rename(folder / "global_step7" / "offloaded_tensors")
    checkpoint = read(folder)
    check_values(checkpoint)
    file = checkpoint.parameters["embed.weight"].atoms["exp_avg"].fragments[0].file
    assert file == "global_step7/offloaded_tensors/rank00/exp_avg-0_5.tensor.swp"
    assert file in checkpoint.sizes


def test_state_offloaded_to_nvme_without_swap_files(tmp_path: Path) -> None:
    files = sharded_files(2)
    swapped_out(files, tmp_path / "elsewhere", 2, tagged=True)
    with pytest.raises(InconsistentError, match=r"offloaded to NVMe.*offloaded_tensors/rank00") as error:
        read(save(tmp_path / "c", files))
    assert optim_file(1) in str(error.value)


def unsharded_optimizer(masters: bool) -> dict[str, Any]:
    state, index = {}, 0
    groups: list[dict[str, Any]] = []
    for g, group in enumerate(GROUPS):
        groups.append({"lr": 0.1 * (g + 1), "params": list(range(index, index + len(group)))})
        for name in group:
            state[index] = {"step": torch.tensor(float(STEP)), **{kind: value(name, kind) for kind in STATES}}
            index += 1
    plain = {"state": state, "param_groups": groups}
    if not masters:
        return plain
    return {"optimizer_state_dict": plain, "fp32_groups": [[value(name, "master") for name in g] for g in GROUPS]}


@pytest.mark.parametrize("masters", [True, False])
def test_zero_off(tmp_path: Path, masters: bool) -> None:
    model = model_state(optimizer=unsharded_optimizer(masters), param_shapes=None)
    checkpoint = read(save(tmp_path / "c", {MODEL_FILE: model}))
    check_values(checkpoint, ("master", *STATES) if masters else STATES)
    assert (checkpoint.mesh.zero, checkpoint.mesh.dp) == (0, 2)
    (note,) = [note for note in checkpoint.notes if note.id == "names-inferred"]
    assert ("comparing master weights" if masters else "by shape") in note.text
    assert [group.names for group in checkpoint.groups] == [list(group) for group in GROUPS]


def test_zero_off_with_groups_in_another_order_is_matched_by_value(tmp_path: Path) -> None:
    optimizer = unsharded_optimizer(True)
    optimizer["fp32_groups"] = [group[::-1] for group in optimizer["fp32_groups"]]
    inner = optimizer["optimizer_state_dict"]
    for group in inner["param_groups"]:
        group["params"] = group["params"][::-1]
    checkpoint = read(save(tmp_path / "c", {MODEL_FILE: model_state(optimizer=optimizer, param_shapes=None)}))
    check_values(checkpoint)
    assert checkpoint.groups[0].names == GROUPS[0][::-1]


def test_zero_off_with_an_ambiguous_order_carries_the_state_in_extras(tmp_path: Path) -> None:
    """Two candidates of one shape, one of them frozen: nothing shows which one the optimizer owns."""
    module = OrderedDict()
    for name in SHAPES:
        module[name] = value(name, "master")
        if name == "up.weight":
            module["twin.weight"] = module[name] + 1
    model = model_state(module, optimizer=unsharded_optimizer(False), param_shapes=None)
    checkpoint = read(save(tmp_path / "c", {MODEL_FILE: model}))
    assert "optimizer-unnamed" in notes(checkpoint)
    assert all(list(parameter.atoms) == ["weight"] for parameter in checkpoint.parameters.values())
    kept = checkpoint.extras.trees[MODEL_FILE]["optimizer"]["state"][0]["exp_avg"]
    assert array(checkpoint, kept).tobytes() == value("embed.weight", "exp_avg").numpy().tobytes()


def test_fused_adam_with_zero_off_keeps_flat_groups(tmp_path: Path) -> None:
    module: OrderedDict[str, torch.Tensor] = OrderedDict.fromkeys(SHAPES)  # type: ignore[assignment]
    state, masters = {}, []
    for g, group in enumerate(GROUPS):
        flat = {kind: torch.cat([value(name, kind).reshape(-1) for name in group]) for kind in ("master", *STATES)}
        masters.append(flat["master"])
        state[g] = {"step": STEP, **{kind: flat[kind] for kind in STATES}}
        half, at = flat["master"].half(), 0
        for name in group:
            numel = int(np.prod(SHAPES[name]))
            module[name] = half[at : at + numel].reshape(SHAPES[name])
            at += numel
    groups = [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": [1]}]
    optimizer = {"optimizer_state_dict": {"state": state, "param_groups": groups}, "fp32_groups_flat": masters}
    checkpoint = read(save(tmp_path / "c", {MODEL_FILE: model_state(module, optimizer=optimizer, param_shapes=None)}))
    check_values(checkpoint)


def test_weights_alone_are_read_with_a_note(tmp_path: Path) -> None:
    checkpoint = read(save(tmp_path / "c", {MODEL_FILE: model_state()}))
    assert "optimizer-missing" in notes(checkpoint)
    assert all(list(parameter.atoms) == ["weight"] for parameter in checkpoint.parameters.values())


def test_the_step_before_the_first_has_no_states(tmp_path: Path) -> None:
    files: dict[str, Any] = {MODEL_FILE: model_state()}
    for rank in range(2):
        files[optim_file(rank)] = flat_optim(2, rank)
        files[optim_file(rank)]["optimizer_state_dict"]["base_optimizer_state"]["state"] = {}
    checkpoint = read(save(tmp_path / "c", files))
    check_values(checkpoint, ["master"])
    assert list(checkpoint.parameters["up.bias"].atoms) == ["weight", "master"]


def test_files_from_before_0_3_17_are_refused(tmp_path: Path) -> None:
    state = {"optimizer_state_dict": {"local_sub_partitions_of_fp32_groups": []}}
    with pytest.raises(NotUnderstoodError, match=r"0\.3\.17"):
        read(save(tmp_path / "c", {MODEL_FILE: model_state(dp_world_size=1), optim_file(0): state}))


def test_ranks_that_share_a_pickle_read_their_own_tensors(tmp_path: Path) -> None:
    """Equal pickles are parsed once; their tensors differ, and so may the offsets."""
    folder = save_even(tmp_path / "c", 3)
    checkpoint = read(folder)
    trees = [checkpoint.extras.trees[optim_file(rank)] for rank in range(3)]
    assert trees[0] is trees[1] is trees[2]
    check_values(checkpoint)


def test_fragments_are_created_lazily(tmp_path: Path) -> None:
    checkpoint = read(save_even(tmp_path / "c", 2))
    fragments = checkpoint.parameters["embed.weight"].atoms["master"].fragments
    assert isinstance(fragments, RankFragments)
    assert len(fragments) == len(list(fragments)) == 2
    assert fragments[-1] == list(fragments)[-1]
    assert fragments[0:2] == tuple(fragments)


def test_client_state_survives_with_its_tensors(tmp_path: Path) -> None:
    client = {"rng": torch.arange(5, dtype=torch.int64), "nested": [{"deep": torch.ones(2)}, "text"]}
    checkpoint = read(save_flat(tmp_path / "c", client=client))
    carried = checkpoint.extras.trees[MODEL_FILE]
    assert carried["iteration"] == STEP
    assert "module" not in carried
    assert array(checkpoint, carried["client"]["rng"]).tolist() == [0, 1, 2, 3, 4]
    assert carried["client"]["nested"][1] == "text"
    deep = carried["client"]["nested"][0]["deep"]
    assert (deep.kind, deep.name) == ("extra", f"{MODEL_FILE}/client/nested/0/deep")
    assert array(checkpoint, deep).tolist() == [1.0, 1.0]


def test_unknown_files_are_carried_and_noted(tmp_path: Path) -> None:
    folder = save_flat(tmp_path / "c")
    (folder / "global_step7" / "my_notes.csv").write_text("a,b")
    checkpoint = read(folder)
    assert checkpoint.extras.files == {"my_notes.csv": "global_step7/my_notes.csv"}
    assert "file-unknown" in notes(checkpoint)


def test_neighbours_of_the_trainer(tmp_path: Path) -> None:
    folder = save_flat(tmp_path / "checkpoint-7")
    (folder / "trainer_state.json").write_text("{}")
    (folder / "config.json").write_text("{}")
    (folder / "training_args.bin").write_bytes(b"never unpickled")
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "zero_to_fp32.py").write_text("")
    torch.save({"last_epoch": 3}, folder / "scheduler.pt")
    torch.save({"cpu": torch.arange(4, dtype=torch.int64)}, folder / "rng_state_0.pth")
    (folder / "random_states_0.pkl").write_bytes(b"\x80\x04]\x94.")
    checkpoint = read(folder)
    assert checkpoint.details["wrapper"] == "HF Trainer"
    assert set(checkpoint.extras.files) == {
        "trainer_state.json",
        "config.json",
        "training_args.bin",
        "random_states_0.pkl",
    }
    assert checkpoint.extras.trees["scheduler.pt"] == {"last_epoch": 3}
    assert array(checkpoint, checkpoint.extras.trees["rng_state_0.pth"]["cpu"]).tolist() == [0, 1, 2, 3]
    assert "weights-beside" in notes(checkpoint)
    assert {"scheduler.pt", "config.json"} <= set(checkpoint.sizes)
