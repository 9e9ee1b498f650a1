"""Files that bear each other's names. Nothing in a shard tells its rank, but torch names an archive after its file."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Final

from ucp.formats.deepspeed.names import StepFiles, sort_names
from ucp.formats.deepspeed.reading import Reading
from ucp.formats.deepspeed.shards import RankFile

_SHARDS: Final = ("optim", "sharded_model", "expert_optim")  # of which every rank has its own
_WHOLE: Final = ("model", "layers")


def check_names(reading: Reading, files: StepFiles) -> None:
    """Report files that were exchanged, or of which one was copied over another; other renaming is only noted.

    A layer that was copied to make a model deeper is fine, and so are ranks that were all made of one file. With ZeRO-1
    and 2 all is noted: there a master that is not its weight's shows what is wrong, parameter by parameter.
    """
    is_seen_elsewhere = bool(files.optim) and not files.sharded_model
    for role in (*_SHARDS, *_WHOLE):
        names: Mapping[Hashable, str] = getattr(files, role)
        opened = {key: reading.files.open(reading.prefix + name) for key, name in names.items()}
        saved = {key: _saved_key(file, role, key) for key, file in opened.items()}
        wrong = [opened[key] for key in opened if saved[key] != key]
        if not wrong:
            continue
        found = set(saved.values())
        is_exchange = len(found) == len(saved)
        is_copy = role in _SHARDS and (len(found) > 1 or len(saved) == 2)
        if found <= set(opened) and (is_exchange or is_copy) and not is_seen_elsewhere:
            for file in wrong:
                reading.problems.add(f"{file.name}: was saved as {file.saved_as}.pt, the file of another rank or layer")
        else:
            reading.note(
                "saved-under-other-names",
                f"{wrong[0].name} was saved as {wrong[0].saved_as}.pt, and {len(wrong) - 1} more under other names",
            )
    reading.problems.raise_any("give every file the name that it was saved under, and restore what was overwritten")


def _saved_key(file: RankFile, role: str, named: Hashable) -> Hashable:
    """The key of the name that a file was saved under; the one that it is `named` by where it does not say."""
    found: Mapping[Hashable, str] = getattr(sort_names([f"{file.saved_as}.pt"]), role)
    return next(iter(found), named)
