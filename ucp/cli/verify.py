"""`ucp verify`: whether the shards of a checkpoint are consistent; if not, which rank and parameter."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ucp.api import read_options
from ucp.cli.output import (
    FILE,
    add_options,
    check_parent_folder,
    echo,
    plural,
    quiet_option,
    source_argument,
    with_colours,
)
from ucp.engine.plan import default_jobs
from ucp.errors import StorageError, UsageError, format_bytes
from ucp.options import VerifyOptions

if TYPE_CHECKING:
    from ucp.checks.verify_report import Report

# Repeated in ucp.checks, so that --help need not import the checks; a test compares them.
FORMATS = ("text", "json", "junit", "sarif", "github")
_FORMATS_BY_SUFFIX = {".json": "json", ".sarif": "sarif", ".xml": "junit", ".txt": "text"}


@click.command("verify", short_help="Check that a checkpoint is complete and consistent.")
@source_argument
@add_options(VerifyOptions)
@click.option("--quick", is_flag=True, help="Check only the index: milliseconds, whatever the size.")
@click.option("--deep", is_flag=True, help="Read every byte once: checksums, NaN, padding.")
@click.option("--format", "form", type=click.Choice(FORMATS), help="What to print. [default: text]")
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
@click.option(
    "--output",
    "-o",
    multiple=True,
    type=FILE,
    help="Also write a file: .json, .sarif, .xml (JUnit), else in the format of --format. Repeatable.",
)
@quiet_option
@click.pass_context
def command(
    ctx: click.Context,
    src: Path,
    quiet: bool,
    tag: str | None,
    rules: Path | None,
    preset: str | None,
    trust_recorded_ranks: bool,
    trust_file_names: bool,
    quick: bool,
    deep: bool,
    form: str | None,
    as_json: bool,
    output: tuple[Path, ...],
    fail_on: str,
    allow: tuple[str, ...],
    baseline: Path | None,
    jobs: int | None,
    log: Path | None,
    step: str | None,
    exact: bool,
) -> None:
    """Check the checkpoint SRC. Prints one line per finding, most important first.

    \b
    By default the index is checked, and copies, steps and master weights are
    read and compared. docs/checks.md lists every check.
      ucp verify run/checkpoints
      ucp verify run/checkpoints --quick
      ucp verify run/checkpoints --deep -o report.json -o ucp.sarif
      ucp verify atoms --allow finite --fail-on warning
      ucp verify run --log run --step latest

    Exit code 0: consistent · 1: inconsistent · 4: damaged bytes. Warnings and notes do not change it, unless --fail-on
    includes them. --allow and --baseline do not excuse a checkpoint that cannot be opened.
    """
    # BLAS is not used here, and its threads would have to be started and stopped again before a fork.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from ucp.checks.render import render
    from ucp.checks.runner import verify
    from ucp.checks.verify_report import make_policy
    from ucp.core.findings import Level

    if quick and deep:
        raise UsageError("--quick and --deep exclude each other")
    if as_json and form not in (None, "json"):
        raise UsageError(f"--json and --format {form} exclude each other")
    form = "json" if as_json else form or "text"
    level = Level.QUICK if quick else Level.DEEP if deep else Level.DEFAULT
    policy = make_policy(fail_on, allow, baseline)
    for path in output:
        check_parent_folder(path, "the report")
    options = read_options(tag, rules, preset, trust_recorded_ranks, trust_file_names)
    progress = None
    if not quick:
        from ucp.cli.progress import ProgressBar

        progress = ProgressBar(quiet=quiet)
    how: dict[str, Any] = {"jobs": jobs or default_jobs(), "progress": progress, "policy": policy, "processes": True}
    if log is not None or step is not None or exact:
        from ucp.replay.checks import verify_at

        report = verify_at(src, level, options, log, step, exact=exact, **how)
    else:
        report = verify(src, level, options=options, **how)
    for path in output:
        _write(path, render(report, _FORMATS_BY_SUFFIX.get(path.suffix, form)))
    # If a file already has the output in the format of --format, print text.
    is_written = any(path.suffix not in _FORMATS_BY_SUFFIX for path in output)
    shown = "text" if is_written else form
    text = render(report, shown)
    echo(with_colours(text) if shown == "text" else text, nl=False, obeyed=shown == "github")
    if not quiet:
        _conclude(report)
    ctx.exit(report.exit_code)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise StorageError(f"{path}: the report cannot be written: {error.strerror}") from error


def _conclude(report: Report) -> None:
    """Print the verdict to stderr; the findings are data and go to stdout."""
    from ucp.checks.render import verdict

    said = click.style(verdict(report), fg="green" if report.ok else "red")
    echo(
        f"{report.source}: {said}; {plural(len(report.checks), 'check')} ({report.level.title}) of"
        f" {plural(report.parameters, 'parameter')}, {plural(report.atoms, 'atom')}, {plural(report.files, 'file')};"
        f" {format_bytes(report.bytes_read)} read",
        err=True,
    )
