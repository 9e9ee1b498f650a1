"""Signals that a command waits for: none is lost, even if several arrive together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

from ucp.cli.shadow import SignalQueue

WAITING = """
import signal, threading
from ucp.cli.shadow import SignalQueue

for _ in range(3):  # some thread of which may be given a signal
    threading.Thread(target=lambda: [threading.Event().wait(0.001) for _ in range(100_000)], daemon=True).start()
with SignalQueue(signal.SIGUSR1, signal.SIGUSR2) as signals:
    print("ready", flush=True)
    while True:
        print(signals.wait().name, flush=True)
"""


def test_signals_that_arrive_together() -> None:
    with subprocess.Popen([sys.executable, "-c", WAITING], stdout=subprocess.PIPE, text=True) as process:
        watch = threading.Timer(60, process.kill)  # one that misses a signal waits for ever
        watch.start()
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for _ in range(200):
            process.send_signal(signal.SIGUSR1)
            process.send_signal(signal.SIGUSR2)
            assert {process.stdout.readline() for _ in range(2)} == {"SIGUSR1\n", "SIGUSR2\n"}
        process.kill()
        watch.cancel()


def test_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with SignalQueue(signal.SIGUSR1) as signals:
        threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        assert signals.wait() == signal.SIGUSR1
        assert signal.getsignal(signal.SIGUSR1) is not before
    assert signal.getsignal(signal.SIGUSR1) is before
    assert signal.set_wakeup_fd(-1) == -1
