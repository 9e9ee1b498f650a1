"""`ucp report`: one page to see a checkpoint on."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ucp import api
from ucp.cli.parameters import (
    FILE,
    check_parent_folder,
    format_bytes,
    parse_bytes,
    plural,
    reading_options,
    source_argument,
)
from ucp.errors import UsageError


@click.command("report", short_help="Write a page to see a checkpoint on.")
@source_argument
@click.option(
    "--output",
    "-o",
    type=FILE,
    default="report.html",
    show_default=True,
    help="The page to write.",
)
@reading_options
@click.option("--quick", is_flag=True, help="Use the index alone: quick checks, no statistics.")
@click.option("--deep", is_flag=True, help="Run the deep checks, which read every byte.")
@click.option("--no-stats", is_flag=True, help="Leave the statistics out.")
@click.option(
    "--sample", type=parse_bytes, metavar="COUNT", help="Measure at most this many elements of each state (1M)."
)
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
@click.option("--jobs", "-j", type=click.IntRange(1), help="Threads. [default: one per core, at most 8]")
@click.pass_context
def command(
    ctx: click.Context,
    src: Path,
    output: Path,
    tag: str | None,
    rules: Path | None,
    preset: str | None,
    quick: bool,
    deep: bool,
    no_stats: bool,
    sample: int | None,
    as_json: bool,
    jobs: int | None,
) -> None:
    """Write one self-contained HTML page about the checkpoint SRC.

    \b
    It shows the mesh, which rank holds which part of which parameter, sizes
    by layer and state, what the checks found, and the numbers of each state:
    norm, extremes, NaN, histogram. It needs no network: send it to anyone.
      ucp report run/checkpoints -o report.html
      ucp report run/checkpoints --quick
      ucp report run/checkpoints --sample 1M

    For a checkpoint that cannot be opened, the page says what is wrong with it, and the exit code is that of `ucp
    verify`.
    """
    from ucp.cli.progress import ProgressBar

    if quick and deep:
        raise UsageError("--quick and --deep exclude each other")
    check_parent_folder(output, "the page")
    written = api.report(
        src,
        output,
        level="quick" if quick else "deep" if deep else "default",
        statistics=not (quick or no_stats),
        sample=sample,
        jobs=jobs,
        tag=tag,
        rules=rules,
        preset=preset,
        progress=ProgressBar(),
    )
    checks = written.report
    if as_json:
        summary = {"schema": 1, "page": str(output), "bytes": written.nbytes, "parameters": written.parameters}
        click.echo(json.dumps({**summary, "ok": checks.ok, "counts": checks.counts}))
    else:
        counts = ", ".join(plural(count, severity) for severity, count in checks.counts.items() if count)
        size, parameters = format_bytes(written.nbytes), plural(written.parameters, "parameter")
        click.echo(f"{output}: {size}, {parameters}; {counts or 'consistent'}")
    ctx.exit(0 if written.parameters else checks.exit_code)
