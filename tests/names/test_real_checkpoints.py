"""Real checkpoints under other names: all states, any layout, round trips, and other degrees of parallelism."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ucp
from tests.formats.dcp.state_dicts import save
from tests.names.small_models import LLAMA, MIXTRAL, llama_shapes, mixtral_shapes, numbers, write_weights
from ucp.api import plan
from ucp.core.checkpoint import Checkpoint
from ucp.errors import InconsistentError, UsageError
from ucp.formats.translate.hf_config import from_hf_config, to_hf_config
from ucp.formats.translate.megatron_args import (
    from_megatron_args,
    to_megatron_args,
    to_megatron_core_args,
    to_megatron_deepspeed_args,
)
from ucp.formats.translate.model_config import ModelConfig


@pytest.mark.parametrize(
    "source, seed",
    [
        ("llama_tp2_dp2_do_torch", "llama_tp2_dp2_do_full_torchdist"),
        ("llama_tp2_pp2_torch", "llama_tp1_pp1_torchdist"),
        ("moegg_ep2_torch", "moegg_ep2_torchdist"),
        ("gpt_tp1_pp2_vpp2_torch", "gpt_tp2_pp2_torch"),
    ],
)
def test_layouts_of_one_run_are_equal_under_other_names(corpus: Path, tmp_path: Path, source: str, seed: str) -> None:
    """Mapped back, they equal the run's own checkpoint."""
    given, other = corpus / "megatron" / source, corpus / "megatron" / seed
    assert ucp.diff(given, other, names="hf").same
    ucp.convert(given, tmp_path / "atoms", names="hf")
    assert ucp.verify(tmp_path / "atoms").ok
    assert ucp.diff(tmp_path / "atoms", given, names="megatron").same


def test_moments_are_rearranged_like_weights(corpus: Path) -> None:
    given = corpus / "megatron/llama_tp2_pp2_torch"
    own, new = ucp.open(given), ucp.open(given, names="hf")
    for kind in ("weight", "master", "exp_avg", "exp_avg_sq"):
        fused = np.asarray(own["decoder.layers.3.self_attention.linear_qkv.weight"].read(kind)).reshape(4, 4, 4, 16)
        parts = [np.asarray(new[f"model.layers.3.self_attn.{part}_proj.weight"].read(kind)) for part in "qkv"]
        assert (parts[0].reshape(4, 2, 4, 16) == fused[:, :2]).all(), kind
        assert (parts[1].reshape(4, 4, 16) == fused[:, 2]).all(), kind
        assert (parts[2].reshape(4, 4, 16) == fused[:, 3]).all(), kind
    assert new["model.layers.3.self_attn.k_proj.weight"].read("step") == 2


@pytest.mark.parametrize(
    "source, target",
    [
        ("megatron/llama_tp1_pp1_torchdist", {"to": "deepspeed", "names": "hf", "tp": 4, "zero": 1}),
        ("megatron/gpt_tp1_pp1_torch", {"to": "deepspeed", "names": "hf", "tp": 2, "zero": 2, "dp": 3}),
        ("megatron/llama_tp2_pp2_torch", {"to": "deepspeed", "names": "megatron-deepspeed", "tp": 1, "zero": 1}),
        ("megatron/moe_ep2_torchdist", {"to": "deepspeed", "names": "hf", "zero": 2}),  # experts are dense there
        ("megatron_deepspeed/mds_swiglu_tp2_pp2_z1_bf16", {"to": "torch-dist", "names": "megatron", "tp": 4, "pp": 1}),
        ("megatron_deepspeed/mds_gpt_dp2_z2_bf16", {"to": "megatron", "names": "megatron", "tp": 4, "dp": 1}),
    ],
)
def test_renamed_parameters_are_split_correctly(
    corpus: Path, tmp_path: Path, source: str, target: dict[str, Any]
) -> None:
    ucp.convert(corpus / source, tmp_path / "out", **target)
    assert ucp.diff(corpus / source, tmp_path / "out", names=target["names"]).same
    assert ucp.verify(tmp_path / "out").ok


def test_experts_are_split_correctly(tmp_path: Path) -> None:
    """From a folder of weights to ranks of expert and tensor parallelism, and back."""
    config = {**MIXTRAL, "num_attention_heads": 4, "num_local_experts": 3}
    folder = write_weights(tmp_path / "hf", numbers(mixtral_shapes()), config)
    ucp.convert(folder, tmp_path / "out", to="torch-dist", names="megatron", tp=2, ep=3, dp=3)
    options: dict[str, Any] = {"names": "hf", "model_config": folder / "config.json"}
    assert ucp.diff(folder, tmp_path / "out", **options).same
    assert ucp.open(tmp_path / "out").index.mesh.ep == 3


