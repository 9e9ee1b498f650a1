"""What two checkpoints say beside their tensors: steps, hyper-parameters, roles."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ucp.errors import UcpError
from ucp.formats.inert_json import Encoder
from ucp.model.checkpoint import Checkpoint, Note, Parameter

# Which parameters a group has, what the source calls it, and whether its ranks hold experts of their own: the layout.
_NO_SETTING = ("params", "param_names", "name", "is_expert_parallel")


@dataclass(frozen=True, slots=True)
class SettingDifference:
    """A hyper-parameter (or the step) that differs, for the parameters named. Values are JSON, None where absent."""

    key: str
    a: Any
    b: Any
    names: tuple[str, ...] = ()
    one_sided: bool = False  # only one of the two has it

    def to_json(self) -> dict[str, Any]:
        side = {"one_sided": True} if self.one_sided else {}
        return {"key": self.key, "a": self.a, "b": self.b, "parameters": list(self.names), **side}


def settings(
    a: Checkpoint, b: Checkpoint, pairs: Sequence[tuple[Parameter, Parameter]]
) -> tuple[list[SettingDifference], list[Note]]:
    """What differs, and what a person should know. Groups are compared parameter by parameter, whatever their order."""
    notes = list(_notes(a, b, pairs))
    found: list[SettingDifference] = []
    if a.step != b.step and a.step is not None and b.step is not None:
        found.append(SettingDifference("step", a.step, b.step))
    hyper_a, hyper_b = _hyper(a), _hyper(b)
    differing: dict[tuple[str, str, str], list[str]] = {}
    for one, other in pairs:
        if one.group is None or other.group is None:
            continue
        ours, theirs = hyper_a[one.group], hyper_b[other.group]
        for key in dict.fromkeys([*ours, *theirs]):
            value_a, value_b = ours.get(key, ""), theirs.get(key, "")
            if value_a != value_b:
                differing.setdefault((key, value_a, value_b), []).append(one.name)
    for (key, value_a, value_b), names in differing.items():
        found.append(SettingDifference(key, _value(value_a), _value(value_b), tuple(names), not (value_a and value_b)))
    return found, notes


def _notes(a: Checkpoint, b: Checkpoint, pairs: Sequence[tuple[Parameter, Parameter]]) -> Iterator[Note]:
    for side, one, other in (("A", a, b), ("B", b, a)):
        if one.step is None and other.step is not None:
            yield Note("no-step", f"{side} does not say at which step it is; the other is at {other.step}")
        if not one.groups and other.groups:
            yield Note("no-hyper", f"{side} has no hyper-parameters to compare")
    roles: dict[tuple[str, str], list[str]] = {}
    for one_, other_ in pairs:
        if one_.role != other_.role:
            roles.setdefault((one_.role, other_.role), []).append(one_.name)
    for (role_a, role_b), names in roles.items():
        yield Note("role", f"{role_a} in A and {role_b} in B: {_some(names)}")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _hyper(checkpoint: Checkpoint) -> list[dict[str, str]]:
    """Each group's hyper-parameters as JSON texts, lists and tuples being the same."""
    return [
        {str(key): text for key, value in group.hyper.items() if key not in _NO_SETTING and (text := _text(value))}
        for group in checkpoint.groups
    ]


def _text(value: Any) -> str:
    try:
        return json.dumps(_plain(Encoder().encode(value)), sort_keys=True)
    except UcpError:
        return ""


def _plain(value: Any) -> Any:
    """Without what only a pickle tells apart."""
    if isinstance(value, dict):
        if set(value) == {"$tuple"}:
            return _plain(value["$tuple"])
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return int(value) if type(value) is float and value.is_integer() and abs(value) < 2**53 else value


def _value(text: str) -> Any:
    return json.loads(text) if text else None
