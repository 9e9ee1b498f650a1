"""Run the transcripts and the Python of documents, and compare the output with what the documents show.

A page names the checkpoints of its examples in a comment, `<!-- fixtures: checkpoints=z1_bf16_tp2_dp2 -->` (`corpus:`
for real ones outside the project), and a file that they use before the block with its content, `<!-- file: rules.toml
-->`. Every command of its console blocks is then run, in order, in a folder with these. A line `…` stands for the rest
of the output.

`python -m tests.transcripts README.md docs/*.md` writes the present output into the pages.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.paths import PROJECT

# Characters that need a shell; a command without any is run in this process, which is ten times as fast.
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
    """Whether the page uses checkpoints outside the project."""
    return "<!-- corpus: " in text


def steps(text: str) -> list[tuple[str, str]]:
    """Every command of the console blocks, and what is shown below it."""
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    return [step for block in blocks for step in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)]


def check(text: str, folder: Path, *, as_processes: bool = False) -> int:
    """Run every command of the console blocks in `folder` and compare the output. Returns the number of commands."""
    found = steps(text)
    for command, shown in found:
        printed = run(command, folder, as_process=as_processes)
        assert matches(shown, printed), f"$ {command}\n{printed}"
    return len(found)


def matches(shown: str, printed: str) -> bool:
    """Whether a page shows what a command printed, but for times and sizes."""
    expected, cut, _ = without_figures(shown).partition("\n…")
    expected = "" if expected == "…" else expected
    actual = without_figures(printed)
    return actual.startswith(expected) if cut else actual == expected


def record(path: Path) -> bool:
    """Write the present output of a page's commands into it. Returns whether something has changed."""
    text = path.read_text(encoding="utf-8")
    fresh = text
    with TemporaryDirectory() as name:
        set_up(text, Path(name))
        for command, shown in steps(text):
            printed = run(command, Path(name), as_process=True)
            if not matches(shown, printed):
                lines = shown.splitlines()
                kept = printed.rstrip("\n").splitlines()
                if "…" in lines:
                    kept = [*kept[: max(1, lines.index("…"))], "…"]
                fresh = fresh.replace(f"$ {command}\n{shown}", "\n".join([f"$ {command}", *kept, ""]), 1)
    path.write_text(fresh, encoding="utf-8")
    return fresh != text


def run(
    command: str,
    folder: Path,
    *,
    as_process: bool = True,
    programs: Path = Path(sys.executable).parent,
    environment: Mapping[str, str] = os.environ,
) -> str:
    """The output of a command, stdout first, with the `ucp` of the folder `programs`."""
    if not as_process and not _NEEDS_SHELL.search(command):
        return _run_here(shlex.split(command)[1:], folder)
    variables = {**environment, "PATH": f"{programs}{os.pathsep}{environment['PATH']}"}
    done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, check=False, env=variables)
    return done.stdout + done.stderr


def _run_here(arguments: list[str], folder: Path) -> str:
    from ucp.cli import main

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
    """The output of `code`, run in a process of its own, if it fails; otherwise an empty string."""
    (folder / "example.py").write_text(checked(code), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", "example.py"], cwd=folder, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr if done.returncode else ""


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        if record(Path(argument)):
            sys.stdout.write(f"{argument}: changed\n")
