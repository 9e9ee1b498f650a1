"""The job's side of a shadow: send the frames of the log to it, without delaying training more than allowed.

The newest frames are kept in memory, sent or not, up to a limit: a shadow that was disconnected gets those it has
missed, and reads older ones from the log. A shadow of a shard is sent only the blocks of that shard.
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
    concatenated,
    receive_json,
    send,
    send_json,
)
from ucp.training.shadow.step_assembler import PARTIAL_FRAME, BlockTables, StreamShard, wanted_parts
from ucp.training.shadow.transports import GlooChannel, connect, is_local, take_ring

_ZEROS = bytes(FRAME_BYTES)


@dataclass(slots=True)
class SinkStats:
    """Counters of a sink."""

    frames: int = 0  # sent frames, including those sent again
    bytes: int = 0
    dropped: int = 0  # frames that were never sent: the shadow reads them from the log
    connections: int = 0
    stall_seconds: float = 0.0  # time that the log's thread waited for space


class ShadowSink:
    """Sends one stream to a shadow from its own thread. `offer` is called by the thread that writes the log."""

    def __init__(
        self, address: ShadowAddress, manifest: EpochManifest, stream: int, run: Path | None, *, wait: float = 0.0
    ) -> None:
        """Connect; `UcpError` if that fails. `offer` may wait up to `wait` seconds for space."""
        self.address = address
        self.stats = SinkStats()
        self._tables = BlockTables(manifest.stream(stream), manifest.state_kinds)  # with the shadow's shard
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
        self._kept: deque[tuple[FrameHeader, memoryview]] = deque()  # consecutive frames
        self._kept_bytes = 0
        self._unsent_bytes = 0  # of the kept frames
        self._next_lsn = 0  # number of the next frame from the log
        self._next: int | None = None  # number of the next frame to send; None: the first kept one
        self._closing = False
        self._opened: ByteChannel | None = None  # the channel that the thread may be waiting for
        self._channel: ByteChannel | None = None
        self._hello_changed = False  # the connection was opened with an outdated description of the job
        self._at = 0
        self._salt = 0
        self.error: str | None = None  # why the shadow cannot be reached now
        self._connect()
        self._thread = threading.Thread(target=self._run, name="ucp-shadow-sink", daemon=True)
        self._thread.start()

    # The log's side ---------------------------------------------------------------------------------------------------

    def offer(self, header: FrameHeader, payload: memoryview) -> None:
        """Add a frame. Waits for space up to the limit, then drops the oldest frames."""
        with self._changed:
            if self._kept and header.lsn != self._kept[-1][0].lsn + 1:
                if header.lsn <= self._kept[-1][0].lsn:
                    return  # rewritten after a disk error: it was offered before
                while self._kept:
                    self._drop_oldest()
            if self._is_full(len(payload)) and self._wait > 0 and not self._waited and self.error is None:
                begin = time.monotonic()
                room = self._changed.wait_for(lambda: not self._is_full(len(payload)) or self._closing, self._wait)
                self._waited = not room  # wait only once, until the shadow receives something again
                self.stats.stall_seconds += time.monotonic() - begin
            while self._kept and self._kept_bytes + len(payload) > settings.SHADOW_QUEUE_BYTES:
                self._drop_oldest()
            self._kept.append((header, payload))
            self._next_lsn = header.lsn + 1
            self._kept_bytes += len(payload)
            self._unsent_bytes += len(payload)
            self._changed.notify_all()

    def send_state_kinds(self, kinds: Sequence[str]) -> None:
        """Send the names of the optimizer's states to the shadow, before any frame contains them."""
        with self._changed:
            self._hello = {**self._hello, "manifest": {**self._hello["manifest"], "state_kinds": list(kinds)}}
            self._tables.set_kinds(kinds)
            self._hello_changed = True

    def _is_full(self, size: int) -> bool:
        """Whether another frame would push out one that was not sent."""
        return bool(self._unsent_bytes) and self._unsent_bytes + size > settings.SHADOW_QUEUE_BYTES

    def _drop_oldest(self) -> None:
        header, payload = self._kept.popleft()
        self._kept_bytes -= len(payload)
        if self._next is None or header.lsn >= self._next:
            self._unsent_bytes -= len(payload)
            self.stats.dropped += 1
            self._next = header.lsn + 1

    def report(self) -> dict[str, Any]:
        """The counters, and the reason if the shadow cannot be reached, as JSON values."""
        return {**asdict(self.stats), "error": self.error}

    def close(self, seconds: float = 5.0) -> None:
        """Send the remaining frames, for at most a few seconds, and stop."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(seconds)
        end = time.monotonic() + settings.SHADOW_SEND_SECONDS
        while self._thread.is_alive() and time.monotonic() < end:  # it is blocked by a shadow that does not read
            with self._changed:
                if self._opened is not None:
                    with contextlib.suppress(OSError):
                        self._opened.shutdown(socket.SHUT_RDWR)
            self._thread.join(0.1)

    # The thread's side ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                beats = settings.SHADOW_HEARTBEAT_SECONDS if isinstance(self._channel, GlooChannel) else None
                self._changed.wait_for(lambda: self._frame() is not None or self._closing, beats)
                frame = self._frame()
                if frame is None and self._closing:  # everything is sent
                    break
            try:
                if frame is None:
                    if isinstance(self._channel, GlooChannel):
                        self._channel.send_heartbeat()
                    continue
                if self._hello_changed and self._channel is not None:
                    self._channel.close()
                    self._channel = None
                if self._channel is None:
                    self._connect()
                    continue  # the shadow may need another frame
                self._send(*frame)
            except (OSError, RefusedError, UcpError) as error:
                with self._changed:
                    self.error = str(error)
                    channel, self._channel = self._channel, None
                    self._changed.notify_all()
                if channel is not None:
                    channel.close()
                with self._changed:
                    if self._changed.wait_for(lambda: self._closing, settings.SHADOW_RETRY_SECONDS):
                        break
        if self._channel is not None:
            self._channel.close()

    def _frame(self) -> tuple[FrameHeader, memoryview] | None:
        """The next frame to send."""
        if not self._kept:
            return None
        first = self._kept[0][0].lsn
        place = 0 if self._next is None else max(self._next - first, 0)
        return self._kept[place] if place < len(self._kept) else None

    def _connect(self) -> None:
        def on_opened(channel: ByteChannel) -> None:
            with self._changed:
                self._opened = channel

        sock = connect(self.address, on_opened)
        try:
            with self._changed:
                oldest = self._kept[0][0].lsn if self._kept else self._next_lsn
                hello, self._hello_changed = self._hello, False
            send_json(sock, {**hello, "oldest": oldest})
            sock.settimeout(None)  # it may load a base first; TCP keepalive notices if it dies
            answer: Any = receive_json(sock, settings.SHADOW_REQUEST_BYTES)
            if not isinstance(answer, dict) or "error" in answer:
                raise UcpError(f"{self.address}: {answer['error']}", hint=answer.get("hint"))
            wanted = None if answer.get("next") is None else int(answer["next"])
            channel = take_ring(sock, int(answer["ring"])) if is_local(sock) else sock
            stream_shard = None if answer.get("wants") is None else StreamShard.from_json(answer["wants"])
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
            self._tables.stream_shard = stream_shard
            self._next = wanted
            unsent = (len(payload) for header, payload in self._kept if header.lsn >= (self._next or 0))
            self._unsent_bytes = sum(unsent)
            self.error = None
            self._channel = channel
        self.stats.connections += 1

    def _send(self, header: FrameHeader, payload: memoryview) -> None:
        assert self._channel is not None
        placed = replace(header, offset=self._at)
        wanted = None if self._tables.stream_shard is None else wanted_parts(header, payload, self._tables)
        if wanted is None:
            tail = _ZEROS[: padded(len(payload)) - len(payload)]
            parts: list[Buffer] = [placed.pack(self._salt), payload, tail]
        else:
            parts = [replace(placed, flags=placed.flags | PARTIAL_FRAME).pack(self._salt), *wanted]
        send(self._channel, parts)
        self._at = placed.end
        with self._changed:
            if self._next is None or header.lsn >= self._next:  # otherwise it was dropped while it was being sent
                self._next = header.lsn + 1
                self._unsent_bytes -= len(payload)
            self._waited = False
            self.stats.frames += 1
            self.stats.bytes += sum(map(len, parts))
            self._changed.notify_all()


class ShadowSinks:
    """The sinks of one stream to all shadows of a job. They share one copy of every frame."""

    def __init__(self, sinks: Sequence[ShadowSink]) -> None:
        self._sinks = list(sinks)
        atexit.register(self.close)  # also send the remaining frames of a program that does not call `close`

    def offer(self, header: FrameHeader, parts: Sequence[Buffer]) -> None:
        """Add a copy of a frame to every sink."""
        payload = concatenated(parts)
        for sink in self._sinks:
            sink.offer(header, payload)

    def send_state_kinds(self, kinds: Sequence[str]) -> None:
        """Send the names of the optimizer's states, in the order of their numbers in frames, to every shadow."""
        for sink in self._sinks:
            sink.send_state_kinds(kinds)

    def report(self) -> dict[str, Any]:
        """The sums of all counters and the first error as JSON values; with several shadows, also each one's."""
        each = [sink.report() for sink in self._sinks]
        sums = {key: sum(one[key] for one in each) for key in each[0] if key != "error"}
        error = next((one["error"] for one in each if one["error"] is not None), None)
        by_address = {str(sink.address): report for sink, report in zip(self._sinks, each, strict=True)}
        return {**sums, "error": error, **({"shadows": by_address} if len(each) > 1 else {})}

    def close(self) -> None:
        """Send the remaining frames, for at most a few seconds, and stop."""
        atexit.unregister(self.close)
        for sink in self._sinks:
            sink.close()
