"""The job's end: frames that go into the log go to a shadow as well, and training never waits for it longer than told.

The newest frames are kept, sent or not, as far as there is room: a shadow that was away gets what it lacks of them, and
reads the rest from the log. A shadow of a share is sent only the gradients that it wants.
"""

from __future__ import annotations

import atexit
import contextlib
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ucp import settings
from ucp.errors import UcpError
from ucp.log.epoch_manifest import EpochManifest
from ucp.log.frames import FRAME_BYTES, SEGMENT_BYTES, FrameHeader, SegmentHeader, padded
from ucp.training.shadow.protocol import (
    Buffer,
    ByteChannel,
    RefusedError,
    ShadowAddress,
    joined,
    receive_json,
    send,
    send_json,
)
from ucp.training.shadow.step_assembler import BlockTables, StreamShard, partial_header, wanted_parts
from ucp.training.shadow.transports import GlooChannel, connect, is_local, take_ring

_ZEROS = bytes(FRAME_BYTES)


@dataclass(slots=True)
class SinkStats:
    """What a sink has done so far."""

    frames: int = 0  # sent, those that were sent again included
    bytes: int = 0
    dropped: int = 0  # frames that never went out: the shadow reads them from the log
    connections: int = 0
    stall_seconds: float = 0.0  # that the log's thread waited for room


