"""Weights as a Hugging Face folder: `from_pretrained` loads the values of the engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ucp
from ucp.formats.huggingface.writer import hugging_face_names

FULL = ["trainer_llama_z2_bf16", "trainer_llama_z3_bf16", "trainer_llama_tied_z1_bf16", "trainer_gpt2_tied_z2_fp32"]


def source_of(corpus: Path, variant: str) -> Path:
    return corpus / "huggingface" / variant / "out" / "checkpoint-3"


def reference_of(corpus: Path, variant: str) -> dict[str, torch.Tensor]:
    held = load_file(corpus / "huggingface" / variant / "reference" / "reference.safetensors")
    return {key.removesuffix("|fp32"): value for key, value in held.items() if key.endswith("|fp32")}


@pytest.mark.parametrize("variant", FULL)
def test_transformers_loads_the_masters(corpus: Path, tmp_path: Path, variant: str) -> None:
    transformers = pytest.importorskip("transformers")
    ucp.convert(source_of(corpus, variant), tmp_path / "hf", to="safetensors", max_shard_size=20_000)
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 1
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    reference = reference_of(corpus, variant)
    state = model.state_dict()
    assert reference.keys() <= state.keys()
    for name, value in reference.items():
        assert state[name].dtype == torch.float32
        assert torch.equal(state[name], value.reshape(state[name].shape)), name
    # The same logits as a model with the engine's own weights; no weight is newly initialised.
    twin = transformers.AutoModelForCausalLM.from_config(model.config).float()
    missing = twin.load_state_dict(reference, strict=False).missing_keys
    assert set(missing) <= {"lm_head.weight"} | {key for key in missing if key.endswith((".attn.bias", ".masked_bias"))}
    tokens = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        assert torch.equal(model.eval()(tokens).logits, twin.eval()(tokens).logits)


def test_dtype_is_cast_and_named_in_the_config(corpus: Path, tmp_path: Path) -> None:
    variant = "trainer_llama_z3_bf16"
    ucp.convert(source_of(corpus, variant), tmp_path / "hf", to="safetensors", dtype="bf16")
    assert json.loads((tmp_path / "hf" / "config.json").read_bytes())["dtype"] == "bfloat16"
    loaded = load_file(tmp_path / "hf" / "model.safetensors")
    for name, value in reference_of(corpus, variant).items():
        assert torch.equal(loaded[name], value.bfloat16().reshape(loaded[name].shape))
    ucp.convert(source_of(corpus, variant), tmp_path / "full", to="safetensors")
    assert json.loads((tmp_path / "full" / "config.json").read_bytes())["dtype"] == "float32"


def test_tied_weights_are_written_once_if_the_config_ties_them(corpus: Path, tmp_path: Path) -> None:
    source = source_of(corpus, "trainer_llama_tied_z1_bf16")
    ucp.convert(source, tmp_path / "tied", to="safetensors")
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    ucp.convert(source, tmp_path / "atoms")
    ucp.convert(tmp_path / "atoms", tmp_path / "again", to="safetensors")
    tied, again = (tmp_path / name / "model.safetensors" for name in ("tied", "again"))
    assert tied.read_bytes() == again.read_bytes()


def test_transformers_reads_the_index(corpus: Path, tmp_path: Path) -> None:
    source = source_of(corpus, "trainer_llama_z2_bf16")
    ucp.convert(source, tmp_path / "hf", to="safetensors", max_shard_size=20_000)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_bytes())
    stored = {name: file for file in (tmp_path / "hf").glob("model-*.safetensors") for name in load_file(file)}
    assert index["weight_map"] == {name: file.name for name, file in sorted(stored.items())}
    tensors = [t for file in set(stored.values()) for t in load_file(file).values()]
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors)
    assert index["metadata"]["total_parameters"] == sum(t.numel() for t in tensors)
    assert {p.name for p in (tmp_path / "hf").iterdir()} >= {"config.json", "generation_config.json"}
    assert not (tmp_path / "hf" / "training_args.bin").exists(), "no pickles in a model folder"


def test_adapters_get_a_folder_of_their_own(corpus: Path, tmp_path: Path) -> None:
    source = source_of(corpus, "trainer_llama_lora_z2_bf16")
    ucp.convert(source, tmp_path / "adapter", to="safetensors", dtype="bf16")
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    saved = load_file(source / "adapter_model.safetensors")
    assert written.keys() == saved.keys()
    for name, value in saved.items():
        assert torch.equal(written[name], value.bfloat16())
    assert (tmp_path / "adapter" / "adapter_config.json").exists()
    whole = corpus / "huggingface" / "accelerate_llama_lora_z2_bf16" / "ckpt"
    ucp.convert(whole, tmp_path / "both", to="safetensors")
    base = load_file(tmp_path / "both" / "model.safetensors")
    assert "model.layers.0.self_attn.q_proj.weight" in base
    assert not any("lora" in name for name in base)
    assert (tmp_path / "both" / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize(
    "names, expected",
    [
        (["model.layers.0.w", "lm_head.w"], ["model.layers.0.w", "lm_head.w"]),
        (["model.model.layers.0.w", "model.lm_head.w"], ["model.layers.0.w", "lm_head.w"]),
        (["_forward_module.model.model.a", "_forward_module.model.lm_head.w"], ["model.a", "lm_head.w"]),
        (["module.a", "module.b"], ["a", "b"]),
        (["model.embed.w", "model.norm.w"], ["model.embed.w", "model.norm.w"]),
        (["base_model.model.m.q.base_layer.weight", "base_model.model.m.q.lora_A.default.weight"], ["m.q.weight"]),
    ],
)
def test_prefixes_of_wrappers_are_removed(names: list[str], expected: list[str]) -> None:
    assert list(hugging_face_names(names).model.values()) == expected


LAYER = "base_model.model.m.q"


@pytest.mark.parametrize(
    "names, model, adapter",
    [
        (["lora_A.default.weight", "lora_B.default.bias"], [], ["lora_A.weight", "lora_B.bias"]),
        (["lora_embedding_A.default"], [], ["lora_embedding_A"]),
        (["base_layer.weight", "lora_magnitude_vector.default.weight"], ["weight"], ["lora_magnitude_vector"]),
        (["base_layer.weight", "ia3_l.mine"], ["weight"], ["ia3_l"]),
        (
            ["lora_A.default.weight", "original_module.weight", "modules_to_save.default.weight"],
            ["weight"],
            ["lora_A.weight", "weight"],
        ),
        (["lora_A.weight", "lora_B.weight"], [], ["lora_A.weight", "lora_B.weight"]),
    ],
)
def test_names_of_adapters(names: list[str], model: list[str], adapter: list[str]) -> None:
    """The names in PEFT's own files: LoRA, DoRA, IA3, modules that are trained completely; names from such a file."""
    naming = hugging_face_names([f"{LAYER}.{name}" for name in names])
    assert list(naming.model.values()) == [f"m.q.{name}" for name in model]
    assert list(naming.adapter.values()) == [f"{LAYER}.{name}" for name in adapter]


@pytest.mark.parametrize("by_way_of", [None, "atoms"])
def test_an_adapter_stays_an_adapter(tmp_path: Path, by_way_of: str | None) -> None:
    tensors = {
        f"{LAYER}.lora_A.weight": torch.randn(2, 3),
        "base_model.model.head.weight": torch.randn(3),
        "prompt_embeddings": torch.randn(4),
    }
    source = tmp_path / "a"
    source.mkdir()
    save_file(tensors, source / "adapter_model.safetensors")
    (source / "adapter_config.json").write_text("{}")
    if by_way_of is not None:
        ucp.convert(source, tmp_path / "between", to=by_way_of)
        source = tmp_path / "between"
    ucp.convert(source, tmp_path / "b", to="safetensors")
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    written = load_file(tmp_path / "b/adapter_model.safetensors")
    assert {name: value.tolist() for name, value in written.items()} == {n: v.tolist() for n, v in tensors.items()}
