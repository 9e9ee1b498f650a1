"""What is known about optimizers: the states they keep, their param-group fields, and whether they can be replayed.

To add an optimizer, add an entry to `OPTIMIZERS` and its new state names to `STATES`. If its update is element-wise and
should be replayed from a gradient log, also add its update function to `ucp.replay.kernels`. Optimizers that are not
listed work everywhere, except that their missing states are not noticed and that they cannot be replayed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ucp.core.checkpoint import MASTER, STEP, WEIGHT

Hyper = Mapping[str, Any]  # the hyper-parameters of one param group


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """A state of some optimizer, by its name in the optimizer's `state` dictionary."""

    non_negative: bool = False  # a sum of squares, or a maximum of squares or magnitudes
    gradient_power: int = 1  # proportional to this power of the gradient; -1: in units of the weight
    zero_padding: bool = True  # starts at zero, and stays there without a gradient
    is_counter: bool = False  # one number per parameter, also if the parameter itself is one number


STATES: Final[dict[str, OptimizerState]] = {
    STEP: OptimizerState(is_counter=True),
    "mu_product": OptimizerState(is_counter=True),  # NAdam
    "mu": OptimizerState(is_counter=True),  # ASGD
    "eta": OptimizerState(is_counter=True),  # ASGD
    "exp_avg_sq": OptimizerState(non_negative=True, gradient_power=2),
    "max_exp_avg_sq": OptimizerState(non_negative=True, gradient_power=2),
    "square_avg": OptimizerState(non_negative=True, gradient_power=2),
    "v": OptimizerState(non_negative=True),
    "exp_inf": OptimizerState(non_negative=True, zero_padding=False),  # Adamax adds eps
    # Adagrad's sum of squares starts at `initial_accumulator_value`.
    "sum": OptimizerState(non_negative=True, gradient_power=2, zero_padding=False),
    "step_size": OptimizerState(gradient_power=-1, zero_padding=False),  # Rprop: starts at the learning rate
    "ax": OptimizerState(gradient_power=-1),  # ASGD: an average of the weight
}

COUNTERS: Final = frozenset(name for name, state in STATES.items() if state.is_counter)
NON_NEGATIVE: Final = frozenset(name for name, state in STATES.items() if state.non_negative)
NONZERO_PADDING: Final = frozenset(name for name, state in STATES.items() if not state.zero_padding)


