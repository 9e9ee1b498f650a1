"""Model configurations and the `config.json` of Hugging Face models, in both directions.

What is specific to a family of models is data: one file per family in `ucp/data/names/families`, most of which extend
`decoder.toml`. Adding a family is adding a file:

    extends = "decoder"
    title = "Qwen2"                        # for messages
    architecture = "Qwen2ForCausalLM"      # omit it for a family that is only read

    [fixed]                                # true of every model of the family, whatever config.json contains
    [defaults]                             # if config.json lacks the key
    [replace.FIELD]                        # values of a field that stand for others
    [read]                                 # field = "key", for keys that only this family has
    [config]                               # key = "field", or { field, default }, { field, true, false }, { value }
    [requires]                             # what a model must be to be written as one of this family

Fields are those of `ModelConfig` and the derived values below. "any" takes back what the extended file fixes or
requires.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import resources
from typing import Any, Final

from ucp.containers.config_files import parse_toml
from ucp.formats.translate.model_config import ModelConfig, fields_only_of, positive_int, read_fields

_DECODER: Final = "decoder"
_SIGMOID: Final = "sigmoid"
_SPLIT_ROPE: Final = "its latent attention rotates the halves of a head, megatron-core's rotates neighboring elements"
# Llama 3.1's rotary scaling besides its factor. Megatron has no arguments for these.
_LLAMA3_ROPE: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# YaRN: keys of Hugging Face's rope parameters and their defaults.
YARN_DEFAULTS: Final = {
    "factor": 1.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
}


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """One file of `ucp/data/names/families`, with what it extends."""

    name: str
    model_types: tuple[str, ...] = ()
    title: str = ""
    architecture: str = ""
    unsupported: str | None = None
    ungrouped: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    replace: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    read: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    requires: Mapping[str, Any] = field(default_factory=dict)

    def unmet(self, model: ModelConfig) -> list[str]:
        """The requirements that a model does not meet."""
        values = {key: _value(model, key) for key in self.requires}
        values |= {key: bool(values[key]) for key, wanted in self.requires.items() if isinstance(wanted, bool)}
        return [key for key, wanted in self.requires.items() if values[key] != wanted]


_MERGED: Final = ("fixed", "defaults", "replace", "read", "config", "requires")


@cache
def model_families() -> dict[str, ModelFamily]:
    """Every packaged family by name."""
    folder = resources.files("ucp") / "data" / "names" / "families"
    documents: dict[str, dict[str, Any]] = {
        entry.name.removesuffix(".toml"): parse_toml(entry.read_bytes(), entry.name, "model family")[1]
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name)
    }

    def merged(name: str) -> dict[str, Any]:
        own = documents[name]
        base = merged(own["extends"]) if "extends" in own else {}
        sections = {key: {**base.get(key, {}), **own.get(key, {})} for key in _MERGED}
        for key in ("fixed", "requires"):
            sections[key] = {name: value for name, value in sections[key].items() if value != "any"}
        inherited = {"ungrouped": base["ungrouped"]} if "ungrouped" in base else {}
        return {**inherited, **{k: v for k, v in own.items() if k not in ("extends", "about")}, **sections}

    families = {}
    for name in documents:
        values = merged(name)
        values["model_types"] = tuple(values.get("model_types", [name]))
        families[name] = ModelFamily(name, **values)
    return families


# --- Reading ---


def from_hf_config(config: Mapping[str, Any]) -> ModelConfig:
    """The configuration that a `config.json` describes."""
    families, kind = model_families(), config.get("model_type")
    family = next((each for each in families.values() if kind in each.model_types), families[_DECODER])
    if "n_head" in config:
        family = families["gpt2"]
    known = {**family.defaults, **read_fields(config, "hf", family.read), **family.fixed}
    for name, values in family.replace.items():
        known[name] = values.get(str(known.get(name)), known.get(name))
    hidden, heads = known.get("hidden"), known.get("heads")
    known.setdefault("query_groups", heads)
    known.setdefault("head_dim", hidden // heads if hidden and heads else None)
    if known["rotary"]:
        known |= _rotary_decoder(config, family, known)
    else:
        known.setdefault("ffn", 4 * hidden if hidden else None)
    if not known["experts"]:
        known = {name: value for name, value in known.items() if name not in fields_only_of("moe")}
    if not known["latent"]:
        known = {name: value for name, value in known.items() if name not in fields_only_of("mla")}
    model = ModelConfig(**known)
    return replace(model, mismatch=model.mismatch or router_mismatch(model))


def _rotary_decoder(config: Mapping[str, Any], family: ModelFamily, known: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that follow from several keys."""
    attention_bias = config.get("attention_bias") is True
    rope = next((r for key in ("rope_parameters", "rope_scaling") if isinstance(r := config.get(key), dict)), {})
    scaling = rope.get("rope_type", rope.get("type", "default"))
    base = config.get("rope_theta", rope.get("rope_theta"))
    factor = rope.get("factor")
    latent = known.get("kv_rank") is not None
    experts = known.get("experts", 0)
    return {
        "bias": attention_bias and config.get("mlp_bias") is True,
        "qkv_bias": attention_bias or known.get("qkv_bias", False),
        "window": _window(config) if "window" in family.read else None,
        "rotary_base": float(base) if isinstance(base, (int, float)) else None,
        "rotary_scaling": float(factor) if scaling == "llama3" and isinstance(factor, (int, float)) else None,
        "yarn": yarn_values(rope, {key: key for key in YARN_DEFAULTS}) if latent and scaling == "yarn" else None,
        "latent": latent,
        "experts": experts,
        **(_experts(config, family, known) if experts else {"ffn": positive_int(config, "intermediate_size")}),
        "mismatch": _rope_mismatch(rope, scaling, latent) or _layer_mismatch(config, family),
        "unsupported": family.unsupported or (_SPLIT_ROPE if config.get("rope_interleave") is False else None),
    }


