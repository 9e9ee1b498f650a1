"""The README's transcripts and its Python are run, so that they cannot rot."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.paths import PROJECT
from tests.transcripts import check, python_blocks, run, run_python, set_up

README = (PROJECT / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """A folder with the checkpoint that the README names."""
    set_up(README, tmp_path)
    return tmp_path


def test_transcripts(example: Path) -> None:
    assert check(README, example, as_processes=True) >= 6


def test_python(example: Path) -> None:
    (code,) = python_blocks(README)
    assert run("ucp convert checkpoints atoms", example)
    kinds = re.search(r"\.kinds +# (.*)", code)
    assert kinds
    check_kinds = f"\nassert ckpt['blocks.0.attn.proj.weight'].kinds == {kinds[1]}\n"
    assert run_python(code + check_kinds, example) == ""
    assert (example / "weights" / "ucp.json").exists()
