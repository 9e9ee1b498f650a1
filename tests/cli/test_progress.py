"""Progress: bytes, rate and time left on a terminal's stderr; now and then a line in a log file."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import in_terminal

# Small slabs and a slow disk; lines of progress after so many seconds.
SLOW = """
import sys, time
from ucp import settings
settings.SLAB_BYTES, settings.COPY_TASK_BYTES, settings.PROGRESS_SECONDS = 256, 4096, 0.0
settings.PROGRESS_LINE_SECONDS = ({}, {})
from ucp.storage.local import SourceFiles
read = SourceFiles.read_into
def dawdle(self, file, offset, target):
    time.sleep(0.0005)
    read(self, file, offset, target)
SourceFiles.read_into = dawdle
from ucp.cli.main import run
sys.exit(run(sys.argv[1:]))
"""


def command(
    project: Path, folder: Path, *options: str, target: str = "atoms", soon: float = 5.0, late: float = 30.0
) -> list[str]:
    source = project / "fixtures" / "z1_bf16_dp2"
    return [sys.executable, "-c", SLOW.format(soon, late), "convert", str(source), str(folder / target), *options]


def test_a_terminal_gets_a_bar(project: Path, tmp_path: Path) -> None:
    code, shown = in_terminal(command(project, tmp_path), 100)
    assert code == 0, shown
    assert "B/s" in shown
    assert "%|" in shown
    assert "progress:" not in shown


def test_a_dumb_terminal_gets_lines(project: Path, tmp_path: Path) -> None:
    code, shown = in_terminal(command(project, tmp_path, soon=0.0), 100, TERM="dumb")
    assert code == 0, shown
    assert "%|" not in shown
    assert "progress: " in shown


def stderr_of(*arguments: str) -> str:
    return subprocess.run(arguments, capture_output=True, text=True, check=True).stderr


@pytest.mark.parametrize("soon, late, least, most", [(0.0, 1e9, 5, 20), (1e9, 0.0, 30, 10_000), (1e9, 1e9, 0, 0)])
def test_a_log_file_gets_a_line_now_and_then(
    project: Path, tmp_path: Path, soon: float, late: float, least: int, most: int
) -> None:
    """One per 5 % that took the first time at least, and one after the second time in any case."""
    lines = [
        line
        for line in stderr_of(*command(project, tmp_path, "-j", "1", soon=soon, late=late)).splitlines()
        if line.startswith("progress: ")
    ]
    assert least <= len(lines) <= most
    assert all(re.fullmatch(r"progress: \d+% of [\d.]+ KiB, [\d.]+ [KM]?i?B/s, \d+ s left", line) for line in lines)
    shares = [int(line.split()[1].rstrip("%")) for line in lines]
    assert shares == sorted(shares)


def test_quiet(project: Path, tmp_path: Path) -> None:
    assert stderr_of(*command(project, tmp_path, "--quiet", soon=0.0)) == ""
    code, shown = in_terminal(command(project, tmp_path, "-q", "--to", "dcp", target="again"), 100)
    assert (code, shown) == (0, "")


def test_stdout_of_json_is_data(project: Path, tmp_path: Path) -> None:
    done = subprocess.run(command(project, tmp_path, "--json"), capture_output=True, text=True, check=True)
    assert done.stderr == "", "short runs print no progress"
    assert done.stdout.startswith("{")
