"""SIGKILL at many points of a conversion, then --resume: the same bytes, no leftover files."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.formats.atoms.synthetic import write_atoms
from tests.trees import contents

# Small slabs and copy tasks, and a process that kills itself after a given number of slabs.
DRIVER = """
import os, signal, sys
from ucp import settings
settings.SLAB_BYTES, settings.COPY_TASK_BYTES = 1024, 4096
settings.PROGRESS_SECONDS, settings.JOURNAL_SECONDS = 0.0, 0.0
from ucp.cli import progress
left = int(sys.argv[1])
class Killer(progress.ProgressBar):
    def advance(self, nbytes):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
progress.ProgressBar = Killer
from ucp.cli.main import run
sys.exit(run(sys.argv[2:]))
"""


def convert(kill_after: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", DRIVER, str(kill_after), "convert", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kill") / "source"
    random = np.random.default_rng(0)
    write_atoms(
        folder, {f"layer.{i}.weight": random.standard_normal((37 + i, 19)).astype(np.float32) for i in range(12)}
    )
    return folder


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_killed_runs_resume_to_the_same_bytes(source: Path, tmp_path: Path, jobs: str) -> None:
    whole = tmp_path / "whole"
    assert convert(0, str(source), str(whole), "-j", jobs).returncode == 0
    expected = contents(whole)
    for point in (1, 2, 3, 5, 8, 13, 21, 34, 40):
        target = tmp_path / f"killed-{point}"
        killed = convert(point, str(source), str(target), "-j", jobs)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert not target.exists(), "a killed run has no output that looks finished"
        refused = convert(0, str(source), str(target), "-j", jobs)
        assert refused.returncode == 2
        assert "--resume" in refused.stderr
        resumed = convert(0, str(source), str(target), "-j", jobs, "--resume")
        assert resumed.returncode == 0, resumed.stderr
        assert contents(target) == expected
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        ["whole", *(f"killed-{p}" for p in (1, 2, 3, 5, 8, 13, 21, 34, 40))]
    )


def test_a_run_that_is_killed_repeatedly_completes(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    for _ in range(60):
        run = convert(12, str(source), str(target), "--resume")
        if run.returncode == 0:
            break
        assert run.returncode == -signal.SIGKILL, run.stderr
    assert run.returncode == 0
    assert convert(0, str(source), str(tmp_path / "whole")).returncode == 0
    assert contents(target) == contents(tmp_path / "whole")


@pytest.mark.parametrize("name, code, word", [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_an_interrupted_run_keeps_finished_work(
    source: Path, tmp_path: Path, name: str, code: int, word: str, jobs: str
) -> None:
    # The signal reaches the main thread in its own time: this worker waits for it instead of finishing the job. Like a
    # terminal and like Slurm, it is sent to all processes.
    driver = DRIVER.replace("os.kill(os.getpid(), signal.SIGKILL)", f"os.killpg(0, signal.{name}); time.sleep(2)")
    driver = (
        "import signal, time; signal.signal(signal.SIGINT, signal.default_int_handler)" + driver
    )  # ignored under `&`
    command = [sys.executable, "-c", driver, "9", "convert", str(source), str(tmp_path / "out"), "-j", jobs]
    stopped = subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)
    assert stopped.returncode == code, stopped.stderr
    assert "Traceback" not in stopped.stderr
    kept = f"finished work is kept in {tmp_path / '.out.ucp-partial'}: repeat the command with --resume to continue"
    assert kept in stopped.stderr
    assert stopped.stderr.endswith(f"ucp: {word}\n")
    resumed = convert(0, str(source), str(tmp_path / "out"), "--resume")
    assert resumed.returncode == 0


def test_a_resumed_run_reports_its_own_bytes(source: Path, tmp_path: Path) -> None:
    driver = DRIVER.replace(
        "    def advance(self, nbytes):\n", "    def advance(self, nbytes):\n        super().advance(nbytes)\n"
    )
    command = [sys.executable, "-c", driver, "20", "convert", str(source), str(tmp_path / "out"), "-j", "1"]
    assert subprocess.run(command, capture_output=True, text=True, check=False).returncode == -signal.SIGKILL
    command[3] = "0"
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True, check=True)
    found = re.search(r"; \d+ files, ([\d.]+) KiB, ([\d.]+) KiB of it in ([\d.]+) s \(.*/s\)$", done.stderr.strip())
    assert found, done.stderr
    assert 0 < float(found[2]) < float(found[1])
