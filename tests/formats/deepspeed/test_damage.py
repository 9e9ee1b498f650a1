"""Inconsistent checkpoints: each error names the file, the rank and the parameter."""

from __future__ import annotations

import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.formats.deepspeed.synthetic import (
    GROUPS,
    SHAPES,
    STEP,
    even_optim,
    flat_optim,
    model_state,
    read,
    save,
    save_even,
    save_flat,
    value,
)
from ucp.errors import InconsistentError, IntegrityError, NotUnderstoodError, UcpError
from ucp.formats.sharded.shard_table import MAX_LISTED_PROBLEMS, Problems

MODEL = "mp_rank_00_model_states.pt"
OPTIM = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"


@pytest.fixture
def real(project: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a real checkpoint, to be damaged."""

    def copy(name: str) -> Path:
        target = tmp_path / name
        shutil.copytree(project / "fixtures" / name, target, ignore=shutil.ignore_patterns("reference"))
        return target

    return copy


def flat(step: int = 2, change: Callable[[dict[str, Any]], None] | None = None, rank: int = 1) -> dict[str, Any]:
    """Files of a ZeRO-1 checkpoint of which one optimizer file was changed."""
    files: dict[str, Any] = {MODEL: model_state(dp_world_size=step)}
    for r in range(step):
        files[OPTIM.format(r)] = flat_optim(step, r)
    if change is not None:
        change(files[OPTIM.format(rank)]["optimizer_state_dict"])
    return files


def refusal(tmp_path: Path, files: dict[str, Any]) -> str:
    with pytest.raises(InconsistentError) as error:
        read(save(tmp_path / "c", files))
    assert error.value.hint
    return str(error.value)


def test_a_missing_rank_in_the_middle(real: Callable[[str], Path]) -> None:
    folder = real("z1_bf16_moe4_ep2_dp4")
    missing = "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"
    (folder / "global_step3" / missing).unlink()
    with pytest.raises(InconsistentError, match=missing):
        read(folder)


def test_a_missing_last_rank_is_noticed_by_the_count(real: Callable[[str], Path]) -> None:
    folder = real("z1_bf16opt_dp3")
    missing = "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"
    (folder / "global_step3" / missing).unlink()
    with pytest.raises(InconsistentError, match=rf"{missing} is missing .*3 data-parallel ranks"):
        read(folder)


def test_every_missing_file_is_named(real: Callable[[str], Path]) -> None:
    folder = real("pp2_z1_bf16_tied_dp2")
    gone = ["mp_rank_01_model_states.pt", *(f"bf16_zero_pp_rank_{d}_mp_rank_01_optim_states.pt" for d in range(2))]
    for name in gone:
        (folder / "global_step3" / name).unlink()
    with pytest.raises(InconsistentError) as error:
        read(folder)
    assert all(name in str(error.value) for name in gone)


@pytest.mark.parametrize("saved", [save_flat, save_even])
def test_files_of_an_earlier_save_with_more_ranks(tmp_path: Path, saved: Callable[[Path, int], Path]) -> None:
    folder = saved(tmp_path / "c", 2)
    older = saved(tmp_path / "older", 4)
    for path in (older / "global_step7").iterdir():
        if "rank_2" in path.name or "rank_3" in path.name:
            shutil.copy(path, folder / "global_step7")
    with pytest.raises(InconsistentError, match=r"4 data-parallel ranks were found, but according to .* the job had 2"):
        read(folder)


@pytest.mark.parametrize("kind", ["model", "optim"])
def test_a_missing_rank_of_stage_3(tmp_path: Path, kind: str) -> None:
    folder = save_even(tmp_path / "c", 3)
    name = {"model": "zero_pp_rank_2_mp_rank_00_model_states.pt", "optim": OPTIM.format(2)}[kind]
    (folder / "global_step7" / name).unlink()
    with pytest.raises(InconsistentError, match=name):
        read(folder)


def test_a_missing_layer_file(real: Callable[[str], Path]) -> None:
    folder = real("pp2_tp2_z1_bf16_untied_dp1")
    missing = "layer_02-model_01-model_states.pt"
    (folder / "global_step3" / missing).unlink()
    with pytest.raises(InconsistentError, match=missing):
        read(folder)


def test_a_missing_expert_file(real: Callable[[str], Path]) -> None:
    folder = real("z1_bf16_moe4_ep2_dp4")
    missing = "layer_0_expert_2_mp_rank_00_model_states.pt"
    (folder / "global_step3" / missing).unlink()
    with pytest.raises(InconsistentError, match=f"expert file {missing} is missing"):
        read(folder)


def test_all_expert_files_missing(real: Callable[[str], Path]) -> None:
    """Their masters are in the optimizer files, but DeepSpeed loads experts from these files."""
    folder = real("z1_bf16_moe4_ep2_dp4")
    for path in (folder / "global_step3").glob("layer_0_expert_*"):
        path.unlink()
    with pytest.raises(InconsistentError, match=r"expert file layer_0_expert_3_mp_rank_00_model_states\.pt is missing"):
        read(folder)


def test_expert_files_that_were_exchanged(real: Callable[[str], Path]) -> None:
    folder = real("z1_bf16_moe4_ep2_dp4")
    exchange(*(folder / "global_step3" / f"layer_0_expert_{n}_mp_rank_00_model_states.pt" for n in (0, 3)))
    with pytest.raises(
        InconsistentError, match=r"layer_0_expert_0_mp.* is named for expert 0, but contains .*experts\.3\."
    ):
        read(folder, trusted_ranks="file-names")
    with pytest.raises(InconsistentError, match=r"layer_0_expert_0_mp.*: was saved as layer_0_expert_3_mp"):
        read(folder)


def test_the_last_optimizer_file_of_experts_missing(tmp_path: Path) -> None:
    """ZeRO off: one optimizer file per expert-parallel rank. The groups' names contain their number."""
    name = "mlp.deepspeed_moe.experts.deepspeed_experts.{}.weight"
    files: dict[str, Any] = {
        "mp_rank_00_model_states.pt": model_state({"gate": torch.ones(3)}, dp_world_size=2, num_experts=[2])
        | {"param_shapes": None}
    }
    for expert in range(2):
        weight = torch.full((2, 2), float(expert))
        files[f"layer_0_expert_{expert}_mp_rank_00_model_states.pt"] = {name.format(expert): weight}
        state = {0: {"exp_avg": torch.ones(3)}, 1: {"exp_avg": weight}}
        groups = [{"lr": 0.1, "params": [0]}, {"lr": 0.1, "params": [1], "name": "ep_size_2", "moe": True}]
        tree = {"optimizer": {"state": state, "param_groups": groups}}
        files[f"expp_rank_{expert}_mp_rank_00_optim_states.pt"] = tree
    folder = save(tmp_path / "c", files)
    assert "exp_avg" in read(folder).parameters[name.format(1)].atoms
    one, other = (folder / "global_step7" / f"expp_rank_{n}_mp_rank_00_optim_states.pt" for n in (0, 1))
    exchange(one, other)
    with pytest.raises(InconsistentError, match=f"{one.name}: was saved as {other.name}"):
        read(folder)
    exchange(one, other)
    other.unlink()
    with pytest.raises(InconsistentError, match=f"{other.name} is missing"):
        read(folder)


def test_all_optimizer_files_of_experts_missing(tmp_path: Path) -> None:
    """The model file repeats the optimizer of the first expert-parallel rank, without the experts of others."""
    groups = [{"lr": 0.1, "params": [0]}, {"lr": 0.1, "params": [1], "name": "ep_size_2", "moe": True}]
    optimizer = {"state": {0: {"exp_avg": torch.ones(3)}, 1: {"exp_avg": torch.ones(2, 2)}}, "param_groups": groups}
    model = model_state({"gate": torch.ones(3)}, dp_world_size=2, num_experts=[2], optimizer=optimizer)
    files: dict[str, Any] = {MODEL: {**model, "param_shapes": None}}
    for expert in range(2):
        weight = {f"mlp.deepspeed_moe.experts.deepspeed_experts.{expert}.weight": torch.full((2, 2), float(expert))}
        files[f"layer_0_expert_{expert}_mp_rank_00_model_states.pt"] = weight
    assert "expp_rank_1_mp_rank_00_optim_states.pt is missing" in refusal(tmp_path, files)


@pytest.mark.parametrize("kind", ["model", "optim"])
def test_files_of_stage_3_that_were_exchanged(tmp_path: Path, kind: str) -> None:
    """Shards of ZeRO-3 all look alike; only the name that torch gave the archive differs."""
    folder = save_even(tmp_path / "c", 3)
    name = {"model": "zero_pp_rank_{}_mp_rank_00_model_states.pt", "optim": OPTIM}[kind]
    exchange(*(folder / "global_step7" / name.format(rank) for rank in (1, 2)))
    with pytest.raises(InconsistentError, match=f"{name.format(1)}: was saved as {name.format(2)}"):
        read(folder)


def test_a_file_of_stage_3_that_was_copied_over_another(tmp_path: Path) -> None:
    folder = save_even(tmp_path / "c", 3)
    shutil.copy(folder / "global_step7" / OPTIM.format(2), folder / "global_step7" / OPTIM.format(1))
    with pytest.raises(InconsistentError, match=f"{OPTIM.format(1)}: was saved as {OPTIM.format(2)}"):
        read(folder)


def test_model_files_without_zero_that_were_exchanged(tmp_path: Path) -> None:
    """Weights and optimizer of a rank are in one file, so they agree under any name."""
    names = ["mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"]
    folder = save(tmp_path / "c", {name: model_state(param_shapes=None, mp_world_size=2) for name in names})
    exchange(*(folder / "global_step7" / name for name in names))
    with pytest.raises(InconsistentError, match=f"{names[0]}: was saved as {names[1]}"):
        read(folder)


def exchange(one: Path, other: Path) -> None:
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)