def test_a_model_without_a_hugging_face_equivalent_is_refused(tmp_path: Path) -> None:
    folder = write_weights(tmp_path / "hf", numbers(llama_shapes()), LLAMA)
    said = {"apply_layernorm_1p": True, "num_attention_heads": 4, "num_query_groups": 2, "group_query_attention": True}
    (tmp_path / "job.json").write_text(json.dumps(said))
    (tmp_path / "none.json").write_text("[]")
    ucp.convert(folder, tmp_path / "out", to="megatron", names="megatron", model_config=tmp_path / "job.json")
    with pytest.raises(UsageError, match="its norms store their weight minus one"):
        ucp.open(tmp_path / "out", names="hf")
    with pytest.raises(UsageError, match="is not a JSON object"):
        ucp.open(tmp_path / "out", names="hf", model_config=tmp_path / "none.json")


def test_a_megatron_target_needs_megatron_names(tmp_path: Path) -> None:
    folder = write_weights(tmp_path / "hf", numbers(llama_shapes()), LLAMA)
    with pytest.raises(UsageError, match="do not have megatron-core's names") as refused:
        ucp.convert(folder, tmp_path / "out", to="megatron")
    assert "--names megatron" in str(refused.value)


def test_damaged_state_is_still_refused(corpus: Path, tmp_path: Path) -> None:
    given = corpus / "megatron/gpt_pp2_dp2_do_full_torchdist"
    with pytest.raises(InconsistentError, match="has values of its neighbours"):
        ucp.convert(given, tmp_path / "out", names="hf")
    ucp.convert(given, tmp_path / "out", names="hf", only="weights")
    found = ucp.diff(tmp_path / "out", given, names="megatron", only="weights")
    assert not found.atoms
    assert found.compared == 52


def test_models_without_a_table_are_refused(corpus: Path) -> None:
    with pytest.raises(UsageError, match="no table of 'megatron-deepspeed' names covers this model"):
        ucp.open(corpus / "megatron/moe_ep1_torch", names="megatron-deepspeed")
    with pytest.raises(UsageError, match="linear_kv_up_proj"):
        ucp.open(corpus / "megatron/mla_tp1_torch", names="mixtral")
    with pytest.raises(UsageError, match="its latent attention has no norms of the latents"):
        ucp.open(corpus / "megatron/mla_tp1_torch", names="hf")
    assert isinstance(ucp.open(corpus / "megatron/mla_tp1_torch", names="megatron").index, Checkpoint)


WINDOWED = from_hf_config({**LLAMA, "model_type": "mistral", "sliding_window": 3})
SCALED = from_hf_config({**LLAMA, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}})


@pytest.mark.parametrize(
    "model",
    [SCALED, from_hf_config(MIXTRAL), from_hf_config({**LLAMA, "model_type": "qwen2"}), WINDOWED, from_hf_config({
        "model_type": "gpt2", "n_head": 4, "n_embd": 12, "n_layer": 2, "n_positions": 6, "vocab_size": 7
    })],
    ids=["llama", "mixtral", "qwen2", "mistral", "gpt2"],
)  # fmt: skip
def test_model_configs_survive_arguments_and_config_json(model: ModelConfig) -> None:
    args = to_megatron_args(model, 3, "bfloat16")
    assert from_megatron_args(args).over(ModelConfig(vocabulary=model.vocabulary)) == model
    config, why = to_hf_config(from_megatron_args(args), model.vocabulary)
    assert why is None
    assert config is not None
    assert from_hf_config(config) == model
    mds = to_megatron_deepspeed_args(args)
    assert from_megatron_args(to_megatron_core_args(mds)).over(ModelConfig(vocabulary=model.vocabulary)) == model


@pytest.mark.parametrize(
    "source",
    ["trainer_llama_tied_z1_bf16", "trainer_gpt2_tied_z2_fp32", "lightning_llama_z2_bf16", "trainer_llama_z3_bf16"],
)
def test_a_hugging_face_trainer_run_becomes_a_megatron_run(corpus: Path, tmp_path: Path, source: str) -> None:
    given = corpus / "huggingface" / source
    given = next((child for child in given.rglob("checkpoint-3")), given)
    config = corpus / "huggingface/trainer_llama_z2_bf16/out/checkpoint-3/config.json"
    said: dict[str, Any] = {"model_config": config} if source.startswith("lightning") else {}
    ucp.convert(given, tmp_path / "out", to="torch-dist", names="megatron", tp=2, dp=1, zero=1, **said)
    assert ucp.diff(given, tmp_path / "out", names="hf", **said).same  # the vocabulary's padding is known
    made = ucp.open(tmp_path / "out").index
    assert made.extras.trees["common.pt"]["opt_param_scheduler"]["num_steps"] > 0
    assert made.step == 3
    assert [group.hyper["is_decoupled_lr"] for group in made.groups] == [False] * len(made.groups)


