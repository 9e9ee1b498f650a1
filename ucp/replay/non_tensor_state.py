"""Everything but tensors after a step: hyper-parameters, counters, LR scheduler, loss scaler."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, Final

from ucp.containers.inert import Inert
from ucp.containers.pickle_writer import bare_object
from ucp.core.checkpoint import Atom, Checkpoint, Extras, Note, ParamGroup
from ucp.log.payloads import StepRecord
from ucp.log.reader import EpochSpan, LogStream
from ucp.replay.logged_states import with_number

_GLOBAL_STEPS: Final = "global_steps"
_RNG_FILE: Final = re.compile(r"rng_state(_\d+)?\.pth")


def advance_extras(checkpoint: Checkpoint, span: EpochSpan) -> Checkpoint:
    """The checkpoint with everything but its tensors advanced from the start of the span to its end."""
    stream = span.epoch.streams[min(span.epoch.streams)]
    aux = stream.aux(span.last)
    logged: Mapping[str, Any] = aux if isinstance(aux, dict) else {}
    groups, notes = _groups(checkpoint, span, stream, logged)
    trees = {}
    left_out = False
    for name, tree in checkpoint.extras.trees.items():
        if _RNG_FILE.fullmatch(PurePosixPath(name).name):
            left_out = True
        else:
            trees[name] = _tree(tree, span, logged, notes)
    if left_out:
        notes.append(
            Note("random-generators", "the states of random generators are left out: the log does not contain them")
        )
    extras = Extras(trees, checkpoint.extras.files)
    return replace(checkpoint, groups=groups, extras=extras, notes=[*checkpoint.notes, *notes])


def with_following_hyper(base: Checkpoint, span: EpochSpan) -> Checkpoint:
    """A base with the hyper-parameters of the step after it, the first of the span.

    It was saved after the optimizer's step; a scheduler may have run after that.
    """
    stream = span.epoch.streams[min(span.epoch.streams)]
    numbers, before = _group_numbers(span), replace(span, last=span.first - 1)
    groups = []
    for group in base.groups:
        number = next((numbers[name] for name in group.names if name in numbers), None)
        following = {} if number is None else _set_after(group.hyper, stream, before, number, {})
        groups.append(ParamGroup({**group.hyper, **following}, group.names))
    return replace(base, groups=groups)


def _group_numbers(span: EpochSpan) -> dict[str, int]:
    """Parameter → number of its group in the log."""
    return {name: number for number, group in enumerate(span.epoch.manifest.groups) for name in group.names}


def _groups(
    checkpoint: Checkpoint, span: EpochSpan, stream: LogStream, aux: Mapping[str, Any]
) -> tuple[list[ParamGroup], list[Note]]:
    numbers = _group_numbers(span)
    groups = []
    notes: list[Note] = []
    for group in checkpoint.groups:
        number = next((numbers[name] for name in group.names if name in numbers), None)
        hyper = dict(group.hyper)
        if number is not None:
            for step in range(span.last, span.first - 1, -1):  # the newest step in which the group was updated
                if scalars := _scalars(hyper, stream.record(step), number):
                    hyper.update(scalars)
                    break
            following = _set_after(hyper, stream, span, number, aux)
            hyper.update(following)
            if "lr" not in following and not notes:
                text = f"the learning rate is that of step {span.last}: the log does not contain the next one"
                notes.append(Note("learning-rate", text))
        groups.append(ParamGroup(hyper, group.names))
    return groups, notes


def _scalars(hyper: Mapping[str, Any], record: StepRecord, group: int) -> dict[str, Any]:
    """The hyper-parameters of a group in one step; {} if the step was skipped or did not update the group."""
    scalars = next((one for one in record.groups if one.group == group), None)
    if record.skipped or scalars is None:
        return {}
    logged = {key: getattr(scalars, key) for key in ("eps", "weight_decay", "momentum", "dampening")}
    logged = {key: value for key, value in logged.items() if not math.isnan(value)}
    betas = {} if math.isnan(scalars.beta1) else {"betas": [scalars.beta1, scalars.beta2]}
    return _in_types_of(hyper, {"lr": scalars.lr, **betas, **logged})


def _in_types_of(hyper: Mapping[str, Any], logged: Mapping[str, Any]) -> dict[str, Any]:
    """Logged values of the hyper-parameters that a group has, in the types in which the group has them."""
    found: dict[str, Any] = {}
    for key, value in logged.items():
        old = hyper.get(key)
        if isinstance(old, (list, tuple)) and isinstance(value, list):
            found[key] = type(old)(value)
        elif isinstance(old, (int, float)) and value == old:
            found[key] = old  # keeps 0 if the log has 0.0
        elif key in hyper or key == "lr":
            found[key] = value
    return found


def _set_after(
    hyper: Mapping[str, Any], stream: LogStream, span: EpochSpan, group: int, aux: Mapping[str, Any]
) -> dict[str, Any]:
    """Hyper-parameters that schedulers set after the span: logged with its last step, or those of the next step."""
    logged = aux.get("hyper")
    if isinstance(logged, list) and group < len(logged) and isinstance(logged[group], dict):
        return _in_types_of(hyper, logged[group])
    rates = aux.get("lr")  # in older logs
    if isinstance(rates, list) and group < len(rates) and isinstance(rates[group], (int, float)):
        return {"lr": float(rates[group])}
    following = span.last + 1
    return _scalars(hyper, stream.record(following), group) if following in stream.steps else {}


def _tree(tree: Any, span: EpochSpan, aux: Mapping[str, Any], notes: list[Note]) -> Any:
    """An extras tree of the base with newer values from the log, where DeepSpeed and `ucp.save` keep them.

    What the user logs with every step (`ucp.record(aux=…)`) becomes client state.
    """
    logged = aux.get("user")
    user: dict[str, Any] = logged if isinstance(logged, dict) else {}
    if not isinstance(tree, dict):
        return tree
    if isinstance(tree.get("client_state"), dict):  # `ucp.save` of a torch module
        return {**tree, "client_state": {**tree["client_state"], **user}}
    inner = tree.get("optimizer_state_dict")
    if isinstance(inner, dict) and isinstance(inner.get("loss_scaler"), Inert):
        scaler = inner["loss_scaler"]
        if not isinstance(scaler.state, dict) or not isinstance(aux.get("scaler"), dict):
            return tree
        fields = {**scaler.state, **_plain_updates(scaler.state, aux["scaler"])}
        newer = bare_object(scaler.module, scaler.qualname, fields)
        return {**tree, "optimizer_state_dict": {**inner, "loss_scaler": newer}}
    if _GLOBAL_STEPS not in tree:
        return tree
    found = {**tree, _GLOBAL_STEPS: span.last, **user}
    found.update({name: count for name, count in aux.get("counters", {}).items() if name in tree})
    if isinstance(tree.get("lr_scheduler"), dict):
        if isinstance(aux.get("lr_scheduler"), dict):
            found["lr_scheduler"] = {**aux["lr_scheduler"], **_newer(tree["lr_scheduler"], aux["lr_scheduler"])}
        else:
            notes.append(Note("lr-scheduler", "the LR scheduler is that of the base: the log does not contain it"))
    if isinstance(tree.get("optimizer"), dict):
        found["optimizer"] = {**tree["optimizer"], **_plain_updates(tree["optimizer"], aux.get("scaler", {}))}
    return found


def _plain_updates(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The new values of keys that the base has, if JSON can represent them: numbers, strings, lists of these."""
    return {key: _like(old[key], value) for key, value in new.items() if key in old and _is_plain(old[key])}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _like(old: Any, new: Any) -> Any:
    return tuple(new) if isinstance(old, tuple) and isinstance(new, list) else new


def _newer(old: Any, new: Any) -> Any:
    """A value of the base updated from the log; recurses into dictionaries and lists (schedulers of schedulers)."""
    if isinstance(old, dict) and isinstance(new, dict):
        return {key: _newer(value, new[key]) if key in new else value for key, value in old.items()}
    if isinstance(old, (list, tuple)) and isinstance(new, list) and len(old) == len(new):
        return _like(old, [_newer(*pair) for pair in zip(old, new, strict=True)])
    if isinstance(old, Atom) and isinstance(new, (int, float)):
        return with_number(old, new) or old
    return _like(old, new) if _is_plain(old) else old
