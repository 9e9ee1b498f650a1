"""The mapped store: one file with fixed slots that a job writes into directly, and that is whole at every instant.

Specified in docs/store.md. `Store` writes, `load` reads without copying; every command takes the file as a source.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ucp.formats.store.generations import StoreBusyError
    from ucp.formats.store.store_layout import StoreEntry, StoreSchema
    from ucp.training.store.store_loading import LoadedGeneration, load_store
    from ucp.training.store.writer import Store

__all__ = ["LoadedGeneration", "Store", "StoreBusyError", "StoreEntry", "StoreSchema", "load_store"]

_HOMES = {
    "LoadedGeneration": "ucp.training.store.store_loading",
    "Store": "ucp.training.store.writer",
    "StoreBusyError": "ucp.formats.store.generations",
    "StoreEntry": "ucp.formats.store.store_layout",
    "StoreSchema": "ucp.formats.store.store_layout",
    "load_store": "ucp.training.store.store_loading",
}


def __getattr__(name: str) -> Any:
    """Import on first use: a command that reads headers does not need numpy."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ucp.training.store' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