def test_a_format_without_vocabularies_has_no_padding(corpus: Path, tmp_path: Path) -> None:
    """All rows are real, also after Megatron has padded them."""
    (tmp_path / "heads.json").write_text('{"num_attention_heads": 8, "num_query_groups": 4}')
    given = corpus / "megatron/llama_tp2_pp2_torch"
    ucp.convert(given, tmp_path / "dcp", to="dcp")
    ucp.convert(tmp_path / "dcp", tmp_path / "back", to="torch-dist", tp=2, model_config=tmp_path / "heads.json")
    assert ucp.diff(given, tmp_path / "back", extras=False).same


def optimizer_state(names: list[str], shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    return {name: {"exp_avg": torch.ones(shapes[name]), "step": torch.tensor(3.0)} for name in names}


@pytest.mark.parametrize("decay", [0.1, 0.0])
def test_groups_are_formed_as_megatron_forms_them(tmp_path: Path, decay: float) -> None:
    """A job identifies its groups by their settings, and would not load without a group for vectors."""
    shapes = llama_shapes()
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    weights = {name: torch.from_numpy(value.astype("float32")) for name, value in numbers(shapes).items()}
    group = {"lr": 0.1, "weight_decay": decay, "params": list(shapes)}
    state = {"model": weights, "optim": {"state": optimizer_state(list(shapes), shapes), "param_groups": [group]}}
    given = save(state, tmp_path / "dcp")
    said: dict[str, Any] = {"names": "megatron", "model_config": tmp_path / "config.json"}
    ucp.convert(given, tmp_path / "out", to="torch-dist", **said)
    matrices, vectors = ucp.open(tmp_path / "out").index.groups
    assert [(g.hyper["wd_mult"], g.hyper["weight_decay"]) for g in (matrices, vectors)] == [(1.0, decay), (0.0, 0.0)]
    assert all("norm" in name for name in vectors.names)
    assert not any("norm" in name for name in matrices.names)
    notes = plan(given, tmp_path / "again", to="megatron", **said).writer.source.notes
    assert any(note.id == "groups-dealt" for note in notes) == bool(decay)


def test_virtual_atoms_under_other_names(corpus: Path, tmp_path: Path) -> None:
    """Virtual atoms point at blocks of Megatron's files, transposed ones too."""
    given = corpus / "megatron/gpt_tp2_pp2_torchdist"
    ucp.convert(given, tmp_path / "view", names="hf", link=True)
    assert ucp.diff(tmp_path / "view", given, names="hf").same
    assert sum(path.stat().st_size for path in (tmp_path / "view").rglob("*") if path.is_file()) < 400_000


@pytest.mark.parametrize("source", ["gptfp16_tp1_torch", "gptfp16_tp1_torchdist"])
def test_the_loss_scale_survives_a_round_trip(corpus: Path, tmp_path: Path, source: str) -> None:
    given = corpus / "megatron" / source
    ucp.convert(given, tmp_path / "zero", to="deepspeed", names="hf", zero=1, dp=1)
    trees = ucp.open(tmp_path / "zero").extras.trees
    (scaler,) = [t["optimizer_state_dict"]["loss_scaler"] for t in trees.values() if "optimizer_state_dict" in t]
    assert scaler.get("cur_scale") == 256.0
    assert scaler.get("dynamic") is True
    config = tmp_path / "zero/config.json"
    ucp.convert(tmp_path / "zero", tmp_path / "back", to="megatron", names="megatron", model_config=config)
    # Only the position of the schedule is converted.
    assert ucp.diff(given, tmp_path / "back", names="hf", extras=False).same
    tree = next(iter(ucp.open(tmp_path / "back").extras.trees.values()))
    fragment = tree["optimizer"]["grad_scaler"]["scale"].fragments[0]
    with (ucp.open(tmp_path / "back").index.root / fragment.file).open("rb") as file:
        file.seek(fragment.offset)
        assert np.frombuffer(file.read(4), np.float32)[0] == 256.0


@pytest.mark.parametrize("source", ["moe_ep2_dp2_do_torch", "moe_ep2_torchdist"])
def test_megatron_experts_are_dense_parameters_in_deepspeed(corpus: Path, tmp_path: Path, source: str) -> None:
    given = corpus / "megatron" / source
    ucp.convert(given, tmp_path / "zero", to="deepspeed", zero=1, dp=2, tp=1)
    assert not list((tmp_path / "zero").rglob("*expert*"))
    assert ucp.diff(given, tmp_path / "zero", extras=False).same
