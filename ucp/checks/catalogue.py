"""The list of all checks, most important first. `docs/checks.md` describes each and explains how to add one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ucp.core.findings import Level
from ucp.errors import InconsistentError, IntegrityError


@dataclass(frozen=True, slots=True)
class Check:
    """A check: stable id, one-line meaning, lowest level at which it runs, module that implements it, exit code.

    `module` is the name of a module in `ucp/checks/` with a function `run_check(context)`. Checks that need the same
    bytes share a module, so that the bytes are read once. It is empty for checks that the runner itself reports, and
    for those `of_logs`, which need a gradient log (`ucp/replay/checks.py`).
    """

    id: str
    meaning: str
    level: Level
    module: str
    exit_code: int = InconsistentError.exit_code
    of_logs: bool = False


_DAMAGE: Final = IntegrityError.exit_code
_QUICK, _DEFAULT, _DEEP = Level.QUICK, Level.DEFAULT, Level.DEEP

CHECKS: Final = (
    Check("source-unchanged", "the source files of virtual atoms have not changed", _QUICK, "format_hooks", _DAMAGE),
    Check("manifest-files", "the files of the manifest exist in the listed sizes", _QUICK, "format_hooks", _DAMAGE),
    Check("store", "superblocks and slot headers of a mapped store are intact", _QUICK, "format_hooks", _DAMAGE),
    Check("zip-crc", "every member of every torch file has the CRC that its archive records", _DEEP, "scan", _DAMAGE),
    Check("zip-structure", "the zip headers of every torch file agree with its directory", _DEEP, "scan", _DAMAGE),
    Check("manifest-checksums", "every part of every file has the checksum of its manifest", _DEEP, "scan", _DAMAGE),
    Check("headers", "the header of every atom file agrees with the manifest", _DEFAULT, "format_hooks", _DAMAGE),
    Check("readable", "every file could be indexed and the shards fit together", _QUICK, ""),
    Check("grid", "no rank's file is missing, and every file belongs to a rank", _QUICK, "format_hooks"),
    Check("coverage", "every element of every atom is stored exactly once, plus replicas", _QUICK, "atom_coverage"),
    Check("states", "every trained parameter has all states that its siblings have", _QUICK, "parameter_states"),
    Check("shapes", "every state has the shape that its parameter and siblings imply", _QUICK, "parameter_states"),
    Check("dtypes", "all ranks and siblings store a state in one dtype", _QUICK, "parameter_states"),
    Check("steps", "all ranks and parameters of a group took the same number of steps", _DEFAULT, "parameter_states"),
    Check("iteration", "all ranks have the same iteration and scheduler state", _QUICK, "format_hooks"),
    Check("hyper-parameters", "all ranks have the same hyper-parameters and loss scale", _QUICK, "format_hooks"),
    Check("master-matches-weight", "the master cast to the weight's dtype is the saved weight", _DEFAULT, "agreement"),
    Check("replicas", "all copies of a state are equal, bit for bit", _DEFAULT, "agreement"),
    Check("padding", "padding of flat buffers is zero", _DEEP, "scan"),
    Check("finite", "no element is NaN or infinite", _DEEP, "scan"),
    Check("second-moments", "no second moment is negative", _DEEP, "scan"),
    Check("extras", "everything stored besides parameter states can be read", _DEFAULT, "readable_extras", _DAMAGE),
    Check("log", "every frame of the log is intact, and no stream is missing", _QUICK, "", _DAMAGE, of_logs=True),
    Check("replay", "replaying the log reproduces the job's state, bit for bit", _QUICK, "", of_logs=True),
    Check("slice-mappings", "DeepSpeed's param_slice_mappings agrees with the layout", _QUICK, ""),
    Check("notes", "what the reader inferred, decided or left out", _QUICK, ""),
)

BY_ID: Final = {check.id: check for check in CHECKS}


def checks_of(level: Level) -> list[Check]:
    """Checks that run at this level."""
    return [check for check in CHECKS if check.level <= level and not check.of_logs]
