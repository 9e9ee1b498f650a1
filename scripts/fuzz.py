#!/usr/bin/env python
"""Feed everything that reads foreign bytes with bytes that nobody would write.

    .venv/bin/python scripts/fuzz.py --seconds 60                 # every reader, 60 s each
    .venv/bin/python scripts/fuzz.py pickle zip --seconds 3600
    .venv/bin/python scripts/fuzz.py rank --found DIR             # where to put what was found

With atheris (`pip install atheris`) and one reader, inputs are guided by what they reach in the code; else they are
mutations of real files. A finding is any exception that is not ours, an input that takes more than 5 s, or one that
takes more than 4 GB. Ends with 1 if there was one (guided: says so, or ends at once where time or memory ran out); make
a test of it (tests/hostile).
"""

from __future__ import annotations

import argparse
import hashlib
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

try:
    import atheris
except ImportError:
    atheris = None

if atheris is not None and len(sys.argv) > 1 and "--no-atheris" not in sys.argv:
    with atheris.instrument_imports(include=["ucp"]):
        from tests.hostile.targets import TARGETS, Target, mutated
else:
    from tests.hostile.targets import TARGETS, Target, mutated

LONGEST_SECONDS = 5
MOST_MEMORY = 4 << 30


class TooLongError(Exception):
    """An input took more time than any should."""


def _too_long(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise TooLongError


def try_one(target: Target, data: bytes, folder: Path) -> None:
    """Raises what the reader should not have raised."""
    signal.alarm(LONGEST_SECONDS)
    try:
        target.survives(data, folder)
    finally:
        signal.alarm(0)


class Findings:
    """What a reader should not have raised: of every place in the code the first input, in a file."""

    def __init__(self, target: Target, folder: Path) -> None:
        self._target = target
        self._folder = folder
        self.places: set[str] = set()

    def add(self, error: Exception, data: bytes) -> None:
        place = traceback.extract_tb(error.__traceback__)[-1]
        known = f"{type(error).__name__} in {Path(place.filename).name}:{place.lineno}"
        if known not in self.places:
            self.places.add(known)
            path = self._folder / f"{self._target.name}-{hashlib.sha256(data).hexdigest()[:12]}"
            path.write_bytes(data)
            traceback.print_exception(error)
            print(f"FOUND {self._target.name}: {known}: {path}", flush=True)


def mutate(target: Target, seconds: float, found: Path, seed: int) -> int:
    """Mutations of real files for so many seconds; gives the number of different findings."""
    seeds = list(target.seeds())
    chance = random.Random(seed)
    findings = Findings(target, found)
    count, end = 0, time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < end:
            data = mutated(chance.choice(seeds), chance, seeds)
            count += 1
            try:
                try_one(target, data, Path(folder))
            except Exception as error:  # noqa: BLE001 - that is what is looked for
                findings.add(error, data)
    print(f"{target.name}: {count:,} inputs, {len(findings.places)} findings", flush=True)
    return len(findings.places)


def guided(target: Target, seconds: float, found: Path) -> None:
    """Inputs guided by coverage; does not come back."""
    corpus = found / f"corpus-{target.name}"
    corpus.mkdir(exist_ok=True)
    for seed in target.seeds():
        (corpus / hashlib.sha256(seed).hexdigest()[:12]).write_bytes(seed)
    folder = Path(tempfile.mkdtemp())
    findings = Findings(target, found)

    def one(data: bytes) -> None:
        try:
            target.survives(data, folder)
        except Exception as error:  # noqa: BLE001 - that is what is looked for
            findings.add(error, data)

    with atheris.instrument_imports(include=["ucp"]):  # of what is imported when it is first needed
        for seed in target.seeds():
            one(seed)

    options = [f"-max_total_time={int(seconds)}", "-max_len=65536", f"-timeout={LONGEST_SECONDS}", "-rss_limit_mb=4096"]
    atheris.Setup([sys.argv[0], str(corpus), *options, f"-artifact_prefix={found}/{target.name}-"], one)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="READER", help=f"of {', '.join(TARGETS)} [default: all]")
    parser.add_argument("--seconds", type=float, default=60, help="for each reader")
    parser.add_argument("--found", type=Path, default=Path("fuzz-findings"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-atheris", action="store_true", help="mutations of real files only")
    given = parser.parse_args()
    if unknown := set(given.targets) - TARGETS.keys():
        parser.error(f"no such reader: {', '.join(sorted(unknown))}")
    given.found.mkdir(parents=True, exist_ok=True)
    names = given.targets or list(TARGETS)
    if atheris is not None and not given.no_atheris and len(names) == 1:
        guided(TARGETS[names[0]], given.seconds, given.found)
    signal.signal(signal.SIGALRM, _too_long)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    return 1 if sum(mutate(TARGETS[name], given.seconds, given.found, given.seed) for name in names) else 0


if __name__ == "__main__":
    sys.exit(main())
