"""The README's transcripts and its Python are run, so that they cannot rot."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent
README = (PROJECT / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """A folder with the checkpoint that the README talks about."""
    fixture = PROJECT / "fixtures" / "z1_bf16_tp2_dp2"
    shutil.copytree(fixture, tmp_path / "checkpoints", ignore=shutil.ignore_patterns("reference"))
    return tmp_path


def run(command: str, folder: Path) -> str:
    """What a command prints, stdout first."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, shell=True, cwd=folder, capture_output=True, text=True, check=False, env={**os.environ, "PATH": path}
    )
    return done.stdout + done.stderr


def without_figures(text: str) -> str:
    """Times and rates differ between runs, sizes and numbers of checks with every key that a release adds."""
    text = re.sub(r"in [\d.]+ s \([^)]*/s\)", "in … s", text)
    text = re.sub(r"[\d.]+ [KM]iB", "… KiB", text)
    return re.sub(r"\d+ checks", "… checks", text).strip()


def test_transcripts(example: Path) -> None:
    blocks = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    steps = [step for block in blocks for step in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)]
    assert len(steps) >= 6
    for command, shown in steps:
        said = without_figures(run(command, example))
        expected, cut, _ = without_figures(shown).partition("\n…")
        assert said.startswith(expected) if cut else said == expected, f"$ {command}\n{said}"


def test_python(example: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert run("ucp convert checkpoints atoms", example)
    kinds = re.search(r"\.kinds +# (.*)", code)
    assert kinds
    check = f"\nassert ckpt['blocks.0.attn.proj.weight'].kinds == {kinds[1]}\n"
    assert run(f"{sys.executable} - <<'EOF'\n{code}{check}EOF\n", example) == ""
    assert (example / "weights" / "ucp.json").exists()
