"""Runs commands of `ucp` with a fault at one call after the other, and reports what did not go as it should.

`python -m tests.faults.sweep` reads a JSON object from its standard input and prints one. It forks a child for every
fault, so that a sweep over many costs no more than the commands themselves.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.faults.injection import KINDS, Injector, always_short, points, signal_storm
from tests.trees import contents
from ucp import settings
from ucp.cli.main import run
from ucp.storage.paths import OWN_PREFIX

BUG = 70  # exit code of a child that shows a traceback
KILLED = -signal.SIGKILL


@dataclass
class Ended:
    code: int
    said: str


def child(arguments: list[str], prepare: Callable[[], None], after: Callable[[], None] | None = None) -> Ended:
    """Run one command in a child of its own."""
    with tempfile.TemporaryFile("w+") as said:
        pid = os.fork()
        if pid == 0:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            code = BUG
            try:
                prepare()
                code = run(arguments)
                if after is not None:
                    after()
            except BaseException:  # noqa: BLE001 - shown by the parent
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(pid, 0)
        said.seek(0)
        return Ended(os.waitstatus_to_exitcode(status), said.read())


class Sweep:
    """Commands that together make `{out}`; a fault is injected into number `hit`."""

    def __init__(self, folder: Path, commands: list[list[str]], hit: int) -> None:
        self.folder = folder
        self.commands = commands
        self.hit = hit
        whole = folder / "whole"
        whole.mkdir()
        for number in range(len(commands)):  # in this process, so that its children need not import anything
            assert run(self._arguments(number, whole)) == 0
        self.expected = contents(whole / "out")
        self.problems: list[str] = []
        self.counts: dict[str, int] = {}

    def calls(self) -> list[tuple[str, str]]:
        """The system calls of the command under test without a fault."""
        place, found = self._begin("recorded"), self.folder / "calls.json"
        injector = Injector()
        ended = child(self._arguments(self.hit, place), injector.install, lambda: _write(found, injector.calls))
        assert ended.code == 0, ended.said
        return [(name, site) for name, site in json.loads(found.read_text())]

    def every(self, kind: str, calls: list[tuple[str, str]]) -> None:
        for at in points(calls, kind):
            name, site = calls[at]
            self._one(f"{kind} at call {at} ({name}, {site})", kind, Injector(kind, at).install)

    def one(self, kind: str) -> None:
        prepare = {"always short": lambda: always_short(100), "signals": signal_storm}[kind]
        self._one(kind, kind, prepare)

    def _one(self, title: str, kind: str, prepare: Callable[[], None]) -> None:
        place = self._begin("point")
        ended = child(self._arguments(self.hit, place), prepare)
        self.counts[kind] = self.counts.get(kind, 0) + 1
        found = [*self._after_the_fault(kind, ended, place), *self._after_the_rerun(place)]
        self.problems += [f"{title}: {problem}\n{ended.said}" for problem in found]

    def _after_the_fault(self, kind: str, ended: Ended, place: Path) -> Iterator[str]:
        if kind in ("kill", "torn", "power"):
            if ended.code != KILLED:
                yield f"ended with {ended.code} before it was killed"
        elif kind in ("EIO", "ENOSPC"):
            if ended.code not in (0, 5):
                yield f"ended with {ended.code}"
            said = [line for line in ended.said.splitlines() if not line.startswith(("note: ", "read "))]
            if ended.code and not (said and said[0].startswith("ucp: ") and len(said) <= 2):
                yield "its message is none"
        elif ended.code and not (kind == "lost" and ended.code == KILLED):
            yield f"ended with {ended.code}"
        if (place / "out").exists() and without_journals(contents(place / "out")) != self.expected:
            yield "the output is there and not whole"
        if strays := {path.name for path in place.iterdir()} - {"out", ".out.ucp-partial"}:
            yield f"it left {strays}"
        if ended.code == 0 and self.hit == len(self.commands) - 1 and not (place / "out").exists():
            yield "it said that all is well, and there is no output"

    def _after_the_rerun(self, place: Path) -> Iterator[str]:
        resume = ["--resume"] if len(self.commands) == 1 else []
        for number in range(self.hit, len(self.commands)):
            ended = child([*self._arguments(number, place), *resume], Injector().install)
            exists = ended.code == 2 and "already exists" in ended.said and (place / "out").is_dir()
            if ended.code and not exists:
                yield f"run again, it ended with {ended.code}: {ended.said}"
        if not (place / "out").is_dir() or contents(place / "out") != self.expected:
            yield "run again, it made something else"
        if strays := {path.name for path in place.iterdir()} - {"out"}:
            yield f"run again, it left {strays}"

    def _begin(self, name: str) -> Path:
        """A new folder after all commands before the one under test."""
        place = self.folder / name
        shutil.rmtree(place, ignore_errors=True)
        self._run_all(place, self.commands[: self.hit])
        return place

    def _run_all(self, place: Path, commands: list[list[str]]) -> None:
        place.mkdir()
        for number in range(len(commands)):
            ended = child(self._arguments(number, place), lambda: None)
            assert ended.code == 0, ended.said

    def _arguments(self, number: int, place: Path) -> list[str]:
        return [word.replace("{out}", str(place / "out")) for word in self.commands[number]]


def without_journals(files: dict[str, bytes]) -> dict[str, bytes]:
    """What a run leaves that was killed in its last step: the next one removes its journals."""
    return {name: data for name, data in files.items() if not name.startswith(OWN_PREFIX)}


def _write(path: Path, calls: list[tuple[str, str]]) -> None:
    with path.open("w") as file:
        json.dump(calls, file)


def main() -> None:
    asked = json.load(sys.stdin)
    settings.SLAB_BYTES, settings.COPY_TASK_BYTES, settings.PREALLOCATE_FILE_BYTES = 4096, 16384, 8192
    settings.JOURNAL_SECONDS = 0.0
    sweep = Sweep(Path(asked["folder"]), asked["commands"], asked["hit"])
    calls = sweep.calls()
    for kind in asked["kinds"]:
        if kind in KINDS:
            sweep.every(kind, calls)
        else:
            sweep.one(kind)
    print(json.dumps({"calls": len(calls), "counts": sweep.counts, "problems": sweep.problems}))  # noqa: T201


if __name__ == "__main__":
    main()
