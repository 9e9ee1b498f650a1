"""What every test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent


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