def test_a_truncated_file(real: Callable[[str], Path]) -> None:
    folder = real("z1_bf16_dp2")
    path = folder / "global_step3" / OPTIM.format(1)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(IntegrityError, match=OPTIM.format(1)):
        read(folder)


def test_a_truncated_file_with_a_known_pickle(tmp_path: Path) -> None:
    folder = save_even(tmp_path / "c", 3)
    path = folder / "global_step7" / OPTIM.format(2)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(IntegrityError, match=OPTIM.format(2)):
        read(folder)


def test_a_file_that_is_not_an_archive(real: Callable[[str], Path]) -> None:
    folder = real("z1_bf16_dp2")
    (folder / "global_step3" / MODEL).write_bytes(b"not a zip at all, but long enough to be looked at")
    with pytest.raises(NotUnderstoodError, match=MODEL):
        read(folder)


def test_a_model_file_of_another_step(tmp_path: Path) -> None:
    folder = save_even(tmp_path / "c", 3)
    other = model_state({name: torch.zeros(0) for name in SHAPES}, dp_world_size=3, global_steps=STEP + 1)
    name = "zero_pp_rank_1_mp_rank_00_model_states.pt"
    torch.save(other, folder / "global_step7" / name)
    with pytest.raises(InconsistentError, match=rf"{name}: step {STEP + 1}, but .*rank_0.* has {STEP}"):
        read(folder)


