"""A shadow over TCP: jobs that feed it, who asks it, and who is not let in."""

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
    """Log and shadow are two sinks of one recorder: both have every step, the shadow's from the socket alone."""
    pairs.append(Pair())
    job = Job(tmp_path / "run", to=pairs[0].url)
    shadow = pairs[0].shadow
    for feed in shadow.follower.feeds.values():  # type: ignore[union-attr]
        feed.tail = None
    for step in range(1, 21):
        job.train()
        wait_for(shadow, step)
        assert_same(state_of(held(shadow)), job.history[step])
    told = status(pairs[0].url)
    assert (told["step"], told["lag_steps"], told["feeds"], told["condition"]) == (20, 0, 1, "live")
    assert told["state_bytes"] >= 3 * 4 * sum(p.numel() for p in job.net.parameters())
    job.recorder.close()
    assert job.shadow_stats()["dropped"] == 0
    assert ucp.diff(pairs[0].url, tmp_path / "run", log_b=tmp_path / "run", step_b=20).same


def test_two_hundred_steps_from_every_source(tmp_path: Path, pairs: list[Pair]) -> None:
    """Shadows over TCP and shared memory, and one that follows the files, meet every digest of the job's own states."""
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


def test_a_source_like_any_other_while_the_job_goes_on(tmp_path: Path, pairs: list[Pair]) -> None:
    """What was opened stays at its step; what is opened later is newer."""
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
    """Retention of bases does not take the ground from under a shadow that is asked later."""
    pairs.append(Pair())
    job = Job(tmp_path / "run", to=pairs[0].url, base_every=2, keep_bases=1)
    job.train(7)
    job.recorder.flush()
    wait_for(pairs[0].shadow, 7)
    job.recorder.close()
    assert not Path(pairs[0].shadow.status()["base"]).exists()
    assert_same(state_of(ucp.open(pairs[0].url).index), job.history[7])


