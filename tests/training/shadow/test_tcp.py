"""A shadow over TCP: jobs that send to it, queries, and peers that are refused."""

from __future__ import annotations

import contextlib
import copy
import json
import secrets
import socket
import struct
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ucp
from tests.replay.logged_job import assert_same, state_of
from tests.training.shadow.follower import held, until, wait_for
from tests.training.shadow.jobs import Job, Pair
from ucp import settings
from ucp.errors import StorageError, UcpError, UsageError
from ucp.training.shadow.client import status
from ucp.training.shadow.protocol import ShadowAddress, parse_address, read_token, require_token
from ucp.training.shadow.shadow import Shadow


def test_every_step_of_a_job_over_tcp(tmp_path: Path, pairs: list[Pair]) -> None:
    """Log and shadow are two sinks of one recorder: both have every step, the shadow only from the socket."""
    pairs.append(Pair())
    job = Job(tmp_path / "run", to=pairs[0].url)
    shadow = pairs[0].shadow
    for feed in shadow.follower.feeds.values():  # type: ignore[union-attr]
        feed.tail = None
    for step in range(1, 21):
        job.train()
        wait_for(shadow, step)
        assert_same(state_of(held(shadow)), job.history[step])
    found = status(pairs[0].url)
    assert (found["step"], found["lag_steps"], found["feeds"], found["condition"]) == (20, 0, 1, "live")
    assert found["state_bytes"] >= 3 * 4 * sum(p.numel() for p in job.net.parameters())
    job.recorder.close()
    assert job.shadow_stats()["dropped"] == 0
    assert ucp.diff(pairs[0].url, tmp_path / "run", log_b=tmp_path / "run", step_b=20).same


def test_two_hundred_steps_from_every_source(tmp_path: Path, pairs: list[Pair]) -> None:
    """Shadows over TCP and shared memory, and one that follows the files, match every digest of the job."""
    pairs.append(Pair())
    pairs.append(Pair(address=ShadowAddress(f"test-{secrets.token_hex(8)}", 0, None, "shm")))
    job = Job(tmp_path / "run", to=[pair.url for pair in pairs])
    for pair in pairs:  # by what is sent alone
        for feed in pair.shadow.follower.feeds.values():  # type: ignore[union-attr]
            feed.tail = None
    pairs.append(Pair(None, tmp_path / "run"))
    for _ in range(20):
        job.train(10)
        job.recorder.digest()
    job.recorder.close()
    for pair in pairs:
        wait_for(pair.shadow, 200)
        assert_same(state_of(held(pair.shadow)), job.history[200])
        until(partial(_is_proven, pair.shadow, 200))
    assert pairs[0].shadow.status()["epoch"] == 0
    assert job.shadow_stats()["connections"] == 2


def _is_proven(shadow: Shadow, step: int) -> bool:
    return bool(shadow.status()["proven_step"] == step)


def test_a_shadow_is_read_like_any_source_while_the_job_continues(tmp_path: Path, pairs: list[Pair]) -> None:
    """An open checkpoint stays at its step; one that is opened later is newer."""
    pairs.append(Pair())
    job = Job(tmp_path / "run", to=pairs[0].url)
    job.train(3)
    wait_for(pairs[0].shadow, 3)
    opened = ucp.open(pairs[0].url)
    job.train(4)
    wait_for(pairs[0].shadow, 7)
    ucp.convert(pairs[0].url, tmp_path / "seven")
    assert opened.index.step == 3
    assert_same(state_of(opened.index), job.history[3])
    assert_same(state_of(ucp.open(tmp_path / "seven").index), job.history[7])
    assert ucp.verify(tmp_path / "seven", "deep").ok
    del opened
    with pytest.raises(UsageError, match="holds only the newest step"):
        ucp.open(pairs[0].url, log=tmp_path / "run", step=2)
    with pytest.raises(StorageError, match="use the copy"):
        ucp.load_into(pairs[0].url, job.net, job.optimizer)
    job.recorder.close()


