"""Fixtures for tests of shadows, which end with the test; no thread may outlive it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from tests.training.shadow.jobs import Pair


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    """Check that closed objects have ended their threads; the last may still be ending."""
    before = set(threading.enumerate())
    yield
    end = time.monotonic() + 60
    while left := [t for t in threading.enumerate() if t not in before and t.name.startswith("ucp-")]:
        assert time.monotonic() < end, f"threads stay: {left}"
        time.sleep(0.01)


@pytest.fixture
def pairs(_no_thread_stays: None) -> Iterator[list[Pair]]:
    """Shadows that are closed with the test."""
    made: list[Pair] = []
    yield made
    for pair in made:
        pair.close()
