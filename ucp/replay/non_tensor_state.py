"""What else a step changes: hyper-parameters, counters, learning-rate scheduler, loss scaler."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, Final

from ucp.containers.inert import Inert
from ucp.containers.pickle_writer import bare_object
from ucp.core.checkpoint import Atom, Checkpoint, Extras, Fragment, Note, ParamGroup
from ucp.core.dtypes import scalar_data
from ucp.core.region import Region
from ucp.log.payloads import StepRecord
from ucp.log.reader import EpochSpan, LogStream

_COUNTED: Final = "global_steps"
_RANDOM: Final = re.compile(r"rng_state(_\d+)?\.pth")


def advance_extras(checkpoint: Checkpoint, span: EpochSpan) -> Checkpoint:
    """The checkpoint with everything but tensors brought from the beginning of the span to its end."""
    stream = span.epoch.streams[min(span.epoch.streams)]
    aux = stream.aux(span.last)
    told: Mapping[str, Any] = aux if isinstance(aux, dict) else {}
    groups, notes = _groups(checkpoint, span, stream, told)
    trees = {}
    left_out = False
    for name, tree in checkpoint.extras.trees.items():
        if _RANDOM.fullmatch(PurePosixPath(name).name):
            left_out = True
        else:
            trees[name] = _tree(tree, span, told, notes)
    if left_out:
        notes.append(Note("random-generators", "the states of random generators are left out: the log has none"))
    extras = Extras(trees, checkpoint.extras.files)
    return replace(checkpoint, groups=groups, extras=extras, notes=[*checkpoint.notes, *notes])


def with_following_hyper(base: Checkpoint, span: EpochSpan) -> Checkpoint:
    """A base as it is, with the hyper-parameters of the step after it, the first of the span.

    It was saved when the optimizer had taken its step: a scheduler may have taken its own after that.
    """
    stream = span.epoch.streams[min(span.epoch.streams)]
    number, before = _group_numbers(span), replace(span, last=span.first - 1)
    found = []
    for group in base.groups:
        mine = next((number[name] for name in group.names if name in number), None)
        following = {} if mine is None else _set_after(group.hyper, stream, before, mine, {})
        found.append(ParamGroup({**group.hyper, **following}, group.names))
    return replace(base, groups=found)


def _group_numbers(span: EpochSpan) -> dict[str, int]:
    """Parameter → its group in the log."""
    return {name: number for number, group in enumerate(span.epoch.manifest.groups) for name in group.names}


def _groups(
    checkpoint: Checkpoint, span: EpochSpan, stream: LogStream, aux: Mapping[str, Any]
) -> tuple[list[ParamGroup], list[Note]]:
    number = _group_numbers(span)
    found = []
    notes: list[Note] = []
    for group in checkpoint.groups:
        mine = next((number[name] for name in group.names if name in number), None)
        hyper = dict(group.hyper)
        if mine is not None:
            hyper.update(_scalars(hyper, _last_record(stream, span, mine), mine))
            following = _set_after(hyper, stream, span, mine, aux)
            hyper.update(following)
            if "lr" not in following and not notes:
                text = (
                    f"the learning rate is that of step {span.last}: the log does not say what it was set to after it"
                )
                notes.append(Note("learning-rate", text))
        found.append(ParamGroup(hyper, group.names))
    return found, notes


def _last_record(stream: LogStream, span: EpochSpan, group: int) -> StepRecord | None:
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
    told = {key: getattr(scalars, key) for key in ("eps", "weight_decay", "momentum", "dampening")}
    told = {key: value for key, value in told.items() if not math.isnan(value)}
    betas = {} if math.isnan(scalars.beta1) else {"betas": [scalars.beta1, scalars.beta2]}
    return _in_form(hyper, {"lr": scalars.lr, **betas, **told})


def _in_form(hyper: Mapping[str, Any], told: Mapping[str, Any]) -> dict[str, Any]:
    """Hyper-parameters that a group has, as the log tells them, in the form in which the group has them."""
    found: dict[str, Any] = {}
    for key, value in told.items():
        held = hyper.get(key)
        if isinstance(held, (list, tuple)) and isinstance(value, list):
            found[key] = type(held)(value)
        elif isinstance(held, (int, float)) and value == held:
            found[key] = held  # also where one is written 0 and the other 0.0
        elif key in hyper or key == "lr":
            found[key] = value
    return found


def _set_after(
    hyper: Mapping[str, Any], stream: LogStream, span: EpochSpan, group: int, aux: Mapping[str, Any]
) -> dict[str, Any]:
    """What schedulers have set after the span: as noted with its last step, or as the next step had it."""
    noted = aux.get("hyper")
    if isinstance(noted, list) and group < len(noted) and isinstance(noted[group], dict):
        return _in_form(hyper, noted[group])
    rates = aux.get("lr")  # what older logs have noted
    if isinstance(rates, list) and group < len(rates) and isinstance(rates[group], (int, float)):
        return {"lr": float(rates[group])}
    following = span.last + 1
    if following in stream.steps:
        record = stream.record(following)
        if not record.skipped and any(scalars.group == group for scalars in record.groups):
            return _scalars(hyper, record, group)
    return {}


def _tree(tree: Any, span: EpochSpan, aux: Mapping[str, Any], notes: list[Note]) -> Any:
    """An extras tree of the base, with what the log knows better: in the places where DeepSpeed and `ucp.save` keep it.

    What the user logged with every step (`ucp.record(aux=…)`) becomes client state.
    """
    noted = aux.get("user")
    user: dict[str, Any] = noted if isinstance(noted, dict) else {}
    if not isinstance(tree, dict):
        return tree
    if isinstance(tree.get("client_state"), dict):  # `ucp.save` of a torch module
        return {**tree, "client_state": {**tree["client_state"], **user}}
    inner = tree.get("optimizer_state_dict")
    if isinstance(inner, dict) and isinstance(inner.get("loss_scaler"), Inert):
        return {**tree, "optimizer_state_dict": {**inner, "loss_scaler": _scaler(inner["loss_scaler"], aux)}}
    if _COUNTED not in tree:
        return tree
    found = {**tree, _COUNTED: span.last, **user}
    found.update({name: count for name, count in aux.get("counters", {}).items() if name in tree})
    if isinstance(tree.get("lr_scheduler"), dict):
        if isinstance(aux.get("lr_scheduler"), dict):
            found["lr_scheduler"] = {**aux["lr_scheduler"], **_newer(tree["lr_scheduler"], aux["lr_scheduler"])}
        else:
            notes.append(Note("lr-scheduler", "the LR scheduler is that of the base: the log does not have it"))
    if isinstance(tree.get("optimizer"), dict):
        found["optimizer"] = {**tree["optimizer"], **_alike(tree["optimizer"], aux.get("scaler", {}))}
    return found


def _alike(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The new values of keys that the base has, where JSON could keep them: numbers, texts, lists of such."""
    return {key: _as(old[key], value) for key, value in new.items() if key in old and _is_plain(old[key])}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _as(old: Any, new: Any) -> Any:
    return tuple(new) if isinstance(old, tuple) and isinstance(new, list) else new


