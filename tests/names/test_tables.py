"""Tables of names as files: packaged tables, and files with errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ucp
from tests.names.small_models import LLAMA, llama_shapes, numbers, write_weights
from ucp.errors import InconsistentError, StorageError, UsageError
from ucp.names.name_tables import (
    NamePattern,
    load_packaged_table,
    load_table,
    outline,
    packaged_tables,
    parse_table,
    table_names,
)


def test_the_packaged_tables() -> None:
    assert [table.name for table in packaged_tables()] == table_names()
    assert {"gpt2", "llama", "mixtral", "megatron-deepspeed"} <= set(table_names())
    assert all("megatron" in table.sides for table in packaged_tables())


def test_the_table_of_the_documentation(project: Path) -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", (project / "docs/names.md").read_text(encoding="utf-8"), re.DOTALL)
    assert [str(entry.rule) for entry in parse_table(block.encode(), "names.md", "own").entries] == [
        "vocab(dim=0)",
        "split(dim=0)",
    ]


def test_numbers_in_patterns() -> None:
    pattern = NamePattern("{layer+2}.mlp.experts.{expert}.weight")
    assert pattern.read("7.mlp.experts.3.weight", None) == {"layer": 5, "expert": 3}
    assert pattern.write({"layer": 5, "expert": 3}, None) == "7.mlp.experts.3.weight"
    assert pattern.read("1.mlp.experts.3.weight", None) is None  # there is no layer before the first
    assert pattern.read("7.mlp.experts.3.weights", None) is None
    last = NamePattern("{layers+2}.weight")
    assert last.read("6.weight", 4) == {}
    assert last.read("7.weight", 4) is None
    assert last.read("6.weight", None) is None


@pytest.mark.parametrize("text", ["h{layer}.x", "{layer}.x", "1.{layer+1}.7.x{expert}", "{layers+2}.weight", "a.b"])
def test_the_outline_of_a_pattern(text: str) -> None:
    pattern = NamePattern(text)
    name = pattern.write({"layer": 12, "expert": 3}, 40)
    assert pattern.outline() in (outline(name), None)
    assert (pattern.outline() is None) == ("h{" in text or "x{" in text)
    assert pattern.read(name, 40) == {key: {"layer": 12, "expert": 3}[key] for key in pattern.counters}


GOOD = 'sides = ["a", "b"]\n[[map]]\na = "x.{layer}"\nb = "y.{layer}"\n'


@pytest.mark.parametrize(
    "text, wrong",
    [
        ("sides = [", "not valid TOML"),
        ("", "missing 'map'"),
        ('[[map]]\na = "x"\nb = "y"\n', "sides must name two"),
        (GOOD + "colour = 1\n", "line 2: a map needs 'a' and 'b'"),
        (GOOD.replace('b = "y.{layer}"', ""), "line 2: a map needs"),
        (GOOD.replace("y.{layer}", "y.{depth}"), "is not a valid pattern of names"),
        (GOOD.replace("y.{layer}", "y.{layer"), "is not a valid pattern of names"),
        (GOOD.replace("y.{layer}", "y"), "both sides must count"),
        (GOOD.replace('"y.{layer}"', "7"), "7 is not a name"),
        (GOOD.replace('"y.{layer}"', '["y.{layer}", "z.{layer}"]'), "2 names for 1 parts"),
        (GOOD.replace('"y.{layer}"', '["y.{layer}", "z"]'), "must contain the same numbers"),
        (GOOD.replace('"y.{layer}"', '{ name = "y.{layer}", grouped = true }'), "grouped needs"),
        (GOOD.replace('"y.{layer}"', '{ name = "y.{layer}", turned = true }'), "transposed = true"),
        (GOOD + 'ratio = "thirds"\n', "a ratio is"),
        (GOOD + "ratio = [1]\n", "a ratio is"),
        (GOOD + 'ratio = 7\ncut = "split"\n', "must be a list of sizes"),
        (GOOD + "cut = [1]\n", "cut is one of"),
        (GOOD + 'cut = "split"\ndim = 2\n', "is not supported in a table of names"),
        (GOOD + 'cut = "vocab"\ndim = 1\n', "is not supported in a table of names"),
        (GOOD + 'cut = "average"\n', "is not supported in a table of names"),
        ('extends = "lama"\n' + GOOD, "packaged tables are"),
        ('extends = "llama"\n' + GOOD, "sides must be those of the extended table"),
        ('extends = "llama"\nwithout = ["x"]\n[[map]]\nhf = "x"\nmegatron = "y"\n', "without must list names"),
        ('extends = "llama"\n[[map]]\nhf = "x"\nmegatron = "y"\nbefore = "z"\n', "before = 'z' is not in the table"),
        (GOOD + "before = 3\n", "before = 3 is not a name"),
        ('sides = 3\nextends = "llama"\n[[map]]\nhf = "x"\nmegatron = "y"\n', "sides must be those of the extended"),
        ('extends = "llama"\nwithout = [[1]]\n[[map]]\nhf = "x"\nmegatron = "y"\n', "without must list names"),
        (GOOD + 'ratio = "gated"\nparts = [1, 2]\ncut = "split"\n', "ratio cannot be combined with parts"),
        # The grammar of tables before it was that of rule files.
        (GOOD + 'parts = "thirds"\n', "a ratio is"),
        (GOOD + "parts = [1]\n", "a ratio is"),
        (GOOD + 'cut = "diagonal"\n', "cut is one of"),
        (GOOD + "when = { green = true }\n", "conditions are"),
        ("computed = ['(']\n" + GOOD, "computed"),
        ("rows = 3\n" + GOOD, "unexpected or missing 'rows'"),
    ],
)
def test_errors_in_tables(text: str, wrong: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_table(text.encode(), "own.toml", "own")
    assert wrong in str(refused.value)
    assert "own.toml" in str(refused.value)


@pytest.mark.parametrize(
    "old, new",
    [
        ('cut = "rows"', 'cut = "split"\ndim = 0'),
        ('cut = "columns"', 'cut = "split"\ndim = 1'),
        ('cut = "whole"', 'cut = "replicated"'),
        ("", 'cut = "replicated"'),
        ('cut = "rows"\nparts = "qkv"', 'cut = "split"\nratio = "qkv"'),
        ('cut = "rows"\nparts = "gated"', 'cut = "split"\nratio = "gated"'),
        ('cut = "rows"\nparts = [2, 1]', 'cut = "split"\nratio = [2, 1]'),
        ("parts = [1, 1]", "ratio = [1, 1]"),
        ('cut = "rows"\nparts = [1, 1, 1]', 'cut = "split"\ncount = 3'),
    ],
)
def test_the_old_grammar_is_still_read(old: str, new: str) -> None:
    """Before tables had the grammar of rule files, `parts` were proportions and `cut` was rows or columns."""
    (before,), (after,) = (parse_table((GOOD + text).encode(), "own.toml", "own").entries for text in (old, new))
    assert before == after


def test_parts_are_sizes(tmp_path: Path) -> None:
    table = 'sides = ["a", "b"]\n[[map]]\na = ["x", "y"]\nb = "z"\nparts = [4, 2]\ncut = "split"\n'
    (tmp_path / "own.toml").write_text(table)
    folder = write_weights(tmp_path / "hf", numbers({"x": (4, 3), "y": (2, 3)}), None)
    rule = ucp.open(folder, names=tmp_path / "own.toml")["z"].parameter.rule
    assert str(rule) == "split(dim=0, parts=[4, 2])"
    (tmp_path / "own.toml").write_text(table.replace("[4, 2]", "[2, 1]"))
    with pytest.raises(InconsistentError, match="6 rows do not divide in the ratio 2:1"):
        ucp.open(folder, names=tmp_path / "own.toml")


def test_a_table_that_extends_another() -> None:
    text = """
        extends = "llama"
        without = ["output_layer.weight"]
        [[map]]
        hf = "model.embed.weight"
        megatron = "embedding.word_embeddings.weight"
        cut = "vocab"
        [[map]]
        hf = "model.extra"
        megatron = "decoder.extra"
        before = "decoder.final_layernorm.weight"
        [[map]]
        hf = "model.last"
        megatron = "decoder.last"
    """
    base, table = load_packaged_table("llama"), parse_table(text.encode(), "own.toml", "own")
    assert (table.sides, table.when, table.computed) == (base.sides, base.when, base.computed)
    names = [entry.sides["megatron"].names[0].text for entry in base.entries]
    assert [entry.sides["megatron"].names[0].text for entry in table.entries] == [
        *names[:-2],
        "decoder.extra",
        *names[-2:-1],
        "decoder.last",
    ]
    assert table.entries[0].sides["hf"].names[0].text == "model.embed.weight"


def test_a_missing_table(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot read the table"):
        load_table(tmp_path / "none.toml")
    folder = write_weights(tmp_path / "hf", numbers(llama_shapes()), LLAMA)
    with pytest.raises(UsageError, match="no such file, and not one of: hf, megatron, megatron-deepspeed"):
        ucp.open(folder, names="lama")


def test_two_parameters_with_one_name_are_refused(tmp_path: Path) -> None:
    table = 'sides = ["a", "b"]\n[[map]]\na = "x.{layer}"\nb = "y.{layer}"\n[[map]]\na = "z.{layer}"\nb = "y.{layer}"\n'
    (tmp_path / "own.toml").write_text(table)
    folder = write_weights(tmp_path / "hf", numbers({"x.0": (2,), "z.0": (2,)}), None)
    with pytest.raises(UsageError, match=r"two parameters would both be called y\.0"):
        ucp.open(folder, names=tmp_path / "own.toml")
