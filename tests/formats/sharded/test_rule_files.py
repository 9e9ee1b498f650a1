"""Rule files: the rules in them, and the errors for invalid ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from ucp.containers.config_files import MAX_BYTES
from ucp.core.rules import REPLICATED, Rule
from ucp.errors import StorageError, UsageError
from ucp.formats.sharded.rule_files import format_rule, load_preset, load_rules, preset_names


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "mine.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_every_key_reaches_the_rule(tmp_path: Path) -> None:
    book = load_rules(
        write(
            tmp_path,
            r"""
            about = "mine"
            [[rule]]
            match = 'a'
            cut = "replicated"
            [[rule]]
            match = 'b'
            cut = "split"
            dim = -1
            parts = [8, 4]
            widths = [[5, 3], [2, 2]]
            [[rule]]
            match = 'c'
            cut = "split"
            ratio = [4, 1, 1]
            [[rule]]
            match = 'd'
            cut = "split"
            dim = 1
            count = 3
            [[rule]]
            match = 'e'
            cut = "vocab"
            true_size = 50257
            [[rule]]
            match = 'f'
            cut = "average"
            """,
        )
    )
    assert [named.rule for named in book.rules] == [
        REPLICATED,
        Rule("split", -1, parts=(8, 4), widths=((5, 3), (2, 2))),
        Rule("split", 0, ratio=(4, 1, 1)),
        Rule("split", 1, ratio=(1, 1, 1)),
        Rule("vocab", 0, true_size=50257),
        Rule("average"),
    ]
    named = book.find("embed")
    assert named is not None
    assert named.origin == "file: mine.toml"


@pytest.mark.parametrize(
    "entry, complaint",
    [
        ("cut = 'split'", "needs match"),
        ("match = 3\ncut = 'split'", "needs match"),
        ("match = '('\ncut = 'split'", "not a regular expression"),
        ("match = 'a'", "cut = None"),
        ("match = 'a'\ncut = 'shredded'", "shredded"),
        ("match = 'a'\ncut = ['split']", "cut = "),
        ("match = 'a'\ncut = 'pieces'", "pieces"),
        ("match = 'a'\ncut = 'split'\ndimension = 1", "dimension"),
        ("match = 'a'\ncut = 'replicated'\ndim = 0", "takes no further keys, found dim"),
        ("match = 'a'\ncut = 'split'\ntrue_size = 3", "true_size"),
        ("match = 'a'\ncut = 'split'\ndim = '0'", "dim = '0'"),
        ("match = 'a'\ncut = 'split'\ndim = true", "dim = True"),
        ("match = 'a'\ncut = 'split'\ndim = 99", "dim = 99"),
        ("match = 'a'\ncut = 'split'\nparts = []", "parts"),
        ("match = 'a'\ncut = 'split'\nparts = [0]", "parts"),
        ("match = 'a'\ncut = 'split'\nparts = [1.5]", "parts"),
        ("match = 'a'\ncut = 'split'\nparts = [1]\nratio = [1]", "give one of them"),
        ("match = 'a'\ncut = 'split'\nratio = 3", "ratio"),
        ("match = 'a'\ncut = 'split'\ncount = 0", "count = 0"),
        ("match = 'a'\ncut = 'split'\nwidths = [[1]]", "widths needs parts"),
        ("match = 'a'\ncut = 'split'\nparts = [3]\nwidths = [[1, 1]]", "add up"),
        ("match = 'a'\ncut = 'split'\nparts = [3]\nwidths = [3]", "one list per part"),
        ("match = 'a'\ncut = 'vocab'\ntrue_size = 0", "true_size = 0"),
    ],
)
def test_a_wrong_entry_is_named_by_file_and_line(tmp_path: Path, entry: str, complaint: str) -> None:
    path = write(tmp_path, "[[rule]]\nmatch = 'fine'\ncut = 'replicated'\n\n[[rule]]\n" + entry)
    with pytest.raises(UsageError, match=r"mine\.toml, line 5: ") as caught:
        load_rules(path)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "about = 'nothing'",
        "rule = 3",
        "rule = [3]",
        "[[rule]\n",
        "[[rules]]\nmatch = 'a'\ncut = 'split'",
        b"\xff\xfe",
        "a = " + "[" * 100_000,
        "#" * (MAX_BYTES + 1),
    ],
)
def test_an_invalid_rule_file_is_a_usage_error(tmp_path: Path, text: str | bytes) -> None:
    with pytest.raises(UsageError, match=r"mine\.toml"):
        load_rules(write(tmp_path, text))


def test_inline_entries_are_named_by_number(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"mine\.toml, rule 2: "):
        load_rules(write(tmp_path, "rule = [{match = 'a', cut = 'split'}, {match = 'a', cut = 'no'}]"))


def test_a_missing_file_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"nowhere\.toml"):
        load_rules(tmp_path / "nowhere.toml")


def test_lines_for_a_hint_read_back_as_the_rule(tmp_path: Path) -> None:
    rules = [Rule("split", 1), Rule("split", 0, ratio=(2, 1)), Rule("split", 0, parts=(4, 2)), REPLICATED]
    rules.append(Rule("vocab", 0, true_size=7))
    for rule in rules:
        book = load_rules(write(tmp_path, format_rule("blocks.0.w[1]", rule)))
        found = book.find("blocks.0.w[1]")
        assert found is not None
        assert found.rule == rule
        assert book.find("blocks.0.w[1].bias") is None


def test_an_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match="llama"):
        load_preset("lama")


def test_the_packaged_presets() -> None:
    assert {"megatron-deepspeed-gpt", "bloom", "llama", "mixtral", "gpt2", "gpt-neox", "generic-hf"} <= set(
        preset_names()
    )


D0, D1, VOCAB = Rule("split", 0), Rule("split", 1), Rule("vocab", 0)
QKV, GATED = Rule("split", 0, ratio=(1, 1, 1)), Rule("split", 0, ratio=(1, 1))


@pytest.mark.parametrize(
    "preset, rules",
    [
        (
            "megatron-deepspeed-gpt",
            {
                "language_model.embedding.word_embeddings.weight": VOCAB,
                "tied_modules.embed.word_embeddings.weight": VOCAB,
                "language_model.embedding.position_embeddings.weight": REPLICATED,
                "1.position_embeddings.weight": REPLICATED,
                "language_model.encoder.layers.3.input_layernorm.weight": REPLICATED,
                "3.post_attention_layernorm.bias": REPLICATED,
                "language_model.encoder.final_layernorm.bias": REPLICATED,
                "6.weight": REPLICATED,
                "3.self_attention.query_key_value.weight": D0,
                "3.self_attention.query_key_value.bias": D0,
                "language_model.encoder.layers.3.self_attention.dense.weight": D1,
                "3.self_attention.dense.bias": REPLICATED,
                "3.mlp.dense_h_to_4h.weight": D0,
                "3.mlp.dense_h_to_4h.bias": D0,
                "3.mlp.dense_4h_to_h.weight": D1,
                "3.mlp.dense_4h_to_h.bias": REPLICATED,
                "7.lm_head.weight": VOCAB,
            },
        ),
        ("megatron-deepspeed-swiglu", {"3.mlp.dense_h_to_4h.weight": GATED, "3.mlp.dense_4h_to_h.weight": D1}),
        (
            "bloom",
            {
                "tied_modules.embed.word_embeddings.weight": VOCAB,
                "tied_modules.embed.word_embeddings.norm.weight": Rule("average"),
                "transformer.h.0.input_layernorm.bias": Rule("average"),
                "transformer.h.0.self_attention.query_key_value.weight": D0,
                "transformer.h.0.self_attention.dense.weight": D1,
                "transformer.h.0.mlp.dense_4h_to_h.bias": Rule("average"),
            },
        ),
        (
            "llama",
            {
                "model.embed_tokens.weight": VOCAB,
                "lm_head.weight": VOCAB,
                "model.layers.0.self_attn.q_proj.weight": D0,
                "model.layers.0.self_attn.k_proj.bias": D0,
                "model.layers.0.self_attn.qkv_proj.weight": QKV,
                "model.layers.0.self_attn.o_proj.weight": D1,
                "model.layers.0.mlp.gate_proj.weight": D0,
                "model.layers.0.mlp.gate_up_proj.weight": GATED,
                "model.layers.0.mlp.down_proj.weight": D1,
                "model.layers.0.mlp.down_proj.bias": REPLICATED,
                "model.layers.0.input_layernorm.weight": REPLICATED,
                "model.norm.weight": REPLICATED,
            },
        ),
        (
            "mixtral",
            {
                "model.layers.0.block_sparse_moe.gate.weight": REPLICATED,
                "model.layers.0.block_sparse_moe.experts.7.w1.weight": D0,
                "model.layers.0.block_sparse_moe.experts.7.w2.weight": D1,
                "model.layers.0.mlp.experts.gate_up_proj": Rule("split", 1, ratio=(1, 1)),
                "model.layers.0.mlp.experts.down_proj": Rule("split", 2),
                "model.layers.0.self_attn.v_proj.weight": D0,
            },
        ),
        (
            "gpt2",
            {
                "transformer.wte.weight": VOCAB,
                "transformer.wpe.weight": REPLICATED,
                "transformer.h.0.attn.c_attn.weight": Rule("split", 1, ratio=(1, 1, 1)),
                "transformer.h.0.attn.c_attn.bias": QKV,
                "transformer.h.0.attn.c_proj.weight": D0,
                "transformer.h.0.mlp.c_fc.weight": D1,
                "transformer.h.0.mlp.c_proj.bias": REPLICATED,
                "transformer.ln_f.bias": REPLICATED,
            },
        ),
        (
            "gpt-neox",
            {
                "gpt_neox.embed_in.weight": VOCAB,
                "gpt_neox.layers.0.attention.query_key_value.bias": D0,
                "gpt_neox.layers.0.attention.dense.weight": D1,
                "gpt_neox.final_layer_norm.weight": REPLICATED,
            },
        ),
        (
            "generic-hf",
            {
                "blocks.0.attn.qkv.bias": QKV,
                "blocks.0.attn.proj.weight": D1,
                "blocks.0.attn.proj.bias": REPLICATED,
                "blocks.0.mlp.up.weight": D0,
                "blocks.0.mlp.down.weight": D1,
                "decoder.layers.0.fc1.bias": D0,
                "decoder.layers.0.fc2.weight": D1,
                "blocks.0.ln1.weight": REPLICATED,
                "ln_f.bias": REPLICATED,
                "pos.weight": REPLICATED,
            },
        ),
    ],
)
def test_presets_match_their_model(preset: str, rules: dict[str, Rule]) -> None:
    book = load_preset(preset)
    found = {name: named.rule if (named := book.find(name)) else None for name in rules}
    assert found == rules
    assert all(named.origin == f"preset: {preset}" for named in book.rules)