def test_an_optimizer_file_of_another_step(tmp_path: Path) -> None:
    def later(top: dict[str, Any]) -> None:
        for slot in top["base_optimizer_state"]["state"].values():
            slot["step"] = torch.tensor(STEP + 1.0)

    text = refusal(tmp_path, flat(change=later))
    assert f"'step' is {float(STEP)}" in text
    assert f"but {STEP + 1.0} in global_step7/{OPTIM.format(1)} (dp rank 1)" in text


def test_a_step_that_differs_between_tensor_parallel_ranks(real: Callable[[str], Path]) -> None:
    """Both files of tp rank 1 are from a later step; each tp rank is consistent in itself."""
    folder = real("z1_bf16_tp2_nouc_dp1")
    path = folder / "global_step3" / "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt"
    data = path.read_bytes()
    three = torch.tensor(3.0).numpy().tobytes()
    assert data.count(three) >= 2
    path.write_bytes(data.replace(three, torch.tensor(4.0).numpy().tobytes()))
    with pytest.raises(InconsistentError, match=r"'step' is 3\.0 in .*mp_rank_00.* but 4\.0 in .*mp_rank_01"):
        read(folder)


def test_another_version_of_deepspeed(tmp_path: Path) -> None:
    files = flat()
    files[OPTIM.format(0)]["ds_version"] = "9.9"
    assert "DeepSpeed version '9.9'" in refusal(tmp_path, files)


