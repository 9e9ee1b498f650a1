"""Checks that forked workers run, with an incident.

`python -m tests.checks.forking WHAT SRC…`: a process of its own, because pytest's has threads. Prints a line of JSON
for every report, or the workers and how it ended.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from tests.engine.forking import WORKERS, Happening, count_forks, tell
from ucp import settings
from ucp.checks import tasks
from ucp.checks.render import FORMATS, render
from ucp.checks.runner import verify
from ucp.checks.tasks import CheckTask, run_task
from ucp.checks.verify_report import Report
from ucp.cli.main import run
from ucp.core.findings import Finding
from ucp.engine.pool import Meter
from ucp.errors import UcpError
from ucp.storage.local import SourceFiles

PARENT = os.getpid()
SIZES = {"SLAB_BYTES": 1024, "COPY_TASK_BYTES": 4096, "PROGRESS_SECONDS": 0}


def main(what: str, *sources: str) -> None:
    for name, size in SIZES.items():
        setattr(settings, name, size)
    count_forks()
    if what == "command":
        for source in sources:
            run(["verify", source, "--deep", "--jobs", "2"])
        tell("forked", len(WORKERS))
        return
    if what == "break a worker":
        tasks.run_task = _divide
    if what == "truncate a file":
        SourceFiles.read_into = _after_truncation  # type: ignore[method-assign]
    level, progress = ("default", None) if what == "default" else ("deep", Happening(what))
    try:
        for source in sources:
            WORKERS.clear()
            report = verify(source, level, jobs=3, progress=progress, processes=True)
            tell("forked", len(WORKERS))
            tell(json.dumps(said(report)))
    except (UcpError, KeyboardInterrupt, RuntimeError) as error:
        tell("ended", type(error).__name__, str(error).replace("\n", " "))


def said(report: Report) -> dict[str, Any]:
    """The report in every form, without its duration."""
    report.seconds = 0
    return {"report": report.to_json(), **{form: render(report, form) for form in FORMATS}}


def _divide(task: CheckTask, meter: Meter) -> list[Finding]:
    found = run_task(task, meter)
    assert 1 // 0
    return found


_read_into = SourceFiles.read_into


def _after_truncation(self: SourceFiles, file: str, offset: int, target: memoryview) -> None:
    if os.getpid() != PARENT and "optim_states" in file:
        os.truncate(self.root / file, offset)
    _read_into(self, file, offset, target)


if __name__ == "__main__":
    main(*sys.argv[1:])
