"""Run the `ucp` command in a process of its own: through pipes, or in a terminal of a given width."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import threading


def ucp(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ucp", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "200", **environment}
    )


def in_terminal(command: list[str], columns: int = 80, **environment: str) -> tuple[int, str]:
    """The exit code of a command, and what it shows in a terminal."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    inherited = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR") and not k.startswith("TQDM_")}
    variables = {**inherited, "TERM": "xterm", **environment}
    with subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=variables) as process:
        os.close(follower)
        watch = threading.Timer(120, process.kill)
        watch.start()
        shown = read_all(leader)
        watch.cancel()
    return process.returncode, shown.replace("\r\n", "\n")


def ucp_in_terminal(*arguments: object, columns: int = 80, **environment: str) -> tuple[int, str]:
    return in_terminal([sys.executable, "-m", "ucp", *map(str, arguments)], columns, **environment)


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