def test_a_partition_of_the_wrong_length(tmp_path: Path) -> None:
    def shorten(top: dict[str, Any]) -> None:
        top["single_partition_of_fp32_groups"][0] = torch.zeros(5)

    text = refusal(tmp_path, flat(change=shorten))
    assert f"{OPTIM.format(1)} (dp rank 1) has 5 elements, expected 20 or 19" in text
    assert "39 elements of 3 parameters partitioned over 2 ranks" in text


def test_a_file_partitioned_for_other_ranks(tmp_path: Path) -> None:
    def recut(top: dict[str, Any]) -> None:
        top["partition_count"] = [4, 4]

    assert "[4, 4] ranks by group" in refusal(tmp_path, flat(change=recut))


def test_all_files_partitioned_for_other_ranks(tmp_path: Path) -> None:
    files = {MODEL: model_state(), **{OPTIM.format(r): flat_optim(2, r, partition_count=[1, 1]) for r in range(2)}}
    assert "was partitioned for 1 ranks" in refusal(tmp_path, files)


def test_a_group_too_few(tmp_path: Path) -> None:
    def drop(top: dict[str, Any]) -> None:
        del top["single_partition_of_fp32_groups"][1]

    assert "has 1 flat groups, but the model file lists 2" in refusal(tmp_path, flat(change=drop))


def test_a_state_that_one_rank_lacks(tmp_path: Path) -> None:
    def forget(top: dict[str, Any]) -> None:
        del top["base_optimizer_state"]["state"][1]["exp_avg_sq"]

    text = refusal(tmp_path, flat(change=forget))
    assert "group 1" in text
    assert f"'exp_avg_sq' is missing on dp rank 1 (global_step7/{OPTIM.format(1)})" in text


def test_a_state_of_the_wrong_length_on_one_rank(tmp_path: Path) -> None:
    def shorten(top: dict[str, Any]) -> None:
        top["base_optimizer_state"]["state"][0]["exp_avg"] = torch.zeros(3)

    text = refusal(tmp_path, flat(change=shorten))
    assert "'exp_avg' on dp rank 1" in text
    assert "expected 20 or 19 elements" in text


def test_master_weights_of_two_dtypes(tmp_path: Path) -> None:
    def halve(top: dict[str, Any]) -> None:
        masters = top["single_partition_of_fp32_groups"]
        masters[0] = masters[0].bfloat16()

    assert "different dtypes on different dp ranks: bfloat16, float32" in refusal(tmp_path, flat(change=halve))


def test_swapped_shapes(tmp_path: Path) -> None:
    module = {name: value(name, "master").bfloat16() for name in SHAPES}
    module["up.weight"] = module["up.weight"].t().contiguous()
    files = flat()
    files[MODEL] = model_state(OrderedDict(module))
    text = refusal(tmp_path, files)
    assert "parameter up.weight" in text
    assert "[3, 4]" in text
    assert "[4, 3]" in text


