"""The progress bar: bytes, rate and time left on a terminal's stderr; nothing on anything else."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

SLOW = """
import sys, time
from ucp import settings
settings.SLAB_BYTES, settings.COPY_TASK_BYTES = 256, 4096
from ucp.storage.local import SourceFiles
read = SourceFiles.read_into
def dawdle(self, file, offset, target):
    time.sleep(0.0005)
    read(self, file, offset, target)
SourceFiles.read_into = dawdle
from ucp.cli.main import run
sys.exit(run(sys.argv[1:]))
"""


def test_a_terminal_gets_a_bar_and_stdout_stays_data(project: Path, tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    source = project / "fixtures" / "z1_bf16_dp2"
    command = [sys.executable, "-c", SLOW, "convert", str(source), str(tmp_path / "atoms"), "--json"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TQDM_")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=follower, env=environment) as process:
        os.close(follower)
        shown = read_all(leader)
        assert process.stdout is not None
        data = process.stdout.read()
    assert process.returncode == 0, shown
    assert "B/s" in shown
    assert "%" in shown
    assert data.startswith(b"{"), "stdout is data"


def read_all(leader: int) -> str:
    """What was written to the terminal until it was closed."""
    shown = b""
    while True:
        try:
            block = os.read(leader, 4096)
        except OSError:  # Linux reports the closed end as an I/O error
            block = b""
        if not block:
            os.close(leader)
            return shown.decode(errors="replace")
        shown += block


def test_a_pipe_gets_nothing(project: Path, tmp_path: Path) -> None:
    source = project / "fixtures" / "z1_bf16_dp2"
    command = [sys.executable, "-c", SLOW, "convert", str(source), str(tmp_path / "atoms"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
