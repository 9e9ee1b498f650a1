"""`ucp merge`: the state after any step of a logged run, as atoms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ucp.cli import convert
from ucp.cli.parameters import PATH, log_options, parse_bytes, reading_options, source_argument


@click.command("merge", short_help="Make atoms of any step of a logged run.")
@source_argument
@click.argument("dst", type=PATH)
@log_options
@reading_options
@click.option("--jobs", "-j", type=click.IntRange(1), help="Workers. [default: one per core, at most 8]")
@click.option(
    "--memory", type=parse_bytes, metavar="BYTES", default="256M", show_default=True, help="Most for buffers."
)
@click.option("--resume", is_flag=True, help="Continue a half-done output.")
@click.option("--restart", is_flag=True, help="Discard a half-done output and start over.")
@click.option("--durable", is_flag=True, help="Flush everything to disk before the output appears.")
@click.option("--dry-run", is_flag=True, help="Print the plan and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print what was planned or done as JSON.")
@click.pass_context
def command(ctx: click.Context, /, src: Path, dst: Path, log: Path | None, **options: Any) -> None:
    """Write the state after a step of the run SRC to DST, as atoms.

    \b
    SRC is the folder that `ucp.record` was given, or a checkpoint from which the
    log named by --log continues. For other formats use `ucp convert --log`.
      ucp merge run step1200 --step 1200
      ucp merge run newest
      ucp merge checkpoints/global_step1000 step1200 --log run --step 1200 --exact

    What is written is bit for bit what the job held after that step. Where that cannot be promised, the notes of the
    output call it approximate and say why; --exact refuses it instead.
    """
    ctx.invoke(convert.command, src=src, dst=dst, log=src if log is None else log, to="atoms", **options)
