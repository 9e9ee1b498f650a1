"""Renamed parameters compared with the same arithmetic in numpy, and round trips."""

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
    GPT2,
    GROUPS,
    HEADS,
    HIDDEN,
    LAYERS,
    LLAMA,
    MIXTRAL,
    Array,
    gpt2_shapes,
    interleaved,
    llama_shapes,
    mixtral_shapes,
    numbers,
    read_all,
    same,
    write_weights,
)
from ucp.errors import InconsistentError, UsageError


def llama_in_megatron(t: dict[str, Array]) -> dict[str, Array]:
    made = {
        "embedding.word_embeddings.weight": t["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": t["model.norm.weight"],
        "output_layer.weight": t["lm_head.weight"],
    }
    for n in range(LAYERS):
        old, new = f"model.layers.{n}", f"decoder.layers.{n}"
        for kind in ("weight", "bias"):
            if f"{old}.self_attn.q_proj.{kind}" in t:
                q, k, v = (t[f"{old}.self_attn.{part}_proj.{kind}"] for part in "qkv")
                made[f"{new}.self_attention.linear_qkv.{kind}"] = interleaved(q, k, v, GROUPS)
        made[f"{new}.self_attention.linear_proj.weight"] = t[f"{old}.self_attn.o_proj.weight"]
        made[f"{new}.input_layernorm.weight"] = t[f"{old}.input_layernorm.weight"]
        made[f"{new}.pre_mlp_layernorm.weight"] = t[f"{old}.post_attention_layernorm.weight"]
        if f"{old}.mlp.gate_proj.weight" in t:
            halves = [t[f"{old}.mlp.gate_proj.weight"], t[f"{old}.mlp.up_proj.weight"]]
            made[f"{new}.mlp.linear_fc1.weight"] = np.concatenate(halves)
            made[f"{new}.mlp.linear_fc2.weight"] = t[f"{old}.mlp.down_proj.weight"]
    return made


@pytest.mark.parametrize("bias", [False, True])
def test_llama_becomes_megatron(tmp_path: Path, bias: bool) -> None:
    tensors = numbers(llama_shapes(bias=bias))
    folder = write_weights(tmp_path / "hf", tensors, {**LLAMA, "model_type": "qwen2" if bias else "llama"})
    same(read_all(folder, names="megatron"), llama_in_megatron(tensors))


@pytest.mark.parametrize(
    "shapes, config",
    [
        (llama_shapes(bias=True), {**LLAMA, "model_type": "qwen2"}),
        (mixtral_shapes(), MIXTRAL),
        (gpt2_shapes(), GPT2),
    ],
    ids=["qwen2", "mixtral", "gpt2"],
)
def test_round_trip_is_byte_identical(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], config: dict[str, Any]
) -> None:
    tensors = numbers(shapes)
    folder = write_weights(tmp_path / "hf", tensors, config)
    ucp.convert(folder, tmp_path / "atoms", names="megatron")
    assert not any(name.startswith(("model.", "transformer.")) for name in ucp.open(tmp_path / "atoms"))
    ucp.convert(tmp_path / "atoms", tmp_path / "back", to="safetensors", names="hf")
    same(read_all(tmp_path / "back"), tensors)
    assert json.loads((tmp_path / "back/config.json").read_text())["model_type"] == config["model_type"]


