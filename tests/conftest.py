"""What every test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.paths import PROJECT

# A busy machine is no defect of the code: examples are judged by their result, not by their time.
settings.register_profile("ucp", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ucp")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first, so that in the end no process is left alone with one."""
    slow = {item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("interop")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def project() -> Path:
    """The project's folder."""
    return PROJECT


@pytest.fixture(scope="session")
def corpus() -> Path:
    """Folder of real checkpoints outside the project; tests that need it are skipped without."""
    folder = os.environ.get("UCP_CORPUS")
    if not folder:
        pytest.skip("UCP_CORPUS is not set")
    return Path(folder)
