"""Slices of tensor-parallel ranks: which rule applies, how it combines them, which are copies."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.formats.deepspeed.synthetic import array, model_state, read, save
from ucp.core.checkpoint import Checkpoint
from ucp.core.rules import Rule, RuleBook
from ucp.errors import InconsistentError

Slices = Mapping[str, Sequence[torch.Tensor]]
WHOLE = torch.arange(24.0).reshape(4, 6)


def save_slices(folder: Path, slices: Slices, info: dict[str, Any] | None) -> Path:
    """A ZeRO-1 checkpoint of one data-parallel rank; moments are the values plus a half, and plus one."""
    files: dict[str, Any] = {}
    tp = len(next(iter(slices.values())))
    for rank in range(tp):
        local = OrderedDict((name, held[rank]) for name, held in slices.items())
        shapes = [OrderedDict((name, tensor.shape) for name, tensor in local.items())]
        more: dict[str, Any] = {"universal_checkpoint_info": info} if info is not None else {}
        files[f"mp_rank_{rank:02d}_model_states.pt"] = model_state(
            local, param_shapes=shapes, dp_world_size=1, mp_world_size=tp, **more
        )
        flat = torch.cat([tensor.reshape(-1) for tensor in local.values()])
        padded = torch.cat([flat, torch.zeros(flat.numel() % 2)])
        state = {"step": torch.tensor(1.0), "exp_avg": padded + 0.5, "exp_avg_sq": padded + 1}
        files[f"zero_pp_rank_0_mp_rank_{rank:02d}_optim_states.pt"] = {
            "optimizer_state_dict": {
                "zero_stage": 1,
                "base_optimizer_state": {"state": {0: state}, "param_groups": [{"lr": 0.1, "params": [0]}]},
                "single_partition_of_fp32_groups": [flat.clone()],
                "partition_count": [1],
            },
            "ds_version": "0.0.1",
        }
    return save(folder, files)


def master(checkpoint: Checkpoint, name: str) -> list[Any]:
    listed: list[Any] = array(checkpoint, checkpoint.parameters[name].atoms["master"]).tolist()
    return listed


def test_patterns_of_the_checkpoint_decide(tmp_path: Path) -> None:
    slices = {
        "norm": [torch.tensor([1.0, 2.0])] * 2,
        "up": list(WHOLE.chunk(2, 0)),
        "down": [part.contiguous() for part in WHOLE.chunk(2, 1)],
    }
    info = {"tp_replicated_parameter_patterns": ["norm"], "parameter_with_row_parallelism_patterns": ["down", "unused"]}
    checkpoint = read(save_slices(tmp_path / "c", slices, info))
    assert checkpoint.mesh.tp == 2
    assert master(checkpoint, "up") == master(checkpoint, "down") == WHOLE.tolist()
    assert [str(checkpoint.parameters[name].rule) for name in slices] == [
        "replicated",
        "split(dim=0)",
        "split(dim=1)",
    ]
    assert checkpoint.parameters["down"].rule_origin == "checkpoint: parameter_with_row_parallelism_patterns"
    assert [note.id for note in checkpoint.notes] == ["pattern-unused"]
    norm = checkpoint.parameters["norm"].atoms["exp_avg"]
    assert {fragment.rank.tp for fragment in norm.fragments} == {0}
    assert [{fragment.rank.tp for fragment in replica} for replica in norm.replicas] == [{1}]
    assert array(checkpoint, norm, norm.replicas[0]).tolist() == [1.5, 2.5]


def test_without_patterns_rules_are_inferred_and_noted(tmp_path: Path) -> None:
    slices = {
        "input_norm.weight": [torch.arange(6.0)] * 2,
        "mlp.up_proj.weight": list(torch.arange(60.0).reshape(10, 6).chunk(2, 0)),
    }
    checkpoint = read(save_slices(tmp_path / "c", slices, None))
    assert checkpoint.parameters["mlp.up_proj.weight"].shape == (10, 6)
    assert checkpoint.parameters["input_norm.weight"].rule.cut == "replicated"
    assert [note.id for note in checkpoint.notes] == ["rule-inferred", "rule-inferred"]


def test_the_user_s_rules_win(tmp_path: Path) -> None:
    slices = {"w": list(WHOLE.chunk(2, 0))}
    rules = RuleBook()
    rules.add("w", Rule("split", 1), "file: mine.toml")
    checkpoint = read(save_slices(tmp_path / "c", slices, {"tp_replicated_parameter_patterns": ["w"]}), rules=rules)
    parameter = checkpoint.parameters["w"]
    assert checkpoint.notes == [], "the checkpoint's own pattern is overruled, not unused"
    assert (parameter.shape, parameter.rule_origin) == ((2, 12), "file: mine.toml")
    assert master(checkpoint, "w") == torch.cat(list(WHOLE.chunk(2, 0)), 1).tolist()


def test_an_unused_rule_of_the_user_is_noted_and_one_of_a_preset_is_not(tmp_path: Path) -> None:
    rules = RuleBook()
    rules.add("typo", Rule("split", 1), "file: mine.toml")
    rules.add("other_model", Rule("split", 1), "preset: all", optional=True)
    checkpoint = read(
        save_slices(tmp_path / "c", {"w": list(WHOLE.chunk(2, 0))}, {"tp_replicated_parameter_patterns": ["w"]}),
        rules=rules,
    )
    assert [note.text for note in checkpoint.notes] == ["'typo' (file: mine.toml) matches no parameter"]


def test_a_rule_that_contradicts_the_shapes(tmp_path: Path) -> None:
    slices = {"w": [torch.zeros(2, 3), torch.zeros(3, 3)]}
    with pytest.raises(InconsistentError, match="parameter w: rule 'replicated'"):
        read(save_slices(tmp_path / "c", slices, {"tp_replicated_parameter_patterns": ["w"]}))


def test_slices_of_uneven_size(tmp_path: Path) -> None:
    slices = {"w": [WHOLE[:3].clone(), WHOLE[3:].clone()], "n": [torch.ones(2)] * 2}
    info = {"tp_replicated_parameter_patterns": ["n"]}
    assert master(read(save_slices(tmp_path / "c", slices, info)), "w") == WHOLE.tolist()


def test_fused_parts_are_split_separately(tmp_path: Path) -> None:
    q, k = WHOLE[:2], WHOLE[2:]
    slices = {"qk": [torch.cat([q[r : r + 1], k[r : r + 1]]) for r in range(2)]}
    info = {"parameter_with_sub_params": [{"patterns": ["qk"], "shape": ((2, 2), 6), "partition_dim": 0}]}
    checkpoint = read(save_slices(tmp_path / "c", slices, info))
    assert master(checkpoint, "qk") == WHOLE.tolist()
    assert len(checkpoint.parameters["qk"].atoms["master"].fragments) == 2


@pytest.mark.parametrize("tp", [1, 2])
def test_vocabulary_padding_is_removed(tmp_path: Path, tp: int) -> None:
    slices = {"embed": list(WHOLE.chunk(tp, 0)), "n": [torch.ones(2)] * tp}
    info = {
        "original_vocab_size": 3,
        "vocabulary_parameter_patterns": ["embed"],
        "tp_replicated_parameter_patterns": ["n"],
    }
    checkpoint = read(save_slices(tmp_path / "c", slices, info))
    parameter = checkpoint.parameters["embed"]
    assert (parameter.shape, parameter.padded_shape, parameter.rule.cut) == ((3, 6), (4, 6), "vocab")
    assert master(checkpoint, "embed") == WHOLE[:3].tolist()


def test_averaged_parameters_keep_every_version(tmp_path: Path) -> None:
    slices = {"a": [torch.tensor([1.0, 3.0]), torch.tensor([3.0, 5.0])]}
    checkpoint = read(save_slices(tmp_path / "c", slices, {"parameter_to_average_patterns": ["a"]}))
    atom = checkpoint.parameters["a"].atoms["master"]
    assert atom.combine == "average"
    versions = [array(checkpoint, atom), *(array(checkpoint, atom, replica) for replica in atom.replicas)]
    assert [version.tolist() for version in versions] == [[1.0, 3.0], [3.0, 5.0]]
    assert checkpoint.parameters["a"].atoms["step"].combine == "copy"


def affine(rank_pieces: Sequence[Sequence[dict[str, Any]]], logical: list[int], shard: list[int]) -> dict[str, Any]:
    ranks = {rank: {"shard_shape": shard, "pieces": list(pieces)} for rank, pieces in enumerate(rank_pieces)}
    return {"affine_map": {"version": 1, "params": {"^w$": {"logical_shape": logical, "ranks": ranks}}}}


def test_values_that_were_saved_scaled(tmp_path: Path) -> None:
    """A row-parallel bias is divided by the number of ranks before every rank adds it: both have all of it, halved."""
    piece = {"shape": [3], "source": [0, [1]], "dest": [0, [1]], "locations": [0, 1], "scale": 0.5}
    slices = {"w": [torch.tensor([1.0, 2.0, 3.0])] * 2}
    checkpoint = read(save_slices(tmp_path / "c", slices, affine([[piece], [piece]], [3], [3])))
    atoms = checkpoint.parameters["w"].atoms
    assert checkpoint.parameters["w"].rule.cut == "pieces"
    scales = {kind: {fragment.scale for fragment in atoms[kind].fragments} for kind in atoms}
    assert scales == {"weight": {0.5}, "master": {0.5}, "exp_avg": {2.0}, "exp_avg_sq": {4.0}, "step": {1.0}}
    assert len(atoms["master"].fragments) == 1
    assert [{fragment.rank.tp for fragment in replica} for replica in atoms["master"].replicas] == [{1}]


def test_blocks_that_two_ranks_share_are_declared_replicas(tmp_path: Path) -> None:
    """Rank 0 has rows 0 to 2, rank 1 rows 2 to 4 (a key head that both need): row 2 is on both."""
    pieces = [
        [{"shape": [rows, 6], "source": [6 * start, [6, 1]], "dest": [6 * at, [6, 1]]} for start, rows, at in held]
        for held in ([(0, 2, 0), (2, 1, 2)], [(2, 1, 0), (3, 2, 1)])
    ]
    whole = torch.arange(30.0).reshape(5, 6)
    slices = {"w": [whole[:3].clone(), whole[2:].clone()]}
    checkpoint = read(save_slices(tmp_path / "c", slices, affine(pieces, [5, 6], [3, 6])))
    atom = checkpoint.parameters["w"].atoms["master"]
    assert master(checkpoint, "w") == whole.tolist()
    covered = [box.shape for replica in atom.replicas for fragment in replica for box in fragment.region.boxes]
    assert covered == [(1, 6)]
