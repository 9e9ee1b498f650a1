"""`ucp verify`: are the shards of a checkpoint consistent, and if not, which rank and parameter?"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ucp import api
from ucp.cli.options import human_bytes, reading_options, source_argument
from ucp.errors import UsageError

if TYPE_CHECKING:
    from ucp.checks import Report

_SHOWN = 50  # findings of one check that are printed; --json has them all


@click.command("verify", short_help="Say whether the shards of a checkpoint are consistent.")
@source_argument
@reading_options
@click.option("--quick", is_flag=True, help="Look at the index alone: milliseconds, whatever the size.")
@click.option("--deep", is_flag=True, help="Read every byte once: checksums, NaN, padding.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--jobs", "-j", type=click.IntRange(1), help="Threads. [default: cores, at most 8]")
@click.pass_context
def command(
    ctx: click.Context,
    src: Path,
    tag: str | None,
    rules: Path | None,
    preset: str | None,
    quick: bool,
    deep: bool,
    as_json: bool,
    jobs: int | None,
) -> None:
    """Check the checkpoint SRC: one line a finding, most important first.

    \b
    By default the index is checked, and what it takes to compare copies,
    steps and master weights is read. docs/checks.md lists every check.
      ucp verify run/checkpoints
      ucp verify run/checkpoints --quick
      ucp verify atoms --deep --json

    Exit code 0: consistent · 1: inconsistent · 4: damaged bytes. Warnings and notes do not change it.
    """
    from ucp.checks import Level, verify

    if quick and deep:
        raise UsageError("--quick and --deep exclude each other")
    level = Level.QUICK if quick else Level.DEEP if deep else Level.DEFAULT
    options = api.read_options(tag, rules, preset)
    progress = None
    if not quick:  # which has nothing to wait for, and so should not wait for the modules of the bar either
        from ucp.cli.progress import Bar

        progress = Bar()
    report = verify(src, level, options=options, jobs=jobs or api.default_jobs(), progress=progress)
    if as_json:
        click.echo(json.dumps(report.to_json()))
    else:
        _print(report)
    ctx.exit(report.exit_code)


def _print(report: Report) -> None:
    """Findings are data and go to stdout, the verdict is talk."""
    printed: Counter[str] = Counter()
    for finding in report.findings:
        printed[finding.check] += 1
        if printed[finding.check] > _SHOWN:
            continue
        click.echo(str(finding))
        if finding.hint:
            click.echo(f"  → {finding.hint}")
    for check, count in printed.items():
        if count > _SHOWN:
            click.echo(f"… {count - _SHOWN} more of {check} (--json has all)")
    counts = ", ".join(f"{count} {severity}s" for severity, count in report.counts.items() if count)
    verdict = ("ok" if report.ok else "NOT ok") + (f" ({counts})" if counts else "")
    click.echo(
        f"{report.source}: {verdict}; {len(report.checks)} checks ({report.level.title}) of"
        f" {report.parameters} parameters, {report.atoms} atoms, {report.files} files;"
        f" {human_bytes(report.bytes_read)} read",
        err=True,
    )
