"""Run a function on every rank of a real world over gloo: `Worlds().run(2, "tests.train.ranks:resume", out, …)`."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent.parent


class WorldError(Exception):
    """A rank raised, died or hung; the message has every rank's traceback."""


class Worlds:
    """A running worker process. Use as a context manager."""

    def __init__(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.train.world_worker"],
            cwd=PROJECT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._reply()

    def __enter__(self) -> Worlds:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()
        self._log.close()

    def run(self, world: int, function: str, out: Path, **arguments: Any) -> list[Any]:
        """What `function(out, rank, **arguments)` gave on each rank."""
        assert self._process.stdin is not None
        job = {"function": function, "world": world, "out": str(out), "arguments": arguments}
        self._process.stdin.write(json.dumps(job, default=str) + "\n")
        self._process.stdin.flush()
        reply = self._reply()
        if "error" in reply:
            raise WorldError(reply["error"])
        return [json.loads((out / f"rank{rank:02d}.json").read_text()) for rank in range(world)]

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise WorldError("the worker died:\n" + self._log.read().decode(errors="replace")[-4000:])
        reply: dict[str, Any] = json.loads(line)
        return reply
