"""`ucp`: the universal checkpoint converter for DeepSpeed and Megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucp.version import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from ucp.api import convert, diff, plan, report, verify
    from ucp.api import open_checkpoint as open
    from ucp.train.loading import LoadReport, load_into
    from ucp.train.recording.record import Recorder, record
    from ucp.train.saving import SaveHandle, save
    from ucp.train.snapshots.snapshot import Snapshots, snapshot
    from ucp.train.topk import TopK
    from ucp.views import OpenCheckpoint

__all__ = [
    "LoadReport",
    "OpenCheckpoint",
    "Recorder",
    "SaveHandle",
    "Snapshots",
    "TopK",
    "__version__",
    "convert",
    "diff",
    "load_into",
    "open",
    "plan",
    "record",
    "report",
    "save",
    "snapshot",
    "verify",
]

_LIVE = {
    "LoadReport": "ucp.train.loading",
    "load_into": "ucp.train.loading",
    "Recorder": "ucp.train.recording.record",
    "record": "ucp.train.recording.record",
    "SaveHandle": "ucp.train.saving",
    "save": "ucp.train.saving",
    "Snapshots": "ucp.train.snapshots.snapshot",
    "snapshot": "ucp.train.snapshots.snapshot",
    "TopK": "ucp.train.topk",
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
