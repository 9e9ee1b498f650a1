"""The library: what the command line does, under the same names.

import ucp
ckpt = ucp.open("run/checkpoints")
ckpt.parameters                                     # name → parameter
ckpt["lm_head.weight"].read("exp_avg")              # numpy
ckpt["lm_head.weight"].read("weight", rows=slice(0, 8), as_torch=True)
ucp.convert("run/checkpoints", "atoms", dtype="bf16")
ucp.verify("run/checkpoints", "deep").ok
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ucp.core.checkpoint import Checkpoint
from ucp.core.selection import Only
from ucp.engine.plan import DEFAULT_MEMORY, Plan, default_jobs
from ucp.errors import UsageError
from ucp.options import as_strings, byte_count, check_choices, check_counts
from ucp.planning import plan
from ucp.sources import OpenCheckpoint, index_state, read_options, renamed

if TYPE_CHECKING:
    from ucp.checks.verify_report import Report
    from ucp.compare.comparison import Comparison
    from ucp.engine.pool import Progress
    from ucp.reports.html_page import WrittenReport

__all__ = ["Engine", "OpenCheckpoint", "Plan", "convert", "diff", "open_checkpoint", "plan", "report", "verify"]

Engine = Literal["local", "ray"]  # this machine, or tasks of a Ray cluster


def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    tag: str | None = None,
    rules: str | Path | None = None,
    preset: str | None = None,
    names: str | os.PathLike[str] | None = None,
    model_config: str | os.PathLike[str] | None = None,
    log: str | os.PathLike[str] | None = None,
    step: int | str | None = None,
    exact: bool = False,
) -> OpenCheckpoint:
    """Index the checkpoint at `path`, whatever its format. No tensor is loaded and nothing in it is executed.

    `names` gives its parameters the names, and the forms, of another framework: `hf`, `megatron`, `megatron-deepspeed`,
    or the path of a table. `model_config` is a JSON file that says what the checkpoint does not say of its model. With
    the `log` of a run, it is the state after `step` (a number or `latest`) that follows from the checkpoint.
    """
    indexed = index_state(path, read_options(tag, rules, preset), log, step, exact)
    return OpenCheckpoint(renamed(indexed, names, model_config))


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    jobs: int | None = None,
    memory: int | str = DEFAULT_MEMORY,
    resume: bool = False,
    restart: bool = False,
    durable: bool = False,
    shard: tuple[int, int] | None = None,
    finish: bool = False,
    engine: Engine = "local",
    ray_address: str = "auto",
    shards: int | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Checkpoint:
    """Convert the checkpoint at `src` to a new folder `dst`; `options` as in `plan`. Gives the source's index.

    `memory` is a number of bytes, or a size as the command line takes it: `512M`.
    Several processes may each write one `shard`, `(1, n)` to `(n, n)`; a last call with `finish` publishes `dst`. With
    the engine `ray`, `shards` tasks of the Ray cluster at `ray_address` write it, each with `jobs` CPUs.
    """
    from ucp.engine.work_shard import WorkShard

    check_choices(engine=(engine, Engine))
    check_counts(jobs=jobs, shards=shards)
    memory = byte_count("memory", memory)
    if engine == "ray" and (shard is not None or finish):
        raise UsageError("shard and finish cannot be combined with engine='ray'", hint="leave them out")
    planned = plan(src, dst, **options)
    how: dict[str, Any] = {"memory": memory, "resume": resume, "restart": restart, "durable": durable}
    if engine == "ray":
        from ucp.engine.on_ray import run_on_ray

        run_on_ray(planned, plan, address=ray_address, shards=shards, jobs=jobs, progress=progress, **how)
    elif finish:
        planned.finish(durable=durable)
    else:
        own = None if shard is None else WorkShard(shard[0] - 1, shard[1])
        planned.run(jobs=jobs, shard=own, progress=progress, **how)
    return planned.source


def verify(
    src: str | os.PathLike[str],
    level: str = "default",
    *,
    fail_on: str = "error",
    allow: str | Sequence[str] = (),
    baseline: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    tag: str | None = None,
    rules: str | Path | None = None,
    preset: str | None = None,
    log: str | os.PathLike[str] | None = None,
    step: int | str | None = None,
    exact: bool = False,
) -> Report:
    """Check the checkpoint at `src` (`level`: `quick`, `default` or `deep`). What is wrong is reported, not raised.

    `report.ok` and `report.exit_code` follow from `fail_on` (a severity or `never`), the checks in `allow` and the path
    of an earlier report in `baseline`. With a `log`, base and log are checked, and the state after `step` that they
    make; with `exact`, that it may differ from what the job held is an error.
    """
    from ucp.checks.runner import verify as run_checks
    from ucp.checks.verify_report import make_policy

    check_counts(jobs=jobs)
    policy = make_policy(fail_on, as_strings(allow), baseline)
    options, jobs = read_options(tag, rules, preset), jobs or default_jobs()
    if log is None and step is None and not exact:
        return run_checks(src, level, options=options, jobs=jobs, policy=policy)
    from ucp.replay.checks import verify_at

    return verify_at(src, level, options, log, step, exact=exact, jobs=jobs, policy=policy)


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    ulp: int = 0,
    only: Only | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    strict: bool = False,
    extras: bool = True,
    updates: bool = False,
    jobs: int | None = None,
    tag_a: str | None = None,
    tag_b: str | None = None,
    rules: str | Path | None = None,
    preset: str | None = None,
    names: str | os.PathLike[str] | None = None,
    model_config: str | os.PathLike[str] | None = None,
    log_a: str | os.PathLike[str] | None = None,
    step_a: int | str | None = None,
    log_b: str | os.PathLike[str] | None = None,
    step_b: int | str | None = None,
    exact: bool = False,
    progress: Progress | None = None,
) -> Comparison:
    """Compare the checkpoints at `a` and `b`, whatever their formats and layouts, in one pass.

    Without a tolerance only equal bits are the same. `extras` are what both carry beside parameters. `updates` also
    measures how far each parameter moved. With `names` both are compared under the names of one framework, as in
    `open_checkpoint`. With `log_a`, A is the state after `step_a` that follows from it, and B likewise.
    """
    from ucp.compare.comparison import CompareOptions, compare
    from ucp.compare.elements import Tolerance

    check_choices(only=(only, Only))
    check_counts(jobs=jobs)
    options = CompareOptions(
        Tolerance(rtol, atol, ulp), only, as_strings(include), as_strings(exclude), strict, updates, extras
    )
    one, other = (
        renamed(
            index_state(path, read_options(tag, rules, preset), log, step, exact and log is not None),
            names,
            model_config,
        )
        for path, tag, log, step in ((a, tag_a, log_a, step_a), (b, tag_b, log_b, step_b))
    )
    return compare(one, other, options, jobs=jobs or default_jobs(), progress=progress)


def report(
    src: str | os.PathLike[str],
    page: str | os.PathLike[str],
    *,
    level: str = "default",
    statistics: bool = True,
    sample: int | None = None,
    jobs: int | None = None,
    tag: str | None = None,
    rules: str | Path | None = None,
    preset: str | None = None,
    progress: Progress | None = None,
) -> WrittenReport:
    """Write one self-contained HTML `page` about the checkpoint at `src`.

    `level` is that of `verify`; `sample` bounds the elements of each state that statistics are measured on.
    """
    from ucp import __version__
    from ucp.core.findings import Level
    from ucp.reports.html_page import ReportOptions, write_report

    try:
        depth = Level[level.upper()]
    except KeyError:
        raise UsageError(f"{level!r} is not a level of verification", hint="choose quick, default or deep") from None
    options = ReportOptions(depth, statistics, sample, read_options(tag, rules, preset))
    return write_report(src, page, options, version=__version__, jobs=jobs or default_jobs(), progress=progress)
