"""Options given to the library are checked, as on the command line."""

from __future__ import annotations

import subprocess
import sys
from inspect import signature
from pathlib import Path
from typing import Any

import click
import pytest
import torch

import ucp
from tests.paths import PROJECT
from ucp.api import read_options
from ucp.cli.main import cli
from ucp.errors import UsageError
from ucp.options import (
    ConvertOptions,
    DiffOptions,
    OpenOptions,
    PageOptions,
    PlanOptions,
    VerifyOptions,
    declared,
    parse_size,
)

CHECKPOINT = PROJECT / "fixtures" / "z1_bf16_tp2_dp2"
PIPELINE = PROJECT / "fixtures" / "pp2_z1_bf16_tied_dp2"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"only": "weight"}, "only='weight' is not a known value"),
        ({"to": "megatron", "optimizer": "zero"}, "optimizer='zero' is not a known value"),
        ({"engine": "spark"}, "engine='spark' is not a known value"),
        ({"to": "deepspeed", "tp": 0}, "tp=0: must be at least 1"),
        ({"jobs": 0}, "jobs=0: must be at least 1"),
        ({"memory": "much"}, "memory='much' is not a size"),
        ({"to": "safetensors", "max_shard_size": "big"}, "max_shard_size='big' is not a size"),
        ({"to": "deepspeed", "stages": "0,2"}, "stages='0,2' is not a list of integers"),
        ({"to": "deepspeed", "stages": [0, 2]}, "--stages 0,2 lists the first layers of 2 stages, but pp=1"),
        ({"dp": 3}, "--dp is not supported with --to atoms\n.*--to deepspeed or --to megatron"),
        ({"zero": 0}, "--zero is not supported with --to atoms"),
        ({"to": "dcp", "zero": 1}, "--zero is not supported with --to dcp"),
        ({"to": "dcp", "vocab_size": 64}, "--vocab-size is not supported with --to dcp"),
        ({"to": "deepspeed", "max_shard_size": 4096}, "--max-shard-size is not supported with --to deepspeed"),
    ],
)
def test_wrong_values_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ucp.convert(CHECKPOINT, tmp_path / "out", **options)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "stages, message", [([0, 1, 2], "lists the first layers of 3 stages, but pp=2"), ([1, 2], "must start with 0")]
)
def test_wrong_stages_are_refused(tmp_path: Path, stages: list[int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ucp.convert(PIPELINE, tmp_path / "out", to="deepspeed", pp=2, stages=stages)


def test_shorter_forms_in_python(tmp_path: Path) -> None:
    ucp.convert(CHECKPOINT, tmp_path / "a", include="*.bias", dtype=torch.float16, memory="64M")
    ucp.convert(CHECKPOINT, tmp_path / "b", include=["*.bias"], dtype="fp16", memory=64 << 20)
    assert ucp.diff(tmp_path / "a", tmp_path / "b").identical
    assert all(name.endswith(".bias") for name in ucp.open(tmp_path / "a"))
    assert ucp.diff(CHECKPOINT, tmp_path / "a", include="*.ln1.bias", only="optimizer").same
    ucp.convert(CHECKPOINT, tmp_path / "c", to="safetensors", max_shard_size="4K")
    assert len(list((tmp_path / "c").glob("*.safetensors"))) > 1
    assert ucp.verify(CHECKPOINT, allow="finite").ok


def test_rows_are_a_slice() -> None:
    with pytest.raises(UsageError, match="rows=3 is not a slice"):
        ucp.open(CHECKPOINT)["embed.weight"].read("master", rows=3)  # type: ignore[arg-type]


def test_results_have_a_short_repr(tmp_path: Path) -> None:
    assert len(repr(ucp.convert(CHECKPOINT, tmp_path / "out"))) < 200 + len(str(CHECKPOINT))
    assert len(repr(ucp.plan(CHECKPOINT, tmp_path / "more"))) < 600 + 2 * len(str(CHECKPOINT))


def test_wrong_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'shart'; did you mean 'shard'\?"):
        ucp.convert(CHECKPOINT, tmp_path / "out", shart=(1, 2))  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "function, declaration",
    [
        (ucp.open, OpenOptions),
        (ucp.plan, PlanOptions),
        (ucp.convert, ConvertOptions),
        (ucp.verify, VerifyOptions),
        (ucp.diff, DiffOptions),
        (ucp.report, PageOptions),
    ],
)
def test_signatures_and_declarations_agree(function: Any, declaration: type) -> None:
    parameters = signature(function).parameters.values()
    shown = {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}
    assert shown | {"progress": None} == {
        "progress": None,
        **{name: option.default for name, option in declared(declaration).items()},
    }


def test_signatures_show_every_option() -> None:
    names = list(signature(ucp.convert).parameters)
    assert names[:3] == ["src", "dst", "progress"]
    assert names[3:] == list(declared(ConvertOptions))
    assert signature(ucp.diff).parameters["extras"].default is True


def test_the_command_line_has_the_options_of_the_library() -> None:
    for function, name in ((ucp.convert, "convert"), (ucp.diff, "diff"), (ucp.verify, "verify"), (ucp.open, "inspect")):
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        of_command = {parameter.name for parameter in command.params}
        of_library = set(signature(function).parameters) - {"path", "level", "progress"}
        assert of_library <= of_command, name


@pytest.mark.parametrize(
    "text, count", [("1048576", 1 << 20), ("512M", 512 << 20), ("1.5g", 3 << 29), ("2 GiB", 2 << 30), ("x", None)]
)
def test_sizes(text: str, count: int | None) -> None:
    assert parse_size(text) == count


def test_everything_public_is_reachable_after_import_ucp() -> None:
    code = (
        "import sys, ucp\n"
        "assert not {'torch', 'numpy', 'click'} & set(sys.modules)\n"
        "assert ucp.errors.UsageError is ucp.UsageError\n"
        "missing = [name for name in ucp.__all__ if not hasattr(ucp, name)]\n"
        "assert not missing, missing\n"
        "assert 'shards' not in dir(ucp) and not hasattr(ucp, 'shards')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_repair_together_with_rules() -> None:
    reading = read_options(preset="llama", repair=True)
    assert reading.repair
    assert not reading.spread
