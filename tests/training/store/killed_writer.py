"""Kills real writers at random instants and looks at what is left. Runs by itself: `killed_writer.py STORE KILLS SEED`.

One process forks a writer again and again, so that a kill costs milliseconds. Prints what it saw as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any

from tests.training.store.stores import fill, is_of_one_step, schema
from ucp.formats.store.generations import find_generations, positional_reader, read_store_file
from ucp.training.store import Store, load_store


def write_forever(path: Path, pipe: int) -> None:
    store = Store.open(path)
    os.write(pipe, struct.pack("<q", 0))  # it has started
    while True:
        fill(store, store.sequence + 1, wait=10.0)
        os.write(pipe, struct.pack("<q", store.commit()))


def kill_one(path: Path, chance: random.Random, seconds: float) -> int:
    """Kill a writer somewhere in a generation; returns the last one that it reported as committed (0: none).

    Up to two generations are waited for, so that a slow machine sees as many as a fast one. `seconds` is about what one
    takes.
    """
    ours, theirs = os.pipe()
    writer = os.fork()
    if writer == 0:
        os.close(ours)
        try:
            write_forever(path, theirs)
        finally:
            os._exit(1)
    os.close(theirs)
    last = 0
    for _ in range(1 + chance.randrange(3)):  # the first one reports the start
        last = int.from_bytes(os.read(ours, 8), "little")
    time.sleep(chance.uniform(0, seconds))
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    while data := os.read(ours, 8):
        last = int.from_bytes(data, "little")
    os.close(ours)
    return last


def main() -> None:
    path, kills, chance = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    with Store.create(path, schema()) as store:
        began = time.perf_counter()
        for step in (1, 2, 3):
            fill(store, step)
            store.commit()
        seconds = (time.perf_counter() - began) / 3  # of a generation, on this disk
    seen: dict[str, Any] = {"kills": 0, "wrong": [], "in the middle": 0, "uncommitted": 0, "generations": 0}
    before = 3
    for _ in range(kills):
        reported = kill_one(path, chance, seconds)
        loaded = load_store(path)
        loaded.check()
        if not is_of_one_step(loaded):
            seen["wrong"].append(f"step {loaded.step} is a mixture")
        if not max(before, reported) <= loaded.sequence <= max(before, reported) + 1 or loaded.sequence != loaded.step:
            seen["wrong"].append(f"generation {loaded.sequence} after {before}, {reported}")
        before = loaded.sequence
        del loaded
        fd = os.open(path, os.O_RDONLY)
        read = positional_reader(fd, path)
        found = find_generations(read, read_store_file(read, os.fstat(fd).st_size, path))
        os.close(fd)
        seen["in the middle"] += len(found.generations) == 1 and not found.uncommitted
        seen["uncommitted"] += len(found.uncommitted)
        seen["kills"] += 1
    seen["generations"] = before
    json.dump(seen, sys.stdout)


if __name__ == "__main__":
    main()
