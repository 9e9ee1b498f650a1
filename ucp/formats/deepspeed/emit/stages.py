"""Pipeline stages of the target: which layers go where, as DeepSpeed's PipelineModule would place them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ucp.errors import UsageError
from ucp.model.checkpoint import Checkpoint

_LAYER: Final = re.compile(r"(\d+)\.(.+)")
_TIED: Final = re.compile(r"tied_modules\.([^.]+)\.(.+)")


@dataclass(frozen=True, slots=True)
class LayerName:
    """A parameter name of a pipeline: its layer number or tied key, and its name inside that layer."""

    layer: int | None
    tied: str | None
    local: str


def layer_name(name: str) -> LayerName | None:
    """What a pipeline's parameter name says; None for a name without a layer."""
    if found := _LAYER.fullmatch(name):
        return LayerName(int(found[1]), None, found[2])
    if found := _TIED.fullmatch(name):
        return LayerName(None, found[1], found[2])
    return None


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The layers of a pipelined model: those that have a file, where each tied module's file is, and its spelling."""

    layers: tuple[int, ...]
    tied: dict[str, int]
    model_axis: bool  # file names carry `-model_TT`
    again: dict[int, str]  # further layers that have a file of a tied module, and its key

    def layers_of(self, key: str) -> list[int]:
        """The layers that have a file of a tied module."""
        return [self.tied[key], *(layer for layer, other in self.again.items() if other == key)]

    @staticmethod
    def of(source: Checkpoint) -> Pipeline | None:
        """The source's pipeline, from what its reader found; None for a model that is not pipelined."""
        facts = source.details.get("pipeline")
        if not isinstance(facts, dict):
            return None
        again = {int(layer): key for layer, key in facts.get("again", {}).items()}
        return Pipeline(tuple(facts["layers"]), dict(facts["tied"]), bool(facts["model_axis"]), again)


def place(
    source: Checkpoint, pp: int, first_layers: Sequence[int] | None = None, like: Checkpoint | None = None
) -> dict[str, tuple[int, ...]]:
    """Parameter name → the stages that hold it.

    `first_layers` are the numbers of the first layer of every stage; without them the stages are those of `like`, or of
    the source where it has as many, or what DeepSpeed chooses by default.
    """
    if (
        first_layers is None
        and like is not None
        and like.mesh.pp == pp
        and like.parameters.keys() >= source.parameters.keys()
    ):
        return {name: like.parameters[name].stages for name in source.parameters}
    if pp == source.mesh.pp and first_layers is None:
        return {name: parameter.stages for name, parameter in source.parameters.items()}
    if first_layers is not None:
        _check_starts(first_layers, pp)
    if pp == 1:
        return dict.fromkeys(source.parameters, (0,))
    pipeline = Pipeline.of(source)
    if pipeline is None:
        raise UsageError(
            f"pp={pp} needs a pipelined model, and this one's parameter names carry no layer numbers",
            hint="keep --pp 1; only checkpoints of a PipelineModule can be cut into stages",
        )
    starts = list(first_layers) if first_layers is not None else _balanced_starts(source, pipeline, pp)
    stage_of = {layer: sum(layer >= start for start in starts) - 1 for layer in pipeline.layers}
    placed: dict[str, tuple[int, ...]] = {}
    for name in source.parameters:
        found = layer_name(name)
        if found is None:
            raise UsageError(f"parameter {name}: has no layer number, so no stage can be chosen for it")
        if found.layer is not None:
            placed[name] = (stage_of[found.layer],)
        else:
            assert found.tied is not None
            uses = pipeline.layers_of(found.tied)
            # A use that calls a function of the module has no file. It is at the end of the model: a head.
            placed[name] = tuple(sorted({*(stage_of[layer] for layer in uses), *((pp - 1,) if len(uses) == 1 else ())}))
    return placed


def _check_starts(starts: Sequence[int], pp: int) -> None:
    said = f"--stages {','.join(map(str, starts))}"
    if len(starts) != pp:
        raise UsageError(f"{said} names the first layers of {len(starts)} stages, but pp={pp}", hint="add --pp")
    if list(starts) != sorted({0, *starts}):
        raise UsageError(f"{said}: first layers must increase, and begin with 0")


def _balanced_starts(source: Checkpoint, pipeline: Pipeline, pp: int) -> list[int]:
    """First layers of the stages by DeepSpeed's default, `partition_method="parameters"`."""
    if len(pipeline.layers) < pp:
        raise UsageError(f"pp={pp} stages are more than the {len(pipeline.layers)} layers of the model")
    count = max(pipeline.layers) + 1
    heads = [key for key in pipeline.tied if len(pipeline.layers_of(key)) == 1]  # uses without a file, at the end
    weights = [0] * (count + len(heads))
    for name, parameter in source.parameters.items():
        found = layer_name(name)
        if found is None or parameter.role != "trained":
            continue
        if found.layer is not None:
            weights[found.layer] += parameter.numel
        elif found.tied is not None:
            uses = pipeline.layers_of(found.tied)
            for layer in uses if len(uses) > 1 else (*uses, count + heads.index(found.tied)):
                weights[layer] += parameter.numel
    return balanced(weights, pp)


def balanced(weights: Sequence[int], parts: int) -> list[int]:
    """Cut `weights` into consecutive parts whose sums differ least (largest minus smallest); gives each part's start.

    Of equally good cuts the one with the latest last boundary is taken, then the latest before it, and so on.
    """
    total = [0]
    for weight in weights:
        total.append(total[-1] + weight)
    n = len(weights)
    # best[i]: for the first i items in j parts, (spread, largest, smallest, where the last part begins)
    best: list[tuple[float, float, float, int] | None] = [(0, 0, float("inf"), 0), *[None] * n]
    boundaries: list[list[int]] = []
    for j in range(1, parts + 1):
        following: list[tuple[float, float, float, int] | None] = [None] * (n + 1)
        for i in range(j, n + 1):
            for k in range(i):
                before = best[k]
                if before is None:
                    continue
                last = total[i] - total[k]
                largest, smallest = max(before[1], last), min(before[2], last)
                found = following[i]
                if found is None or found[0] >= largest - smallest:
                    following[i] = (largest - smallest, largest, smallest, k)
        boundaries.append([entry[3] if entry else 0 for entry in following])
        best = following
    starts: list[int] = []
    end = n
    for row in reversed(boundaries):
        end = row[end]
        starts.append(end)
    return starts[::-1]
