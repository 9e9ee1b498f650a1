"""What else a step changes: hyper-parameters, counters, learning-rate scheduler, loss scaler."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from ucp.log.payloads import StepRecord
from ucp.log.reader import Span, Stream
from ucp.model.checkpoint import Checkpoint, Extras, Note, ParamGroup

_COUNTED: Final = "global_steps"


def advance(checkpoint: Checkpoint, span: Span) -> Checkpoint:
    """The checkpoint with everything but tensors brought from the beginning of the span to its end."""
    stream = span.epoch.streams[min(span.epoch.streams)]
    aux = stream.aux(span.last)
    told: Mapping[str, Any] = aux if isinstance(aux, dict) else {}
    groups, notes = _groups(checkpoint, span, stream, told)
    trees = {name: _tree(tree, span, stream, told) for name, tree in checkpoint.extras.trees.items()}
    extras = Extras(trees, checkpoint.extras.files)
    return replace(checkpoint, groups=groups, extras=extras, notes=[*checkpoint.notes, *notes])


def _groups(
    checkpoint: Checkpoint, span: Span, stream: Stream, aux: Mapping[str, Any]
) -> tuple[list[ParamGroup], list[Note]]:
    manifest = span.epoch.manifest
    number = {name: n for n, group in enumerate(manifest.groups) for name in group.names}
    found = []
    notes: list[Note] = []
    for group in checkpoint.groups:
        mine = next((number[name] for name in group.names if name in number), None)
        hyper = dict(group.hyper)
        if mine is not None:
            hyper.update(_scalars(hyper, _last_record(stream, span, mine), mine))
            rate = _next_rate(stream, span, mine, aux)
            if rate is not None:
                hyper["lr"] = rate
            elif not notes:
                text = (
                    f"the learning rate is that of step {span.last}: the log does not say what it was set to after it"
                )
                notes.append(Note("learning-rate", text))
        found.append(ParamGroup(hyper, group.names))
    return found, notes


def _last_record(stream: Stream, span: Span, group: int) -> StepRecord | None:
    """The newest step that the optimizer was called in for this group."""
    for step in range(span.last, span.first - 1, -1):
        record = stream.record(step)
        if not record.skipped and any(scalars.group == group for scalars in record.groups):
            return record
    return None


def _scalars(hyper: Mapping[str, Any], record: StepRecord | None, group: int) -> dict[str, Any]:
    if record is None:
        return {}
    scalars = record.group(group)
    found: dict[str, Any] = {"lr": scalars.lr}
    if "betas" in hyper and not math.isnan(scalars.beta1):
        found["betas"] = type(hyper["betas"])((scalars.beta1, scalars.beta2))
    for key in ("eps", "weight_decay", "momentum", "dampening"):
        value = getattr(scalars, key)
        if key in hyper and not math.isnan(value):
            found[key] = (
                type(hyper[key])(value) if isinstance(hyper[key], (int, float)) and value == hyper[key] else value
            )
    return found


def _next_rate(stream: Stream, span: Span, group: int, aux: Mapping[str, Any]) -> float | None:
    """What the learning rate was set to after the span: as noted with its last step, or as the next step had it."""
    noted = aux.get("lr")
    if isinstance(noted, list) and group < len(noted) and isinstance(noted[group], (int, float)):
        return float(noted[group])
    following = span.last + 1
    if following in stream.steps:
        record = stream.record(following)
        for scalars in record.groups:
            if scalars.group == group and not record.skipped:
                return scalars.lr
    return None


def _tree(tree: Any, span: Span, stream: Stream, aux: Mapping[str, Any]) -> Any:
    """An extras tree of the base, with what a log knows better."""
    if not isinstance(tree, dict) or _COUNTED not in tree:
        return tree
    del stream, aux
    return {**tree, _COUNTED: span.last}
