"""Kills writers: `python -m tests.log.killed_writer FOLDER TIMES`.

Forks a process that writes a log and reports durable steps through a pipe, kills it (SIGKILL) after a random time, and
reads what is left. Every second process continues the log of the one before.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import struct
import sys
import time
from pathlib import Path

from tests.log.small_logs import contents, expected, put, small_manifest
from ucp import settings
from ucp.log.epoch_manifest import write_manifest
from ucp.log.maintenance import resume_stream
from ucp.log.reader import Log, epoch_folder, stream_folder
from ucp.log.writer import StreamWriter


def write_until_killed(run: Path, pipe: int) -> None:
    """Write steps as fast as they go; report every durable step."""
    manifest = small_manifest()
    folder = epoch_folder(run / "log", 0)
    lsn, step = 0, 0
    if folder.exists():
        log = Log.open(run)
        step = log.recoverable_step
        lsn = resume_stream(log.epochs[0], log.epochs[0].streams[0])
    else:
        write_manifest(folder, manifest)
    writer = StreamWriter(stream_folder(folder, 0), 0, manifest.streams[0], slots=3, next_lsn=lsn, durable_step=step)
    told = -1
    while True:
        step += 1
        put(writer, step)
        if writer.durable_step > told:
            told = writer.durable_step
            os.write(pipe, struct.pack("<q", told))


def kill_one(run: Path, after: float) -> tuple[int, int]:
    """(last step that was reported durable, last step that can be recovered)."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        write_until_killed(run, writing)
        os._exit(1)
    os.close(writing)
    select.select([reading], [], [], 20)  # the first durable step: from now on there is something to lose
    time.sleep(after)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), "the writer failed before it was killed"
    told = b""
    while data := os.read(reading, 1 << 16):
        told += data
    os.close(reading)
    durable = struct.unpack("<q", told[-8:])[0]
    log = Log.open(run)
    found = contents(log)
    assert found == expected(range(1, log.recoverable_step + 1)), "what is read is not what was written"
    return durable, log.recoverable_step


def main() -> None:
    folder, times = Path(sys.argv[1]), int(sys.argv[2])
    settings.LOG_SEGMENT_BYTES = 20_000
    settings.LOG_RESERVE_BYTES = 8192
    chance = random.Random(7)
    results = [kill_one(folder / str(i // 2), chance.uniform(0, 0.03)) for i in range(times)]
    recovered = [r for _, r in results]
    told = {"killed": times, "durable": [d for d, _ in results], "recovered": recovered, "steps": sum(recovered)}
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main()
