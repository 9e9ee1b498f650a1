"""Fixtures for all tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.paths import PROJECT, unpacked

# Examples are judged by their result, not by their time: the machine may be busy.
settings.register_profile("ucp", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ucp")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with slow tests first, so that no process ends up alone with one."""
    slow = {item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("interop")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def project() -> Path:
    """The project's folder."""
    return PROJECT


@pytest.fixture(scope="session")
def corpus() -> Path:
    """Folder of real checkpoints of every framework, as `<family>/<variant>/…`; see `fixtures/README.md`."""
    return unpacked()


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    """The port of a real S3 server on loopback."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    script = Path(__file__).parent / "remote" / "s3_server.py"
    server = subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        yield int(server.stdout.readline())
    finally:
        server.stdin.close()
        server.wait(60)
        server.stdout.close()
