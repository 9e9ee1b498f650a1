"""What torch's own optimizers keep in their parameter groups: a loading job asks for every field of its optimizer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

_SHARED: Final[dict[str, Any]] = {"maximize": False, "foreach": None, "differentiable": False}
_ADAM: Final[dict[str, Any]] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "amsgrad": False,
    **_SHARED,
    "capturable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
_SGD: Final[dict[str, Any]] = {
    "lr": 1e-3,
    "momentum": 0.0,
    "dampening": 0.0,
    "weight_decay": 0.0,
    "nesterov": False,
    **_SHARED,
    "fused": None,
}
_ADAGRAD: Final[dict[str, Any]] = {
    "lr": 1e-2,
    "lr_decay": 0.0,
    "eps": 1e-10,
    "weight_decay": 0.0,
    "initial_accumulator_value": 0.0,
    **_SHARED,
    "fused": None,
}
# The state that tells an optimizer → the fields of its groups, with torch's defaults.
_BY_STATE: Final = (
    ("exp_avg_sq", _ADAM),
    ("momentum_buffer", _SGD),
    ("sum", _ADAGRAD),
)

# Fields that tell optimizers which share such a state and keep other fields: NAdam and Muon.
_OF_OTHERS: Final = frozenset({"momentum_decay", "ns_steps"})

# Adam counts steps in a float32 tensor a parameter; without it a loading job misses a key.
NEEDS_STEP: Final = frozenset({"exp_avg_sq", "sum"})


def complete_fields(hyper: Mapping[str, Any], kinds: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """The fields of a group whose parameters have states `kinds`: the source's own, and torch's defaults for the rest.

    Gives the fields and the names of those that were filled in.
    """
    known = next((fields for state, fields in _BY_STATE if state in kinds), {})
    defaults = {} if hyper.keys() & _OF_OTHERS else known
    filled = [name for name in defaults if name not in hyper]
    fields = {**{name: defaults[name] for name in filled}, **hyper}
    # A job with an LR scheduler asks for this too; it is the rate that the scheduler starts from.
    if "lr" in fields:
        fields.setdefault("initial_lr", fields["lr"])
    return fields, filled
