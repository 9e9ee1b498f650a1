"""Small files, so that many can be written."""

from __future__ import annotations

import pytest

from ucp import settings


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "LOG_RESERVE_BYTES", 8192)
