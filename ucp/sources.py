"""What a user names as a source, as an index: read by the user's rules, after a step of a log, under other names."""

from __future__ import annotations

import os
from pathlib import Path

from ucp.errors import UsageError
from ucp.files.paths import as_path, is_shadow
from ucp.formats.registry import ReadOptions
from ucp.formats.registry import open_checkpoint as index_checkpoint
from ucp.model.checkpoint import Checkpoint


def read_options(
    tag: str | None = None, rules: str | Path | None = None, preset: str | None = None, repair: bool = False
) -> ReadOptions:
    """Options for reading from what a user says: a rule file wins over a preset, both over the checkpoint."""
    if tag is not None:
        tag = tag.rstrip("/") or tag  # a shell that completes names adds it
    if rules is None and preset is None:
        return ReadOptions(tag, repair=repair)
    from ucp.formats.rulefiles import rule_book

    return ReadOptions(tag, rule_book(rules, preset), repair)


def index_state(
    path: str | os.PathLike[str],
    options: ReadOptions,
    log: str | os.PathLike[str] | None = None,
    step: int | str | None = None,
    exact: bool = False,
) -> Checkpoint:
    """The index of a checkpoint; with a `log`, of the state after `step` (a number or `latest`) that both make.

    Where that may differ from what the job held, notes say so; with `exact` it is an error.
    """
    if is_shadow(path):
        if log is not None or step is not None:
            raise UsageError(
                f"{path}: a shadow holds one step, the newest; --log and --step are about others",
                hint="name the run or a checkpoint instead of the shadow to get another step",
            )
        from ucp.shadow.client import open_shadow

        return open_shadow(path, options)
    if log is None and step is None and not exact:
        return index_checkpoint(as_path(path), options)
    from ucp.replay.opening import open_at

    return open_at(path, options, log, step, exact=exact)


def renamed(
    checkpoint: Checkpoint, names: str | os.PathLike[str] | None, model_config: str | os.PathLike[str] | None
) -> Checkpoint:
    """The checkpoint under the names, and in the forms, that `names` says: as it is where that is None."""
    if names is None:
        return checkpoint
    from ucp.names.choose import with_names

    return with_names(checkpoint, os.fspath(names), None if model_config is None else Path(model_config))
