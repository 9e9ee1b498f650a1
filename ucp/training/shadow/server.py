"""The server of a shadow: receives frames from jobs, and answers queries for its status and state."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ucp import settings
from ucp.errors import StorageError, UcpError
from ucp.log.epoch_manifest import EpochManifest
from ucp.log.frames import FRAME_BYTES, SEGMENT_BYTES, FrameHeader, SegmentHeader, padded
from ucp.training.shadow.protocol import (
    ByteChannel,
    RefusedError,
    ShadowAddress,
    accept_handshake,
    receive,
    receive_json,
    send,
    send_json,
)
from ucp.training.shadow.shadow import Shadow, StepPin
from ucp.training.shadow.shadow_state import StateSnapshot
from ucp.training.shadow.step_assembler import PARTIAL_FRAME, BlockTables, ReceivedFrame, receive_partial
from ucp.training.shadow.transports import is_local, listen, offer_ring, prepare_incoming


class ShadowServer:
    """Serves a shadow at one address, with one thread per connection. Peers without the token get no answer."""

    def __init__(self, shadow: Shadow, address: ShadowAddress, note: Callable[[str], None] = lambda _: None) -> None:
        self._shadow = shadow
        self._key = address.key()
        self._note = note
        self._lock = threading.Lock()
        self._open: dict[ByteChannel, threading.Thread] = {}
        self._snapshots = 0
        self._closing = threading.Event()
        self._socket, self.address = listen(address)
        self._thread = threading.Thread(target=self._accept, name="ucp-shadow-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and end all connections and their threads."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()
        with self._lock:
            threads = list(self._open.values())
        self.disconnect_all()
        for thread in threads:
            thread.join()

    def disconnect_all(self) -> None:
        """End all current connections."""
        with self._lock:
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        reported = False
        while True:
            try:
                sock, _ = self._socket.accept()
                reported = False
            except OSError as error:
                # The process may have run out of file descriptors, or the peer is already gone: keep listening.
                if not (reported or self._closing.is_set()):
                    self._note(f"a connection could not be accepted: {error.strerror or error}")
                reported = True
                if self._closing.wait(settings.SHADOW_ACCEPT_SECONDS):
                    return
                continue
            thread = threading.Thread(target=self._serve, args=(sock,), name="ucp-shadow-peer", daemon=True)
            with self._lock:
                full = len(self._open) >= settings.SHADOW_CONNECTIONS
                if not full:
                    self._open[sock] = thread
            try:
                if not full:
                    thread.start()
                    continue
            except RuntimeError:  # no more threads
                with self._lock:
                    del self._open[sock]
            sock.close()

    def _serve(self, sock: ByteChannel) -> None:
        try:
            sock.settimeout(settings.SHADOW_HANDSHAKE_SECONDS)
            prepare_incoming(sock)
            accept_handshake(sock, self._key)
            sock.settimeout(None)
            first = _dictionary(receive_json(sock, settings.SHADOW_MANIFEST_BYTES))
            if first.get("ask") == "feed":
                self._feed(sock, first)
            elif self.address.transport == "gloo":  # a thread that waits for another question could not be stopped
                hint = "use the shadow's address for TCP or shared memory"
                refused = {"error": "over gloo a shadow only receives frames and returns its status", "hint": hint}
                send_json(sock, self._shadow.status() if first.get("ask") == "status" else refused)
            else:
                self._answer(sock, first)
        except RefusedError as error:
            if str(error) != "the connection was closed":
                self._note(f"refused: {error}")
        except OSError:
            pass  # the peer is gone
        except Exception as error:  # noqa: BLE001 - whatever one peer sends, the others must be served
            self._note(f"refused: {type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._open.pop(sock, None)
                sock.close()

    # Connections that send the frames of one stream -------------------------------------------------------------------

    def _feed(self, sock: ByteChannel, hello: dict[str, Any]) -> None:
        manifest = EpochManifest.from_json(hello["manifest"])
        stream = int(hello["stream"])
        run = None if hello.get("run") is None else Path(str(hello["run"]))
        schema = manifest.stream(stream)
        try:
            number, wanted, stream_shard = self._shadow.join(manifest, stream, run, int(hello.get("oldest", 0)))
        except UcpError as error:
            self._note(f"cannot follow a job: {error}")
            send_json(sock, {"error": error.what, "hint": error.hint})
            return
        channel: ByteChannel = sock
        answer = {"next": wanted, "wants": None if stream_shard is None else stream_shard.to_json()}
        try:
            if is_local(sock):
                send_json(sock, {**answer, "ring": settings.SHADOW_RING_BYTES})
                channel = offer_ring(sock, settings.SHADOW_RING_BYTES)
            else:
                send_json(sock, answer)
            segment = SegmentHeader.unpack(bytes(receive(channel, SEGMENT_BYTES)))
            if (segment.epoch, segment.stream, segment.schema_hash) != (manifest.epoch, stream, schema.hash()):
                raise RefusedError("frames of another stream than announced")
            for frame in frames_of(channel, segment, BlockTables(schema, manifest.state_kinds, stream_shard)):
                self._shadow.put(number, stream, frame, self._closing.is_set)
        except UcpError as error:  # stale, or another epoch: the job will reconnect
            self._note(f"stream {stream}: {error.what}")
        finally:
            self._shadow.leave(number, stream)
            if channel is not sock:
                channel.close()

    # Queries ----------------------------------------------------------------------------------------------------------

    def _answer(self, sock: ByteChannel, question: dict[str, Any]) -> None:
        snapshot: StateSnapshot | None = None
        pin: StepPin | None = None
        try:
            while True:
                asked = question.get("ask")
                try:
                    if asked == "status":
                        send_json(sock, self._shadow.status())
                    elif asked == "pin":
                        pin = pin or self._shadow.pin()
                        send_json(sock, pin.status())
                    elif asked == "snapshot":
                        if snapshot is not None:
                            self._release(snapshot)
                        snapshot = None
                        snapshot = self._take(pin, question.get("step"))
                        pin = None
                        send_json(sock, snapshot.description)
                    elif asked == "read" and snapshot is not None:
                        self._read(sock, snapshot, question)
                    else:
                        raise RefusedError("an unknown query")
                except UcpError as error:
                    if pin is not None:
                        pin.close()
                        pin = None
                    send_json(sock, {"error": error.what, "hint": error.hint})
                question = _dictionary(receive_json(sock, settings.SHADOW_REQUEST_BYTES))
        finally:
            if pin is not None:
                pin.close()
            if snapshot is not None:
                self._release(snapshot)

    def _take(self, pin: StepPin | None, step: Any) -> StateSnapshot:
        """A snapshot of the newest step, or of a pinned one; closes the pin."""
        with self._lock:
            if self._snapshots >= settings.SHADOW_SNAPSHOTS:
                raise StorageError(
                    f"{self._snapshots} conversions of this shadow are in progress", hint="wait until one has finished"
                )
            self._snapshots += 1
        try:
            if pin is None:
                return self._shadow.snapshot()
            made = pin.snapshot(int(step))
            pin.close()
            return made
        except BaseException:
            with self._lock:
                self._snapshots -= 1
            raise

    def _release(self, snapshot: StateSnapshot) -> None:
        snapshot.close()
        with self._lock:
            self._snapshots -= 1

    def _read(self, sock: ByteChannel, snapshot: StateSnapshot, question: dict[str, Any]) -> None:
        size = int(question["size"])
        if not 0 <= size <= settings.SHADOW_READ_BYTES:
            raise RefusedError(f"a query for {size} bytes")
        data = np.empty(size, np.uint8).data
        key = int(question["stream"]), int(question["tensor"]), str(question["kind"])
        snapshot.read_into(key, int(question["offset"]), data)
        send_json(sock, {"size": size})
        send(sock, [data])


def _dictionary(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RefusedError("a message that is not a JSON object")
    return value


def frames_of(sock: ByteChannel, segment: SegmentHeader, tables: BlockTables) -> Iterator[ReceivedFrame]:
    """Receive frames until one violates the protocol."""
    at = SEGMENT_BYTES
    while True:
        header = FrameHeader.unpack(bytes(receive(sock, FRAME_BYTES)), segment.salt)
        if header.offset != at or header.length > tables.payload_limit(header.type):
            raise RefusedError(f"a frame of {header.length} bytes at {header.offset}")
        if header.flags & PARTIAL_FRAME:
            if tables.stream_shard is None:
                raise RefusedError("a partial frame, although the whole frame is needed")
            yield receive_partial(sock, header, tables)
        else:
            yield ReceivedFrame(header, receive(sock, padded(header.length))[: header.length])
        at = header.end
