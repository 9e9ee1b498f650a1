"""The `ucp` command: finds the subcommand, and turns errors into messages and exit codes."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

import click

from ucp.cli.output import Terminated, echo
from ucp.errors import (
    INTERRUPTED_EXIT_CODE,
    TERMINATED_EXIT_CODE,
    StorageError,
    UcpError,
    UsageError,
    missing_package,
)
from ucp.version import VERSION

# Commands are imported when they are called, so that `ucp --help` is fast.
COMMANDS = {
    "inspect": "Show what a checkpoint contains, and where each byte of a parameter is.",
    "convert": "Turn a checkpoint into another format or layout, in one pass and constant memory.",
    "merge": "Write the state after any step of a run that was logged with ucp.record, as atoms.",
    "verify": "Check that a checkpoint is complete and consistent, or name the file, rank and parameter at fault.",
    "diff": "Compare two checkpoints, whatever their formats, and show what differs and by how much.",
    "log": "Inspect, check and clean up gradient logs.",
    "tune": "Compute how often to save bases, from measured costs and the time between failures.",
    "shadow": "Keep the newest complete step of a running job in memory, ready to be converted.",
    "snapshot": "Show when a job's snapshots copy each tensor, and what that costs the job.",
    "report": "Write one self-contained HTML page: mesh, partition map, sizes, checks, statistics.",
    "formats": "List the formats that can be read and written.",
    "presets": "List the packaged rules for splitting parameters over tensor-parallel ranks (--preset).",
    "names": "List the naming schemes, tables and model families that --names supports.",
    "help": "Show the help of a command.",
}
_MODULES = {  # of commands that are not alone in a module of their name
    "merge": "convert:merge_command",
    "formats": "listings:formats_command",
    "presets": "listings:presets_command",
    "names": "listings:names_command",
    "help": "main:help_command",
}


class _CommandGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = _MODULES.get(cmd_name, f"{cmd_name}:command").partition(":")
        command: click.Command = getattr(import_module(f"ucp.cli.{module}"), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            from difflib import get_close_matches  # only needed for a wrong name

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
    " · 6 refused as unsafe · 7 not possible for this checkpoint · 130 interrupted · 143 terminated."
    " UCP_DEBUG=1 shows tracebacks.",
)
@click.version_option(VERSION, "-V", "--version", prog_name="ucp")
def cli() -> None:
    """The universal checkpoint converter for DeepSpeed and Megatron.

    Inspects, converts, reshards, verifies and compares checkpoints of parallel training jobs. It recognizes which
    framework wrote them. Start with:

    \b
      ucp inspect run/checkpoints                      what is in it?
      ucp verify run/checkpoints                       is it complete?
      ucp convert run/checkpoints six --to deepspeed --dp 6
                                                       for a job on 6 ranks
      ucp convert run/checkpoints hf --to safetensors --dtype bf16
                                                       weights for inference
      ucp convert --help                               more about one command
    """


@click.command("help", short_help="Show the help of a command.")
@click.argument("command", nargs=-1)
@click.pass_context
def help_command(ctx: click.Context, /, command: tuple[str, ...]) -> None:
    """Show the help of COMMAND, or of ucp itself.

    \b
      ucp help convert
      ucp help log compact
    """
    ctx.find_root().command.main([*command, "--help"], prog_name="ucp", standalone_mode=False)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. A user's mistake shows no traceback, a bug always does."""
    # An index consists of many small objects that live as long as the command, so collecting garbage among them is
    # wasted time.
    gc.set_threshold(200_000, 50, 50)
    # Nothing here multiplies matrices, and idle BLAS threads take time from the workers.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        result = cli.main(list(arguments), prog_name="ucp", standalone_mode=False)
        _flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as error:
        return error.exit_code
    except (click.Abort, KeyboardInterrupt) as error:
        is_terminated = isinstance(error.__cause__ or error, Terminated)  # click turns interrupts into aborts
        echo(f"ucp: {'terminated' if is_terminated else 'interrupted'}", err=True)
        return TERMINATED_EXIT_CODE if is_terminated else INTERRUPTED_EXIT_CODE
    except click.ClickException as error:
        error.show()
        return UsageError.exit_code
    except UcpError as error:
        if os.environ.get("UCP_DEBUG"):
            raise
        return _report(error)
    except ModuleNotFoundError as error:
        missing = missing_package(error)
        if missing is None or os.environ.get("UCP_DEBUG"):
            raise
        return _report(missing)
    except (BrokenPipeError, SystemExit):
        # The reader of a help text (`head`, `less`) has closed it, for which click exits with 1; `echo` handles
        # everything else.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        # Errors of known files are `StorageError`s. This is the rest: the terminal, or a full disk after `>`.
        if os.environ.get("UCP_DEBUG"):
            raise
        what = error.filename or "the output cannot be written"
        return _report(StorageError(f"{what}: {error.strerror or error}"))


def _report(error: UcpError) -> int:
    echo(f"{click.style('ucp:', fg='red')} {error}", err=True)
    return error.exit_code


def main() -> None:
    """Entry point of the console script."""
    code = run(sys.argv[1:])
    # Freeing an index of many ranks object by object is wasted time, so exit without it, after exit functions have run
    # and output is flushed.
    atexit._run_exitfuncs()
    with suppress(OSError):  # a closed output, which `run` has already reported
        _flush()
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # None in a process that was started without it
            stream.flush()