def test_a_parameter_of_the_optimizer_that_the_module_lacks(tmp_path: Path) -> None:
    files = flat()
    del files[MODEL]["module"]["down.weight"]
    assert "parameter down.weight (pp 0 tp 0) is in the optimizer, but not in the module" in refusal(tmp_path, files)


def test_shapes_that_differ_between_ranks_of_stage_3(tmp_path: Path) -> None:
    folder = save_even(tmp_path / "c", 3)
    shapes = [OrderedDict((name, torch.Size(SHAPES[name])) for name in group) for group in GROUPS]
    shapes[1]["up.bias"] = torch.Size([5])
    name = "zero_pp_rank_2_mp_rank_00_model_states.pt"
    state = model_state({n: torch.zeros(0) for n in SHAPES}, dp_world_size=3, param_shapes=shapes)
    torch.save(state, folder / "global_step7" / name)
    with pytest.raises(InconsistentError, match=rf"{name} \(dp rank 2.*param_shapes differs"):
        read(folder)


def test_a_buffer_of_the_wrong_length_in_stage_3(tmp_path: Path) -> None:
    folder = save_even(tmp_path / "c", 2)
    state = even_optim(2, 1)
    state["optimizer_state_dict"]["fp32_flat_groups"][0] = torch.zeros(4)
    torch.save(state, folder / "global_step7" / OPTIM.format(1))
    with pytest.raises(InconsistentError, match=r"sub-group 0 .* dp rank 1 .*expected 20 elements"):
        read(folder)


def test_an_object_with_tensors_in_optimizer_state(tmp_path: Path) -> None:
    def hide(top: dict[str, Any]) -> None:
        top["base_optimizer_state"]["state"][0]["hidden"] = Carrier(torch.ones(3))

    files = flat(change=hide, rank=0)
    hide(files[OPTIM.format(1)]["optimizer_state_dict"])
    text = refusal(tmp_path, files)
    assert "'hidden'" in text
    assert "Carrier that contains tensors" in text


class Carrier:
    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner


def test_a_tensor_parallel_rank_without_a_parameter(real: Callable[[str], Path]) -> None:
    folder = real("pp2_tp2_z1_bf16_untied_dp1")
    step = folder / "global_step3"
    state = torch.load(step / "layer_01-model_01-model_states.pt", weights_only=True)
    shapes = {name: list(tensor.shape) for name, tensor in state.items()}
    assert shapes
    state[next(iter(shapes))] = torch.zeros(2, 2, dtype=torch.bfloat16)
    torch.save(state, step / "layer_01-model_01-model_states.pt")
    with pytest.raises(InconsistentError, match=r"parameter 1\..*\[2, 2\]"):
        read(folder)


def test_problems_are_collected_and_capped() -> None:
    problems = Problems("folder")
    for number in range(MAX_LISTED_PROBLEMS + 5):
        problems.add(f"problem {number}")
        problems.add(f"problem {number}")
    assert len(problems) == MAX_LISTED_PROBLEMS + 5
    with pytest.raises(InconsistentError) as error:
        problems.raise_any("do this")
    text = str(error.value)
    assert "problem 0\n" in text
    assert f"problem {MAX_LISTED_PROBLEMS - 1}\n" in text
    assert f"problem {MAX_LISTED_PROBLEMS}\n" not in text
    assert "and 5 more" in text


@pytest.mark.parametrize("content", [None, [], {"module": 3}, {"module": {}, "param_shapes": {"a": "b"}}])
def test_model_files_with_other_content(tmp_path: Path, content: object) -> None:
    files = flat()
    files[MODEL] = content
    with pytest.raises(UcpError):
        read(save(tmp_path / "c", files))


def test_a_damaged_rank_is_refused_before_stage_1_is_read(tmp_path: Path) -> None:
    folder = save_flat(tmp_path / "c", 2)
    (folder / "global_step7" / OPTIM.format(1)).write_bytes(b"")
    with pytest.raises(IntegrityError, match=OPTIM.format(1)):
        read(folder)
