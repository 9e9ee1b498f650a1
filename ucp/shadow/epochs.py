"""Which state an epoch begins with, and where a log keeps its epochs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ucp.engine.shares import Share
from ucp.errors import UsageError
from ucp.formats.registry import ReadOptions, open_checkpoint
from ucp.log.bases import ATOMS, BASE
from ucp.log.manifest import MANIFEST, Manifest
from ucp.log.reader import EPOCH
from ucp.shadow.assembling import HeldFiles, assemble, tell
from ucp.shadow.loading import Beginning, from_checkpoint, from_log
from ucp.shadow.portions import WHOLE
from ucp.shadow.state import HeldState


def root_of(log: Path) -> Path:
    """The folder that holds the epochs of a log, which may be named by its run."""
    return log / "log" if (log / "log").is_dir() else log


def epochs_of(log: Path) -> list[int]:
    """Numbers of the epochs that a log has."""
    root = root_of(log)
    if not root.is_dir():
        return []
    found = [EPOCH.fullmatch(path.name) for path in root.iterdir() if (path / MANIFEST).is_file()]
    return [int(named[1]) for named in found if named is not None]


def newest_of(log: Path, base: Path | None, options: ReadOptions, share: Share = WHOLE) -> Beginning:
    """The newest state of a log: from its run's own bases where it has some, else from `base`."""
    own = (root_of(log).parent / "base").is_dir()
    return from_log(None if own else base, log, options, share)


def goes_on_from(state: HeldState, manifest: Manifest) -> bool:
    """Is what is held just what the epoch goes on from?"""
    parent = manifest.parent
    same = state.manifest.run == manifest.run and state.step == manifest.start
    return same and parent is not None and (parent.epoch, parent.step) == (state.manifest.epoch, state.step)


def from_held(state: HeldState, base: Path, manifest: Manifest, options: ReadOptions) -> Beginning | None:
    """A new epoch that goes on from the state that is held, in its own layout.

    None where a share of another layout is needed: what it lacks is in other shadows.
    """
    if not state.share.is_whole:
        return _in_the_same_layout(state, base, manifest)
    snapshot = state.snapshot(lambda: tell(state, base, None))
    try:
        held = assemble(open_checkpoint(base, replace(options, spread=True)), snapshot.told, HeldFiles(snapshot))
        beginning = from_checkpoint(held, manifest, state.labels)
    finally:
        snapshot.close()
    beginning.base = base
    return beginning


def _in_the_same_layout(state: HeldState, base: Path, manifest: Manifest) -> Beginning | None:
    """The state as it is, where the epoch's streams are those of the one before."""
    if [schema.hash() for schema in state.manifest.streams] != [schema.hash() for schema in manifest.streams]:
        return None
    if state.manifest.kernel != manifest.kernel:
        return None
    for tensor in state.tensors:
        for replay in tensor.replays:
            replay.stretch.resumed_at = replay.stretch.step
    again = HeldState(
        *(manifest, state.step, state.tensors, state.labels, state.recent, state.aux, state.share, state.buffers)
    )
    return Beginning(again, base, {schema.stream: None for schema in manifest.streams})


def from_told(
    manifest: Manifest,
    run: Path | None,
    log: Path | None,
    base: Path | None,
    options: ReadOptions,
    share: Share = WHOLE,
) -> Beginning:
    """An epoch that a job tells of: from the log, from the base that the job names in its `run`, or from `base`."""
    if log is not None and epochs_of(log):
        beginning = newest_of(log, base, options, share)
        found = beginning.state.manifest
        if (found.run, found.epoch) == (manifest.run, manifest.epoch):
            return beginning
    told = None if manifest.base is None else Path(manifest.base)
    if told is not None and not told.is_absolute():
        told = None if run is None else run / told
    if told is not None and (told / BASE).is_file():  # a base of the run, and no checkpoint of somebody's
        told = told / ATOMS
    reasons = []
    for path in (told, base):
        if path is not None and path.exists():
            try:
                return from_checkpoint(open_checkpoint(path, options), manifest, named=path is not base, share=share)
            except UsageError as error:
                reasons.append(error.what)
    raise UsageError(
        f"there is no checkpoint of step {manifest.start}, which the job goes on from"
        + (f" ({'; '.join(reasons)})" if reasons else ""),
        hint="start the shadow with --base of that step, or with --log of the run",
    )