def test_a_shadow_that_dies_and_comes_back(tmp_path: Path, pairs: list[Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on without it; a new one catches up from the log and is fed again."""
    monkeypatch.setattr(settings, "SHADOW_RETRY_SECONDS", 0.05)
    first = Pair()
    job = Job(tmp_path / "run", to=first.url)
    job.train(3)
    wait_for(first.shadow, 3)
    port = first.door.address.port
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
    """It takes nothing for a while: the job lets frames go, and waits no longer than it was told."""
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


def test_a_cut_connection(tmp_path: Path, pairs: list[Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut at any moment, again and again: no step is lost, none is taken twice."""
    monkeypatch.setattr(settings, "SHADOW_RETRY_SECONDS", 0.01)
    pairs.append(Pair())
    job = Job(tmp_path / "run", to=pairs[0].url)
    for number in range(1, 41):
        job.train()
        if number % 4 == 0:
            pairs[0].door.disconnect_all()
    job.recorder.flush()
    wait_for(pairs[0].shadow, 40)
    assert_same(state_of(held(pairs[0].shadow)), job.history[40])
    job.recorder.close()
    assert pairs[0].shadow.status()["condition"] == "live"


def test_a_job_that_begins_again_is_followed(tmp_path: Path, pairs: list[Pair]) -> None:
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


def test_only_who_knows_the_token_is_let_in(tmp_path: Path, pairs: list[Pair], token: Path) -> None:
    pairs.append(Pair(address=ShadowAddress("0.0.0.0", 0, token)))
    address = f"127.0.0.1:{pairs[0].door.address.port}"
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


def test_a_peer_without_the_token_gets_nothing_but_a_challenge(pairs: list[Pair], token: Path) -> None:
    pairs.append(Pair(address=ShadowAddress("127.0.0.1", 0, token)))
    with socket.create_connection(("127.0.0.1", pairs[0].door.address.port)) as sock:
        assert len(_all(sock, 40)) == 40
        sock.sendall(b"UCPSHDW1" + bytes(64))
        assert _all(sock, 1) == b""


def _all(sock: socket.socket, size: int) -> bytes:
    """So many bytes, or fewer where the other end closes."""
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


def test_tokens_are_secrets(tmp_path: Path, token: Path) -> None:
    assert read_token(token) == b"a secret of some length"
    token.chmod(0o644)
    with pytest.raises(UsageError, match="other users can read"):
        read_token(token)
    short = tmp_path / "short"
    short.write_text("abc")
    with pytest.raises(UsageError, match="too short"):
        read_token(short)


@pytest.mark.parametrize("text", ["nowhere", "host:port", "host:99999", "shadow://"])
def test_no_address(text: str) -> None:
    with pytest.raises(UsageError, match="not an address"):
        parse_address(text)


def test_a_shadow_that_is_not_there(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"shadow://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(StorageError, match="cannot be reached"):
        Job(tmp_path / "run", to=url)


# ----------------------------------------------------------------------------------------------------------------------
# Lengths are not believed


@pytest.mark.parametrize("length", [2**32 - 1, settings.SHADOW_MANIFEST_BYTES + 1])
def test_a_message_that_claims_too_much(pairs: list[Pair], length: int) -> None:
    from ucp.training.shadow.protocol import start_handshake

    pairs.append(Pair())
    with socket.create_connection(("127.0.0.1", pairs[0].door.address.port)) as sock:
        start_handshake(sock, b"")
        sock.sendall(struct.pack("<I", length))
        assert _all(sock, 1) == b""
    assert any("maximum" in note for note in pairs[0].notes)


def test_frames_that_lie(tmp_path: Path, pairs: list[Pair]) -> None:
    """A frame too long, one with another's number, one with a bit turned: the connection ends, the state stays."""
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
        with socket.create_connection(("127.0.0.1", pairs[0].door.address.port)) as sock:
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


def test_a_gap_that_no_log_fills(tmp_path: Path, pairs: list[Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """Who brings a frame that is far ahead is not waited for without end; the job's own frames come as before."""
    from ucp.log.frames import SEGMENT_BYTES, FrameHeader, FrameType, SegmentHeader, checksum
    from ucp.training.shadow.protocol import receive_json, send_json, start_handshake

    monkeypatch.setattr(settings, "SHADOW_GAP_SECONDS", 0.1)
    pairs.append(Pair())
    job = Job(tmp_path / "run", to=pairs[0].url)
    job.train(1)
    wait_for(pairs[0].shadow, 1)
    manifest = pairs[0].shadow.follower.state.manifest  # type: ignore[union-attr]
    far = FrameHeader(FrameType.AUX, 0, 0, manifest.epoch, 10**9, 2, 64, checksum(bytes(64)), SEGMENT_BYTES)
    with socket.create_connection(("127.0.0.1", pairs[0].door.address.port)) as sock:
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
    "a parameter that is not there": _set("nobody", "parameters", 0, "name"),
    "another step": _set(7, "start"),
    "an optimizer that nobody knows": _set("some.Own", "kernel", "id"),
    "no streams": _set([], "streams"),
    "numbers that are none": _set("many", "streams", 0, "tensors", 0, "numel"),
    "a mesh that is none": _set([1], "mesh"),
    "no manifest": _set(None, "parameters"),
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A base, and the manifest of the epoch that goes on from it."""
    run = tmp_path_factory.mktemp("recorded")
    job = Job(run)
    job.train(1)
    job.recorder.close()
    manifest = json.loads((run / "log" / "epoch-000000" / "manifest.json").read_bytes())
    return run / "base" / "base-000000" / "atoms", manifest


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_that_lie(pairs: list[Pair], recorded: tuple[Path, Any], name: str) -> None:
    """The job is told, or not even that; the shadow goes on serving, and takes the true manifest after it."""
    from ucp.training.shadow.protocol import RefusedError, receive_json, send_json, start_handshake

    base, told = recorded
    pairs.append(Pair(base))
    lie = copy.deepcopy(told)
    MANIFESTS[name](lie)
    for manifest, right in ((lie, False), (told, True)):
        with socket.create_connection(("127.0.0.1", pairs[0].door.address.port)) as sock:
            sock.settimeout(120)
            start_handshake(sock, b"")
            send_json(sock, {"ask": "feed", "manifest": manifest, "stream": 0, "run": None})
            try:
                answer = receive_json(sock, 1 << 20)
            except RefusedError:
                answer = {"error": "closed"}
            assert ("error" not in answer) == right, (answer, pairs[0].notes)
        assert status(pairs[0].url)["condition"] == ("live" if right else "loading")