def yarn_values(values: Mapping[str, Any], keys: Mapping[str, str]) -> tuple[tuple[str, float], ...]:
    """The parameters of YaRN in a framework's settings; `keys` are Hugging Face's keys and the framework's."""
    found = {key: values.get(own) for key, own in keys.items()}
    return tuple(
        (key, value if isinstance(value, (int, float)) and not isinstance(value, bool) else YARN_DEFAULTS[key])
        for key, value in found.items()
    )


def _experts(config: Mapping[str, Any], family: ModelFamily, known: Mapping[str, Any]) -> dict[str, Any]:
    shared_ffn = known.get("shared_ffn", 0)
    if "shared_experts" in family.read:
        shared_ffn = (positive_int(config, family.read["shared_experts"]) or 0) * (known.get("ffn") or 0)
    groups = known.get("router_groups")
    if groups == 1 or any(config.get(key, value) == value for key, value in family.ungrouped.items()):
        groups = None
    return {
        "shared_ffn": shared_ffn,
        "moe_layers": _moe_layers(config, known.get("layers") or 0),
        "router_groups": groups,
        "router_top_groups": known.get("router_top_groups") if groups else None,
    }


def _moe_layers(config: Mapping[str, Any], layers: int) -> tuple[bool, ...] | None:
    """Which layers have experts; None if all have."""
    dense = positive_int(config, "first_k_dense_replace") or 0
    if dense:
        return tuple(i >= dense for i in range(layers))
    step = positive_int(config, "decoder_sparse_step") or 1
    listed = config.get("mlp_only_layers")
    without = set(listed) if isinstance(listed, list) and all(type(n) is int for n in listed) else set()
    found = tuple(i not in without and (i + 1) % step == 0 for i in range(layers))
    return None if all(found) else found


