"""Tables of names as files: those that come with ucp, and those that are wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ucp
from tests.names.made import LLAMA, llama_shapes, numbers, write_weights
from ucp.errors import StorageError, UsageError
from ucp.names.name_tables import NamePattern, load_table, outline, packaged_tables, parse_table, table_names


def test_the_packaged_tables() -> None:
    assert [table.name for table in packaged_tables()] == table_names()
    assert {"gpt2", "llama", "mixtral", "megatron-deepspeed"} <= set(table_names())
    assert all("megatron" in table.sides for table in packaged_tables())


def test_the_table_of_the_documentation(project: Path) -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", (project / "docs/names.md").read_text(encoding="utf-8"), re.DOTALL)
    assert [entry.cut for entry in parse_table(block.encode(), "names.md", "own").entries] == ["vocab", "rows"]


def test_patterns_count() -> None:
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
def test_an_outline_is_that_of_its_names(text: str) -> None:
    pattern = NamePattern(text)
    name = pattern.write({"layer": 12, "expert": 3}, 40)
    assert pattern.outline() in (outline(name), None)
    assert (pattern.outline() is None) == ("h{" in text or "x{" in text)
    assert pattern.read(name, 40) == {key: {"layer": 12, "expert": 3}[key] for key in pattern.places}


GOOD = 'sides = ["a", "b"]\n[[map]]\na = "x.{layer}"\nb = "y.{layer}"\n'


@pytest.mark.parametrize(
    "text, wrong",
    [
        ("sides = [", "not valid TOML"),
        ("", "missing 'map'"),
        ('[[map]]\na = "x"\nb = "y"\n', "sides must name two"),
        (GOOD + "colour = 1\n", "line 2: a map needs 'a' and 'b'"),
        (GOOD.replace('b = "y.{layer}"', ""), "line 2: a map needs"),
        (GOOD.replace("y.{layer}", "y.{depth}"), "is not a pattern of names"),
        (GOOD.replace("y.{layer}", "y.{layer"), "is not a pattern of names"),
        (GOOD.replace("y.{layer}", "y"), "both sides must count"),
        (GOOD.replace('"y.{layer}"', "7"), "7 is not a name"),
        (GOOD.replace('"y.{layer}"', '["y.{layer}", "z.{layer}"]'), "2 names for 1 parts"),
        (GOOD.replace('"y.{layer}"', '["y.{layer}", "z"]'), "the same numbers"),
        (GOOD.replace('"y.{layer}"', '{ name = "y.{layer}", grouped = true }'), "grouped needs"),
        (GOOD.replace('"y.{layer}"', '{ name = "y.{layer}", turned = true }'), "transposed = true"),
        (GOOD + 'parts = "thirds"\n', "parts are"),
        (GOOD + "parts = [1]\n", "parts are"),
        (GOOD + 'cut = "diagonal"\n', "cut is one of"),
        (GOOD + "when = { green = true }\n", "conditions are"),
        ("computed = ['(']\n" + GOOD, "computed"),
        ("rows = 3\n" + GOOD, "unexpected or missing 'rows'"),
    ],
)
def test_tables_that_are_wrong(text: str, wrong: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_table(text.encode(), "own.toml", "own")
    assert wrong in str(refused.value)
    assert "own.toml" in str(refused.value)


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot read the table"):
        load_table(tmp_path / "none.toml")
    folder = write_weights(tmp_path / "hf", numbers(llama_shapes()), LLAMA)
    with pytest.raises(UsageError, match="no such file, and not one of: hf, megatron, megatron-deepspeed"):
        ucp.open(folder, names="lama")


def test_two_that_would_have_one_name(tmp_path: Path) -> None:
    table = 'sides = ["a", "b"]\n[[map]]\na = "x.{layer}"\nb = "y.{layer}"\n[[map]]\na = "z.{layer}"\nb = "y.{layer}"\n'
    (tmp_path / "own.toml").write_text(table)
    folder = write_weights(tmp_path / "hf", numbers({"x.0": (2,), "z.0": (2,)}), None)
    with pytest.raises(UsageError, match=r"two parameters would both be called y\.0"):
        ucp.open(folder, names=tmp_path / "own.toml")
