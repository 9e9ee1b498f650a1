"""The grid of ranks that a checkpoint must have, and whether all its files are there and of one save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ucp.errors import NotUnderstoodError
from ucp.formats.deepspeed.names import StepFiles, model_name, optim_name, sharded_model_name
from ucp.formats.deepspeed.problems import Problems
from ucp.formats.deepspeed.shards import RankFile, RankFiles

_MOST_RANKS: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Grid:
    """Degrees as the files show them. `dp` counts rank files (1 when state is not sharded)."""

    tp: int
    pp: int
    dp: int
    dp_world: int  # data-parallel ranks of the job, which need not all have files
    sharded_model: bool  # one model file a rank: ZeRO-3

    @property
    def mp(self) -> int:
        return self.tp * self.pp


def find_grid(files: StepFiles, opened: RankFiles, prefix: str, problems: Problems) -> Grid:
    """The grid, after a check that no file of it is missing (every missing one is named)."""
    sharded = bool(files.sharded_model)
    mps = {mp for _, mp in files.optim} | set(files.model) | {mp for _, mp in files.sharded_model}
    first = _first_model(files, opened, prefix)
    tree = first.mapping() if first is not None else {}
    mp = max([*mps, _count(tree, "mp_world_size") - 1]) + 1
    ranks = [dp for dp, _ in (*files.optim, *files.sharded_model)]
    written = max(ranks) + 1 if ranks else 1
    dp_world = max(_count(tree, "dp_world_size"), written)
    expected = _expected_ranks(files, opened, prefix, written, dp_world) if ranks else 1
    said = tree.get("dp_world_size")
    if type(said) is int and 0 < said < written and first is not None:
        problems.add(
            f"rank files of {written} data-parallel ranks are here, but {first.name} says that the job had {said}: the"
            " folder holds files of an earlier save"
        )
    if mp * expected > _MOST_RANKS:
        raise NotUnderstoodError(
            f"{first.name if first is not None else prefix}: claims {mp} model-parallel × {expected} dp ranks",
            hint="no job had that many; the file is damaged",
        )
    _name_missing(files, mp, expected, sharded, first, problems)
    tp = _tensor_parallel(files, opened, prefix, tree, mp)
    return Grid(tp, mp // tp, expected, dp_world, sharded)


def _first_model(files: StepFiles, opened: RankFiles, prefix: str) -> RankFile | None:
    names = [
        *(files.model[mp] for mp in sorted(files.model)),
        *(files.sharded_model[k] for k in sorted(files.sharded_model)),
    ]
    return opened.open(prefix + names[0]) if names else None


def _count(tree: Mapping[Any, Any], key: str) -> int:
    value = tree.get(key)
    return value if type(value) is int and value > 0 else 1


def _expected_ranks(files: StepFiles, opened: RankFiles, prefix: str, written: int, dp_world: int) -> int:
    """How many data-parallel ranks must have written files: all of the job's, but one shard group's under MiCS."""
    if not files.optim:
        return dp_world
    top = opened.open(prefix + files.optim[min(files.optim)]).mapping().get("optimizer_state_dict")
    count = top.get("partition_count") if isinstance(top, dict) else None
    if type(count) is int and count == written and len({dp for dp, _ in files.optim}) == written:
        return written
    if isinstance(count, (list, tuple)):
        return max([dp_world, *(n for n in count if type(n) is int)])
    return dp_world


def _name_missing(
    files: StepFiles, mp: int, dp: int, sharded: bool, model: RankFile | None, problems: Problems
) -> None:
    missing: list[str] = []
    if sharded:
        missing += [sharded_model_name(d, m) for m in range(mp) for d in range(dp) if (d, m) not in files.sharded_model]
    else:
        missing += [model_name(m) for m in range(mp) if m not in files.model]
    if files.optim:
        like = next(iter(files.optim.values()))
        missing += [optim_name(d, m, like) for m in range(mp) for d in range(dp) if (d, m) not in files.optim]
    elif sharded:
        missing += [optim_name(d, m, "zero_pp_rank_0_mp_rank_00_optim_states.pt") for m in range(mp) for d in range(dp)]
    where = f" ({model.name} says: {mp} model-parallel × {dp} data-parallel ranks)" if model is not None else ""
    for name in missing:
        problems.add(f"rank file {name} is missing{where}")
        where = ""


def _tensor_parallel(files: StepFiles, opened: RankFiles, prefix: str, tree: Mapping[Any, Any], mp: int) -> int:
    """The tensor-parallel degree: as the file says (recent releases), as layer files show, or by comparing names."""
    degrees = tree.get("checkpoint_parallel_dimensions")
    said = degrees.get("tp_degree") if isinstance(degrees, dict) else None
    if type(said) is int and said > 0 and mp % said == 0:
        return said
    if files.layers:
        tp = max(t for _, t in files.layers) + 1
        return tp if mp % tp == 0 else 1
    return _ranks_with_same_names(files, opened, prefix, mp)


def _ranks_with_same_names(files: StepFiles, opened: RankFiles, prefix: str, mp: int) -> int:
    """Without layer files every rank is a tensor-parallel one, unless later ranks hold other parameters (stages)."""
    first = _names_of(files, opened, prefix, 0)
    for m in range(1, mp):
        if _names_of(files, opened, prefix, m) != first:
            return m if mp % m == 0 else mp
    return mp


def _names_of(files: StepFiles, opened: RankFiles, prefix: str, mp: int) -> list[list[str]] | None:
    name = files.model.get(mp) or files.sharded_model.get((0, mp))
    shapes = opened.open(prefix + name).mapping().get("param_shapes") if name is not None else None
    if isinstance(shapes, dict):
        shapes = [shapes]
    return (
        [sorted(map(str, group)) for group in shapes if isinstance(group, dict)] if isinstance(shapes, list) else None
    )


def check_same_save(models: Mapping[str, RankFile], optims: Mapping[str, RankFile], problems: Problems) -> None:
    """Report files that another step or another version of DeepSpeed wrote."""
    _same(models, "global_steps", "step", problems)
    _same(models, "dp_world_size", "data-parallel ranks", problems)
    _same({**models, **optims}, "ds_version", "DeepSpeed version", problems)


def _same(files: Mapping[str, RankFile], key: str, what: str, problems: Problems) -> None:
    seen: dict[str, list[str]] = {}
    for name, file in files.items():
        value = file.mapping().get(key)
        if value is not None:
            seen.setdefault(repr(value), []).append(name)
    if len(seen) < 2:
        return
    most = max(seen, key=lambda value: len(seen[value]))
    for value, names in seen.items():
        if value != most:
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            problems.add(
                f"{shown}: {what} {value}, but {seen[most][0]} says {most}: files of different saves are mixed"
            )