def _window(config: Mapping[str, Any]) -> int | None:
    """The length of the attention window, if sequences can be longer."""
    length = positive_int(config, "sliding_window")
    longest = positive_int(config, "max_position_embeddings")
    if length is None or config.get("use_sliding_window") is False:
        return None
    return length if longest is None or length < longest else None


def _rope_mismatch(rope: Mapping[str, Any], scaling: str | None, latent: bool) -> str | None:
    if scaling not in (("default", "llama3", "yarn") if latent else ("default", "llama3")):
        return f"its rotary positions are scaled ({scaling})"
    if scaling == "llama3" and any(rope.get(key, value) != value for key, value in _LLAMA3_ROPE.items()):
        numbers = ", ".join(f"{key} {rope.get(key, value)}" for key, value in _LLAMA3_ROPE.items())
        return f"its rotary positions are scaled by other numbers than Llama 3.1's ({numbers})"
    return None


def _layer_mismatch(config: Mapping[str, Any], family: ModelFamily) -> str | None:
    attention, mlp = config.get("attention_bias") is True, config.get("mlp_bias") is True
    if attention != mlp:
        has, lacks = ("attention", "MLP") if attention else ("MLP", "attention")
        return f"the output of its {has} has a bias and that of its {lacks} does not"
    window = _window(config)
    if window is not None and "window" not in family.read:
        return f"some of its layers attend to {window} tokens only (sliding_window)"
    return None


# --- Comparing with the modules of the two frameworks ---


def router_mismatch(model: ModelConfig) -> str | None:
    """Why megatron-core's router weighs experts differently from Hugging Face's; None if it does not."""
    sigmoid, chosen = model.router_scores == _SIGMOID, model.experts_per_token or 1
    if not model.experts:
        return None
    if sigmoid and (model.router_sums is False or chosen == 1):
        return "its router does not normalize the weights of the chosen experts"
    # Hugging Face ranks a group by its best two experts (DeepSeek-V3) or its best one (V2), Megatron by as many as are
    # chosen from it.
    same_rank = chosen // (model.router_top_groups or 1) == (2 if sigmoid else 1)
    if model.router_groups and model.router_top_groups != model.router_groups and not same_rank:
        return "its router ranks groups of experts by another number of them"
    return None


def hf_mismatch(model: ModelConfig) -> str | None:
    """Why no Hugging Face module computes what this model does; None if one does."""
    if model.mismatch is not None:
        return model.mismatch
    if model.norm_less_one and not model.scaled_embedding:
        return (
            "its norms store their weight minus one (--apply-layernorm-1p); for a Gemma, give its config.json with"
            " --model-config"
        )
    if model.latent and model.qk_norm is False:
        return "its latent attention has no norms of the latents (--qk-layernorm)"
    if model.experts and not model.latent:
        if model.router_scores not in (None, "softmax"):
            return "its router weighs experts differently (--moe-router-score-function)"
        if model.router_sums is False and not (model.shared_ffn or model.qk_norm):
            return "its router weighs experts differently (--moe-router-pre-softmax)"
        if model.router_groups or model.router_scale is not None or model.router_bias:
            return "its router chooses groups of experts, or has a scale or a bias"
    return router_mismatch(model)


# --- Writing ---

# Values that families require or write besides the fields of `ModelConfig`.
_DERIVED: Final[dict[str, Callable[[ModelConfig], Any]]] = {
    "learned_positions": lambda model: model.rotary is False,
    "multi_head": lambda model: model.query_groups == model.heads,
    "square_heads": lambda model: model.head_dim is None or model.head_dim * (model.heads or 0) == model.hidden,
    "sigmoid_router": lambda model: model.router_scores == _SIGMOID,
    "mlp_width": lambda model: model.dense_ffn or model.ffn,
    "shared_experts": lambda model: (
        model.shared_ffn // model.ffn if model.ffn and model.shared_ffn and not model.shared_ffn % model.ffn else 0
    ),
    "dense_layers": lambda model: [i for i, has_experts in enumerate(model.moe_layers or ()) if not has_experts],
    "has_dense_layers": lambda model: model.moe_layers is not None,
    "dense_layers_first": lambda model: list(model.moe_layers or ()) == sorted(model.moe_layers or ()),
    "first_moe_layer": lambda model: (model.moe_layers or (True,)).index(True),
    "rope_parameters": lambda model: _rope_parameters(model),
}

