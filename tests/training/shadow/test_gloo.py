"""A shadow over torch.distributed: frames are sent through gloo groups, separate from those of the job."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

import ucp
from tests.replay.logged_job import assert_same, state_of
from tests.training.shadow.follower import held, wait_for
from tests.training.shadow.jobs import Job, Pair
from ucp import settings
from ucp.errors import StorageError, UcpError, UsageError
from ucp.training.shadow.client import status
from ucp.training.shadow.protocol import RefusedError, ShadowAddress, parse_address, receive, send
from ucp.training.shadow.server import ShadowServer
from ucp.training.shadow.transports import GlooListener, connect_gloo

HERE = ShadowAddress("127.0.0.1", 0, None, "gloo")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "SHADOW_HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setattr(settings, "SHADOW_RETRY_SECONDS", 0.02)


def test_every_step_of_a_job_over_gloo(tmp_path: Path, pairs: list[Pair]) -> None:
    """Interrupted once: the job reconnects. Queries for the state use another server."""
    pairs.append(Pair(address=HERE))
    server = ShadowServer(pairs[0].shadow, ShadowAddress("127.0.0.1", 0))
    job = Job(tmp_path / "run", to=pairs[0].url)
    for feed in pairs[0].shadow.follower.feeds.values():  # type: ignore[union-attr]
        feed.tail = None
    for step in range(1, 6):
        job.train()
        wait_for(pairs[0].shadow, step)
        assert_same(state_of(held(pairs[0].shadow)), job.history[step])
        if step == 3:
            pairs[0].server.disconnect_all()
    assert status(pairs[0].url)["step"] == 5
    with pytest.raises(UcpError, match="only receives frames and returns its status"):
        ucp.open(pairs[0].url)
    assert_same(state_of(ucp.open(str(server.address)).index), job.history[5])
    job.recorder.close()
    server.close()
    assert job.shadow_stats()["dropped"] == 0


def test_only_peers_with_the_token_are_accepted(tmp_path: Path, pairs: list[Pair]) -> None:
    token = tmp_path / "token"
    token.write_text("a secret of some length")
    token.chmod(0o600)
    pairs.append(Pair(address=ShadowAddress("127.0.0.1", 0, token, "gloo")))
    with pytest.raises(UcpError, match="the connection was refused"):
        Job(tmp_path / "run", to=pairs[0].url)
    job = Job(tmp_path / "run2", to=f"{pairs[0].url}?token={token}")
    job.train(1)
    wait_for(pairs[0].shadow, 1)
    job.recorder.close()
    with pytest.raises(UsageError, match="needs a token"):
        ShadowServer(pairs[0].shadow, parse_address("gloo://0.0.0.0:0"))


def test_bytes_arrive_in_order_and_wrong_sizes_are_refused() -> None:
    """Long data is sent as several messages; wrong sizes are refused; a disconnect is detected."""
    listener = GlooListener(HERE)
    address = ShadowAddress("127.0.0.1", listener.port, None, "gloo")
    data = bytes(range(256)) * 20_000  # more than one message

    def write() -> None:
        channel = connect_gloo(address)
        send(channel, [data[:3], data[3:]])
        channel.send_heartbeat()
        channel._send_size(-1)
        channel.close()
        connect_gloo(address).close()

    thread = threading.Thread(target=write)
    thread.start()
    channel, _ = listener.accept()
    channel.open()
    assert receive(channel, len(data)) == data
    with pytest.raises(RefusedError, match="a message of -1 bytes"):
        receive(channel, 1)
    other, _ = listener.accept()
    other.open()
    with pytest.raises(ConnectionError, match="by peer"):
        receive(other, 1)
    thread.join()
    listener.close()
    with pytest.raises(OSError, match="closed"):
        listener.accept()


def test_no_shadow_is_listening(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"gloo://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(StorageError, match="cannot be reached"):
        Job(tmp_path / "run", to=url)
