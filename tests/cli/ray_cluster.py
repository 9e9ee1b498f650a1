"""A Ray cluster of two CPUs that lives as long as this process, which runs commands of ucp in it.

Arguments: a folder for Ray's own files, and one in which tests say how its workers are to misbehave:
`die` kills the worker of part 2, once, in the middle of its work; `wait` keeps part 1 from its work while it is there.
Lines of stdin are commands as JSON lists; for each, and first of all for the start, a line of JSON goes to stdout.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BEFORE_IT_DIES = 40  # lines of the journal


def misbehave() -> None:
    """Runs in every worker when it starts. Also notes who wrote what."""
    from ucp import settings
    from ucp.engine.journal import Journal
    from ucp.engine.plan import Plan
    from ucp.engine.worker import WrittenRange

    settings.JOURNAL_SECONDS = 0.0
    folder = Path(os.environ["UCP_TEST_FOLDER"])
    die, wait, log = folder / "die", folder / "wait", folder / "written"
    record, run = Journal.record, Plan.run

    def recorded(self: Journal, written: Sequence[WrittenRange]) -> None:
        record(self, written)
        with log.open("a") as file:
            file.writelines(f"{self.path.name} {os.getpid()} {w.file} {w.offset}\n" for w in written)
        is_second, lines = self.path.name.startswith(".ucp-journal-2-"), len(self.path.read_bytes().splitlines())
        if is_second and lines > BEFORE_IT_DIES and die.exists():
            die.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    def waited(self: Plan, **options: Any) -> None:
        while options["shard"].number == 0 and wait.exists():
            time.sleep(0.05)
        run(self, **options)

    Journal.record, Plan.run = recorded, waited  # type: ignore[method-assign, assignment]


def start(ray: Any, attempts: int = 3) -> Any:
    """A cluster. Ray gives up on its own start after half a minute, which a very busy machine may need."""
    for attempt in range(attempts):
        try:
            return ray.init(
                num_cpus=2,
                include_dashboard=False,
                object_store_memory=80 << 20,
                logging_level="warning",
                _temp_dir=sys.argv[1],
                runtime_env={
                    "worker_process_setup_hook": "tests.cli.ray_cluster.misbehave",
                    "env_vars": {"UCP_TEST_FOLDER": sys.argv[2]},
                },
            )
        except Exception:
            ray.shutdown()
            if attempt == attempts - 1:
                raise
    raise AssertionError


def main() -> None:
    import ray

    from ucp.cli.main import run

    context = start(ray)
    try:
        print(json.dumps(context.address_info["gcs_address"]), flush=True)  # noqa: T201 - that is how it answers
        for line in sys.stdin:
            said = io.StringIO()
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                code = run(json.loads(line))
            print(json.dumps([code, said.getvalue()]), flush=True)  # noqa: T201
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
