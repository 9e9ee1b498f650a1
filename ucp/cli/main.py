"""The `ucp` command: finds the subcommand, turns failures into messages and exit codes."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import click

from ucp.errors import INTERRUPTED_EXIT_CODE, StorageError, UcpError, UsageError
from ucp.version import VERSION

# Commands are imported when they are called, so that `ucp --help` is instant.
COMMANDS = {
    "inspect": "Show what a checkpoint holds, and where each byte of a parameter lies.",
    "convert": "Turn a checkpoint into another format or layout, in one pass and constant memory.",
    "merge": "Make atoms of any step of a run that was logged with ucp.record.",
    "verify": "Say whether the shards of a checkpoint are consistent, and if not, which rank and parameter.",
    "diff": "Say whether two checkpoints are the same, whatever their formats, and if not, by how much they differ.",
    "log": "Look at gradient logs: what they hold, whether they are whole, and what may go.",
    "tune": "Say how often to save bases, from measured costs and the time between failures.",
    "shadow": "Hold the newest complete step of a running job in memory, ready to be converted.",
    "snapshot": "Show how the snapshots of a job are scheduled, and what they cost it.",
    "report": "Write one self-contained HTML page: mesh, partition map, sizes, checks, statistics.",
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"ucp.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 ok · 1 inconsistent · 2 usage · 3 not understood · 4 integrity · 5 I/O or space"
    " · 6 refused as unsafe · 130 interrupted. UCP_DEBUG=1 shows tracebacks.",
)
@click.version_option(VERSION, prog_name="ucp")
def cli() -> None:
    """The universal checkpoint converter for DeepSpeed and Megatron.

    Takes the per-rank shards of a training run apart into atoms (one whole state of one parameter, free of any
    parallel layout). Start with `ucp inspect CHECKPOINT`.
    """


def run(arguments: Sequence[str]) -> int:
    """Run one command line and give its exit code. A user's mistake shows no traceback, a bug always does."""
    # An index is many small objects that live as long as the command: looking for garbage among them is wasted.
    gc.set_threshold(200_000, 50, 50)
    # We move arrays and never multiply them: threads that wait for a matrix only take time from ours.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        result = cli.main(list(arguments), prog_name="ucp", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as error:
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("ucp: interrupted", err=True)
        return INTERRUPTED_EXIT_CODE
    except click.ClickException as error:
        error.show()
        return UsageError.exit_code
    except UcpError as error:
        if os.environ.get("UCP_DEBUG"):
            raise
        click.echo(f"ucp: {error}", err=True)
        return error.exit_code
    except BrokenPipeError:
        # The reader of our output (`head`, `less`) has left. Nothing is wrong.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        # What a room knows of files it says itself. This is the rest: the terminal, a full disk behind `>`, a path of
        # which the system tells nothing.
        if os.environ.get("UCP_DEBUG"):
            raise
        what = error.filename or "the output cannot be written"
        click.echo(f"ucp: {what}: {error.strerror or error}", err=True)
        return StorageError.exit_code


def main() -> None:
    """Entry point of the console script."""
    code = run(sys.argv[1:])
    gc.freeze()  # the interpreter would look for garbage among all of it once more before it ends
    sys.exit(code)
