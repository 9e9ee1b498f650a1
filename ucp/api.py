"""The library: one function per command, with the same options.

import ucp
ckpt = ucp.open("run/checkpoints")
ckpt.parameters                                     # name → parameter
ckpt["lm_head.weight"].read("exp_avg")              # numpy
ckpt["lm_head.weight"].read("weight", rows=slice(0, 8), as_torch=True)
ucp.convert("run/checkpoints", "atoms", dtype="bf16")
ucp.verify("run/checkpoints", "deep").ok
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucp.core.checkpoint import Checkpoint
from ucp.engine.plan import Plan, default_jobs
from ucp.errors import UsageError
from ucp.options import (
    ConvertOptions,
    DiffOptions,
    OpenOptions,
    PageOptions,
    RunningOptions,
    SharedRunOptions,
    StrPath,
    VerifyOptions,
    declared,
    takes,
    with_defaults,
)
from ucp.planning import plan
from ucp.sources import OpenCheckpoint, index_state, read_options, renamed

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ucp.checks.verify_report import Report
    from ucp.compare.comparison import Comparison
    from ucp.engine.pool import Progress
    from ucp.reports.html_page import WrittenReport

__all__ = ["OpenCheckpoint", "Plan", "convert", "diff", "open_checkpoint", "plan", "report", "verify"]


@takes(OpenOptions)
def open_checkpoint(path: StrPath, **options: Unpack[OpenOptions]) -> OpenCheckpoint:
    """Index the checkpoint at `path`, whatever its format. No tensor is loaded and nothing in it is executed.

    `names` shows its parameters under the names, and in the layout, of another framework: `hf`, `megatron`,
    `megatron-deepspeed`, or the path of a table. `model_config` is a JSON file with what the checkpoint lacks about its
    model. With the `log` of a run, the result is the state after `step` (a number or `latest`).
    """
    given = with_defaults(OpenOptions, options)
    reading = read_options(given.tag, given.rules, given.preset)
    indexed = index_state(path, reading, given.log, given.step, given.exact)
    return OpenCheckpoint(renamed(indexed, given.names, given.model_config))


@takes(ConvertOptions)
def convert(
    src: StrPath, dst: StrPath, *, progress: Progress | None = None, **options: Unpack[ConvertOptions]
) -> Checkpoint:
    """Convert the checkpoint at `src` to a new folder `dst`, and return the index of the source.

    Options are those of `plan`, and how to run: `memory` is a number of bytes or a size such as `512M`. Several
    processes may each write one `shard`, `(1, n)` to `(n, n)`; a last call with `finish` makes `dst` appear. With the
    engine `ray`, tasks of the Ray cluster at `ray_address`, one per shard, write it, each with `jobs` CPUs.
    """
    from ucp.engine.work_shard import WorkShard

    given = with_defaults(ConvertOptions, options)
    planning: Any = {name: value for name, value in options.items() if name not in declared(SharedRunOptions)}
    how = {name: getattr(given, name) for name in declared(RunningOptions)}
    if given.engine == "ray" and (given.shard is not None or given.finish):
        raise UsageError("shard and finish cannot be combined with engine='ray'", hint="leave them out")
    planned = plan(src, dst, **planning)
    if given.engine == "ray":
        from ucp.engine.on_ray import run_on_ray

        address = given.ray_address or "auto"
        run_on_ray(planned, plan, address=address, shards=given.shards, progress=progress, **how)
    elif given.finish:
        planned.finish(durable=given.durable)
    else:
        shard = None if given.shard is None else WorkShard(given.shard[0] - 1, given.shard[1])
        planned.run(shard=shard, progress=progress, **how)
    return planned.source


@takes(VerifyOptions)
def verify(src: StrPath, level: str = "default", **options: Unpack[VerifyOptions]) -> Report:
    """Check the checkpoint at `src` (`level`: `quick`, `default` or `deep`). What is wrong is reported, not raised.

    `report.ok` and `report.exit_code` depend on `fail_on` (a severity or `never`), on the checks in `allow` and on the
    earlier report in `baseline`. With a `log`, base and log are checked, and the state after `step` that they result
    in; with `exact`, it is an error if that state may differ from the job's own.
    """
    from ucp.checks.runner import verify as run_checks
    from ucp.checks.verify_report import make_policy

    given = with_defaults(VerifyOptions, options)
    policy = make_policy(given.fail_on, given.allow, given.baseline)
    reading = read_options(given.tag, given.rules, given.preset)
    jobs = given.jobs or default_jobs()
    if given.log is None and given.step is None and not given.exact:
        return run_checks(src, level, options=reading, jobs=jobs, policy=policy)
    from ucp.replay.checks import verify_at

    return verify_at(src, level, reading, given.log, given.step, exact=given.exact, jobs=jobs, policy=policy)


@takes(DiffOptions)
def diff(a: StrPath, b: StrPath, *, progress: Progress | None = None, **options: Unpack[DiffOptions]) -> Comparison:
    """Compare the checkpoints at `a` and `b`, whatever their formats and layouts, in one pass.

    Without a tolerance only equal bits are equal. `extras` are what both carry besides parameters. `updates` also
    measures how far each parameter moved. With `names` both are compared under the names of one framework, as in
    `open_checkpoint`. With `log_a`, A is the state after `step_a`; likewise B.
    """
    from ucp.compare.comparison import CompareOptions, compare
    from ucp.compare.elements import Tolerance

    given = with_defaults(DiffOptions, options)
    comparing = CompareOptions(
        Tolerance(given.rtol, given.atol, given.ulp),
        given.only,
        given.include,
        given.exclude,
        given.strict,
        given.updates,
        given.extras,
    )
    sides = []
    for path, tag, log, step in (
        (a, given.tag_a, given.log_a, given.step_a),
        (b, given.tag_b, given.log_b, given.step_b),
    ):
        reading = read_options(tag, given.rules, given.preset)
        indexed = index_state(path, reading, log, step, given.exact and log is not None)
        sides.append(renamed(indexed, given.names, given.model_config))
    return compare(sides[0], sides[1], comparing, jobs=given.jobs or default_jobs(), progress=progress)


@takes(PageOptions)
def report(
    src: StrPath, page: StrPath, *, progress: Progress | None = None, **options: Unpack[PageOptions]
) -> WrittenReport:
    """Write one self-contained HTML `page` about the checkpoint at `src`.

    `level` is that of `verify`; `sample` limits the elements of each state that statistics are measured on.
    """
    from ucp import __version__
    from ucp.core.findings import Level
    from ucp.reports.html_page import ReportOptions, write_report

    given = with_defaults(PageOptions, options)
    reading = read_options(given.tag, given.rules, given.preset)
    writing = ReportOptions(Level[given.level.upper()], given.statistics, given.sample, reading)
    return write_report(src, page, writing, version=__version__, jobs=given.jobs or default_jobs(), progress=progress)
