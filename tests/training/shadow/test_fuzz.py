"""Whatever a peer sends to a running shadow, it stays small, alive and correct: thousands of random messages."""

from __future__ import annotations

import contextlib
import json
import random
import re
import resource
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ucp
from tests.replay.logged_job import assert_same, state_of
from tests.training.shadow import trainer
from tests.training.shadow.follower import until
from tests.training.shadow.shadow_processes import Processes, expected
from ucp.log.epoch_manifest import EpochManifest
from ucp.log.frames import FRAME_BYTES, SEGMENT_BYTES, FrameHeader, FrameType, SegmentHeader, padded
from ucp.training.shadow.client import status
from ucp.training.shadow.protocol import RefusedError, parse_address, receive_json, send_json, start_handshake

STEPS = 3
GROWTH = 96 << 20  # bytes that a shadow may grow by, whatever is claimed: one lie claims gigabytes


class Target:
    """A shadow in a separate process that has followed a job, and what a peer knows about it."""

    def __init__(self, process: subprocess.Popen[str], url: str, run: Path) -> None:
        self.process, self.url = process, url
        self.port = parse_address(url).port
        epoch = run / "log" / "epoch-000000"
        self.manifest_json = json.loads((epoch / "manifest.json").read_bytes())
        self.manifest = EpochManifest.from_json(self.manifest_json)
        (segment,) = (epoch / "stream-00000").iterdir()
        data = segment.read_bytes()
        self.salt = SegmentHeader.unpack(data[:SEGMENT_BYTES]).salt
        self.frames: list[tuple[FrameHeader, bytes]] = []
        at = SEGMENT_BYTES
        while at < len(data) and any(data[at : at + FRAME_BYTES]):
            header = FrameHeader.unpack(data[at : at + FRAME_BYTES], self.salt)
            self.frames.append((header, data[at + FRAME_BYTES : at + FRAME_BYTES + padded(header.length)]))
            at = header.end

    def connect(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port))
        sock.settimeout(60)
        return sock

    def peak(self) -> int:
        """The peak memory of the process, in bytes."""
        status_file = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(re.search(r"VmHWM:\s+(\d+)", status_file)[1])  # type: ignore[index]


@pytest.fixture
def processes() -> Iterator[Processes]:
    made = Processes(quiet=True)  # it reports what it refuses, which is a lot here
    yield made
    made.end()


def _garbage(target: Target, chance: random.Random) -> None:
    """Random bytes, before or after the handshake."""
    with target.connect() as sock:
        if chance.random() < 0.7:
            start_handshake(sock, b"")
        sock.sendall(chance.randbytes(chance.choice([1, 4, 72, 500, 5000])))


def _length(target: Target, chance: random.Random) -> None:
    """A length that is too large, or not followed by that number of bytes."""
    with target.connect() as sock:
        start_handshake(sock, b"")
        sock.sendall(struct.pack("<I", chance.choice([0, 1, 1 << 16, 1 << 28, (1 << 29) - 1, 1 << 29, 2**32 - 1])))
        sock.sendall(chance.randbytes(chance.choice([0, 1, 1000])))


def _value(chance: random.Random) -> Any:
    """A random JSON value."""
    some = [None, True, -1, 0, 3, 2**63, 10**30, 1e308, "", "x", "master", "../..", [], {}, [[]], {"a": []}, "9" * 5000]
    return chance.choice(some)


def _question(target: Target, chance: random.Random) -> None:
    """Queries of all kinds with invalid fields."""
    with target.connect() as sock:
        start_handshake(sock, b"")
        for _ in range(6):
            asked = {"ask": chance.choice(["status", "snapshot", "read", "pin", "feed", "x", _value(chance)])}
            for key in ("stream", "tensor", "kind", "offset", "size", "step", "manifest", "run", "oldest"):
                if chance.random() < 0.6:
                    asked[key] = _value(chance)
            send_json(sock, chance.choice([asked, asked, asked, _value(chance)]))
            answer = receive_json(sock, 1 << 26)
            if isinstance(answer, dict) and "size" in answer:
                sock.recv(1 << 16)


