"""Numbers in configurations and arguments, where they are numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def number_in(values: Mapping[str, Any], key: str) -> int | None:
    """A positive whole number."""
    value = values.get(key)
    return value if type(value) is int and value > 0 else None


def real_in(values: Mapping[str, Any], key: str) -> float | None:
    """Any number."""
    value = values.get(key)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def flag_in(values: Mapping[str, Any], key: str) -> bool | None:
    """A truth value."""
    value = values.get(key)
    return value if isinstance(value, bool) else None
