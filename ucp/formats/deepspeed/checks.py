"""Checks of DeepSpeed checkpoints: the grid of rank files, trainer files, and values that all ranks must agree on."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

from ucp.containers.inert import Inert, NumpyScalar
from ucp.core.checkpoint import WEIGHT, Atom, Checkpoint, Rank
from ucp.core.findings import Finding
from ucp.errors import UcpError
from ucp.formats.deepspeed import step_files
from ucp.formats.deepspeed.folder import StepFolder, find, find_universal, is_step_folder
from ucp.formats.deepspeed.read.rank_files import RankFiles
from ucp.formats.deepspeed.read.save_consistency import find_grid, select_model_files, without_stale_model_files
from ucp.formats.registry import FormatChecks, missing_sidecar
from ucp.formats.sharded.shard_table import Problems

_TRAINER: Final = "trainer_state.json"
_SCHEDULER: Final = "scheduler.pt"
# One file per rank: of the Hugging Face Trainer (rng_state.pth if there is one rank only) and of Accelerate.
_RANDOM: Final = re.compile(r"(rng_state_|random_states_)(\d+)(\.pth|\.pkl)")
_RESTART: Final = "training that continues without it starts them anew"

_COUNTERS: Final = ("global_steps", "global_samples", "skipped_steps", "micro_steps", "iteration", "lr_scheduler")
_SCALING: Final = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
_TAG: Final = re.compile(r"global_step(\d+)")
_MIXED: Final = "files of different saves are mixed: keep those of one step, and restore the others"
_MAX_DEPTH: Final = 20


class DeepSpeedChecks(FormatChecks):
    """`grid`, `iteration` and `hyper-parameters`."""

    def quick(self, checkpoint: Checkpoint, atoms: Sequence[Atom]) -> Iterator[Finding]:
        """Files that belong to no rank, missing optimizer and trainer files, and ranks that disagree."""
        del atoms
        yield from missing_sidecars(checkpoint)
        yield from _check_grid(checkpoint)
        yield from _compare_ranks(checkpoint)

    def unreadable(self, path: Path, tag: str | None) -> Iterator[Finding]:
        """The rank files that are missing from the grid."""
        return _missing_files(path, tag)

    def torch_files(self, path: Path, tag: str | None) -> Iterable[Path]:
        """Those of the step folder and the save folder."""
        beside = path.parent if path.is_file() else path
        if is_step_folder(beside):
            return sorted(beside.glob("*.pt"))
        step = find(path, tag)
        return sorted({*step.root.glob("*.pt"), *step.step.glob("*.pt")})


class UniversalChecks(FormatChecks):
    """No checks besides the general ones for a folder that can be read."""

    has_flat_buffers = False  # tensors are complete: gaps are rows beyond the vocabulary

    def unreadable(self, path: Path, tag: str | None) -> Iterator[Finding]:
        """The rank files that are missing next to it."""
        return _missing_files(path, tag)

    def torch_files(self, path: Path, tag: str | None) -> Iterable[Path]:
        """All of the universal folder."""
        return sorted(find_universal(path, tag).rglob("*.pt"))


# the grid of rank files -----------------------------------------------------------------------------------------------


def _check_grid(checkpoint: Checkpoint) -> Iterator[Finding]:
    paths = [PurePosixPath(file) for file in checkpoint.sizes]
    folders = {path.parent for path in paths if step_files.is_state_file(path.name)}
    found = {
        folder: step_files.classify_files([path.name for path in paths if path.parent == folder])
        for folder in sorted(folders)
    }
    zero = checkpoint.details.get("zero")
    stage = zero.get("configured_stage") if isinstance(zero, dict) else None
    has_states = any(kind != WEIGHT for parameter in checkpoint.parameters.values() for kind in parameter.atoms)
    if stage and not has_states and not any(files.optim for files in found.values()):
        yield Finding(
            "grid",
            "error",
            f"saved with ZeRO stage {stage}, but no rank's optimizer file is here: only weights could be read",
            hint="restore the *_optim_states.pt files; without them training cannot continue from here",
        )
    for folder, files in found.items():
        for name in (*files.other, *select_model_files(files, sharded=checkpoint.mesh.zero == 3).foreign):
            if name.endswith(".pt"):
                file = (folder / name).as_posix()
                yield Finding(
                    "grid",
                    "warning",
                    f"{file}: belongs to no rank of {checkpoint.mesh}",
                    file,
                    hint="if it is left over from another save, move it elsewhere; if it was renamed, restore its name",
                )


def _missing_files(path: Path, tag: str | None) -> Iterator[Finding]:
    """Rank files that are missing from a step folder that could not be indexed. Files are relative to `path`."""
    try:
        step = find(path, tag)
        files = step_files.classify_files([entry.name for entry in step.step.iterdir() if entry.is_file()])
        opened = RankFiles(step.root)
        files = without_stale_model_files(files, opened, step.prefix)
        grid = find_grid(files, opened, step.prefix, Problems(""))
    except (UcpError, OSError):
        return
    base = path if path.is_dir() else path.parent
    for mp in range(grid.mp):
        rank = Rank(mp // grid.tp, mp % grid.tp)
        if not grid.sharded_model and mp not in files.model:
            yield _missing_file(base, step, step_files.model_file_name(mp), rank)
        for dp in range(grid.dp):
            rank = Rank(mp // grid.tp, mp % grid.tp, dp)
            if grid.sharded_model and (dp, mp) not in files.sharded_model:
                yield _missing_file(base, step, step_files.sharded_model_file_name(dp, mp), rank)
            if (files.optim or grid.sharded_model) and (dp, mp) not in files.optim:
                like = next(iter(files.optim.values()), None)
                yield _missing_file(base, step, step_files.optimizer_file_name(dp, mp, like), rank)
    # A pipeline layer has one file per tensor-parallel rank. (Layers that are plain functions have none at all.)
    for layer in sorted({layer for layer, _ in files.layers}):
        for tp in range(grid.tp):
            if (layer, tp) not in files.layers:
                has_tp_rank = step_files.names_tp_rank(next(iter(files.layers.values())))
                yield _missing_file(
                    base, step, step_files.layer_file_name(layer, tp, has_tp_rank=has_tp_rank), Rank(tp=tp)
                )


def _missing_file(base: Path, step: StepFolder, name: str, rank: Rank) -> Finding:
    path = step.root / f"{step.prefix}{name}"
    return Finding(
        "grid",
        "error",
        f"{path}: is missing ({rank})",
        (path.relative_to(base) if path.is_relative_to(base) else path).as_posix(),
        rank,
        hint="copy the file from the node that wrote it; without it the checkpoint is not complete",
    )


# files of a trainer ---------------------------------------------------------------------------------------------------


def missing_sidecars(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Files that the Hugging Face Trainer and Accelerate write with every save, and that are missing."""
    trees = [
        tree
        for file, tree in checkpoint.extras.trees.items()
        if step_files.is_state_file(file) and isinstance(tree, dict)
    ]
    has_own = any(tree.get("lr_scheduler") is not None for tree in trees)  # of the engine: the Trainer writes no other
    if _TRAINER in checkpoint.sizes and _SCHEDULER not in checkpoint.sizes and not has_own:
        yield missing_sidecar(checkpoint, _SCHEDULER, "the schedule of the learning rate", _RESTART)
    matches = [match for name in checkpoint.sizes if (match := _RANDOM.fullmatch(name))]
    found = {int(match[2]) for match in matches}
    if not found:
        return
    before, _, after = matches[0].groups()
    # Only gaps below the highest rank: files of more ranks than those of the save are not damage. Files are numbered if
    # there are at least two ranks.
    for rank in range(min(max(*found, 1) + 1, checkpoint.mesh.world)):
        if rank not in found:
            yield missing_sidecar(checkpoint, f"{before}{rank}{after}", f"the random states of rank {rank}", _RESTART)


