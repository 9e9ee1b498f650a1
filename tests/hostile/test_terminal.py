"""Names in a checkpoint reach no terminal and no CI service as commands, in any format of output."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

NAME = "evil\x1b]0;title\x07\x1b[2J\x00\r\n::error::forged\n##[error]forged\u202e\x9bweight"
LINE_NAME = "::error::forged.weight"
STYLE = re.compile(r"\x1b\[[0-9;]*m")
COMMANDS = [
    ["inspect"],
    ["inspect", "--rules"],
    ["inspect", "--json"],
    ["verify"],
    ["verify", "--deep", "--format", "json"],
    ["verify", "--deep", "--format", "junit"],
    ["verify", "--deep", "--format", "sarif"],
    ["verify", "--deep", "--format", "github"],
    ["convert", "OUT", "--to", "safetensors"],
    ["convert", "OUT", "--to", "deepspeed", "--tp", "2"],
    ["diff", "OTHER"],
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A state dict with odd names, and with values that checks report."""
    names = (NAME, LINE_NAME, "plain.weight")
    torch.save({name: torch.tensor([1.0, float("nan"), 3.0]) for name in names}, tmp_path / "state.pt")
    torch.save({name: torch.zeros(3) for name in names}, tmp_path / "other.pt")
    return tmp_path / "state.pt"


def run(arguments: list[str], terminal: bool) -> bytes:
    """What a command prints to stdout and stderr, to a terminal or a pipe."""
    command = [sys.executable, "-m", "ucp", *arguments]
    if not terminal:
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False).stdout
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, stdin=subprocess.DEVNULL) as process:
        os.close(theirs)
        printed = b""
        while True:
            try:
                more = os.read(ours, 65536)
            except OSError:
                break
            if not more:
                break
            printed += more
        process.wait()
    os.close(ours)
    return printed.replace(b"\r\n", b"\n")


@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_names_cannot_command_a_terminal(
    command: list[str], terminal: bool, source: Path, tmp_path: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(project))
    name, *rest = command
    places = {"OUT": str(tmp_path / "out"), "OTHER": str(tmp_path / "other.pt")}
    printed = run([name, str(source), *(places.get(word, word) for word in rest)], terminal).decode()
    # A progress bar moves the cursor of a terminal with carriage returns.
    text = STYLE.sub("", printed).replace("\r", "") if terminal else printed
    assert "weight" in text or "parameters" in text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text), repr(text)
    forged = [line for line in text.splitlines() if line.startswith(("::error::forged", "##["))]
    assert forged == []
