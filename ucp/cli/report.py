"""`ucp report`: one HTML page about a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ucp import api
from ucp.cli.output import FILE, PATH, add_options, check_parent_folder, echo, plural, quiet_option, source_argument
from ucp.core.findings import LevelName
from ucp.errors import UsageError, format_bytes
from ucp.options import PageOptions


@click.command("report", short_help="Write an HTML page about a checkpoint.")
@source_argument
@click.argument("other", type=PATH, required=False)
@click.option("--output", "-o", type=FILE, default="report.html", show_default=True, help="The page to write.")
@add_options(PageOptions, without=("level", "statistics", "compare"))
@click.option("--quick", is_flag=True, help="Use only the index: quick checks, no statistics.")
@click.option("--deep", is_flag=True, help="Run the deep checks, which read every byte.")
@click.option("--no-stats", is_flag=True, help="Leave the statistics out.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
@quiet_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    src: Path,
    other: Path | None,
    quiet: bool,
    output: Path,
    quick: bool,
    deep: bool,
    no_stats: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Write one self-contained HTML page about the checkpoint SRC, compared with the checkpoint OTHER if it is given.

    \b
    It shows the mesh, which rank holds which part of which parameter, sizes
    by layer and state, what the checks found, and the numbers of each state:
    norm, extremes, NaN, histogram. It needs no network: send it to anyone.
      ucp report run/checkpoints -o report.html
      ucp report run/checkpoints --quick
      ucp report run/checkpoints --sample 1M
      ucp report before after

    If files are missing or damaged, the page shows what the others hold, which rank is lost, and which parameters lost
    elements. The exit code is then that of `ucp verify`.
    """
    from ucp.cli.progress import ProgressBar

    if quick and deep:
        raise UsageError("--quick and --deep exclude each other")
    check_parent_folder(output, "the page")
    level: LevelName = "quick" if quick else "deep" if deep else "default"
    statistics = not (quick or no_stats)
    written = api.report(
        src, output, level=level, statistics=statistics, compare=other, progress=ProgressBar(quiet=quiet), **options
    )
    checks, comparison = written.report, written.comparison
    if as_json:
        summary = {"schema": 1, "page": str(output), "bytes": written.nbytes, "parameters": written.parameters}
        summary |= {"ok": checks.ok, "counts": checks.counts, "lost": written.lost, "damaged": written.damaged}
        echo(json.dumps({**summary, "same": None if comparison is None else comparison.same}))
    elif not quiet:
        counts = ", ".join(plural(count, severity) for severity, count in checks.counts.items() if count)
        size, parameters = format_bytes(written.nbytes), plural(written.parameters, "parameter")
        parts = [f"{output}: {size}, {parameters}", counts or "consistent"]
        if written.lost:
            files, damaged = plural(len(written.lost), "file"), plural(written.damaged, "parameter")
            parts.append(f"{files} and elements of {damaged} lost")
        if comparison is not None:
            differing = len({atom.name for atom in comparison.atoms})
            parts.append("the two are the same" if comparison.same else f"{plural(differing, 'parameter')} differ")
        echo("; ".join(parts))
    ctx.exit(0 if written.parameters and checks.format is not None else checks.exit_code)
