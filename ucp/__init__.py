"""`ucp`: the universal checkpoint converter for DeepSpeed and Megatron.

Everything here is imported on first use, so that `import ucp` and the command line start fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucp.version import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from ucp import errors
    from ucp.api import OpenCheckpoint, ParameterView, convert, diff, plan, report, verify
    from ucp.api import open_checkpoint as open
    from ucp.checks.verify_report import Report
    from ucp.compare.comparison import AtomDifference, Comparison
    from ucp.core.checkpoint import Atom, Checkpoint, Extras, Fragment, Mesh, Note, Parameter, ParamGroup, Rank
    from ucp.core.findings import Finding
    from ucp.core.rules import Rule
    from ucp.engine.plan import Plan
    from ucp.engine.pool import Progress
    from ucp.errors import (
        InconsistentError,
        IntegrityError,
        NotUnderstoodError,
        StorageError,
        UcpError,
        UnsafeError,
        UsageError,
    )
    from ucp.formats.registry import Format
    from ucp.formats.store.store_layout import StoreSchema
    from ucp.reports.html_page import WrittenReport
    from ucp.training.gradient_compression import TopK
    from ucp.training.load import LoadReport, load_into
    from ucp.training.recording.recorder import Recorder, record
    from ucp.training.save import SaveHandle, save
    from ucp.training.snapshots.snapshot import Snapshots, snapshot
    from ucp.training.store import Store, load_store

__all__ = [
    "Atom",
    "AtomDifference",
    "Checkpoint",
    "Comparison",
    "Extras",
    "Finding",
    "Format",
    "Fragment",
    "InconsistentError",
    "IntegrityError",
    "LoadReport",
    "Mesh",
    "NotUnderstoodError",
    "Note",
    "OpenCheckpoint",
    "ParamGroup",
    "Parameter",
    "ParameterView",
    "Plan",
    "Progress",
    "Rank",
    "Recorder",
    "Report",
    "Rule",
    "SaveHandle",
    "Snapshots",
    "StorageError",
    "Store",
    "StoreSchema",
    "TopK",
    "UcpError",
    "UnsafeError",
    "UsageError",
    "WrittenReport",
    "__version__",
    "convert",
    "diff",
    "errors",
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

_EXPORTS = {  # module → names
    "ucp.api": "OpenCheckpoint ParameterView convert diff open plan report verify",
    "ucp.checks.verify_report": "Report",
    "ucp.compare.comparison": "AtomDifference Comparison",
    "ucp.core.checkpoint": "Atom Checkpoint Extras Fragment Mesh Note ParamGroup Parameter Rank",
    "ucp.core.findings": "Finding",
    "ucp.core.rules": "Rule",
    "ucp.engine.plan": "Plan",
    "ucp.engine.pool": "Progress",
    "ucp.errors": "InconsistentError IntegrityError NotUnderstoodError StorageError UcpError UnsafeError UsageError",
    "ucp.formats.registry": "Format",
    "ucp.formats.store.store_layout": "StoreSchema",
    "ucp.reports.html_page": "WrittenReport",
    "ucp.training.gradient_compression": "TopK",
    "ucp.training.load": "LoadReport load_into",
    "ucp.training.recording.recorder": "Recorder record",
    "ucp.training.save": "SaveHandle save",
    "ucp.training.snapshots.snapshot": "Snapshots snapshot",
    "ucp.training.store": "Store load_store",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ucp' has no attribute {name!r}")
    from importlib import import_module

    if name == "errors":
        return import_module("ucp.errors")
    module = next(module for module, names in _EXPORTS.items() if name in names.split())
    return getattr(import_module(module), "open_checkpoint" if name == "open" else name)
