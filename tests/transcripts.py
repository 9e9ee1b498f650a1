"""Documents whose transcripts and Python are run: what they show is what the program says.

A page names the checkpoints that its examples talk about in a comment, `<!-- fixtures: checkpoints=z1_bf16_tp2_dp2 -->`
(or `corpus:` for real ones outside the project), and a file that they use in front of the block that shows it,
`<!-- file: rules.toml -->`. Every command of its console blocks is then run, in order, in a folder with these. A line
`…` in what is shown cuts the rest of the output off.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

from tests.paths import PROJECT
from ucp.cli import main

# What only a shell understands; a command without any is run in this process, which is ten times as fast.
_NEEDS_SHELL = re.compile(r"[|<>$;&*?`~]|^(?!ucp )")
_RESULT = re.compile(r"# → (.*)$")


def set_up(text: str, folder: Path) -> None:
    """Put the checkpoints and files that a page names into `folder`."""
    roots = {"fixtures": PROJECT / "fixtures", "corpus": Path(os.environ.get("UCP_CORPUS", ""))}
    for root, names in re.findall(r"<!-- (fixtures|corpus): (.*?) -->", text):
        for entry in names.split():
            name, _, source = entry.partition("=")
            shutil.copytree(roots[root] / source, folder / name, ignore=shutil.ignore_patterns("reference"))
    for name, content in re.findall(r"<!-- file: (\S+) -->\n+```\w*\n(.*?)```", text, re.DOTALL):
        (folder / name).write_text(content, encoding="utf-8")


def needs_corpus(text: str) -> bool:
    """Does the page talk about checkpoints outside the project?"""
    return "<!-- corpus: " in text


def steps(text: str) -> list[tuple[str, str]]:
    """Every command of the console blocks, and what is shown below it."""
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    return [step for block in blocks for step in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)]


def check(text: str, folder: Path, *, as_processes: bool = False) -> int:
    """Run every command of the console blocks in `folder`, and compare. Gives the number of commands."""
    found = steps(text)
    for command, shown in found:
        said = without_figures(run(command, folder, as_process=as_processes))
        expected, cut, _ = without_figures(shown).partition("\n…")
        expected = "" if expected == "…" else expected
        assert said.startswith(expected) if cut else said == expected, f"$ {command}\n{said}"
    return len(found)


def run(command: str, folder: Path, *, as_process: bool = True) -> str:
    """What a command prints, stdout first."""
    if not as_process and not _NEEDS_SHELL.search(command):
        return _run_here(shlex.split(command)[1:], folder)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, shell=True, cwd=folder, capture_output=True, text=True, check=False, env={**os.environ, "PATH": path}
    )
    return done.stdout + done.stderr


def _run_here(arguments: list[str], folder: Path) -> str:
    out, talk = StringIO(), StringIO()
    with _inside(folder), redirect_stdout(out), redirect_stderr(talk):
        main.run(arguments)
    return out.getvalue() + talk.getvalue()


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def without_figures(text: str) -> str:
    """Times and rates differ between runs, sizes and numbers of checks with every key that a release adds."""
    text = re.sub(r"in [\d.]+ s \([^)]*/s\)", "in … s", text)
    text = re.sub(r"[\d.]+ [KM]iB", "… KiB", text)
    text = re.sub(r" in \d+ threads", " in … threads", text)
    return re.sub(r"\d+ checks", "… checks", text).strip()


def python_blocks(text: str) -> list[str]:
    """The Python of a page."""
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def checked(code: str) -> str:
    """`code` in which every expression with a comment `# → value` asserts that its repr is that value."""
    lines = code.splitlines()
    for statement in reversed(ast.parse(code).body):
        assert statement.end_lineno is not None
        last = lines[statement.end_lineno - 1]
        if isinstance(statement, ast.Expr) and (result := _RESULT.search(last)):
            expression = ast.get_source_segment(code, statement)
            lines[statement.lineno - 1 : statement.end_lineno] = [f"_shown(({expression}), {result[1]!r})"]
    return "\n".join((_SHOWN, *lines, ""))


_SHOWN = """
def _shown(value, expected):
    assert repr(value) == expected, f"{value!r}, not {expected}"
"""


def run_python(code: str, folder: Path) -> str:
    """What Python says of `code`, run in a process of its own; empty where it is right."""
    (folder / "example.py").write_text(checked(code), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", "example.py"], cwd=folder, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr if done.returncode else ""
