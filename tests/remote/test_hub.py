"""Repositories of the Hugging Face Hub as sources, through its own client."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import ucp
from tests.paths import FIXTURES
from tests.remote.hub_server import Hub
from ucp.errors import UcpError

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("huggingface_hub")

SOURCE = FIXTURES / "z1_bf16_tp2_dp2"
URL = "hf://org/model"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    (tmp_path / "repository").mkdir()
    server = Hub(tmp_path / "repository")
    monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": server.url, "token": False, "skip_instance_cache": True})
    monkeypatch.setattr("ucp.storage.object_store._stores", {})
    yield server
    server.shutdown()
    server.server_close()


def test_weights_of_a_repository(hub: Hub, tmp_path: Path) -> None:
    ucp.convert(SOURCE, tmp_path / "weights", to="safetensors", max_shard_size=4096)
    shutil.copytree(tmp_path / "weights", hub.root, dirs_exist_ok=True)
    assert len(list(hub.root.glob("*.safetensors"))) > 1
    ucp.convert(URL, tmp_path / "here")
    assert ucp.diff(tmp_path / "here", tmp_path / "weights").identical


def test_a_checkpoint_below_a_repository(hub: Hub) -> None:
    shutil.copytree(SOURCE, hub.root / "run" / "step")
    assert ucp.verify(f"{URL}/run/step", level="deep").ok
    assert ucp.diff(SOURCE, f"{URL}/run/step").identical
    asked = [ranged for name, ranged in hub.fetched if name.endswith("states.pt")]
    assert asked
    assert all(asked), "files are read in ranges"


@pytest.mark.usefixtures("hub")
def test_a_missing_repository_is_reported() -> None:
    with pytest.raises(UcpError, match="hf://org/model/nowhere: no such file or folder"):
        ucp.open(f"{URL}/nowhere")
