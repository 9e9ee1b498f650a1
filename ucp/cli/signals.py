"""Signals that a command waits for, one after the other."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class Signals:
    """From now on these signals are kept until they are waited for. For the main thread, as a context.

    They come through a pipe, which the signal itself is written to, on whichever thread it arrives: a queue that
    handlers put into loses the wake-up where two arrive together. Two that were sent together may change places.
    """

    def __init__(self, *numbers: signal.Signals) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakes = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, _ignore) for number in numbers}

    def wait(self) -> signal.Signals:
        """The next signal that has come, or comes."""
        while True:
            number = signal.Signals(os.read(self._read, 1)[0])
            if number in self._handlers:
                return number

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        """Leave signals to whoever had them before."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakes)
        os.close(self._read)
        os.close(self._write)


def _ignore(number: int, frame: FrameType | None) -> None:
    """The pipe has it already; with SIG_IGN it would not."""
