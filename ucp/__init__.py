"""`ucp`: the universal checkpoint converter for DeepSpeed and Megatron.

ucp.open(path)                            index a checkpoint; parameters and state dicts are read on access
ucp.convert(src, dst, to=…, tp=…, dp=…)   convert or reshard it; `ucp.plan` only lays out what would be written
ucp.verify(src)                           check that its shards are complete and consistent
ucp.diff(a, b)                            compare two checkpoints, whatever their layouts
ucp.report(src, page)                     write an HTML page about it
ucp.load_into(path, model, optimizer)     fill a running job from any checkpoint
ucp.save(path, model, optimizer)          save a running job as a folder of atoms
ucp.record(path, model, optimizer)        log the gradients of a running job, to get any of its steps back
ucp.snapshot(path, model, optimizer)      save a running job in the background every few steps
ucp.load_store(path)                      map a store that `ucp.Store` or `ucp.snapshot` wrote

Every failure that is not a bug is a `ucp.UcpError`. All names are imported on first use, so that `import ucp` and the
command line start fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucp.version import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from ucp import errors
    from ucp.api import convert, diff, plan, report, verify
    from ucp.api import open_checkpoint as open
    from ucp.checks.verify_report import Report
    from ucp.compare.comparison import AtomDifference, Comparison
    from ucp.core.checkpoint import Atom, Checkpoint, Extras, Fragment, Mesh, Note, Parameter, ParamGroup, Rank
    from ucp.core.findings import Finding
    from ucp.core.rules import Rule
    from ucp.engine.plan import Plan
    from ucp.engine.pool import Progress
    from ucp.errors import (
        ImpossibleError,
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
    from ucp.training.store import LoadedGeneration, Store, load_store
    from ucp.views import OpenCheckpoint, ParameterView, StateDict

__all__ = [
    "Atom",
    "AtomDifference",
    "Checkpoint",
    "Comparison",
    "Extras",
    "Finding",
    "Format",
    "Fragment",
    "ImpossibleError",
    "InconsistentError",
    "IntegrityError",
    "LoadReport",
    "LoadedGeneration",
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
    "StateDict",
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
    "ucp.api": "convert diff open plan report verify",
    "ucp.checks.verify_report": "Report",
    "ucp.compare.comparison": "AtomDifference Comparison",
    "ucp.core.checkpoint": "Atom Checkpoint Extras Fragment Mesh Note ParamGroup Parameter Rank",
    "ucp.core.findings": "Finding",
    "ucp.core.rules": "Rule",
    "ucp.engine.plan": "Plan",
    "ucp.engine.pool": "Progress",
    "ucp.errors": "ImpossibleError InconsistentError IntegrityError NotUnderstoodError StorageError UcpError"
    " UnsafeError UsageError",
    "ucp.formats.registry": "Format",
    "ucp.formats.store.store_layout": "StoreSchema",
    "ucp.reports.html_page": "WrittenReport",
    "ucp.training.gradient_compression": "TopK",
    "ucp.training.load": "LoadReport load_into",
    "ucp.training.recording.recorder": "Recorder record",
    "ucp.training.save": "SaveHandle save",
    "ucp.training.snapshots.snapshot": "Snapshots snapshot",
    "ucp.training.store": "LoadedGeneration Store load_store",
    "ucp.views": "OpenCheckpoint ParameterView StateDict",
}


if not TYPE_CHECKING:  # a checker that saw this would accept every name

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name not in __all__:
            from difflib import get_close_matches  # only needed for a wrong name

            close = "" if name.startswith("_") else "".join(get_close_matches(name, __all__, 1))
            raise AttributeError(f"module 'ucp' has no attribute {name!r}" + (close and f"; did you mean {close!r}?"))
        if name == "errors":
            return import_module("ucp.errors")
        module = next(module for module, names in _EXPORTS.items() if name in names.split())
        return getattr(import_module(module), "open_checkpoint" if name == "open" else name)

    def __dir__() -> list[str]:
        return __all__