def test_single_and_stacked_experts_are_equal_in_megatron(tmp_path: Path) -> None:
    single = numbers(mixtral_shapes())
    stacked = {name: array for name, array in single.items() if ".block_sparse_moe." not in name}
    for n in range(LAYERS):
        old = f"model.layers.{n}.block_sparse_moe"
        experts = [[single[f"{old}.experts.{e}.{w}.weight"] for w in ("w1", "w3", "w2")] for e in range(EXPERTS)]
        new = f"model.layers.{n}.mlp"
        stacked[f"{new}.gate.weight"] = single[f"{old}.gate.weight"]
        stacked[f"{new}.experts.gate_up_proj"] = np.stack([np.concatenate(expert[:2]) for expert in experts])
        stacked[f"{new}.experts.down_proj"] = np.stack([expert[2] for expert in experts])
    one = write_weights(tmp_path / "single", single, MIXTRAL)
    other = write_weights(tmp_path / "stacked", stacked, MIXTRAL)
    expected = llama_in_megatron(single)
    for n in range(LAYERS):
        old, new = f"model.layers.{n}.block_sparse_moe", f"decoder.layers.{n}.mlp"
        expected[f"{new}.router.weight"] = single[f"{old}.gate.weight"]
        for e in range(EXPERTS):
            gate, up = (single[f"{old}.experts.{e}.{w}.weight"] for w in ("w1", "w3"))
            expected[f"{new}.experts.local_experts.{e}.linear_fc1.weight"] = np.concatenate([gate, up])
            expected[f"{new}.experts.local_experts.{e}.linear_fc2.weight"] = single[f"{old}.experts.{e}.w2.weight"]
    same(read_all(one, names="megatron"), expected)
    same(read_all(other, names="megatron"), expected)
    ucp.convert(one, tmp_path / "atoms", names="megatron")
    same(read_all(tmp_path / "atoms", names="mixtral-stacked"), stacked)
    rules = {name: str(view.parameter.rule) for name, view in ucp.open(one, names="mixtral-stacked").parameters.items()}
    assert rules["model.layers.0.mlp.experts.gate_up_proj"] == f"split(dim=1, parts=[{FFN}, {FFN}])"
    assert rules["model.layers.0.mlp.experts.down_proj"] == "split(dim=2)"


def test_gpt2_matrices_are_transposed(tmp_path: Path) -> None:
    tensors = numbers(gpt2_shapes())
    found = read_all(write_weights(tmp_path / "hf", tensors, GPT2), names="megatron")
    side_by_side = tensors["transformer.h.1.attn.c_attn.weight"]
    q, k, v = np.split(side_by_side.T, 3)
    assert (found["decoder.layers.1.self_attention.linear_qkv.weight"] == interleaved(q, k, v, HEADS)).all()
    assert (found["decoder.layers.1.mlp.linear_fc1.weight"] == tensors["transformer.h.1.mlp.c_fc.weight"].T).all()
    assert (found["decoder.layers.0.mlp.linear_fc2.weight"] == tensors["transformer.h.0.mlp.c_proj.weight"].T).all()
    q, k, v = np.split(tensors["transformer.h.0.attn.c_attn.bias"], 3)
    assert (found["decoder.layers.0.self_attention.linear_qkv.bias"] == interleaved(q, k, v, HEADS)).all()


