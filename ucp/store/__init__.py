"""The mapped store: one file with fixed slots that a job writes into directly, and that is whole at every instant.

Specified in docs/store.md. `Store` writes, `load` reads without copying; every command takes the file as a source.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ucp.store.layout import Entry, Schema
    from ucp.store.leases import BusyError
    from ucp.store.loading import Loaded, load
    from ucp.store.writer import Store

__all__ = ["BusyError", "Entry", "Loaded", "Schema", "Store", "load"]

_HOMES = {
    "BusyError": "leases",
    "Entry": "layout",
    "Loaded": "loading",
    "Schema": "layout",
    "Store": "writer",
    "load": "loading",
}


def __getattr__(name: str) -> Any:
    """Load on first use: a command that looks at headers does without numpy."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ucp.store' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"ucp.store.{_HOMES[name]}"), name)
