"""Locate a DeepSpeed checkpoint: the path itself, or a folder below a save folder or a trainer's folder."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ucp.errors import InconsistentError, NotUnderstoodError, UsageError, storage_errors
from ucp.formats.deepspeed import step_files
from ucp.storage.local import read_pointer
from ucp.storage.paths import scan_folder

# Levels to search below the given path: Lightning keeps version_0/checkpoints/x.ckpt/checkpoint.
SEARCH_DEPTH: Final = 4
# Folders to look into before the search gives up: it also runs on mistyped paths such as a home folder.
SEARCH_LIMIT: Final = 2000


@dataclass(frozen=True, slots=True)
class StepFolder:
    """A checkpoint on disk: `step` contains DeepSpeed's files; `root` is `step` itself or the save folder above it."""

    root: Path
    step: Path

    @property
    def prefix(self) -> str:
        """The path of the step folder relative to `root`, with a trailing slash; "" if they are the same."""
        return "" if self.step == self.root else f"{self.tag}/"

    @property
    def tag(self) -> str:
        """The tag that DeepSpeed saved the step under: a folder name, or for some jobs a path below the root."""
        return self.step.name if self.step == self.root else self.step.relative_to(self.root).as_posix()


def recognises(path: Path) -> bool:
    """Whether a DeepSpeed step folder is at `path` or a few levels below."""
    with storage_errors(path):
        if path.is_file():
            return step_files.is_state_file(path.name)
        if not path.is_dir():
            return False
        named = _latest_tag(path)
        # A `latest` that names a missing folder is recognised too, so that `find` can report it.
        return is_step_folder(path) or bool(_search(path)) or (named is not None and not (path / named).exists())


def find(path: Path, tag: str | None) -> StepFolder:
    """The checkpoint at or below `path`, with this `tag` if one is given. Several candidates are an error."""
    with storage_errors(path):
        return _find(path, tag)


def _find(path: Path, tag: str | None) -> StepFolder:
    if path.is_file() and step_files.is_state_file(path.name):
        path = path.parent
    if not path.is_dir():
        raise NotUnderstoodError(f"{path}: neither a folder nor a DeepSpeed checkpoint file")
    if is_step_folder(path):
        if tag is not None and tag != path.name:
            raise UsageError(
                f"{path} is a step folder itself and is not named {tag!r}",
                hint="give its parent folder, or leave out --tag",
            )
        resolved = path.resolve()
        if detect_wrapper(resolved.parent) is not None and _latest_tag(resolved.parent) == resolved.name:
            return StepFolder(resolved.parent, resolved)  # a trainer keeps state in the folder above
        return StepFolder(path, path)
    if tag is not None:
        if not _is_relative_tag(tag):
            raise UsageError(f"--tag {tag!r} is not the name of a folder in {path}")
        if is_existing_step_folder(path / tag):
            return StepFolder(path, path / tag)
        steps = _search(path)
        same = [step for step in steps if step.name == tag or step.relative_to(path).as_posix() == tag]
        if not same:
            known = ", ".join(str(step.relative_to(path)) for step in steps) or "none"
            raise UsageError(f"{path}: no checkpoint with the tag {tag!r}", hint=f"checkpoints here: {known}")
        return _single_step(path, same)
    named = read_pointer(path / "latest")
    if named is not None:
        named = named.rstrip("/")  # DeepSpeed joins it to a path
        if not _is_relative_tag(named) or not is_existing_step_folder(path / named):
            tags = sorted(child.name for child in path.iterdir() if child.is_dir() and is_step_folder(child))
            raise InconsistentError(
                f"{path / 'latest'} names {named!r}, but {path / named} is not a DeepSpeed checkpoint",
                hint=f"choose one with --tag: {', '.join(tags)}" if tags else "the step folder is missing: restore it",
            )
        return StepFolder(path, path / named)
    return _single_step(path, _search(path))


def is_step_folder(path: Path) -> bool:
    """Whether a folder contains the files of a DeepSpeed save (and is not the output of ds_to_universal)."""
    found = False
    try:
        with scan_folder(path) as entries:
            for entry in entries:
                if entry.name == step_files.STATES_FOLDER and entry.is_dir():
                    return False
                found = found or step_files.is_state_file(entry.name)
    except NotADirectoryError:
        return False
    return found


