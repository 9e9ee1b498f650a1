#!/usr/bin/env python3
"""Write docs/cli.md: every command's help text and every exit code, taken from the program itself.

* `scripts/make_cli_docs.py` writes it,
* `scripts/make_cli_docs.py --check` fails if it is not what would be written (a test does the same).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import click

from ucp import errors
from ucp.cli.main import COMMANDS, cli

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
WIDTH = 100

TOP = """\
# Commands

This page is made by `scripts/make_cli_docs.py` from the program itself. `ucp COMMAND --help` prints the same.

Data goes to stdout; progress, notes and verdicts go to stderr. `--json` prints one JSON object with a `schema` number.
The progress bar appears only where stderr is a terminal. Units of sizes are powers of 1,024: `512M`, `2G`; a plain
number counts bytes. Nothing in a checkpoint is ever executed.
"""

CODES = """\
## Exit codes

| code | meaning | in Python |
| --- | --- | --- |
| 0 | done; consistent; the same | |
"""

VARIABLES = """\
A mistake in a command shows one paragraph and exits with its code. A traceback is a bug in `ucp`: please report it.
[Troubleshooting](troubleshooting.md) goes through the messages.

| environment variable | effect |
| --- | --- |
| `UCP_DEBUG=1` | show the traceback of every failure |
| `UCP_SHADOW_TOKEN_FILE` | file with the token of a [shadow](shadow.md) |

## Completion

Let the shell complete commands, options and their values, with a line in `~/.bashrc` (for zsh: `zsh_source`, in
`~/.zshrc`):

```bash
eval "$(_UCP_COMPLETE=bash_source ucp)"
```
"""


def page() -> str:
    """The whole page."""
    with click.Context(cli, info_name="ucp", terminal_width=WIDTH, **cli.context_settings) as ctx:
        parts = [TOP, _help(ctx)]
        for name in COMMANDS:
            command = cli.get_command(ctx, name)
            assert command is not None
            inner = click.Context(command, parent=ctx, info_name=name)
            parts.append(f"## `ucp {name}`\n\n{_help(inner)}")
            if isinstance(command, click.Group):
                for sub, each in command.commands.items():
                    shown = _help(click.Context(each, parent=inner, info_name=sub))
                    parts.append(f"### `ucp {name} {sub}`\n\n{shown}")
    return "\n".join([*parts, CODES + _codes(), VARIABLES])


def _help(ctx: click.Context) -> str:
    text = "\n".join(line.rstrip() for line in ctx.get_help().splitlines())
    return f"```text\n{text}\n```\n"


def _codes() -> str:
    classes = [each for each in errors.UcpError.__subclasses__() if each.__module__ == errors.__name__]
    classes.sort(key=lambda each: each.exit_code)
    rows = [f"| {each.exit_code} | {_first_line(each)} | `ucp.errors.{each.__name__}` |" for each in classes]
    return "\n".join([*rows, f"| {errors.INTERRUPTED_EXIT_CODE} | Interrupted with Ctrl-C. | |", ""])


def _first_line(each: type) -> str:
    return (each.__doc__ or "").splitlines()[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is stale")
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page():
        return 0
    print(f"{PAGE.name} is stale: run scripts/make_cli_docs.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
