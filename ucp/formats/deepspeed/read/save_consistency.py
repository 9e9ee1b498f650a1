"""Which files a save consists of, and whether they are complete and all from the same save.

- ZeRO-3 writes one model file per rank, the other stages one per model-parallel rank. The names of the two kinds do not
  collide, so a save into an existing folder replaces only its own kind: `without_stale_model_files` drops the others.
- `find_grid` derives the degrees of parallelism and reports every rank file that is missing.
- `check_saved_names` reports files that carry each other's names. A shard does not contain its rank, but torch names
  the archive after the file that it was saved to.
- `check_same_save` reports files of another step or another DeepSpeed version.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ucp.errors import NotUnderstoodError, first_few
from ucp.formats.deepspeed.read.rank_files import RankFile, RankFiles, lookup
from ucp.formats.deepspeed.read.read_context import ReadContext
from ucp.formats.deepspeed.read.read_zero3 import ZERO3_MASTERS
from ucp.formats.deepspeed.step_files import (
    StepFiles,
    classify_files,
    model_file_name,
    optimizer_file_name,
    sharded_model_file_name,
)
from ucp.formats.sharded.shard_table import Problems

FOREIGN_NOTE: Final = "file-foreign"
_MAX_RANKS: Final = 1 << 20
_SHARDED_ROLES: Final = ("optim", "sharded_model", "expert_optim")  # every rank has its own content
_OTHER_ROLES: Final = ("model", "layers")


def without_stale_model_files(files: StepFiles, opened: RankFiles, prefix: str) -> StepFiles:
    """Drop the model files that do not belong to the optimizer files: an earlier save with another stage left them."""
    if not files.model or not files.sharded_model:
        return files
    return select_model_files(files, sharded=_is_zero3(files, opened, prefix))


def select_model_files(files: StepFiles, *, sharded: bool) -> StepFiles:
    """Keep the model files of ZeRO-3 (`sharded`) or those of the other stages; the rest become `foreign`."""
    others: Mapping[Any, str] = files.model if sharded else files.sharded_model
    if not others or not (files.sharded_model if sharded else files.model):
        return files
    return StepFiles(
        model={} if sharded else files.model,
        sharded_model=files.sharded_model if sharded else {},
        optim=files.optim,
        layers=files.layers,
        experts=files.experts,
        expert_optim=files.expert_optim,
        other=files.other,
        foreign=sorted(others.values()),
    )


def _is_zero3(files: StepFiles, opened: RankFiles, prefix: str) -> bool:
    """Whether ZeRO-3 wrote the optimizer files: it stores the master weights under a different key.

    Without optimizer files, a model file that contains the optimizer is from ZeRO off. Without any
    optimizer state, assume ZeRO-3 with lost files: the whole weights may be left over from an earlier save.
    """
    if not files.optim:
        model = opened.open(prefix + files.model[min(files.model)])
        return not files.expert_optim and model.mapping().get("optimizer") is None
    states = opened.open(prefix + files.optim[min(files.optim)]).mapping().get("optimizer_state_dict")
    return isinstance(states, dict) and ZERO3_MASTERS in states


@dataclass(frozen=True, slots=True)
class RankGrid:
    """Degrees of parallelism, derived from the files. `dp` counts rank files (1 if the state is not sharded)."""

    tp: int
    pp: int
    dp: int
    dp_world: int  # data-parallel ranks of the job, not all of which need to have files
    sharded_model: bool  # one model file per rank: ZeRO-3

    @property
    def mp(self) -> int:
        return self.tp * self.pp


def find_grid(files: StepFiles, opened: RankFiles, prefix: str, problems: Problems) -> RankGrid:
    """Determine the grid of ranks, and report every file of it that is missing."""
    sharded = bool(files.sharded_model)
    mps = {mp for _, mp in files.optim} | set(files.model) | {mp for _, mp in files.sharded_model}
    first = _first_model(files, opened, prefix)
    tree = first.mapping() if first is not None else {}
    mp = max([*mps, _positive_int(tree, "mp_world_size") - 1]) + 1
    ranks = [dp for dp, _ in (*files.optim, *files.sharded_model)]
    written = max(ranks) + 1 if ranks else 1
    dp_world = max(_positive_int(tree, "dp_world_size"), written)
    expected = _expected_ranks(files, opened, prefix, written, dp_world) if ranks else 1
    stored = tree.get("dp_world_size")
    if type(stored) is int and 0 < stored < written and first is not None:
        problems.add(
            f"rank files of {written} data-parallel ranks were found, but according to {first.name} the job had"
            f" {stored}: the folder contains files of an earlier save"
        )
    if mp * expected > _MAX_RANKS:
        raise NotUnderstoodError(
            f"{first.name if first is not None else prefix}: claims {mp} model-parallel × {expected} dp ranks",
            hint="no job has that many; the file is damaged",
        )
    _report_missing(files, mp, expected, sharded, first, problems)
    tp = _tensor_parallel_degree(files, opened, prefix, tree, mp)
    return RankGrid(tp, mp // tp, expected, dp_world, sharded)


def _first_model(files: StepFiles, opened: RankFiles, prefix: str) -> RankFile | None:
    names = [
        *(files.model[mp] for mp in sorted(files.model)),
        *(files.sharded_model[k] for k in sorted(files.sharded_model)),
    ]
    return opened.open(prefix + names[0]) if names else None


def _positive_int(tree: Mapping[Any, Any], key: str) -> int:
    value = tree.get(key)
    return value if type(value) is int and value > 0 else 1


def _expected_ranks(files: StepFiles, opened: RankFiles, prefix: str, written: int, dp_world: int) -> int:
    """Number of data-parallel ranks that must have files: all of the job, except that MiCS saves one shard group."""
    if not files.optim:
        return dp_world
    first = opened.open(prefix + files.optim[min(files.optim)])
    count = lookup(first.mapping(), "optimizer_state_dict", "partition_count")
    if type(count) is int and count == written and len({dp for dp, _ in files.optim}) == written:
        return written
    if isinstance(count, (list, tuple)):
        return max([dp_world, *(n for n in count if type(n) is int)])
    return dp_world


def _report_missing(
    files: StepFiles, mp: int, dp: int, sharded: bool, model: RankFile | None, problems: Problems
) -> None:
    ranks = [(d, m) for m in range(mp) for d in range(dp)]
    if sharded:
        missing = [sharded_model_file_name(d, m) for d, m in ranks if (d, m) not in files.sharded_model]
    else:
        missing = [model_file_name(m) for m in range(mp) if m not in files.model]
    if files.optim or sharded:
        like = next(iter(files.optim.values()), None)
        missing += [optimizer_file_name(d, m, like) for d, m in ranks if (d, m) not in files.optim]
    reason = (
        f" (according to {model.name}: {mp} model-parallel × {dp} data-parallel ranks)" if model is not None else ""
    )
    for name in missing:
        problems.add(f"rank file {name} is missing{reason}")
        reason = ""


def _tensor_parallel_degree(files: StepFiles, opened: RankFiles, prefix: str, tree: Mapping[Any, Any], mp: int) -> int:
    """The degree as stored (recent releases), from the layer files, or by comparing the parameter names of ranks."""
    stored = lookup(tree, "checkpoint_parallel_dimensions", "tp_degree")
    if type(stored) is int and stored > 0 and mp % stored == 0:
        return stored
    if files.layers:
        tp = max(t for _, t in files.layers) + 1
        return tp if mp % tp == 0 else 1
    return _degree_from_names(files, opened, prefix, mp)


def _degree_from_names(files: StepFiles, opened: RankFiles, prefix: str, mp: int) -> int:
    """Without layer files all ranks are tensor-parallel ranks, unless later ranks have other parameters (stages)."""
    first = _parameter_names(files, opened, prefix, 0)
    for m in range(1, mp):
        if _parameter_names(files, opened, prefix, m) != first:
            return m if mp % m == 0 else mp
    return mp


def _parameter_names(files: StepFiles, opened: RankFiles, prefix: str, mp: int) -> list[list[str]] | None:
    name = files.model.get(mp) or files.sharded_model.get((0, mp))
    shapes = opened.open(prefix + name).mapping().get("param_shapes") if name is not None else None
    if isinstance(shapes, dict):
        shapes = [shapes]
    if not isinstance(shapes, list):
        return None
    return [sorted(map(str, group)) for group in shapes if isinstance(group, dict)]


def check_saved_names(context: ReadContext, files: StepFiles) -> None:
    """Report files that were swapped or copied over one another; note files that were merely renamed.

    A layer that was copied to make a model deeper is valid, and so are ranks that were all created from one file. With
    ZeRO-1 and 2 nothing is an error here: a master weight that differs from its module weight is reported later, by
    parameter.
    """
    is_checked_later = bool(files.optim) and not files.sharded_model
    for role in (*_SHARDED_ROLES, *_OTHER_ROLES):
        names: Mapping[Hashable, str] = getattr(files, role)
        opened = {key: context.files.open(context.prefix + name) for key, name in names.items()}
        saved = {key: _saved_key(file, role, key) for key, file in opened.items()}
        wrong = [opened[key] for key in opened if saved[key] != key]
        if not wrong:
            continue
        found = set(saved.values())
        is_exchange = len(found) == len(saved)
        is_copy = role in _SHARDED_ROLES and (len(found) > 1 or len(saved) == 2)
        if found <= set(opened) and (is_exchange or is_copy) and not is_checked_later:
            for file in wrong:
                context.problems.add(f"{file.name}: was saved as {file.saved_as}.pt, the file of another rank or layer")
        else:
            context.note(
                "saved-under-other-names",
                f"{wrong[0].name} was saved as {wrong[0].saved_as}.pt, and {len(wrong) - 1} more under other names",
            )
    context.problems.raise_any("give every file the name that it was saved under, and restore what was overwritten")


def _saved_key(file: RankFile, role: str, current: Hashable) -> Hashable:
    """The key of the name that a file was saved under; `current` if the archive does not record one."""
    found: Mapping[Hashable, str] = getattr(classify_files([f"{file.saved_as}.pt"]), role)
    return next(iter(found), current)


def check_same_save(models: Mapping[str, RankFile], optims: Mapping[str, RankFile], problems: Problems) -> None:
    """Report files that another step or another version of DeepSpeed wrote."""
    _check_equal(models, "global_steps", "step", problems)
    _check_equal(models, "dp_world_size", "data-parallel ranks", problems)
    _check_equal({**models, **optims}, "ds_version", "DeepSpeed version", problems)


def _check_equal(files: Mapping[str, RankFile], key: str, what: str, problems: Problems) -> None:
    by_value: dict[str, list[str]] = {}
    for name, file in files.items():
        value = file.mapping().get(key)
        if value is not None:
            by_value.setdefault(repr(value), []).append(name)
    if len(by_value) < 2:
        return
    most = max(by_value, key=lambda value: len(by_value[value]))
    for value, names in by_value.items():
        if value != most:
            problems.add(
                f"{first_few(names, 5)}: {what} {value}, but {by_value[most][0]} has {most}: files of different saves"
                " are mixed"
            )