def _newer(old: Any, new: Any) -> Any:
    """A value of the base as the log has it: dictionaries and lists (schedulers of schedulers) are gone into."""
    if isinstance(old, dict) and isinstance(new, dict):
        return {key: _newer(value, new[key]) if key in new else value for key, value in old.items()}
    if isinstance(old, (list, tuple)) and isinstance(new, list) and len(old) == len(new):
        return _as(old, [_newer(*pair) for pair in zip(old, new, strict=True)])
    if isinstance(old, Atom) and isinstance(new, (int, float)):
        return _number(old, new)
    return _as(old, new) if _is_plain(old) else old


def _number(old: Atom, new: float) -> Atom:
    """A tensor of one number (a learning rate) with another in it."""
    data = scalar_data(new, old.dtype) if old.numel == 1 else None
    if data is None:
        return old
    fragment = Fragment(Region.all_of(old.shape), "", 0, old.dtype, inline=data)
    return replace(old, fragments=(fragment,), replicas=(), combine="copy")


def _scaler(scaler: Inert, aux: Mapping[str, Any]) -> Any:
    """The loss scaler after the step, as an object of the same class."""
    fields = scaler.state
    noted = aux.get("scaler")
    if not isinstance(fields, dict) or not isinstance(noted, dict):
        return scaler
    return bare_object(scaler.module, scaler.qualname, {**fields, **_alike(fields, noted)})