def detect_wrapper(root: Path) -> str | None:
    """The trainer that created the folder above a step folder, by its files; None for DeepSpeed alone."""
    if (root / "trainer_state.json").is_file():
        return "HF Trainer"
    if root.suffix == ".ckpt":
        return "Lightning"
    if any(root.glob("random_states_*.pkl")):
        return "Accelerate"
    return None


def _latest_tag(path: Path) -> str | None:
    """The tag in `latest`; None if there is none, or if it is not one, which `find` reports."""
    try:
        text = (read_pointer(path / "latest") or "").rstrip("/")
    except InconsistentError:
        return None
    return text if _is_relative_tag(text) else None


def _is_relative_tag(tag: str) -> bool:
    """Whether a tag is a folder name or a relative path (`epoch3/step200`) that stays inside the given folder."""
    return "\0" not in tag and not any(part in ("", ".", "..") for part in tag.split("/"))


def is_existing_step_folder(path: Path) -> bool:
    """`is_step_folder` for a path that may not exist."""
    return path.is_dir() and is_step_folder(path)


def _single_step(path: Path, steps: list[Path]) -> StepFolder:
    if not steps:
        raise NotUnderstoodError(
            f"{path}: no DeepSpeed checkpoint here",
            hint="give the save folder (with `latest`) or the step folder inside it",
        )
    if len(steps) > 1:
        listed = "\n    ".join(str(step.relative_to(path)) for step in steps[:20])
        raise UsageError(
            f"{path}: {len(steps)} checkpoints, and no `latest` file to choose one:\n    {listed}",
            hint="give the path of one of them, or choose with --tag",
        )
    step = steps[0]
    return StepFolder(step.parent, step)


def _search(path: Path) -> list[Path]:
    """Step folders at the first level below `path` that has any; if a folder has `latest`, only the one it names."""
    level = [path]
    visited = 0
    for _ in range(SEARCH_DEPTH):
        steps: list[Path] = []
        below: list[Path] = []
        for folder in level:
            children: list[Path] = []
            with suppress(PermissionError):
                children = sorted(child for child in folder.iterdir() if child.is_dir() and child.name[0] != ".")
            here = [child for child in children if _is_readable_step(child)]
            named = _latest_tag(folder) if folder != path else None
            steps.extend([child for child in here if child.name == named] or here)
            below.extend(child for child in children if child not in here)
            visited += len(children)
            if visited > SEARCH_LIMIT:
                return steps
        if steps:
            return steps
        level = below
    return []


def _is_readable_step(path: Path) -> bool:
    try:
        return is_step_folder(path)
    except PermissionError:
        return False


def recognises_universal(path: Path) -> bool:
    """Whether `path` is a universal folder, or a save folder that names one and has no native checkpoint."""
    with storage_errors(path):
        if _is_universal(path):
            return True
        named = _latest_universal_tag(path)
        return named is not None and _is_universal(path / named) and not (path / "latest").is_file()


def _is_universal(path: Path) -> bool:
    if not (path / step_files.STATES_FOLDER).is_dir():
        return False
    if (path / step_files.OPTIMIZER_STATE).is_file():
        return True
    with scan_folder(path / step_files.STATES_FOLDER) as entries:
        return any(
            (
                path / step_files.STATES_FOLDER / entry.name / f"{step_files.MASTER_FILE}{step_files.STATE_SUFFIX}"
            ).is_file()
            for entry in entries
        )


def _latest_universal_tag(path: Path) -> str | None:
    text = read_pointer(path / step_files.LATEST_UNIVERSAL)
    return text if text is not None and "/" not in text and _is_relative_tag(text) else None


def find_universal(path: Path, tag: str | None) -> Path:
    """The universal folder at `path`, or the one below it with this `tag`."""
    if _is_universal(path):
        if tag is not None and tag != path.name:
            raise UsageError(f"{path} is a universal folder itself, not one named {tag!r}", hint="leave out --tag")
        return path
    named = tag if tag is not None else _latest_universal_tag(path)
    if named is None or not _is_universal(path / named):
        raise UsageError(f"{path}: no universal folder {named or ''} here", hint="give the folder that contains zero/")
    return path / named