def test_parameters_are_in_the_order_of_the_hugging_face_model(tmp_path: Path) -> None:
    """A flat optimizer state is filled in module order, so parameters of one module stay together."""
    shapes = llama_shapes(bias=True)
    folder = write_weights(tmp_path / "hf", numbers(shapes), {**LLAMA, "model_type": "qwen2"})
    ucp.convert(folder, tmp_path / "atoms", names="megatron")
    found = [name for name in ucp.open(tmp_path / "atoms", names="hf") if ".layers.1." in name]
    layer = "model.layers.1"
    attention = [f"{layer}.self_attn.{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")]
    mlp = [f"{layer}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    norms = [f"{layer}.input_layernorm.weight", f"{layer}.post_attention_layernorm.weight"]
    assert found == [*attention, f"{layer}.self_attn.o_proj.weight", *mlp, *norms]


def test_names_that_match_already_are_not_changed(tmp_path: Path) -> None:
    folder = write_weights(tmp_path / "hf", numbers(llama_shapes()), LLAMA)
    assert ucp.open(folder, names="hf").index.parameters.keys() == llama_shapes().keys()


def test_unknown_names_are_listed(tmp_path: Path) -> None:
    strange = {"model.layers.0.mlp.gate_projj.weight": (2,), "model.layers.1.mlp.gate_projj.weight": (2,), "odd": (1,)}
    folder = write_weights(tmp_path / "hf", numbers({**llama_shapes(), **strange}), LLAMA)
    with pytest.raises(UsageError) as refused:
        ucp.open(folder, names="megatron")
    said = str(refused.value)
    assert said.startswith("3 of 24 parameters have no name in 'megatron' (table llama, side hf):")
    assert "model.layers.N.mlp.gate_projj.weight (× 2)   closest: model.layers.{layer}.mlp.gate_proj.weight" in said
    assert "\n  odd" in said
    ucp.convert(folder, tmp_path / "atoms", names="megatron", exclude=["*projj*", "odd"])
    assert len(ucp.open(tmp_path / "atoms")) == 3 + 6 * LAYERS


def test_a_missing_part_is_reported(tmp_path: Path) -> None:
    shapes = llama_shapes()
    del shapes["model.layers.1.self_attn.k_proj.weight"]
    folder = write_weights(tmp_path / "hf", numbers(shapes), LLAMA)
    with pytest.raises(InconsistentError, match=r"layers\.1\.self_attn\.k_proj\.weight is missing, and .*q_proj"):
        ucp.open(folder, names="megatron")


def test_wrong_head_counts_are_refused(tmp_path: Path) -> None:
    folder = write_weights(tmp_path / "hf", numbers(llama_shapes()), {**LLAMA, "num_key_value_heads": 4})
    with pytest.raises(InconsistentError, match=r"40 rows do not divide in the ratio 4:4:4"):
        ucp.open(folder, names="megatron")


@pytest.mark.parametrize("times", [3, 10**9])
def test_more_heads_than_rows_are_refused(tmp_path: Path, times: int) -> None:
    heads = {"num_attention_heads": HEADS * times, "num_key_value_heads": GROUPS * times}
    folder = write_weights(tmp_path / "hf", numbers(llama_shapes()), {**LLAMA, **heads})
    with pytest.raises(InconsistentError, match="40 rows do not divide in the ratio"):
        ucp.open(folder, names="megatron")


def test_heads_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    config = {**LLAMA, "num_attention_heads": 5, "num_key_value_heads": 2}
    folder = write_weights(tmp_path / "hf", numbers(llama_shapes()), config)
    with pytest.raises(UsageError, match="5 query heads do not divide over 2 key heads"):
        ucp.open(folder, names="megatron")


def test_missing_head_counts_are_reported(tmp_path: Path) -> None:
    folder = write_weights(tmp_path / "hf", numbers(llama_shapes()), None)
    with pytest.raises(UsageError, match="does not contain the numbers of query heads and key heads"):
        ucp.open(folder, names="megatron")
    (tmp_path / "said.json").write_text(json.dumps({"num_attention_heads": HEADS, "num_key_value_heads": GROUPS}))
    found = read_all(folder, names="megatron", model_config=tmp_path / "said.json")
    same(found, llama_in_megatron(numbers(llama_shapes())))


def test_a_table_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(
        """
        sides = ["theirs", "mine"]

        [[map]]
        theirs = ["blocks.{layer}.left", "blocks.{layer}.right"]
        mine = { name = "h.{layer+1}.both", transposed = true }
        parts = [2, 1]
        cut = "rows"
        """
    )
    tensors = numbers({"blocks.0.left": (4, 3), "blocks.0.right": (2, 3)})
    folder = write_weights(tmp_path / "theirs", tensors, None)
    found = read_all(folder, names=tmp_path / "own.toml")
    same(found, {"h.1.both": np.concatenate(list(tensors.values())).T})
    ucp.convert(folder, tmp_path / "atoms", names=tmp_path / "own.toml")
    parameter = ucp.open(tmp_path / "atoms")["h.1.both"].parameter
    assert (str(parameter.rule), parameter.rule_origin) == ("split(dim=1, parts=[4, 2])", "names: own.toml")
    same(read_all(tmp_path / "atoms", names=tmp_path / "own.toml"), tensors)


def test_a_wrong_dimension_is_refused(tmp_path: Path) -> None:
    shapes = {**llama_shapes(), "model.layers.1.self_attn.k_proj.weight": (10, HIDDEN + 1)}
    folder = write_weights(tmp_path / "hf", numbers(shapes), LLAMA)
    with pytest.raises(InconsistentError, match="differs from those it is stored with"):
        ucp.open(folder, names="megatron")
