"""A shadow on the machine of the job: frames are sent through shared memory, which is removed with the processes."""

from __future__ import annotations

import os
import random
import secrets
import socket
import struct
import threading
import time
from pathlib import Path

import pytest

import ucp
from tests.replay.logged_job import assert_same, state_of
from tests.training.shadow.follower import held, wait_for
from tests.training.shadow.jobs import Job, Pair
from ucp import settings
from ucp.errors import StorageError, UsageError
from ucp.training.shadow.client import status
from ucp.training.shadow.protocol import RefusedError, ShadowAddress, parse_address, receive, send
from ucp.training.shadow.server import ShadowServer
from ucp.training.shadow.transports import offer_ring, take_ring


def here() -> ShadowAddress:
    return ShadowAddress(f"test-{secrets.token_hex(8)}", 0, None, "shm")


def test_every_step_of_a_job_through_shared_memory(
    tmp_path: Path, pairs: list[Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a ring that is smaller than one frame; queries and conversions use the same address."""
    monkeypatch.setattr(settings, "SHADOW_RING_BYTES", 4096)
    pairs.append(Pair(address=here()))
    assert pairs[0].url.startswith("shm://test-")
    job = Job(tmp_path / "run", to=pairs[0].url)
    for feed in pairs[0].shadow.follower.feeds.values():  # type: ignore[union-attr]
        feed.tail = None
    for step in range(1, 21):
        job.train()
        wait_for(pairs[0].shadow, step)
        assert_same(state_of(held(pairs[0].shadow)), job.history[step])
    assert (status(pairs[0].url)["step"], status(pairs[0].url)["feeds"]) == (20, 1)
    ucp.convert(pairs[0].url, tmp_path / "out")
    assert_same(state_of(ucp.open(tmp_path / "out").index), job.history[20])
    job.recorder.close()
    assert (job.shadow_stats()["dropped"], job.shadow_stats()["connections"]) == (0, 1)


def test_a_connection_that_is_interrupted_repeatedly(
    tmp_path: Path, pairs: list[Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "SHADOW_RETRY_SECONDS", 0.01)
    pairs.append(Pair(address=here()))
    job = Job(tmp_path / "run", to=pairs[0].url)
    for number in range(1, 31):
        job.train()
        if number % 4 == 0:
            pairs[0].server.disconnect_all()
    job.recorder.flush()
    wait_for(pairs[0].shadow, 30)
    assert_same(state_of(held(pairs[0].shadow)), job.history[30])
    job.recorder.close()


def test_a_shadow_that_reads_nothing_does_not_delay_the_job(
    tmp_path: Path, pairs: list[Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ring and queue are full: frames are dropped, and the shadow reads them from the log."""
    monkeypatch.setattr(settings, "SHADOW_RING_BYTES", 64 * 1024)
    monkeypatch.setattr(settings, "SHADOW_QUEUE_BYTES", 256 * 1024)
    monkeypatch.setattr(settings, "SHADOW_PENDING_BYTES", 64 * 1024)
    pairs.append(Pair(address=here()))
    job = Job(tmp_path / "run", width=1024, to=pairs[0].url)
    job.train(1)
    wait_for(pairs[0].shadow, 1)
    with pairs[0].shadow.follower.state._lock:  # type: ignore[union-attr]  # nothing is applied while this is held
        end = time.monotonic() + 120
        while not job.shadow_stats()["dropped"]:
            assert time.monotonic() < end
            job.train(5)
        assert job.shadow_stats()["stall_seconds"] == 0
    job.recorder.flush()
    wait_for(pairs[0].shadow, job.step)
    assert_same(state_of(held(pairs[0].shadow)), job.history[job.step])
    job.recorder.close()


@pytest.mark.parametrize("size", [64, 4096])
def test_bytes_arrive_in_order(size: int) -> None:
    """Random buffers through a ring that is often full or empty; all bytes are read after the writer has closed."""
    data = random.Random(size).randbytes(50 * size)
    one, two = socket.socketpair()
    reader = offer_ring(one, size)
    writer = take_ring(two, size)

    def write() -> None:
        rng, at = random.Random(1), 0
        while at < len(data):
            some = data[at : at + rng.randrange(1, 2 * size)]
            send(writer, [some[:7], some[7:]])
            at += len(some)
        writer.close()

    thread = threading.Thread(target=write)
    thread.start()
    rng, got = random.Random(2), b""
    while len(got) < len(data):
        got += receive(reader, min(rng.randrange(1, 2 * size), len(data) - len(got)))
    assert got == data
    thread.join()
    with pytest.raises(RefusedError, match="closed"):
        receive(reader, 1)
    reader.close()


@pytest.mark.parametrize("position", [0, 65, 2**63])
def test_a_writer_that_reports_a_wrong_position(position: int) -> None:
    """More than the ring can hold, or nothing new."""
    one, two = socket.socketpair()
    reader = offer_ring(one, 64)
    writer = take_ring(two, 64)
    two.sendall(struct.pack("<Q", position))
    with pytest.raises(RefusedError):
        receive(reader, 1)
    reader.close()
    writer.close()


def test_a_reader_that_reports_a_wrong_position_or_disconnects() -> None:
    one, two = socket.socketpair()
    reader = offer_ring(one, 64)
    writer = take_ring(two, 64)
    one.sendall(struct.pack("<Q", 5))
    with pytest.raises(RefusedError):
        send(writer, [b"abc"])
    reader.close()
    with pytest.raises(ConnectionError):
        send(writer, [b"abc"])
    writer.close()


def test_a_full_ring_waits_up_to_the_timeout() -> None:
    one, two = socket.socketpair()
    reader = offer_ring(one, 64)
    writer = take_ring(two, 64)
    writer.settimeout(0.05)
    with pytest.raises(TimeoutError):
        send(writer, [bytes(100)])
    reader.close()
    writer.close()


def test_an_invalid_ring_is_refused() -> None:
    """Memory that could shrink later is refused."""
    one, two = socket.socketpair()
    fd = os.memfd_create("test")
    os.ftruncate(fd, 64)
    socket.send_fds(one, [b"\0"], [fd])
    os.close(fd)
    with pytest.raises(RefusedError, match="ring was not sent"):
        take_ring(two, 64)
    one.close()
    two.close()


def test_names_of_addresses(tmp_path: Path, pairs: list[Pair]) -> None:
    assert str(parse_address("shm:/name")) == "shm://name"
    for wrong in ("shm://", "shm://a/b", "shm://a b"):
        with pytest.raises(UsageError, match="not an address"):
            parse_address(wrong)
    address = here()
    with pytest.raises(StorageError, match="cannot be reached"):
        Job(tmp_path / "run", to=str(address))
    pairs.append(Pair(address=address))
    with pytest.raises(StorageError, match="cannot listen"):
        ShadowServer(pairs[0].shadow, address)
