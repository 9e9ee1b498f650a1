"""Rank files of a model with known numbers: which parameters they make, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import ucp
from tests.formats.megatron.legacy_model import (
    PADDED,
    VOCABULARY,
    all_ranks,
    arguments,
    folder_name,
    rank_tree,
    save,
    slice_of,
    whole_model,
)
from ucp.errors import InconsistentError, NotUnderstoodError, UsageError


@pytest.mark.parametrize("tp, pp", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_slices_and_stages_make_the_whole(tmp_path: Path, tp: int, pp: int) -> None:
    checkpoint = ucp.open(save(tmp_path, all_ranks(tp, pp)))
    expected = whole_model()
    assert list(checkpoint) == list(expected)
    for name, whole in expected.items():
        rows = VOCABULARY if len(whole) == PADDED and "mlp" not in name and "qkv" not in name else len(whole)
        assert torch.equal(checkpoint[name].read("weight", as_torch=True).float(), whole[:rows]), name
        assert torch.equal(checkpoint[name].read("master", as_torch=True), whole[:rows]), name
        assert torch.equal(checkpoint[name].read("exp_avg", as_torch=True), whole[:rows] / 2), name
        assert torch.equal(checkpoint[name].read("exp_avg_sq", as_torch=True), whole[:rows] ** 2), name
        assert checkpoint[name].read("step") == 7
    rule = checkpoint.index.parameters["decoder.layers.1.mlp.linear_fc1.weight"].rule
    assert (rule.cut, rule.dim, rule.parts) == ("split", 0, (6, 6))
    assert checkpoint.index.step == 7
    assert [len(group.names) for group in checkpoint.index.groups] == [10, 3]
    assert checkpoint.index.parameters["decoder.layers.1.mlp.linear_fc1.weight"].stages == (pp - 1,)


def test_everything_but_states_becomes_extras(tmp_path: Path) -> None:
    tree = rank_tree(1, 1, 0, 0)
    tree["rng_state"] = [{"torch_rng_state": torch.arange(5, dtype=torch.uint8)}]
    checkpoint = ucp.open(save(tmp_path, {"mp_rank_00": tree}))
    extras = checkpoint.extras.trees["mp_rank_00/model_optim_rng.pt"]
    assert extras["iteration"] == 7
    assert extras["rng_state"][0]["torch_rng_state"].shape == (5,)
    assert list(extras["model"]) == [f"decoder.layers.{i}.self_attention.linear_proj._extra_state" for i in (0, 1)]
    assert list(extras["optimizer"]) == ["optimizer"]
    assert list(extras["optimizer"]["optimizer"]) == ["param_groups"]


def test_weights_alone(tmp_path: Path) -> None:
    checkpoint = ucp.open(save(tmp_path, {"mp_rank_00": rank_tree(1, 1, 0, 0, optimizer=False)}))
    assert {kind for name in checkpoint for kind in checkpoint[name].kinds} == {"weight"}


@pytest.mark.parametrize("tokenizer, rows", [("NullTokenizer", VOCABULARY), ("HuggingFaceTokenizer", PADDED)])
def test_padding_is_removed_only_if_the_vocabulary_is_known(tmp_path: Path, tokenizer: str, rows: int) -> None:
    tree = rank_tree(1, 1, 0, 0)
    tree["args"].tokenizer_type = tokenizer
    checkpoint = ucp.open(save(tmp_path, {"mp_rank_00": tree}))
    assert checkpoint["output_layer.weight"].shape == (rows, 4)
    assert ("vocabulary-unknown" in [note.id for note in checkpoint.index.notes]) == (rows == PADDED)


def test_fused_norms_have_the_names_of_their_own_modules(tmp_path: Path) -> None:
    tree = rank_tree(1, 1, 0, 0, optimizer=False)
    norm = tree["model"].pop("decoder.layers.0.input_layernorm.weight")
    tree["model"]["decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"] = norm
    checkpoint = ucp.open(save(tmp_path, {"mp_rank_00": tree}))
    assert list(checkpoint) == list(whole_model())


def test_the_copy_of_a_tied_embedding_is_a_replica(tmp_path: Path) -> None:
    trees = all_ranks(1, 2)
    for tree in trees.values():
        tree["args"].untie_embeddings_and_output_weights = False
        tree.pop("optimizer")
    trees["mp_rank_00_001"]["model"]["output_layer.weight"] = trees["mp_rank_00_000"]["model"][
        "embedding.word_embeddings.weight"
    ]
    checkpoint = ucp.open(save(tmp_path, trees))
    embedding = checkpoint.index.parameters["embedding.word_embeddings.weight"]
    assert "output_layer.weight" not in checkpoint.index.parameters
    assert embedding.aliases == ("output_layer.weight",)
    assert embedding.stages == (0, 1)
    assert len(embedding.atoms["weight"].replicas) == 1


def test_rules_of_unknown_names_are_inferred_from_bytes(tmp_path: Path) -> None:
    trees = {folder_name(rank, 0, 1): rank_tree(2, 1, rank, 0, optimizer=False) for rank in range(2)}
    for tree in trees.values():
        tree["model"]["decoder.layers.0.adapter.gain"] = torch.tensor([1.0, 2.0, 3.0, 5.0])
    checkpoint = ucp.open(save(tmp_path, trees))
    assert checkpoint.index.parameters["decoder.layers.0.adapter.gain"].rule.cut == "replicated"
    assert [note.id for note in checkpoint.index.notes] == ["rule-inferred"]


@pytest.mark.parametrize("missing", ["mp_rank_01_000", "mp_rank_00_001"])
def test_a_missing_rank_is_named(tmp_path: Path, missing: str) -> None:
    root = save(tmp_path, all_ranks(2, 2))
    shutil.rmtree(root / "iter_0000007" / missing)
    with pytest.raises(InconsistentError, match=missing):
        ucp.open(root)


def test_files_of_two_saves_are_refused(tmp_path: Path) -> None:
    trees = all_ranks(2, 1)
    trees["mp_rank_01"]["iteration"] = 8
    with pytest.raises(InconsistentError, match=r"mp_rank_01.*iteration 8"):
        ucp.open(save(tmp_path, trees))


def test_files_of_two_jobs_are_refused(tmp_path: Path) -> None:
    trees = all_ranks(2, 1)
    trees["mp_rank_01"]["args"] = arguments(2, 1, hidden_size=8)
    with pytest.raises(InconsistentError, match="hidden_size 8"):
        ucp.open(save(tmp_path, trees))


def test_missing_layers_are_noticed(tmp_path: Path) -> None:
    trees = all_ranks(1, 2)
    model = trees["mp_rank_00_001"]["model"]
    for name in [name for name in model if ".layers." in name]:
        del model[name]
    with pytest.raises(InconsistentError, match="hold 1 layers, but the job had 2"):
        ucp.open(save(tmp_path, trees))


def test_states_that_fit_no_parameter_are_refused(tmp_path: Path) -> None:
    tree = rank_tree(1, 1, 0, 0)
    tree["optimizer"]["optimizer"]["state"][0]["exp_avg"] = torch.zeros(3, 3)
    with pytest.raises(InconsistentError, match=r"parameter group 0.*\[3, 3\]"):
        ucp.open(save(tmp_path, {"mp_rank_00": tree}))


def test_old_interleaving_is_refused(tmp_path: Path) -> None:
    tree = rank_tree(1, 1, 0, 0)
    tree["checkpoint_version"] = 1.0
    with pytest.raises(NotUnderstoodError, match=r"version 1\.0"):
        ucp.open(save(tmp_path, {"mp_rank_00": tree}))


def test_missing_arguments_are_refused(tmp_path: Path) -> None:
    tree = rank_tree(1, 1, 0, 0)
    del tree["args"]
    with pytest.raises(NotUnderstoodError, match="arguments of the job"):
        ucp.open(save(tmp_path, {"mp_rank_00": tree}))


def test_the_tracker_selects_the_iteration_and_may_be_wrong(tmp_path: Path) -> None:
    root = save(tmp_path, all_ranks(1, 1))
    (root / "iter_0000009/mp_rank_00").mkdir(parents=True)  # an incomplete save
    assert ucp.open(root).index.root.name == "iter_0000007"
    assert ucp.open(root, tag="7").index.root.name == "iter_0000007"
    with pytest.raises(UsageError, match="'8'"):
        ucp.open(root, tag="8")
    (root / "latest_checkpointed_iteration.txt").write_text("8")
    with pytest.raises(InconsistentError, match="names iter_0000008"):
        ucp.open(root)
    (root / "latest_checkpointed_iteration.txt").unlink()
    assert [note.id for note in ucp.open(root).index.notes] == ["step-folder"]


def _distributed(trees: dict[str, torch.Tensor], lead: int = 0) -> dict[object, object]:
    """One coalesced bucket: parameters in reverse order, each at a multiple of 64 elements."""
    flat: list[torch.Tensor] = []
    at = 0
    for tensor in reversed(list(trees.values())):
        gap = -at % 64
        flat += [torch.zeros(gap), tensor.float().flatten()]
        at += gap + tensor.numel()
    buffer = torch.cat([*flat, torch.zeros(lead)])
    table = {"param": buffer, "exp_avg": buffer / 2, "exp_avg_sq": buffer**2, "numel_unpadded": len(buffer)}
    return {"buckets_coalesced": True, 0: {(torch.bfloat16, torch.float32): table}}


def _save_distributed(root: Path, lead: int = 0) -> Path:
    trees = {}
    for rank in range(2):
        tree = rank_tree(2, 1, rank, 0, optimizer=False)
        tree["args"].use_distributed_optimizer = True
        groups = [{"wd_mult": 1.0, "lr": 0.1, "step": 7}, {"wd_mult": 0.0, "lr": 0.1, "step": 7}]
        tree["optimizer"] = {"optimizer": {"param_groups": groups}}
        trees[folder_name(rank, 0, 1)] = tree
    save(root, trees)
    for rank in range(2):
        held = {name: slice_of(name, whole, 2, rank) for name, whole in whole_model().items()}
        torch.save(_distributed(held, lead), root / f"iter_0000007/mp_rank_{rank:02d}/distrib_optim.pt")
    return root


def test_flat_buffers_become_parameters(tmp_path: Path) -> None:
    checkpoint = ucp.open(_save_distributed(tmp_path))
    for name, whole in whole_model().items():
        rows = checkpoint[name].shape[0]
        assert torch.equal(checkpoint[name].read("master", as_torch=True), whole[:rows]), name
        assert torch.equal(checkpoint[name].read("exp_avg_sq", as_torch=True), whole[:rows] ** 2), name
        assert checkpoint[name].read("step") == 7
    assert checkpoint.index.mesh.zero == 1


def test_a_buffer_of_another_length_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InconsistentError, match="its buffer of 'param' has"):
        ucp.open(_save_distributed(tmp_path, lead=1))


def test_a_missing_buffer_file_is_named(tmp_path: Path) -> None:
    root = _save_distributed(tmp_path)
    (root / "iter_0000007/mp_rank_01/distrib_optim.pt").unlink()
    with pytest.raises(InconsistentError, match=r"distrib_optim\.pt is missing next to mp_rank_01"):
        ucp.open(root)
