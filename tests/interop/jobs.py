"""Run real DeepSpeed jobs from tests and scripts: `Trainer().run_job(2, Spec(zero=1), steps=3, …)`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.interop.spec import Job, Spec
from tests.interop.worker import JobError, Worker

__all__ = ["JobError", "JobResult", "Trainer"]


@dataclass(frozen=True)
class JobResult:
    """What the ranks of a job reported, and where their states were written."""

    out: Path
    ranks: list[dict[str, Any]]  # coordinates, counters, losses

    @property
    def losses(self) -> dict[int, str]:
        """Step → mean loss over the world, as a hex float."""
        every = {**self.ranks[0]["losses"], **self.ranks[0]["losses_after"]}
        return {int(step): loss for step, loss in every.items()}

    def state(self, rank: int, when: str = "reference") -> dict[str, Any]:
        """`name|kind` → torch tensor of one rank, after the steps (`reference`) or after loading (`loaded`)."""
        from safetensors.torch import load_file

        return load_file(self.out / when / f"rank{rank:02d}.safetensors")


class Trainer(Worker):
    """A running worker process. Use as a context manager."""

    def __init__(self) -> None:
        super().__init__("tests.interop.ds_worker")

    def __enter__(self) -> Trainer:
        return self

    def run_job(
        self,
        world: int,
        spec: Spec,
        steps: int,
        out: Path,
        *,
        save_dir: Path | None = None,
        save_tag: str | None = None,
        load_dir: Path | None = None,
        load_tag: str | None = None,
        universal: bool = False,
        steps_after: int = 0,
        export_final: bool = True,
    ) -> JobResult:
        """Build the world, load `load_dir` if given, train `steps`, save to `save_dir` if given, report into `out`.

        After a load the state of the fresh engine is in `result.state(rank, "loaded")`; after the steps in
        `result.state(rank)`. Batches continue at the engine's step counter, so a resumed job sees the next ones.
        """
        job = Job(
            spec=spec,
            world=world,
            steps=steps,
            out=str(out),
            save_dir=str(save_dir) if save_dir else None,
            save_tag=save_tag,
            load_dir=str(load_dir) if load_dir else None,
            load_tag=load_tag,
            universal=universal,
            export_loaded=load_dir is not None,
            export_final=export_final,
            steps_after=steps_after,
        )
        self.send(job.to_json())
        return JobResult(out, [json.loads((out / f"rank{rank:02d}.json").read_text()) for rank in range(world)])