def state_scale(kind: str, scale: float) -> float:
    """The factor of a state whose weight is stored times `scale`; gradients scale inversely."""
    known = STATES.get(kind)
    power = known.gradient_power if known is not None else 2 if "sq" in kind else 1
    if kind in (WEIGHT, MASTER) or power < 0:
        return scale
    return 1.0 / (scale * scale) if power == 2 else 1.0 / scale


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer class, or several that differ in nothing that matters here.

    Replay works on parts of tensors, so it needs an element-wise update: one that computes every element from its own
    gradient and states. For an optimizer that is not element-wise, `whole_tensor` is the reason.
    """

    classes: tuple[str, ...]
    states: tuple[str, ...] = ()  # one value per element; () if they depend on the parameter's shape
    optional_states: Mapping[str, str] = field(default_factory=dict)  # state → hyper-parameter that turns it on
    unused_states: tuple[str, ...] = ()  # allocated, but never read or written
    is_state_required: bool = True  # training cannot continue without `states`
    counts_updates: bool = True  # keeps `step`
    identified_by: str = ""  # a state that shows that a checkpoint is of this optimizer, whose `group_fields` are known
    group_fields: Hyper = field(default_factory=dict)  # every field of a param group, with torch's default
    own_fields: tuple[str, ...] = ()  # param-group fields that no other optimizer has
    kernel: str | None = None  # how a gradient log names it; of torch, without `.single`, `.foreach` or `.fused`
    whole_tensor: str = ""

    def state_names(self, hyper: Hyper) -> tuple[str, ...]:
        """The states of a param group with these hyper-parameters, without those that are never used."""
        return (*self.states, *(state for state, switch in self.optional_states.items() if hyper.get(switch)))

    def initial_value(self, state: str, hyper: Hyper) -> float:
        """The value that every element of a state starts with."""
        return float(hyper.get("initial_accumulator_value", 0.0)) if state == "sum" else 0.0


_SHARED_FIELDS: Final[dict[str, Any]] = {"maximize": False, "foreach": None, "differentiable": False}
_ADAM_FIELDS: Final[dict[str, Any]] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "amsgrad": False,
    **_SHARED_FIELDS,
    "capturable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
_SGD_FIELDS: Final[dict[str, Any]] = {
    "lr": 1e-3,
    "momentum": 0.0,
    "dampening": 0.0,
    "weight_decay": 0.0,
    "nesterov": False,
    **_SHARED_FIELDS,
    "fused": None,
}
_ADAGRAD_FIELDS: Final[dict[str, Any]] = {
    "lr": 1e-2,
    "lr_decay": 0.0,
    "eps": 1e-10,
    "weight_decay": 0.0,
    "initial_accumulator_value": 0.0,
    **_SHARED_FIELDS,
    "fused": None,
}

_MOMENTS: Final = ("exp_avg", "exp_avg_sq")
_AMSGRAD: Final = {"max_exp_avg_sq": "amsgrad"}
_MOMENTUM: Final = {"momentum_buffer": "momentum"}

# If a class inherits from several of these, the first one counts.
OPTIMIZERS: Final = (
    Optimizer(
        ("AdamW",), _MOMENTS, _AMSGRAD, identified_by="exp_avg_sq", group_fields=_ADAM_FIELDS, kernel="torch.adamw"
    ),
    Optimizer(("Adam",), _MOMENTS, _AMSGRAD, kernel="torch.adam"),
    Optimizer(("DeepSpeedCPUAdam",), _MOMENTS, _AMSGRAD, kernel="deepspeed.cpu_adam"),
    Optimizer(("NAdam",), _MOMENTS, _AMSGRAD, own_fields=("momentum_decay",), kernel="torch.nadam"),
    Optimizer(("RAdam",), _MOMENTS, _AMSGRAD, kernel="torch.radam"),
    Optimizer(("FusedAdam",), _MOMENTS, _AMSGRAD),
    Optimizer(("FusedLamb",), _MOMENTS, _AMSGRAD, whole_tensor="its learning rate depends on norms of whole tensors"),
    Optimizer(
        ("SGD",),
        optional_states=_MOMENTUM,
        counts_updates=False,
        identified_by="momentum_buffer",
        group_fields=_SGD_FIELDS,
        kernel="torch.sgd",
    ),
    Optimizer(("Adagrad",), ("sum",), identified_by="sum", group_fields=_ADAGRAD_FIELDS, kernel="torch.adagrad"),
    Optimizer(("RMSprop",), ("square_avg",), {**_MOMENTUM, "grad_avg": "centered"}, kernel="torch.rmsprop"),
    Optimizer(("Adamax",), ("exp_avg", "exp_inf"), kernel="torch.adamax"),
    Optimizer(("Adadelta",), ("square_avg", "acc_delta"), kernel="torch.adadelta"),
    Optimizer(("Rprop",), ("prev", "step_size"), kernel="torch.rprop"),
    Optimizer(("ASGD",), ("ax",), kernel="torch.asgd"),
    Optimizer(
        ("DeepSpeedCPULion",),
        ("exp_avg",),
        unused_states=("exp_avg_sq",),
        is_state_required=False,
        kernel="deepspeed.cpu_lion",
    ),
    Optimizer(("Lion",), ("exp_avg",), counts_updates=False, kernel="lion"),
    Optimizer(("Adafactor",), whole_tensor="its second moment is kept as row and column means of whole matrices"),
    Optimizer(("Muon",), own_fields=("ns_steps",), whole_tensor="it orthogonalizes the momentum of whole matrices"),
)

_OWN_FIELDS: Final = frozenset(name for optimizer in OPTIMIZERS for name in optimizer.own_fields)

# Param-group fields that an update depends on and that a gradient log does not record with every step.
UNLOGGED_FIELDS: Final = ("lr_decay", "decoupled_weight_decay", "bias_correction")


def optimizer_of_class(names: Iterable[str]) -> Optimizer | None:
    """The optimizer with one of these class names: those of an instance's class and its bases."""
    found = set(names)
    return next((optimizer for optimizer in OPTIMIZERS if found.intersection(optimizer.classes)), None)


def optimizer_of_kernel(kernel: str) -> Optimizer | None:
    """The optimizer of a kernel id in a gradient log: `torch.adamw.fused`, `lion`, or the import path of a class."""
    name, _, last = kernel.rpartition(".")
    named = next((o for o in OPTIMIZERS if o.kernel is not None and o.kernel in (kernel, name)), None)
    return named or optimizer_of_class([last])


def default_group_fields(hyper: Hyper, states: Collection[str]) -> Hyper:
    """The fields of torch's param groups whose parameters have these states, with their defaults; {} if unknown."""
    if not hyper.keys().isdisjoint(_OWN_FIELDS):
        return {}
    return next((o.group_fields for o in OPTIMIZERS if o.identified_by in states), {})


def counts_in_tensor(states: Collection[str]) -> bool:
    """Whether torch's optimizer with these states keeps `step` as a float32 tensor that a loading job asks for."""
    return any(o.counts_updates and o.identified_by in states for o in OPTIMIZERS)


def missing_moment(states: Collection[str], hyper: Hyper) -> str | None:
    """The moment without which Adam and its variants (two betas and an eps) cannot continue; None if all are there."""
    if "betas" not in hyper or "eps" not in hyper:
        return None
    if "exp_avg" in states and not any("sq" in kind or "inf" in kind for kind in states):
        return "exp_avg_sq"
    return "exp_avg" if "exp_avg_sq" in states and "exp_avg" not in states else None


def fills_padding(hyper: Hyper) -> bool:
    """Whether states without a gradient leave zero: Adafactor, which has two eps, adds the first to every square."""
    eps = hyper.get("eps")
    return isinstance(eps, (list, tuple)) and bool(eps) and bool(eps[0])


def is_kept_whole(hyper: Hyper, state: str) -> bool:
    """Whether every ZeRO rank keeps this state of each matrix that it has any element of: Muon's momentum."""
    return hyper.get("use_muon") is True and state == "momentum_buffer"
