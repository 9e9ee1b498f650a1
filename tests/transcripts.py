"""Run the transcripts and the Python of documents, and compare the output with what the documents show.

A page names the checkpoints of its examples in a comment, `<!-- fixtures: checkpoints=z1_bf16_tp2_dp2 -->`
(`dcp/fsdp2_dp2` for a packed one), and a file that they use before the block with its content, `<!-- file: rules.toml
-->`. Its console and Python blocks are then run in order, in a folder with these: every command, and every Python block
in a fresh interpreter. A line `…` stands for the rest of the output. A Python block whose first line is a comment
`# torchrun …` is run by that command, with real ranks over gloo.

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

from tests.paths import PROJECT, fixture

# Characters that need a shell; a command without any is run in this process, which is ten times as fast.
_NEEDS_SHELL = re.compile(r"[|<>$;&*?`~]|^(?!ucp )")
_RESULT = re.compile(r"# → (.*)$")
_BLOCK = re.compile(r"(?:<!-- file: (\S+) -->\n+)?^```(console|python)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def set_up(text: str, folder: Path) -> None:
    """Put the checkpoints and files that a page names into `folder`."""
    for names in re.findall(r"<!-- fixtures: (.*?) -->", text):
        for entry in names.split():
            name, _, source = entry.partition("=")
            shutil.copytree(fixture(source), folder / name, ignore=shutil.ignore_patterns("reference"))
    for name, content in re.findall(r"<!-- file: (\S+) -->\n+```\w*\n(.*?)```", text, re.DOTALL):
        (folder / name).write_text(content, encoding="utf-8")


def needs_ranks(text: str) -> bool:
    """Whether the page has Python that runs in several processes."""
    return any(block.startswith("# torchrun ") for block in python_blocks(text))


def steps(text: str) -> list[tuple[str, str]]:
    """Every command of the console blocks, and what is shown below it."""
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    return [step for block in blocks for step in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)]


def check(text: str, folder: Path, *, as_processes: bool = False, ranks: bool = True) -> int:
    """Run the console and Python blocks of a page in `folder`, in order, and compare. Returns their number.

    Without `ranks`, blocks that start several processes are left out.
    """
    count = 0
    for file, language, block in _BLOCK.findall(text):
        if language == "console":
            for command, shown in steps(f"```console\n{block}```"):
                printed = run(command, folder, as_process=as_processes)
                assert matches(shown, printed), f"$ {command}\n{printed}"
        elif file and f"$ python {file}\n" in text:
            continue  # a transcript runs it
        elif ranks or not needs_ranks(f"```python\n{block}```"):
            problem = run_python(block, folder)
            assert not problem, f"{block}\n{problem}"
        count += 1
    return count


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
    (folder / ".example.py").write_text(checked(code), encoding="utf-8")
    command = [sys.executable, "-W", "error", ".example.py"]
    variables = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    if code.startswith("# torchrun "):
        (folder / ".rank.py").write_text(_RANK, encoding="utf-8")
        options = shlex.split(code.splitlines()[0])[2:-1]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *options, ".rank.py"]
        variables |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PROJECT), variables.get("PYTHONPATH")]))
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=variables)
    return done.stdout + done.stderr if done.returncode else ""


# A rank of an example: DeepSpeed needs a few changes to run on a CPU.
_RANK = """
import runpy

if "deepspeed" in open(".example.py").read():
    from tests.interop.ds_rank import patch_for_cpu

    patch_for_cpu()
runpy.run_path(".example.py", run_name="__main__")
"""


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        if record(Path(argument)):
            sys.stdout.write(f"{argument}: changed\n")
