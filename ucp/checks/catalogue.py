"""Every check, one line each, most important first. `docs/checks.md` is the catalogue for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ucp.checks.findings import Level
from ucp.errors import InconsistentError, IntegrityError


@dataclass(frozen=True, slots=True)
class Check:
    """A check: its stable id, what it means, from which level on it runs, the module that runs it, its exit code.

    Several checks may share a module, which then looks at their bytes in one pass. `readable` has none: it is what
    comes of opening the checkpoint. Those `of_logs` run where a log is put upon it (`ucp.replay.checks`).
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
    Check("source-unchanged", "the files that virtual atoms point at are as they were", _QUICK, "manifests", _DAMAGE),
    Check("manifest-files", "all files of the manifest are there in their size, no more", _QUICK, "manifests", _DAMAGE),
    Check("store", "superblocks and slot headers of a mapped store are whole", _QUICK, "stores", _DAMAGE),
    Check("zip-crc", "every member of every torch file has the CRC that its archive records", _DEEP, "scan", _DAMAGE),
    Check("zip-structure", "the frame of every torch file agrees with its directory", _DEEP, "scan", _DAMAGE),
    Check("manifest-checksums", "every part of every file has the checksum of its manifest", _DEEP, "scan", _DAMAGE),
    Check("headers", "every atom file's own header says what the manifest says", _DEFAULT, "headers", _DAMAGE),
    Check("readable", "every file could be indexed and the shards fit together", _QUICK, ""),
    Check("grid", "every rank's files are there, and none that belongs to no rank", _QUICK, "rank_grid"),
    Check("coverage", "every element of every atom is stored exactly once, replicas apart", _QUICK, "atom_coverage"),
    Check("states", "every trained parameter has all states that its siblings have", _QUICK, "parameter_states"),
    Check("shapes", "every state has the shape that its parameter and siblings ask for", _QUICK, "parameter_states"),
    Check("dtypes", "all ranks and siblings store a state in one dtype", _QUICK, "parameter_states"),
    Check(
        "steps",
        "all ranks and all parameters of a group have taken the same number of steps",
        _DEFAULT,
        "optimizer_steps",
    ),
    Check("iteration", "all ranks say the same iteration and state of the scheduler", _QUICK, "rank_agreement"),
    Check("hyper-parameters", "all ranks have the same hyper-parameters and loss scale", _QUICK, "rank_agreement"),
    Check("master-matches-weight", "the master cast to the weight's dtype is the saved weight", _DEFAULT, "agreement"),
    Check("replicas", "all copies of a state are equal, bit for bit", _DEFAULT, "agreement"),
    Check("padding", "padding of flat buffers is zero", _DEEP, "scan"),
    Check("finite", "no element is NaN or infinite", _DEEP, "scan"),
    Check("second-moments", "no second moment is negative", _DEEP, "scan"),
    Check("extras", "what is carried beside the parameters can be read", _DEFAULT, "readable_extras", _DAMAGE),
    Check("log", "every frame of the log is whole, and every stream is there", _QUICK, "", _DAMAGE, of_logs=True),
    Check("replay", "what the log makes of the base is what the job held, bit for bit", _QUICK, "", of_logs=True),
    Check("slice-mappings", "DeepSpeed's own table of slices agrees with the layout", _QUICK, "reader_notes"),
    Check("notes", "what the reader had to decide or could not use", _QUICK, "reader_notes"),
)

BY_ID: Final = {check.id: check for check in CHECKS}


def checks_of(level: Level) -> list[Check]:
    """The checks that run at this level."""
    return [check for check in CHECKS if check.level <= level and not check.of_logs]