# values that ranks must agree on --------------------------------------------------------------------------------------

_Tree = Mapping[Any, Any]
_Collect = Callable[[_Tree], Iterator[tuple[str, str]]]  # yields values of a tree as text, with their paths


def _compare_ranks(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Compare counters over all rank files, and hyper-parameters over those of a pipeline stage."""
    trees = {name: tree for name, tree in checkpoint.extras.trees.items() if isinstance(tree, dict)}
    files = step_files.classify_files([name for name in trees if "/" not in name])
    tp = checkpoint.mesh.tp
    models = {**{(0, mp): name for mp, name in files.model.items()}, **files.sharded_model}
    paths = {PurePosixPath(file).name: file for file in checkpoint.sizes}

    def compare(check: str, members: Mapping[tuple[int, int], str], collect: _Collect) -> Iterator[Finding]:
        ranks = [(name, Rank(mp // tp, mp % tp, dp)) for (dp, mp), name in sorted(members.items())]
        return _compare(check, ranks, trees, collect, paths)

    yield from compare("iteration", models, _counters)
    yield from _compare_tag(checkpoint, files, trees)
    for role in (files.optim, models):  # without ZeRO, model files contain the optimizer too
        for stage in sorted({mp // tp for _, mp in role}):
            members = {(dp, mp): name for (dp, mp), name in role.items() if mp // tp == stage}
            yield from compare("hyper-parameters", members, _hyper_parameters)


def _counters(tree: _Tree) -> Iterator[tuple[str, str]]:
    for key in _COUNTERS:
        if key in tree:
            yield from _flatten(key, tree[key])


def _compare(
    check: str,
    files: Sequence[tuple[str, Rank]],
    trees: Mapping[str, _Tree],
    collect: _Collect,
    paths: Mapping[str, str],
) -> Iterator[Finding]:
    """One finding per file that differs from the majority."""
    # Files with the same pickle share one tree, whose values are collected once.
    by_tree = {id(tree): tree for tree in (trees[name] for name, _ in files)}
    if len(by_tree) < 2:
        return
    collected = {key: dict(collect(tree)) for key, tree in by_tree.items()}
    facts = {name: collected[id(trees[name])] for name, _ in files}
    counts: dict[str, Counter[str]] = {}
    for name, _ in files:
        for key, value in facts[name].items():
            counts.setdefault(key, Counter())[value] += 1
    majority = {key: values.most_common(1)[0] for key, values in counts.items() if len(values) > 1}
    for name, rank in files if majority else ():
        different = [key for key in majority if facts[name].get(key, majority[key][0]) != majority[key][0]]
        if different:
            key = different[0]
            value, count = majority[key]
            more = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
            yield Finding(
                check,
                "error",
                f"{paths[name]}: {key} is {facts[name][key]}, but {value} in {count} of {len(files)} files{more}",
                paths[name],
                rank,
                hint=_MIXED,
                subject=key,
            )


def _compare_tag(
    checkpoint: Checkpoint, files: step_files.StepFiles, trees: Mapping[str, Mapping[Any, Any]]
) -> Iterator[Finding]:
    """DeepSpeed names a step folder after the step, unless the job chooses another tag."""
    names = [*files.model.values(), *files.sharded_model.values()]
    if not names:
        return
    path = next((file for file in checkpoint.sizes if PurePosixPath(file).name == names[0]), names[0])
    match = _TAG.fullmatch((checkpoint.root / path).parent.name)
    steps = trees[names[0]].get("global_steps")
    if match and type(steps) is int and steps != int(match[1]):
        yield Finding(
            "iteration",
            "warning",
            f"{path}: was saved at step {steps}, but is in the folder {match[0]}",
            path,
            hint="right if the folder was renamed; otherwise its files are of another save",
            subject="tag",
        )


def _hyper_parameters(tree: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    state = tree.get("optimizer_state_dict", tree.get("optimizer"))
    if not isinstance(state, dict):
        return
    for key in _SCALING:
        if key in state:
            yield from _flatten(key, state[key])
    for inner in (state, state.get("base_optimizer_state"), state.get("optimizer_state_dict")):
        groups = inner.get("param_groups") if isinstance(inner, dict) else None
        for number, group in enumerate(groups if isinstance(groups, list) else ()):
            for key, value in group.items() if isinstance(group, dict) else ():
                if key != "params":
                    yield from _flatten(f"{key} of group {number}", value)


def _flatten(path: str, value: Any, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Numbers and strings inside a value, each with its path. Tensors are compared by other checks."""
    if isinstance(value, NumpyScalar):
        value = value.to_python()
    if value is None or isinstance(value, (bool, int, float, str)):
        yield path, repr(value)
    elif depth < _MAX_DEPTH:
        if isinstance(value, Inert):
            value = value.state if isinstance(value.state, dict) else value.args
        members = (
            value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, (list, tuple)) else ())
        )
        for key, item in members:
            yield from _flatten(f"{path}.{key}", item, depth + 1)
