"""Run a function on all ranks of a real gloo world: `Worlds().run(2, "tests.training.deepspeed_ranks:resume", out)`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.interop.worker import JobError as WorldError
from tests.interop.worker import Worker

__all__ = ["WorldError", "Worlds"]


class Worlds(Worker):
    """A running worker process. Use as a context manager."""

    def __init__(self) -> None:
        super().__init__("tests.training.world_worker")

    def __enter__(self) -> Worlds:
        return self

    def run(self, world: int, function: str, out: Path, **arguments: Any) -> list[Any]:
        """The results of `function(out, rank, **arguments)` on each rank."""
        job = {"function": function, "world": world, "out": str(out), "arguments": arguments}
        self.send(json.dumps(job, default=str))
        return [json.loads((out / f"rank{rank:02d}.json").read_text()) for rank in range(world)]