# Requirements in words, for "Llama has …" and "Llama has no …".
_WORDS: Final = {
    "learned_positions": "learned positions",
    "gated": "a gate in its MLP",
    "experts": "experts",
    "latent": "multi-latent attention",
    "qk_norm": "norms of q and k",
    "norm_less_one": "norms that store their weight minus one",
    "scaled_embedding": "scaled embeddings",
    "window": "an attention window",
    "bias": "biases in all linear layers",
    "qkv_bias": "biases of q, k and v",
    "shared_ffn": "shared experts",
    "shared_gate": "a gate for its shared experts",
    "shared_experts": "shared experts that are a multiple of its experts' width",
    "has_dense_layers": "layers without experts",
    "dense_layers_first": "layers without experts before the others only",
    "sigmoid_router": "a router with sigmoid scores",
    "router_sums": "normalized weights of the chosen experts",
    "router_bias": "a router bias",
    "multi_head": "as many key heads as query heads",
    "square_heads": "heads that add up to the hidden size",
}
_FLAGS: Final = frozenset(each.name for each in fields(ModelConfig) if str(each.type).startswith("bool"))


def to_hf_config(model: ModelConfig, vocabulary: int | None) -> tuple[dict[str, Any] | None, str | None]:
    """The `config.json` of a family that computes what the model does, or None and the reason why there is none."""
    model = replace(model, vocabulary=vocabulary)
    needed = ("layers", "hidden", "heads", "ffn", "vocabulary", "positions", "epsilon")
    if any(getattr(model, name) is None for name in needed):
        return None, "the checkpoint does not contain all sizes of the model"
    if model.mismatch is not None:
        return None, model.mismatch
    written = [family for family in model_families().values() if family.architecture]
    # The most specific family first, so that Qwen2, with biases of q, k and v, comes before Llama.
    nearest = min(written, key=lambda family: (len(family.unmet(model)), -len(family.requires)))
    unmet = nearest.unmet(model)
    if unmet:
        wanted, words = nearest.requires[unmet[0]], _WORDS.get(unmet[0], "")
        has = wanted if isinstance(wanted, str) else words
        has = has if wanted else f"no {words.removeprefix('an ').removeprefix('a ')}"
        return None, f"no known model family fits: {nearest.title}, the closest, has {has}"
    values = {key: _written(model, spec) for key, spec in nearest.config.items()}
    return {"architectures": [nearest.architecture], "model_type": nearest.name, **values}, None


def _value(model: ModelConfig, name: str) -> Any:
    return _DERIVED[name](model) if name in _DERIVED else getattr(model, name)


def _written(model: ModelConfig, spec: str | Mapping[str, Any]) -> Any:
    """The value for a key of `config.json`; see the module's docstring for `spec`."""
    if isinstance(spec, str):
        spec = {"field": spec}
    if "field" not in spec:
        return spec.get("value")
    name = spec["field"]
    value = _value(model, name)
    if "true" in spec:
        return spec["true"] if value else spec["false"]
    if name in _FLAGS:
        return bool(value)
    return value or spec["default"] if "default" in spec else value


def _rope_parameters(model: ModelConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rotary_base or 10000.0}
    if model.rotary_scaling is not None:
        rope |= {"rope_type": "llama3", "factor": model.rotary_scaling, **_LLAMA3_ROPE}
    if model.yarn is not None:
        rope |= {"rope_type": "yarn", **dict(model.yarn)}
    return rope