class ShadowSink:
    """Sends one stream to a shadow, from a thread of its own. `offer` is called by the thread that writes the log."""

    def __init__(
        self, address: ShadowAddress, manifest: EpochManifest, stream: int, run: Path | None, *, wait: float = 0.0
    ) -> None:
        """Connect, and be let in; `UcpError` where that fails. `wait` is how many seconds `offer` may wait for room."""
        self.address = address
        self.stats = SinkStats()
        self._tables = BlockTables(manifest.stream(stream), manifest.state_kinds)  # with what the shadow wants of them
        self._hello: dict[str, Any] = {
            "ask": "feed",
            "manifest": manifest.to_json(),
            "stream": stream,
            "run": None if run is None else str(run.resolve()),
        }
        self._epoch = manifest.epoch
        self._wait = wait
        self._waited = False
        self._changed = threading.Condition()
        self._kept: deque[tuple[FrameHeader, memoryview]] = deque()  # by number, without gap
        self._kept_bytes = 0
        self._unsent_bytes = 0  # of those that are kept
        self._coming = 0  # number of the next frame
        self._next: int | None = None  # the frame that goes out next; None: the first that is kept
        self._closing = False
        self._opened: ByteChannel | None = None  # what the thread may be waiting for
        self._channel: ByteChannel | None = None
        self._is_new = False  # what is told of the job: the connection there is was made before
        self._at = 0
        self._salt = 0
        self.error: str | None = None  # why the shadow is not reached now
        self._connect()
        self._thread = threading.Thread(target=self._run, name="ucp-shadow-sink", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------------------------------
    # The log's side

    def offer(self, header: FrameHeader, payload: memoryview) -> None:
        """Take a frame. Waits for room at most as long as told, then lets go of what is oldest."""
        with self._changed:
            if self._kept and header.lsn != self._kept[-1][0].lsn + 1:
                if header.lsn <= self._kept[-1][0].lsn:
                    return  # written again after an error of the disk: it was offered before
                self._forget_all()
            if self._is_full(len(payload)) and self._wait > 0 and not self._waited and self.error is None:
                begin = time.monotonic()
                room = self._changed.wait_for(lambda: not self._is_full(len(payload)) or self._closing, self._wait)
                self._waited = not room  # once, until the shadow takes something again
                self.stats.stall_seconds += time.monotonic() - begin
            while self._kept and self._kept_bytes + len(payload) > settings.SHADOW_QUEUE_BYTES:
                self._forget()
            self._kept.append((header, payload))
            self._coming = header.lsn + 1
            self._kept_bytes += len(payload)
            self._unsent_bytes += len(payload)
            self._changed.notify_all()

    def send_state_kinds(self, kinds: Sequence[str]) -> None:
        """The names of the optimizer's states are known now: the shadow is told before a frame has any of them."""
        with self._changed:
            self._hello = {**self._hello, "manifest": {**self._hello["manifest"], "state_kinds": list(kinds)}}
            self._tables.learn(kinds)
            self._is_new = True

    def _is_full(self, size: int) -> bool:
        """Would one more frame push out one that was not sent?"""
        return bool(self._unsent_bytes) and self._unsent_bytes + size > settings.SHADOW_QUEUE_BYTES

    def _forget(self) -> None:
        header, payload = self._kept.popleft()
        self._kept_bytes -= len(payload)
        if self._next is None or header.lsn >= self._next:
            self._unsent_bytes -= len(payload)
            self.stats.dropped += 1
            self._next = header.lsn + 1

    def _forget_all(self) -> None:
        while self._kept:
            self._forget()

    def told(self) -> dict[str, Any]:
        """What the sink has done, and why the shadow is not reached where it is not, as JSON values."""
        return {**asdict(self.stats), "error": self.error}

    def close(self, seconds: float = 5.0) -> None:
        """Send what is left, as far as that goes in a few seconds, and end."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(seconds)
        end = time.monotonic() + settings.SHADOW_SEND_SECONDS
        while self._thread.is_alive() and time.monotonic() < end:  # it waits for a shadow that takes nothing
            with self._changed:
                if self._opened is not None:
                    with contextlib.suppress(OSError):
                        self._opened.shutdown(socket.SHUT_RDWR)
            self._thread.join(0.1)

    # ------------------------------------------------------------------------------------------------------------------
    # The thread's side

    def _run(self) -> None:
        while True:
            with self._changed:
                beats = settings.SHADOW_HEARTBEAT_SECONDS if isinstance(self._channel, GlooChannel) else None
                self._changed.wait_for(lambda: self._frame() is not None or self._closing, beats)
                frame = self._frame()
                if frame is None and self._closing:  # everything is out
                    break
            try:
                if frame is None:
                    if isinstance(self._channel, GlooChannel):
                        self._channel.beat()
                    continue
                if self._is_new and self._channel is not None:
                    self._channel.close()
                    self._channel = None
                if self._channel is None:
                    self._connect()
                    continue  # the shadow may want another frame
                self._send(*frame)
            except (OSError, RefusedError, UcpError) as error:
                self._lose(str(error))
                with self._changed:
                    if self._changed.wait_for(lambda: self._closing, settings.SHADOW_RETRY_SECONDS):
                        break
        if self._channel is not None:
            self._channel.close()

    def _frame(self) -> tuple[FrameHeader, memoryview] | None:
        """What goes out next."""
        if not self._kept:
            return None
        first = self._kept[0][0].lsn
        place = 0 if self._next is None else max(self._next - first, 0)
        return self._kept[place] if place < len(self._kept) else None

    def _connect(self) -> None:
        sock = connect(self.address, self._is_opened)
        try:
            with self._changed:
                oldest = self._kept[0][0].lsn if self._kept else self._coming
                hello, self._is_new = self._hello, False
            send_json(sock, {**hello, "oldest": oldest})
            sock.settimeout(None)  # it may have a base to load first; the system says when it is gone
            told: Any = receive_json(sock, settings.SHADOW_REQUEST_BYTES)
            if not isinstance(told, dict) or "error" in told:
                raise UcpError(f"{self.address}: {told['error']}", hint=told.get("hint"))
            wanted = None if told.get("next") is None else int(told["next"])
            channel = take_ring(sock, int(told["ring"])) if is_local(sock) else sock
            portion = None if told.get("wants") is None else StreamShard.from_json(told["wants"])
            self._salt = secrets.randbits(64)
            schema = self._tables.schema
            segment = SegmentHeader(
                self._epoch, schema.stream, max(wanted or 0, 0), self._salt, schema.hash(), time.time_ns()
            )
            send(channel, [segment.pack()])
            channel.settimeout(settings.SHADOW_SEND_SECONDS)
        except (OSError, RefusedError, ValueError, TypeError, KeyError) as error:
            sock.close()
            raise UcpError(f"{self.address}: {error}") from error
        except UcpError:
            sock.close()
            raise
        self._at = SEGMENT_BYTES
        with self._changed:
            self._tables.portion = portion
            self._next = wanted
            unsent = (len(payload) for header, payload in self._kept if header.lsn >= (self._next or 0))
            self._unsent_bytes = sum(unsent)
            self.error = None
            self._channel = channel
        self.stats.connections += 1

    def _is_opened(self, sock: ByteChannel) -> None:
        with self._changed:
            self._opened = sock

    def _send(self, header: FrameHeader, payload: memoryview) -> None:
        assert self._channel is not None
        placed = replace(header, offset=self._at)
        some = None if self._tables.portion is None else wanted_parts(header, payload, self._tables)
        if some is None:
            tail = _ZEROS[: padded(len(payload)) - len(payload)]
            parts: list[Buffer] = [placed.pack(self._salt), payload, tail]
        else:
            parts = [partial_header(placed).pack(self._salt), *some]
        send(self._channel, parts)
        self._at = placed.end
        with self._changed:
            if self._next is None or header.lsn >= self._next:  # else it was let go while it went out
                self._next = header.lsn + 1
                self._unsent_bytes -= len(payload)
            self._waited = False
            self.stats.frames += 1
            self.stats.bytes += sum(map(len, parts))
            self._changed.notify_all()

    def _lose(self, reason: str) -> None:
        with self._changed:
            self.error = reason
            channel, self._channel = self._channel, None
            self._changed.notify_all()
        if channel is not None:
            channel.close()


class ShadowSinks:
    """All shadows of a job, for one stream. They share one copy of every frame."""

    def __init__(self, sinks: Sequence[ShadowSink]) -> None:
        self._sinks = list(sinks)
        atexit.register(self.close)  # a program that ends without `close` sends what it has, too

    def offer(self, header: FrameHeader, parts: Sequence[Buffer]) -> None:
        """Take a copy of a frame for every shadow."""
        payload = joined(parts)
        for sink in self._sinks:
            sink.offer(header, payload)

    def send_state_kinds(self, kinds: Sequence[str]) -> None:
        """Tell every shadow the names of the optimizer's states, in the order in which frames number them."""
        for sink in self._sinks:
            sink.send_state_kinds(kinds)

    def told(self) -> dict[str, Any]:
        """What all sinks have done, as JSON values: sums, the first error, and where there are several, each."""
        each = [sink.told() for sink in self._sinks]
        sums = {key: sum(one[key] for one in each) for key in each[0] if key != "error"}
        error = next((one["error"] for one in each if one["error"] is not None), None)
        apart = {str(sink.address): told for sink, told in zip(self._sinks, each, strict=True)}
        return {**sums, "error": error, **({"shadows": apart} if len(each) > 1 else {})}

    def close(self) -> None:
        """Send what is left, as far as that goes in a few seconds, and end."""
        atexit.unregister(self.close)
        for sink in self._sinks:
            sink.close()
