"""Run the `ucp` command in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys


def ucp(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ucp", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "200", **environment}
    )
