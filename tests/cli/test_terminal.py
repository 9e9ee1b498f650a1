"""What depends on where output goes: colours, the width of tables, closed pipes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import ucp, ucp_in_terminal

STYLE = re.compile("\x1b\\[[0-9;]*m")


@pytest.fixture
def checkpoint(project: Path) -> Path:
    return project / "fixtures" / "z1_bf16_tp2_dp2"


@pytest.fixture
def damaged(checkpoint: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "damaged"
    shutil.copytree(checkpoint, copy, ignore=shutil.ignore_patterns("reference"))
    (copy / "global_step3" / "bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt").unlink()
    return copy


def test_colours_only_on_terminals_that_want_them(checkpoint: Path, damaged: Path, tmp_path: Path) -> None:
    for command in (["inspect", checkpoint], ["verify", damaged], ["inspect", tmp_path / "nowhere"]):
        _, shown = ucp_in_terminal(*command)
        assert STYLE.search(shown), command
        for plain in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
            assert not STYLE.search(ucp_in_terminal(*command, **plain)[1]), (command, plain)
        assert STYLE.search(ucp_in_terminal(*command, NO_COLOR="")[1]), "an empty NO_COLOR counts as unset"
        piped = ucp(*command)
        assert not STYLE.search(piped.stdout + piped.stderr)
    assert "\x1b[31merror:" in ucp_in_terminal("verify", damaged)[1]


@pytest.mark.parametrize("columns", [60, 80, 160])
@pytest.mark.parametrize("options", [[], ["--rules"], ["--param", "blocks.0.mlp.up.weight"]])
def test_tables_fit_the_terminal(checkpoint: Path, columns: int, options: list[str]) -> None:
    code, shown = ucp_in_terminal("inspect", checkpoint, *options, columns=columns)
    assert code == 0
    lines = [STYLE.sub("", line) for line in shown.splitlines()]
    assert max(map(len, lines)) <= columns
    text = re.sub(r"\s", "", "".join(lines))
    wide = STYLE.sub("", ucp("inspect", checkpoint, *options).stdout)
    for name in re.findall(r"^blocks\S+", wide, re.MULTILINE):
        assert any(line.startswith(name[:10]) for line in lines), name
    if columns == 60 and not options:
        assert "(nospaceforgroup,dtype" in text, "what is left out is named"


def test_other_tables_fit_too(checkpoint: Path, tmp_path: Path) -> None:
    assert ucp("convert", checkpoint, tmp_path / "half", "--to", "safetensors", "--dtype", "fp16").returncode == 0
    for command in (["diff", "-q", checkpoint, tmp_path / "half"], ["names"], ["formats"], ["presets"]):
        _, shown = ucp_in_terminal(*command, columns=60)
        table = [STYLE.sub("", line) for line in shown.splitlines() if not line.startswith(("note:", "DIFF", "\x1b["))]
        assert max(map(len, table)) <= 60, command


def test_pipes_get_one_line_per_row(checkpoint: Path) -> None:
    rows = ucp("inspect", checkpoint, COLUMNS="60").stdout.partition("\n\n")[2].splitlines()
    assert len(rows) == 1 + 32


def piped(command: str) -> tuple[int, str]:
    """The exit code of `ucp` in a pipeline whose reader stops at once, and stderr."""
    line = f"{sys.executable} -m ucp {command}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def test_a_closed_pipe_does_not_change_the_exit_code(checkpoint: Path, damaged: Path, tmp_path: Path) -> None:
    stop = "| (exec <&-; sleep 1)"  # nobody reads: the first write fails
    for command, code in (
        (f"inspect {checkpoint}", 0),
        (f"inspect {checkpoint} --json", 0),
        (f"verify {damaged}", 1),
        (f"verify {damaged} --json", 1),
        (f"convert {checkpoint} {tmp_path / 'atoms'} --json", 0),
        (f"diff {checkpoint} {checkpoint.with_name('z1_bf16_dp2')}", 1),
        ("convert --help", 0),
    ):
        found, talk = piped(f"{command} {stop}")
        assert found == code, (command, talk)
        assert "Traceback" not in talk
        assert "BrokenPipe" not in talk
    assert (tmp_path / "atoms" / "ucp.json").is_file(), "the work is done whether or not its report is read"


def test_a_closed_stderr_pipe(checkpoint: Path, tmp_path: Path) -> None:
    assert piped(f"convert {checkpoint} {tmp_path / 'out'} 2>&1 >/dev/null | (exec <&-; sleep 1)") == (0, "")
    assert (tmp_path / "out" / "ucp.json").is_file()
