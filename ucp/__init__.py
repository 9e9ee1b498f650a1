"""`ucp`: the universal checkpoint converter for DeepSpeed and Megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucp.version import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from ucp.api import convert, diff, report, verify
    from ucp.api import open_checkpoint as open
    from ucp.formats.store.store_layout import StoreSchema
    from ucp.planning import plan
    from ucp.sources import OpenCheckpoint
    from ucp.training.gradient_compression import TopK
    from ucp.training.load import LoadReport, load_into
    from ucp.training.recording.recorder import Recorder, record
    from ucp.training.save import SaveHandle, save
    from ucp.training.snapshots.snapshot import Snapshots, snapshot
    from ucp.training.store.store_loading import load_store
    from ucp.training.store.writer import Store

__all__ = [
    "LoadReport",
    "OpenCheckpoint",
    "Recorder",
    "SaveHandle",
    "Snapshots",
    "Store",
    "StoreSchema",
    "TopK",
    "__version__",
    "convert",
    "diff",
    "load_into",
    "load_store",
    "open",
    "plan",
    "record",
    "report",
    "save",
    "snapshot",
    "verify",
]

_LIVE = {
    "LoadReport": "ucp.training.load",
    "load_into": "ucp.training.load",
    "Recorder": "ucp.training.recording.recorder",
    "record": "ucp.training.recording.recorder",
    "SaveHandle": "ucp.training.save",
    "save": "ucp.training.save",
    "Snapshots": "ucp.training.snapshots.snapshot",
    "snapshot": "ucp.training.snapshots.snapshot",
    "TopK": "ucp.training.gradient_compression",
    "Store": "ucp.training.store.writer",
    "StoreSchema": "ucp.formats.store.store_layout",
    "load_store": "ucp.training.store.store_loading",
}


def __getattr__(name: str) -> Any:
    """Load the library on first use, so that the command line starts at once."""
    if name not in __all__:
        raise AttributeError(f"module 'ucp' has no attribute {name!r}")
    if name in _LIVE:
        from importlib import import_module

        return getattr(import_module(_LIVE[name]), name)
    from ucp import api

    return getattr(api, "open_checkpoint" if name == "open" else name)
