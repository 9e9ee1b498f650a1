"""Families beyond Llama and GPT-2: shared experts, multi-latent attention, norms that store their weight minus one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ucp
from tests.names.small_models import (
    EXPERTS,
    FFN,
    HEADS,
    HIDDEN,
    LAYERS,
    LLAMA,
    VOCABULARY,
    Array,
    llama_shapes,
    mixtral_shapes,
    numbers,
    read_all,
    same,
    write_weights,
)
from ucp.api import plan
from ucp.errors import UsageError

Shapes = dict[str, tuple[int, ...]]
SHARED, Q_RANK, KV_RANK, NOPE, ROPE, VALUE = 2 * FFN, 6, 8, 4, 2, 3

SOME = {"moe_intermediate_size": FFN, "num_experts_per_tok": 2, "intermediate_size": 14}
QWEN2 = {**LLAMA, **SOME, "model_type": "qwen2_moe", "num_experts": EXPERTS, "shared_expert_intermediate_size": SHARED}
QWEN3 = {**LLAMA, **SOME, "model_type": "qwen3_moe", "num_experts": EXPERTS, "norm_topk_prob": True}
DEEPSEEK = {
    **LLAMA,
    **SOME,
    "model_type": "deepseek_v3",
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": Q_RANK,
    "kv_lora_rank": KV_RANK,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": VALUE,
    "n_group": 1,
    "topk_group": 1,
}
GEMMA = {**LLAMA, "model_type": "gemma", "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}


def mlp(stem: str, width: int) -> Shapes:
    return {
        f"{stem}.gate_proj.weight": (width, HIDDEN),
        f"{stem}.up_proj.weight": (width, HIDDEN),
        f"{stem}.down_proj.weight": (HIDDEN, width),
    }


def of_experts(layer: str, stacked: bool) -> Shapes:
    if stacked:
        both = {f"{layer}.experts.gate_up_proj": (EXPERTS, 2 * FFN, HIDDEN)}
        return {**both, f"{layer}.experts.down_proj": (EXPERTS, HIDDEN, FFN)}
    return {name: shape for e in range(EXPERTS) for name, shape in mlp(f"{layer}.experts.{e}", FFN).items()}


def qwen_shapes(*, shared: bool, normed: bool, stacked: bool = False) -> Shapes:
    shapes = {name: shape for name, shape in mixtral_shapes().items() if ".block_sparse_moe." not in name}
    for n in range(LAYERS):
        layer = f"model.layers.{n}"
        shapes[f"{layer}.mlp.gate.weight"] = (EXPERTS, HIDDEN)
        shapes |= of_experts(f"{layer}.mlp", stacked)
        if shared:
            shapes |= mlp(f"{layer}.mlp.shared_expert", SHARED)
            shapes[f"{layer}.mlp.shared_expert_gate.weight"] = (1, HIDDEN)
            for part, heads in (("q", HEADS), ("k", 2), ("v", 2)):
                shapes[f"{layer}.self_attn.{part}_proj.bias"] = (heads * 5,)
        if normed:
            shapes |= {f"{layer}.self_attn.{part}_norm.weight": (5,) for part in "qk"}
    return shapes


def deepseek_shapes(*, compressed: bool = True, stacked: bool = False) -> Shapes:
    shapes: Shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for n in range(LAYERS):
        layer = f"model.layers.{n}"
        attention = f"{layer}.self_attn"
        if compressed:
            shapes[f"{attention}.q_a_proj.weight"] = (Q_RANK, HIDDEN)
            shapes[f"{attention}.q_a_layernorm.weight"] = (Q_RANK,)
            shapes[f"{attention}.q_b_proj.weight"] = (HEADS * (NOPE + ROPE), Q_RANK)
        else:
            shapes[f"{attention}.q_proj.weight"] = (HEADS * (NOPE + ROPE), HIDDEN)
        shapes[f"{attention}.kv_a_proj_with_mqa.weight"] = (KV_RANK + ROPE, HIDDEN)
        shapes[f"{attention}.kv_a_layernorm.weight"] = (KV_RANK,)
        shapes[f"{attention}.kv_b_proj.weight"] = (HEADS * (NOPE + VALUE), KV_RANK)
        shapes[f"{attention}.o_proj.weight"] = (HIDDEN, HEADS * VALUE)
        if n == 0:
            shapes |= mlp(f"{layer}.mlp", 14)
        else:
            shapes[f"{layer}.mlp.gate.weight"] = (EXPERTS, HIDDEN)
            shapes[f"{layer}.mlp.gate.e_score_correction_bias"] = (EXPERTS,)
            shapes |= of_experts(f"{layer}.mlp", stacked)
            shapes |= mlp(f"{layer}.mlp.shared_experts", SHARED)
        shapes |= {f"{layer}.{norm}_layernorm.weight": (HIDDEN,) for norm in ("input", "post_attention")}
    return {**shapes, "model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


@pytest.mark.parametrize(
    "shapes, config",
    [
        (qwen_shapes(shared=True, normed=False), QWEN2),
        (qwen_shapes(shared=False, normed=True), QWEN3),
        (deepseek_shapes(), DEEPSEEK),
        (deepseek_shapes(compressed=False), {**DEEPSEEK, "q_lora_rank": None}),
    ],
    ids=["qwen2_moe", "qwen3_moe", "deepseek_v3", "deepseek without q_a"],
)
def test_round_trip_through_megatron_files(tmp_path: Path, shapes: Shapes, config: dict[str, Any]) -> None:
    """Equal bytes through two tensor-parallel ranks, and the configuration recovered from the arguments only."""
    tensors = numbers(shapes)
    folder = write_weights(tmp_path / "hf", tensors, config)
    given = {"transformer_impl": "local", "make_vocab_size_divisible_by": 4}
    (tmp_path / "job.json").write_text(json.dumps(given))
    options: dict[str, Any] = {"names": "megatron", "model_config": tmp_path / "job.json"}
    ucp.convert(folder, tmp_path / "core", to="torch-dist", tp=2, **options)
    ucp.convert(tmp_path / "core", tmp_path / "back", to="safetensors", names="hf")
    same(read_all(tmp_path / "back"), tensors)
    made = json.loads((tmp_path / "back/config.json").read_text())
    known = ("head_dim", "num_key_value_heads") if "kv_lora_rank" in config else ()
    assert {key: made.get(key) for key in config if key not in known} == {
        key: value for key, value in config.items() if key not in known
    }


@pytest.mark.parametrize("family", ["qwen-moe", "deepseek"])
def test_stacked_experts_equal_single_ones(tmp_path: Path, family: str) -> None:
    shapes = deepseek_shapes() if family == "deepseek" else qwen_shapes(shared=True, normed=False)
    config = DEEPSEEK if family == "deepseek" else QWEN2
    single = numbers(shapes)
    stacked: dict[str, Array] = {name: array for name, array in single.items() if ".experts." not in name}
    for n in range(LAYERS):
        stem = f"model.layers.{n}.mlp.experts"
        if f"{stem}.0.gate_proj.weight" in single:
            parts = [
                [single[f"{stem}.{e}.{part}_proj.weight"] for part in ("gate", "up", "down")] for e in range(EXPERTS)
            ]
            stacked[f"{stem}.gate_up_proj"] = np.stack([np.concatenate(expert[:2]) for expert in parts])
            stacked[f"{stem}.down_proj"] = np.stack([expert[2] for expert in parts])
    one = write_weights(tmp_path / "single", single, config)
    other = write_weights(tmp_path / "stacked", stacked, config)
    found = read_all(one, names="megatron")
    same(read_all(other, names="megatron"), found)
    experts = [found[f"decoder.layers.1.mlp.experts.local_experts.{e}.linear_fc1.weight"] for e in range(EXPERTS)]
    assert (np.stack(experts) == stacked["model.layers.1.mlp.experts.gate_up_proj"]).all()


def test_norms_of_gemma_are_not_changed(tmp_path: Path) -> None:
    """Megatron adds the one itself if its arguments ask for it."""
    shapes = {name: shape for name, shape in llama_shapes().items() if name != "lm_head.weight"}
    tensors = numbers(shapes)
    folder = write_weights(tmp_path / "hf", tensors, GEMMA)
    made = plan(folder, tmp_path / "core", to="torch-dist", names="megatron")
    assert any(
        note.id == "unlike" and "multiplied by the square root" in note.text for note in made.writer.source.notes
    )
    ucp.convert(folder, tmp_path / "core", to="torch-dist", names="megatron")
    args = ucp.open(tmp_path / "core").index.extras.trees["common.pt"]["args"].state
    assert (args["apply_layernorm_1p"], args["swiglu"], args["geglu"]) == (True, False, True)
    norm = "decoder.layers.0.input_layernorm.weight"
    assert (ucp.open(tmp_path / "core")[norm].read() == tensors["model.layers.0.input_layernorm.weight"]).all()
    with pytest.raises(UsageError, match=r"minus one .*for a Gemma, give its config.json with --model-config"):
        ucp.convert(tmp_path / "core", tmp_path / "back", to="safetensors", names="hf")
    options: dict[str, Any] = {"names": "hf", "model_config": folder / "config.json"}
    ucp.convert(tmp_path / "core", tmp_path / "back", to="safetensors", **options)
    same(read_all(tmp_path / "back"), tensors)
    assert json.loads((tmp_path / "back/config.json").read_text())["model_type"] == "gemma"


@pytest.mark.parametrize("kind, norms", [("gemma2", []), ("gemma2", ["post_feedforward"]), ("olmo2", ["post_mlp"])])
def test_norms_after_attention_are_refused(tmp_path: Path, kind: str, norms: list[str]) -> None:
    """The message gives the reason instead of listing unknown names."""
    more = {f"model.layers.{n}.{norm}_layernorm.weight": (HIDDEN,) for n in range(LAYERS) for norm in norms}
    folder = write_weights(tmp_path / "hf", numbers({**llama_shapes(), **more}), {**GEMMA, "model_type": kind})
    with pytest.raises(UsageError, match="norms after attention and MLP, which megatron-core's layers do not have"):
        ucp.open(folder, names="megatron")


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"n_group": 3, "topk_group": 2, "num_experts_per_tok": 2}, "ranks groups of experts"),
        ({"norm_topk_prob": False}, "does not normalize the weights of the chosen experts"),
    ],
)
def test_a_note_for_routers_that_megatron_lacks(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    folder = write_weights(tmp_path / "hf", numbers(deepseek_shapes()), {**DEEPSEEK, **changes})
    notes = plan(folder, tmp_path / "core", to="torch-dist", names="megatron").writer.source.notes
    assert [expected in note.text for note in notes if note.id == "unlike"] == [True]


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 2.0}}, "high_freq_factor 2.0"),
        ({"attention_bias": True}, "the output of its attention has a bias and that of its MLP does not"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 2}, "attend to 2 tokens only"),
    ],
)
def test_a_note_for_what_no_megatron_argument_expresses(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    folder = write_weights(tmp_path / "hf", numbers(llama_shapes()), {**LLAMA, **changes})
    notes = plan(folder, tmp_path / "core", to="torch-dist", names="megatron").writer.source.notes
    assert [expected in note.text for note in notes if note.id == "unlike"] == [True]


def test_attention_biases_become_llama_again(tmp_path: Path) -> None:
    """Not Qwen2, which has no bias of attention's output and would ignore it."""
    shapes = llama_shapes()
    for name in [name for name in shapes if ".self_attn." in name]:
        shapes[name.replace(".weight", ".bias")] = shapes[name][:1]
    folder = write_weights(tmp_path / "hf", numbers(shapes), {**LLAMA, "attention_bias": True})
    ucp.convert(folder, tmp_path / "core", to="torch-dist", names="megatron")
    ucp.convert(tmp_path / "core", tmp_path / "back", to="safetensors", names="hf")
    assert ucp.diff(folder, tmp_path / "back").same
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert (config["model_type"], config["attention_bias"], config["mlp_bias"]) == ("llama", True, False)


def test_a_router_that_hugging_face_lacks_is_refused(corpus: Path, tmp_path: Path) -> None:
    source = corpus / "megatron/moe_ep1_torch"
    (tmp_path / "job.json").write_text(json.dumps({"num_experts": 4, "moe_router_pre_softmax": True}))
    with pytest.raises(UsageError, match="--moe-router-pre-softmax"):
        ucp.open(source, names="hf", model_config=tmp_path / "job.json")
