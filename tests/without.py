"""Packages that are not there."""

from __future__ import annotations

import sys

import pytest


def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were not installed."""
    for name in ["matplotlib", *(name for name in sys.modules if name.startswith("matplotlib."))]:
        monkeypatch.setitem(sys.modules, name, None)
