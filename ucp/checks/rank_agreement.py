"""What every rank file says about the run must be the same: iteration, scheduler, hyper-parameters, loss scale."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Final

from ucp.checks.findings import Finding
from ucp.checks.tasks import CheckContext
from ucp.containers.inert import Inert, NumpyScalar
from ucp.core.checkpoint import Checkpoint
from ucp.core.mesh import Rank
from ucp.formats.deepspeed.step_files import StepFiles, classify_files

# What model files count, and what they keep of the scheduler.
_COUNTERS: Final = ("global_steps", "global_samples", "skipped_steps", "micro_steps", "iteration", "lr_scheduler")
# What optimizer files say besides their parameter groups.
_SCALING: Final = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
_TAG: Final = re.compile(r"global_step(\d+)")
_MIXED: Final = "files of different saves are mixed: keep those of one step, and restore the others"
_DEEPEST: Final = 20  # levels; what is nested deeper is no number of a run

Facts = dict[str, str]
"""What a file says: the path of a value in its tree, and the value as text."""


def run_check(context: CheckContext) -> Iterator[Finding]:
    """Compare the rank files of a DeepSpeed checkpoint: counters over all, hyper-parameters over those of a stage."""
    checkpoint = context.checkpoint
    if checkpoint.format != "deepspeed":
        return
    trees = {name: tree for name, tree in checkpoint.extras.trees.items() if isinstance(tree, dict)}
    files = classify_files([name for name in trees if "/" not in name])
    tp = checkpoint.mesh.tp
    models = {**{(0, mp): name for mp, name in files.model.items()}, **files.sharded_model}
    paths = {PurePosixPath(file).name: file for file in checkpoint.sizes}
    counted = _FactsByFile(trees, _counters, paths)
    yield from _compare("iteration", _ranked(models, tp), counted)
    yield from _tag(checkpoint, files, trees)
    hyper = _FactsByFile(trees, _hyper, paths)
    for role in (files.optim, models):  # model files of runs without ZeRO hold the optimizer too
        for stage in sorted({mp // tp for _, mp in role}):
            members = {(dp, mp): name for (dp, mp), name in role.items() if mp // tp == stage}
            yield from _compare("hyper-parameters", _ranked(members, tp), hyper)


def _ranked(files: Mapping[tuple[int, int], str], tp: int) -> list[tuple[str, Rank]]:
    return [(name, Rank(mp // tp, mp % tp, dp)) for (dp, mp), name in sorted(files.items())]


class _FactsByFile:
    """Facts of files by name. Files that hold the same pickle share their tree, which is looked at once."""

    def __init__(
        self,
        trees: Mapping[str, Mapping[Any, Any]],
        take: Callable[[Mapping[Any, Any]], Iterator[tuple[str, str]]],
        paths: Mapping[str, str],
    ) -> None:
        self.paths = paths
        self._trees = trees
        self._take = take
        self._known: dict[int, Facts] = {}

    def __getitem__(self, name: str) -> Facts:
        tree = self._trees[name]
        if id(tree) not in self._known:
            self._known[id(tree)] = dict(self._take(tree))
        return self._known[id(tree)]


def _compare(check: str, files: Sequence[tuple[str, Rank]], facts: _FactsByFile) -> Iterator[Finding]:
    """One finding a file that does not say what most files say."""
    if len({id(facts[name]) for name, _ in files}) < 2:
        return
    said: dict[str, Counter[str]] = {}
    for name, _ in files:
        for key, value in facts[name].items():
            said.setdefault(key, Counter())[value] += 1
    usual = {key: values.most_common(1)[0] for key, values in said.items() if len(values) > 1}
    for name, rank in files if usual else ():
        odd = [key for key in usual if facts[name].get(key, usual[key][0]) != usual[key][0]]
        if odd:
            value, count = usual[odd[0]]
            more = f" (and {len(odd) - 1} more)" if len(odd) > 1 else ""
            yield Finding(
                check,
                "error",
                f"{facts.paths[name]}: {odd[0]} is {facts[name][odd[0]]}, but {value} in {count} of {len(files)} files"
                + more,
                facts.paths[name],
                rank,
                hint=_MIXED,
                subject=odd[0],
            )


def _tag(checkpoint: Checkpoint, files: StepFiles, trees: Mapping[str, Mapping[Any, Any]]) -> Iterator[Finding]:
    """DeepSpeed names a step folder after the step, unless it is told otherwise."""
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
            f"{path}: was saved at step {steps}, but lies in a folder {match[0]}",
            path,
            hint="right if the folder was renamed; otherwise its files are of another save",
            subject="tag",
        )


def _counters(tree: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    for key in _COUNTERS:
        if key in tree:
            yield from _flat(key, tree[key])


def _hyper(tree: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    state = tree.get("optimizer_state_dict", tree.get("optimizer"))
    if not isinstance(state, dict):
        return
    for key in _SCALING:
        if key in state:
            yield from _flat(key, state[key])
    for inner in (state, state.get("base_optimizer_state"), state.get("optimizer_state_dict")):
        groups = inner.get("param_groups") if isinstance(inner, dict) else None
        for number, group in enumerate(groups if isinstance(groups, list) else ()):
            for key, value in group.items() if isinstance(group, dict) else ():
                if key != "params":
                    yield from _flat(f"{key} of group {number}", value)


def _flat(path: str, value: Any, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Numbers and texts inside a value, each with its path. Tensors have checks of their own."""
    if isinstance(value, NumpyScalar):
        value = value.to_python()
    if value is None or isinstance(value, (bool, int, float, str)):
        yield path, repr(value)
    elif depth < _DEEPEST:
        for key, item in _items(value):
            yield from _flat(f"{path}.{key}", item, depth + 1)


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    if isinstance(value, Inert):
        return value.state.items() if isinstance(value.state, dict) else enumerate(value.args)
    return ()
