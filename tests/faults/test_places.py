"""Full file systems, and two processes with the same target."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.paths import FIXTURES
from tests.trees import contents

SOURCE = FIXTURES / "z1_bf16_tp2_dp2"
# Assumes that there is room, as if another process filled the file system meanwhile; on request, sleeps
# when it has written something.
DRIVER = """
import sys, time
from ucp import settings
settings.SPACE_RESERVE_BYTES, settings.COPY_TASK_BYTES, settings.SLAB_BYTES = -(1 << 40), 16384, 4096
settings.PREALLOCATE_FILE_BYTES, settings.JOURNAL_SECONDS = 1 << 40, 0.0
from ucp.cli import progress
class Sleeper(progress.ProgressBar):
    def advance(self, nbytes):
        if nbytes and float(sys.argv[1]):
            print("at work", flush=True)
            time.sleep(float(sys.argv[1]))
progress.ProgressBar = Sleeper
from ucp.cli.main import run
sys.exit(run(["convert", *sys.argv[2:]]))
"""


def start(target: Path, *options: str, sleep: float = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", DRIVER, str(sleep), str(SOURCE), str(target), "-j", "1", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, said = process.communicate(timeout=600)
    return process.returncode, said


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("whole") / "out"
    assert end(start(path))[0] == 0
    return contents(path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 500 KB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    if os.geteuid() != 0 or mount is None:
        pytest.skip("only root can mount a file system: run as root")
    done = subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=500k", "none", str(place)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("mounting is not allowed: run outside of a container, or with CAP_SYS_ADMIN")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_reported_and_finished_work_is_kept(small_disk: Path, whole: dict[str, bytes]) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(250_000))
    code, said = end(start(small_disk / "out"))
    assert code == 5
    assert "No space left on device" in said
    assert "--resume" in said
    assert "Traceback" not in said
    assert not (small_disk / "out").exists()
    journal = small_disk / ".out.ucp-partial" / ".ucp-journal.jsonl"
    assert journal.read_bytes().count(b"\n") > 3, "some parts were written before the end"
    ballast.unlink()
    assert end(start(small_disk / "out", "--resume"))[0] == 0
    assert contents(small_disk / "out") == whole
    assert [path.name for path in small_disk.iterdir()] == ["out"]


def test_of_two_conversions_to_one_target_one_succeeds_and_one_is_refused(
    tmp_path: Path, whole: dict[str, bytes]
) -> None:
    first = start(tmp_path / "out", sleep=600)  # until it is killed
    assert first.stdout is not None
    assert first.stdout.readline() == "at work\n"
    for options in ((), ("--resume",), ("--restart",)):
        code, said = end(start(tmp_path / "out", *options))
        assert code == 2
        assert "another process is writing it" in said
    first.kill()
    first.communicate()
    assert end(start(tmp_path / "out", "--resume"))[0] == 0, "whoever dies lets go"
    assert contents(tmp_path / "out") == whole
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_concurrent_conversions_make_one_output(tmp_path: Path, whole: dict[str, bytes]) -> None:
    ended = [end(process) for process in [start(tmp_path / "out", "--restart") for _ in range(4)]]
    codes = [code for code, _ in ended]
    assert 0 in codes, ended
    assert set(codes) <= {0, 2}, ended
    assert codes.count(0) == 1, ended
    assert contents(tmp_path / "out") == whole
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
