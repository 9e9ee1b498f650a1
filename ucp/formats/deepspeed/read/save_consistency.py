"""Which files a save consists of, and whether they are complete and all from the same save.

- ZeRO-3 writes one model file per rank, the other stages one per model-parallel rank. The names of the two kinds do not
  collide, so a save into an existing folder replaces only its own kind: `without_stale_model_files` drops the others.
- `find_grid` derives the degrees of parallelism and reports every rank file that is missing.
- `check_saved_names` and `check_copied_files` report files in the place of another rank's file.
- `check_same_save` reports files of another step or another DeepSpeed version.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ucp.containers.inert import TensorRef
from ucp.core.box import Shape
from ucp.core.checkpoint import Rank
from ucp.errors import InconsistentError, NotUnderstoodError, first_few
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
from ucp.formats.sharded.assembly import ResolvedRule
from ucp.formats.sharded.rank_identity import COPY_HINT, TRUST_HINT, RankContent, find_copies, rank_tensors
from ucp.formats.sharded.shard_table import Problems
from ucp.storage.local import SourceFiles

FOREIGN_NOTE: Final = "file-foreign"
_MAX_RANKS: Final = 1 << 20
_ROLES: Final = ("optim", "sharded_model", "expert_optim", "model", "layers", "experts")


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
        if (names := _parameter_names(files, opened, prefix, m)) != first and None not in (names, first):
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


def by_recorded_rank(files: StepFiles, opened: RankFiles, prefix: str) -> StepFiles:
    """The files by the rank, layer or expert that each was saved as, instead of the one in its name."""
    found = StepFiles(other=files.other, foreign=files.foreign)
    for role, key, name in _placed_files(files):
        recorded = _recorded_place(opened.open(prefix + name)) or (role, key)
        table = getattr(found, recorded[0])
        if recorded[1] in table:
            raise InconsistentError(
                f"{prefix}{name} and {prefix}{table[recorded[1]]} were saved as the same file:"
                " one is a copy of the other",
                hint="restore the file that was overwritten",
            )
        table[recorded[1]] = name
    return found


def check_saved_names(context: ReadContext, files: StepFiles, tp: int, trusts_names: bool) -> None:
    """Report files that were saved as the file of another rank, layer or expert; only note them if names are trusted.

    DeepSpeed's files do not contain their rank, but torch names an archive after the file that it is saved to.
    """
    opened = [(role, key, context.files.open(context.prefix + name)) for role, key, name in _placed_files(files)]
    wrong = [each for each in opened if _recorded_place(each[2]) not in (None, each[:2])]
    if wrong and trusts_names:
        first = wrong[0][2]
        context.note(
            "saved-under-other-names",
            f"{first.name} was saved as {first.saved_as}.pt, and {len(wrong) - 1} more under other names",
        )
        return
    for role, key, file in wrong:
        text = f"{file.name}: was saved as {file.saved_as}.pt, the file of another rank, layer or expert"
        rank = None
        if role not in ("layers", "experts"):
            dp, mp = (0, key) if role == "model" else key
            rank = Rank(mp // tp, mp % tp, dp)
        context.problems.add(text, "grid", file.name, rank)
    context.problems.raise_any(TRUST_HINT)


def check_copied_files(context: ReadContext, files: StepFiles, rules: Mapping[str, ResolvedRule]) -> None:
    """Report rank files whose tensors are equal to those of another rank: what is split or sharded differs.

    Tensor-parallel ranks may be equal if the checkpoint or the user declares that no parameter is split.
    """
    is_declared = any(not resolved.origin.startswith("inferred") for resolved in rules.values())
    may_be_equal = is_declared and all(resolved.rule.cut not in ("split", "vocab") for resolved in rules.values())
    tensors: dict[int, list[TensorRef]] = {}  # files may share a tree

    def content(name: str, key: str | None = None) -> RankContent:
        file = context.files.open(context.prefix + name)
        tree = file.tree if key is None else file.mapping().get(key)
        if id(tree) not in tensors:
            tensors[id(tree)] = rank_tensors(tree)
        return RankContent(file.name, file, tensors[id(tree)])

    copies: list[tuple[str, str]] = []
    if len(files.model) > 1 and not may_be_equal:
        copies += find_copies((content(name, "module") for _, name in sorted(files.model.items())), context.source)
    optimizers: dict[object, list[RankContent]] = {}
    for (dp, mp), name in sorted(files.optim.items()) if len(files.optim) > 1 else ():
        each = content(name, "optimizer_state_dict")
        count = lookup(context.files.open(each.name).tree, "optimizer_state_dict", "partition_count")
        copy = dp // count if type(count) is int and count > 0 else 0  # MiCS: every `count` ranks repeat the state
        optimizers.setdefault((copy, mp), []).append(each)  # ranks of other mp may share what is not split
    for contents in optimizers.values():
        copies += find_copies(contents, context.source)
    if any(tp for _, tp in files.layers) and not may_be_equal:
        copies += _copied_layers({key: content(name) for key, name in files.layers.items()}, context.source)
    for name, other in copies:
        context.problems.add(f"{name}: has the same tensors as {other}: one is a copy of the other", "grid", name)
    context.problems.raise_any(COPY_HINT)


def _copied_layers(layers: Mapping[tuple[int, int], RankContent], source: SourceFiles) -> list[tuple[str, str]]:
    """The layer files that are copies of another tensor-parallel rank's.

    Files of a norm are equal on all ranks, so a copy is one that differs in other layers of the same shapes. If every
    layer is equal, everything is a copy.
    """
    by_shapes: dict[tuple[Shape, ...], list[tuple[str, str | None]]] = {}
    for layer in sorted({layer for layer, _ in layers}):
        ranks = [layers[key] for key in sorted(layers) if key[0] == layer]
        equal = dict(find_copies(ranks, source))
        for rank in ranks[1:]:
            shapes = tuple(ref.shape for ref in rank.tensors)
            by_shapes.setdefault(shapes, []).append((rank.name, equal.get(rank.name)))
    everything = all(other for found in by_shapes.values() for _, other in found)
    copies = [[(name, other) for name, other in found if other] for found in by_shapes.values()]
    return [
        pair
        for found, equal_files in zip(by_shapes.values(), copies, strict=True)
        if everything or len(equal_files) < len(found)
        for pair in equal_files
    ]


def _placed_files(files: StepFiles) -> Iterator[tuple[str, Any, str]]:
    """Every rank file: its role, its key in that role, and its name."""
    for role in _ROLES:
        for key, name in getattr(files, role).items():
            yield role, key, name


def _recorded_place(file: RankFile) -> tuple[str, Any] | None:
    """The role and key of the name that a file was saved under; None if the archive records none."""
    name = recorded_name(file)
    return None if name is None else next((role, key) for role, key, _ in _placed_files(classify_files([name])))


def recorded_name(file: RankFile) -> str | None:
    """The name that a rank file was saved under; None if the archive records none."""
    name = f"{file.saved_as}.pt"
    return None if classify_files([name]).other else name


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