def _manifest(target: Target, chance: random.Random) -> None:
    """A manifest with one changed value."""
    changed = json.loads(json.dumps(target.manifest_json))
    place: Any = changed
    while True:
        key = chance.choice(list(place) if isinstance(place, dict) else range(len(place)))
        if isinstance(place[key], dict | list) and place[key] and chance.random() < 0.8:
            place = place[key]
            continue
        place[key] = _value(chance)
        break
    if changed == target.manifest_json or changed.get("epoch") == 3:
        return
    with target.connect() as sock:
        start_handshake(sock, b"")
        send_json(sock, {"ask": "feed", "manifest": changed, "stream": 0, "run": None})
        receive_json(sock, 1 << 26)


def _frame(target: Target, chance: random.Random) -> None:
    """A frame whose header is well-formed but wrong, or whose payload differs."""
    wanted = target.frames[-1][0].lsn + 1
    header, payload = chance.choice(target.frames)
    header = replace(header, offset=SEGMENT_BYTES)
    big = [0, 1, 63, 64, 65, 2**20, 2**31, 2**40, 2**63 - 1]
    changes: list[Callable[[], Any]] = [
        lambda: {"length": chance.choice(big)},
        lambda: {"length": chance.choice(big), "type": chance.choice(list(FrameType))},
        lambda: {"offset": chance.choice(big)},
        lambda: {"flags": chance.randrange(256)},
        lambda: {"stream": chance.randrange(2**32)},
        lambda: {"epoch": chance.randrange(1, 2**32)},
        lambda: {"step": chance.randrange(2**40), "checksum": chance.randrange(2**63)},
        lambda: {"lsn": wanted, "checksum": chance.randrange(2**63)},
        lambda: {"lsn": wanted, "type": FrameType.GRAD, "length": chance.choice(big)},
    ]
    changed = replace(header, **chance.choice(changes)())
    if changed.lsn == wanted and changed.checksum == header.checksum and changed.length == header.length:
        return  # which is true
    if chance.random() < 0.5 and payload:
        spoiled = bytearray(payload)
        for _ in range(chance.randrange(1, 9)):
            spoiled[chance.randrange(len(spoiled))] = chance.randrange(256)
        payload = bytes(spoiled)
    with target.connect() as sock:
        start_handshake(sock, b"")
        send_json(sock, {"ask": "feed", "manifest": target.manifest_json, "stream": 0, "run": None, "oldest": 0})
        receive_json(sock, 1 << 20)
        segment = SegmentHeader(0, 0, 0, 5, target.manifest.stream(0).hash(), 0)
        sock.sendall(segment.pack() + changed.pack(5) + payload + chance.randbytes(chance.choice([0, 64, 5000])))


MESSAGES: dict[str, Callable[[Target, random.Random], None]] = {
    "garbage": _garbage,
    "lengths": _length,
    "questions": _question,
    "manifests": _manifest,
    "frames": _frame,
}


def test_thousands_of_malformed_messages(tmp_path: Path, processes: Processes) -> None:
    torch.set_num_threads(1)
    net, optimizer = trainer.build()
    process, url = processes.shadow()
    with ucp.record(tmp_path / "run", net, optimizer, to=url) as recorder:
        for step in range(1, STEPS + 1):
            trainer.step(net, optimizer, step)
        recorder.flush()
        until(lambda: status(url)["step"] == STEPS)
        target = Target(process, url, tmp_path / "run")
        assert len(target.frames) >= 3 * STEPS
        before = target.peak()
        for name, send_message in MESSAGES.items():
            chance = random.Random(name)
            for _ in range(400):
                with contextlib.suppress(RefusedError, ConnectionError):  # it has hung up
                    send_message(target, chance)
            assert process.poll() is None
            assert status(url)["step"] == STEPS, name
            assert target.peak() - before < GROWTH, name
        for step in range(STEPS + 1, STEPS + 4):
            trainer.step(net, optimizer, step)
    until(lambda: status(url)["step"] == STEPS + 3)
    ucp.convert(url, tmp_path / "end")
    assert_same(state_of(ucp.open(tmp_path / "end").index), expected(STEPS + 3)[2])


def test_more_connections_than_file_descriptors(processes: Processes) -> None:
    """Silent connections use up all file descriptors; when they are closed, others are accepted again."""
    process, url = processes.shadow()
    port = parse_address(url).port
    used = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (used + 5, used + 5))
    peers = [socket.create_connection(("127.0.0.1", port)) for _ in range(12)]
    until(lambda: len(list(Path(f"/proc/{process.pid}/fd").iterdir())) == used + 5)
    for peer in peers:
        peer.close()
    assert status(url)["condition"] == "loading"