def test_the_base_of_the_shadow_was_dropped(tmp_path: Path, pairs: list[Pair]) -> None:
    """A shadow can be read although its own base was dropped."""
    pairs.append(Pair())
    job = Job(tmp_path / "run", to=pairs[0].url, base_every=2, keep_bases=1)
    job.train(7)
    job.recorder.flush()
    wait_for(pairs[0].shadow, 7)
    job.recorder.close()
    assert not Path(pairs[0].shadow.status()["base"]).exists()
    assert_same(state_of(ucp.open(pairs[0].url).index), job.history[7])


def test_a_shadow_that_is_restarted(tmp_path: Path, pairs: list[Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """Training continues without it; a new one catches up from the log and is connected again."""
    monkeypatch.setattr(settings, "SHADOW_RETRY_SECONDS", 0.05)
    first = Pair()
    job = Job(tmp_path / "run", to=first.url)
    job.train(3)
    wait_for(first.shadow, 3)
    port = first.server.address.port
    first.close()
    job.train(20)
    assert job.step == 23
    job.recorder.flush()
    pairs.append(Pair(None, tmp_path / "run", address=ShadowAddress("127.0.0.1", port)))
    job.train(2)
    wait_for(pairs[0].shadow, 25)
    assert_same(state_of(held(pairs[0].shadow)), job.history[25])
    end = time.monotonic() + 120
    while not pairs[0].shadow.status()["feeds"] and time.monotonic() < end:
        time.sleep(0.01)
        job.train()
    assert pairs[0].shadow.status()["feeds"] == 1
    assert job.shadow_stats()["connections"] == 2
    job.train(3)
    wait_for(pairs[0].shadow, job.step)
    assert_same(state_of(held(pairs[0].shadow)), job.history[job.step])
    job.recorder.close()


@pytest.mark.parametrize("wait", [0.0, 0.3])
def test_a_shadow_that_is_too_slow_reads_the_log(
    tmp_path: Path, pairs: list[Pair], monkeypatch: pytest.MonkeyPatch, wait: float
) -> None:
    """It reads nothing for a while: the job drops frames, and waits no longer than allowed."""
    monkeypatch.setattr(settings, "SHADOW_QUEUE_BYTES", 2 * 1024 * 1024)
    monkeypatch.setattr(settings, "SHADOW_PENDING_BYTES", 1024 * 1024)
    pairs.append(Pair())
    shadow = pairs[0].shadow
    job = Job(tmp_path / "run", width=4096, to=pairs[0].url, shadow_wait=wait)
    job.train(1)
    wait_for(shadow, 1)
    with shadow.follower.state._lock:  # type: ignore[union-attr]  # nothing is applied while this is held
        begin = time.monotonic()
        while not job.shadow_stats()["dropped"]:
            job.train(5)
            assert time.monotonic() - begin < 120
        first = job.shadow_stats()["stall_seconds"]
        assert first == 0 if wait == 0 else first >= wait
        still = 0  # rounds in which the shadow took nothing: a socket takes some, too
        while still < 2:
            before = job.shadow_stats()
            job.train(5)
            job.recorder.flush()
            after = job.shadow_stats()
            still = still + 1 if after["frames"] == before["frames"] else 0
            assert time.monotonic() - begin < 120
        assert after["stall_seconds"] == before["stall_seconds"]  # the log does not wait for the shadow again
        assert shadow.status()["step"] == 1
        assert shadow.status()["lag_steps"] >= 1
    wait_for(shadow, job.step)
    assert_same(state_of(held(shadow)), job.history[job.step])
    job.recorder.close()


def test_an_interrupted_connection(tmp_path: Path, pairs: list[Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted at any time, repeatedly: no step is lost or applied twice."""
    monkeypatch.setattr(settings, "SHADOW_RETRY_SECONDS", 0.01)
    pairs.append(Pair())
    job = Job(tmp_path / "run", to=pairs[0].url)
    for number in range(1, 41):
        job.train()
        if number % 4 == 0:
            pairs[0].server.disconnect_all()
    job.recorder.flush()
    wait_for(pairs[0].shadow, 40)
    assert_same(state_of(held(pairs[0].shadow)), job.history[40])
    job.recorder.close()
    assert pairs[0].shadow.status()["condition"] == "live"


def test_a_restarted_job_is_followed(tmp_path: Path, pairs: list[Pair]) -> None:
    """Another epoch of the same run, from an older step than the shadow has."""
    pairs.append(Pair())
    job = Job(tmp_path / "run", to=pairs[0].url)
    job.train(4)
    job.recorder.close()
    wait_for(pairs[0].shadow, 4)
    ucp.convert(tmp_path / "run", tmp_path / "two", log=tmp_path / "run", step=2)
    again = Job.__new__(Job)
    again.net = torch.nn.Sequential(torch.nn.Linear(13, 33), torch.nn.Tanh(), torch.nn.Linear(33, 5))
    again.optimizer = torch.optim.AdamW(again.net.parameters(), lr=1e-2)
    ucp.load_into(tmp_path / "two", again.net, again.optimizer)
    again.step, again.history = 2, {}
    again.recorder = ucp.record(tmp_path / "run", again.net, again.optimizer, to=pairs[0].url)
    again.train(1)
    again.recorder.flush()
    until(lambda: pairs[0].shadow.status()["step"] == 3)
    assert pairs[0].shadow.status()["epoch"] == 1
    assert_same(state_of(held(pairs[0].shadow)), again.history[3])
    again.recorder.close()


# ----------------------------------------------------------------------------------------------------------------------
# Who is let in


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("a secret of some length\n")
    path.chmod(0o600)
    return path


def test_only_peers_with_the_token_are_accepted(tmp_path: Path, pairs: list[Pair], token: Path) -> None:
    pairs.append(Pair(address=ShadowAddress("0.0.0.0", 0, token)))
    address = f"127.0.0.1:{pairs[0].server.address.port}"
    wrong = tmp_path / "wrong"
    wrong.write_text("another secret of some length")
    wrong.chmod(0o600)
    for url in (f"shadow://{address}", f"shadow://{address}?token={wrong}"):
        with pytest.raises(StorageError, match="the connection was refused"):
            status(url)
        with pytest.raises(UcpError, match="the connection was refused"):
            Job(tmp_path / "run", to=url)
    assert status(f"shadow://{address}?token={token}")["condition"] == "loading"
    job = Job(tmp_path / "run2", to=f"shadow://{address}?token={token}")
    job.train(2)
    wait_for(pairs[0].shadow, 2)
    job.recorder.close()


def test_a_peer_without_the_token_gets_only_a_challenge(pairs: list[Pair], token: Path) -> None:
    pairs.append(Pair(address=ShadowAddress("127.0.0.1", 0, token)))
    with socket.create_connection(("127.0.0.1", pairs[0].server.address.port)) as sock:
        assert len(_all(sock, 40)) == 40
        sock.sendall(b"UCPSHDW1" + bytes(64))
        assert _all(sock, 1) == b""


def _all(sock: socket.socket, size: int) -> bytes:
    """`size` bytes, or fewer if the other end closes."""
    sock.settimeout(120)
    data = b""
    with contextlib.suppress(ConnectionResetError):  # closed with bytes of ours unread
        while len(data) < size and (more := sock.recv(size - len(data))):
            data += more
    return data


def test_other_machines_need_a_token(token: Path) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        with pytest.raises(UsageError, match="needs a token"):
            require_token(ShadowAddress(host, 0))
        require_token(ShadowAddress(host, 0, token))
    require_token(ShadowAddress("127.0.0.1", 0))
    require_token(ShadowAddress("::1", 0))


def test_weak_and_readable_tokens_are_refused(tmp_path: Path, token: Path) -> None:
    assert read_token(token) == b"a secret of some length"
    token.chmod(0o644)
    with pytest.raises(UsageError, match="other users can read"):
        read_token(token)
    short = tmp_path / "short"
    short.write_text("abc")
    with pytest.raises(UsageError, match="too short"):
        read_token(short)


@pytest.mark.parametrize("text", ["nowhere", "host:port", "host:99999", "shadow://"])
def test_malformed_addresses_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not an address"):
        parse_address(text)


def test_an_unreachable_shadow(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"shadow://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(StorageError, match="cannot be reached"):
        Job(tmp_path / "run", to=url)


# ----------------------------------------------------------------------------------------------------------------------
# Lengths are not believed


@pytest.mark.parametrize("length", [2**32 - 1, settings.SHADOW_MANIFEST_BYTES + 1])
def test_a_message_with_a_too_large_size(pairs: list[Pair], length: int) -> None:
    from ucp.training.shadow.protocol import start_handshake

    pairs.append(Pair())
    with socket.create_connection(("127.0.0.1", pairs[0].server.address.port)) as sock:
        start_handshake(sock, b"")
        sock.sendall(struct.pack("<I", length))
        assert _all(sock, 1) == b""
    assert any("maximum" in note for note in pairs[0].notes)


def test_damaged_frames_are_refused(tmp_path: Path, pairs: list[Pair]) -> None:
    """A frame that is too long, has another number, or a flipped bit: the connection ends, the state stays."""
    from dataclasses import replace

    from ucp.log.frames import SEGMENT_BYTES, FrameHeader, FrameType, SegmentHeader
    from ucp.training.shadow.protocol import receive_json, send_json, start_handshake

    pairs.append(Pair())
    job = Job(tmp_path / "run", to=pairs[0].url)
    job.train(1)
    wait_for(pairs[0].shadow, 1)
    manifest = pairs[0].shadow.follower.state.manifest  # type: ignore[union-attr]
    good = FrameHeader(FrameType.GRAD, 0, 0, manifest.epoch, 99, 2, 64, 0, SEGMENT_BYTES)
    payload = bytes(64)
    for header in (
        replace(good, length=1 << 40),
        replace(good, offset=0),
        replace(good, stream=5),
        replace(good, type=FrameType.AUX, length=settings.SHADOW_FRAME_BYTES + 64),
        replace(good, epoch=9),
    ):
        with socket.create_connection(("127.0.0.1", pairs[0].server.address.port)) as sock:
            start_handshake(sock, b"")
            send_json(sock, {"ask": "feed", "manifest": manifest.to_json(), "stream": 0, "run": None})
            receive_json(sock, 1 << 20)
            segment = SegmentHeader(manifest.epoch, 0, 0, 5, manifest.stream(0).hash(), 0)
            sock.sendall(segment.pack() + header.pack(5) + payload)
            assert _all(sock, 1) == b""
    job.train(1)
    wait_for(pairs[0].shadow, 2)
    assert_same(state_of(held(pairs[0].shadow)), job.history[2])
    job.recorder.close()


def test_a_gap_that_the_log_does_not_fill(tmp_path: Path, pairs: list[Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection with a frame far ahead is ended after a while; the job's own frames arrive as before."""
    from ucp.log.frames import SEGMENT_BYTES, FrameHeader, FrameType, SegmentHeader, checksum
    from ucp.training.shadow.protocol import receive_json, send_json, start_handshake

    monkeypatch.setattr(settings, "SHADOW_GAP_SECONDS", 0.1)
    pairs.append(Pair())
    job = Job(tmp_path / "run", to=pairs[0].url)
    job.train(1)
    wait_for(pairs[0].shadow, 1)
    manifest = pairs[0].shadow.follower.state.manifest  # type: ignore[union-attr]
    far = FrameHeader(FrameType.AUX, 0, 0, manifest.epoch, 10**9, 2, 64, checksum(bytes(64)), SEGMENT_BYTES)
    with socket.create_connection(("127.0.0.1", pairs[0].server.address.port)) as sock:
        sock.settimeout(120)
        start_handshake(sock, b"")
        send_json(sock, {"ask": "feed", "manifest": manifest.to_json(), "stream": 0, "run": str(tmp_path / "run")})
        receive_json(sock, 1 << 20)
        segment = SegmentHeader(manifest.epoch, 0, 0, 5, manifest.stream(0).hash(), 0)
        sock.sendall(segment.pack() + far.pack(5) + bytes(64))
        assert _all(sock, 1) == b""
    until(lambda: status(pairs[0].url)["feeds"] == 1)
    job.train(2)
    wait_for(pairs[0].shadow, 3)
    assert_same(state_of(held(pairs[0].shadow)), job.history[3])
    job.recorder.close()
    assert any("the missing frames are not in the log" in note for note in pairs[0].notes)


def _set(value: Any, *keys: Any) -> Callable[[Any], None]:
    """A change to a manifest: the value at this place."""

    def change(manifest: Any) -> None:
        for key in keys[:-1]:
            manifest = manifest[key]
        manifest[keys[-1]] = value

    return change


HUGE = 10**15
MANIFESTS: dict[str, Callable[[Any], None]] = {
    "a tensor that is mostly padding": _set(HUGE, "streams", 0, "tensors", 0, "numel"),
    "a block past its tensor": _set(HUGE, "streams", 0, "blocks", 0, 6),
    "a block before its tensor": _set(-4, "streams", 0, "blocks", 0, 6),
    "a block of no parameter": _set(99, "streams", 0, "blocks", 0, 1),
    "a block of no tensor": _set(99, "streams", 0, "blocks", 0, 5),
    "a parameter of another shape": _set([HUGE, HUGE], "parameters", 0, "shape"),
    "an unknown parameter": _set("nobody", "parameters", 0, "name"),
    "another step": _set(7, "start"),
    "an unknown optimizer": _set("some.Own", "kernel", "id"),
    "no streams": _set([], "streams"),
    "numbers that are none": _set("many", "streams", 0, "tensors", 0, "numel"),
    "a mesh that is none": _set([1], "mesh"),
    "no manifest": _set(None, "parameters"),
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A base, and the manifest of the epoch that continues from it."""
    run = tmp_path_factory.mktemp("recorded")
    job = Job(run)
    job.train(1)
    job.recorder.close()
    manifest = json.loads((run / "log" / "epoch-000000" / "manifest.json").read_bytes())
    return run / "base" / "base-000000" / "atoms", manifest


@pytest.mark.parametrize("name", MANIFESTS)
def test_malformed_manifests_are_refused(pairs: list[Pair], recorded: tuple[Path, Any], name: str) -> None:
    """The job gets an error or is disconnected; the shadow continues, and accepts the true manifest."""
    from ucp.training.shadow.protocol import RefusedError, receive_json, send_json, start_handshake

    base, true = recorded
    pairs.append(Pair(base))
    changed = copy.deepcopy(true)
    MANIFESTS[name](changed)
    for manifest, right in ((changed, False), (true, True)):
        with socket.create_connection(("127.0.0.1", pairs[0].server.address.port)) as sock:
            sock.settimeout(120)
            start_handshake(sock, b"")
            send_json(sock, {"ask": "feed", "manifest": manifest, "stream": 0, "run": None})
            try:
                answer = receive_json(sock, 1 << 20)
            except RefusedError:
                answer = {"error": "closed"}
            assert ("error" not in answer) == right, (answer, pairs[0].notes)
        assert status(pairs[0].url)["condition"] == ("live" if right else "loading")
