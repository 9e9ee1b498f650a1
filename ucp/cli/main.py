"""The `ucp` command: finds the subcommand, turns failures into messages and exit codes."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

import click

from ucp.errors import INTERRUPTED_EXIT_CODE, StorageError, UcpError, UsageError
from ucp.version import VERSION

# Commands are imported when they are called, so that `ucp --help` is instant.
COMMANDS = {
    "inspect": "Show what a checkpoint holds, and where each byte of a parameter lies.",
    "convert": "Turn a checkpoint into another format or layout, in one pass and constant memory.",
    "merge": "Write the state after any step of a run that was logged with ucp.record, as atoms.",
    "verify": "Check that a checkpoint is whole; where it is not, name the file, rank and parameter.",
    "diff": "Compare two checkpoints, whatever their formats, and show what differs and by how much.",
    "log": "Look at gradient logs: what they hold, whether they are intact, what can be deleted.",
    "tune": "Work out how often to save bases, from measured costs and the time between failures.",
    "shadow": "Keep the newest complete step of a running job in memory, ready to be converted.",
    "snapshot": "Show when a job's snapshots copy each tensor, and what that costs the job.",
    "report": "Write one self-contained HTML page: mesh, partition map, sizes, checks, statistics.",
}


class _CommandGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"ucp.cli.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            from difflib import get_close_matches  # only where a name is not found

            close = get_close_matches(args[0], COMMANDS)
            ctx.fail(f"No such command {args[0]!r}." + (f" Did you mean {close[0]!r}?" if close else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=_CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 ok · 1 inconsistent · 2 usage · 3 not understood · 4 integrity · 5 I/O or space"
    " · 6 refused as unsafe · 130 interrupted. UCP_DEBUG=1 shows tracebacks.",
)
@click.version_option(VERSION, prog_name="ucp")
def cli() -> None:
    """The universal checkpoint converter for DeepSpeed and Megatron.

    Inspects, converts, reshards, verifies and compares checkpoints of parallel training jobs. It finds out by itself
    which framework wrote them. Start with:

    \b
      ucp inspect run/checkpoints                      what is in it?
      ucp verify run/checkpoints                       is it whole?
      ucp convert run/checkpoints six --to deepspeed --dp 6
                                                       for a job on 6 ranks
      ucp convert run/checkpoints hf --to safetensors --dtype bf16
                                                       weights for inference
      ucp convert --help                               more about one command
    """


def run(arguments: Sequence[str]) -> int:
    """Run one command line and give its exit code. A user's mistake shows no traceback, a bug always does."""
    # An index is many small objects that live as long as the command: looking for garbage among them is wasted.
    gc.set_threshold(200_000, 50, 50)
    # We move arrays and never multiply them: threads that wait for a matrix only take time from ours.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        result = cli.main(list(arguments), prog_name="ucp", standalone_mode=False)
        _flush()
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
    # To take an index of many ranks apart piece by piece would be wasted: the system takes it back at once. What was
    # registered for the end is done, and what was printed is out.
    atexit._run_exitfuncs()
    with suppress(OSError):  # nobody listens, and `run` has said what there is to say
        _flush()
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # a job may have been started without
            stream.flush()
