"""The extras of the source in the form that DeepSpeed's files need, with defaults for sources of other frameworks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, Final

from ucp.containers.inert import Inert
from ucp.containers.pickle_writer import bare_object
from ucp.core.checkpoint import Checkpoint
from ucp.core.dtypes import BFLOAT16, FLOAT16, FLOAT32, DType, parse_dtype
from ucp.formats.deepspeed.experts import expert_placements
from ucp.formats.deepspeed.read.rank_files import dict_or_empty, lookup
from ucp.formats.deepspeed.step_files import OPTIMIZER_STATE, classify_files

# Keys of a model file that the writer computes; everything else in it is carried over.
_COMPUTED_KEYS: Final = (
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "shared_params",
    "frozen_param_fragments",
)

# Optimizer parameters of the configuration that select the class and are not hyper-parameters of its groups.
_CLASS_OPTIONS: Final = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")

_LOSS_SCALER_MODULE: Final = "deepspeed.runtime.fp16.loss_scaler"


class SourceExtras:
    """The extras of a checkpoint by meaning."""

    def __init__(self, source: Checkpoint) -> None:
        self.source = source
        trees = {PurePosixPath(file).name: tree for file, tree in source.extras.trees.items()}
        self._trees = trees
        files = classify_files(list(trees))
        self._models: dict[int, Mapping[str, Any]] = {mp: trees[name] for mp, name in files.model.items()}
        for (dp, mp), name in files.sharded_model.items():
            if dp == 0 or mp not in self._models:
                self._models[mp] = trees[name]
        self._model: Mapping[str, Any] = next(iter(self._models.values()), {})
        self._optim: Mapping[str, Any] = next((trees[files.optim[key]] for key in sorted(files.optim)), {})
        self._universal = trees.get(PurePosixPath(OPTIMIZER_STATE).name)

    def model(self, mp: int, mp_size: int) -> dict[str, Any]:
        """The carried keys of the model file of rank `mp`; those of rank 0 if the source's size is not `mp_size`."""
        same = mp_size == self.source.mesh.tp * self.source.mesh.pp
        tree = self._models.get(mp if same else 0) or self._model
        return {key: value for key, value in tree.items() if key not in _COMPUTED_KEYS}

    def unnamed_optimizer(self, file: str) -> Mapping[str, Any] | None:
        """The whole state dict of an optimizer with ZeRO off whose parameters could not be named; else None."""
        texts = (note.text for note in self.source.notes if note.id == "optimizer-unnamed")
        if not any(PurePosixPath(text.partition(":")[0]).name == file for text in texts):
            return None
        found = self._trees.get(file, {}).get("optimizer")
        return found if isinstance(found, dict) else None

    @property
    def stacked(self) -> dict[str, int]:
        """Parameters with the stacked experts of an AutoEP layer → number of experts."""
        tree = self._model
        placements = expert_placements(tree, "the model file of the source")
        return {name: placement.total for name, placement in placements.items() if name in self.source.parameters}

    @property
    def optimizer(self) -> Mapping[str, Any]:
        """The carried part of the first optimizer file's `optimizer_state_dict`.

        With ZeRO off it is that of `optimizer`, for a universal folder that of `optimizer_state.pt`.
        """
        inner = self._optim.get("optimizer_state_dict", self._universal)
        if isinstance(inner, dict):
            return inner
        return dict_or_empty(self._model.get("optimizer"))

    @property
    def config(self) -> dict[str, Any]:
        config = self._model.get("ds_config") or self._optim.get("ds_config")
        return dict(dict_or_empty(config))

    @property
    def configured_hyper(self) -> dict[str, Any]:
        """The optimizer's hyper-parameters in the configuration, for groups without any (elastic checkpoints)."""
        params = dict_or_empty(lookup(self.config, "optimizer", "params"))
        return {key: value for key, value in params.items() if key not in _CLASS_OPTIONS}

    @property
    def version(self) -> str:
        """The DeepSpeed version to write into the files; some loaders compare it."""
        version = self._model.get("ds_version")
        return version if isinstance(version, str) else "0.19.8"

    @property
    def model_dtype(self) -> DType:
        """The dtype of the module's weights."""
        named = self.source.details.get("dtype")
        return (parse_dtype(named) if isinstance(named, str) else None) or FLOAT32

    def zero_option(self, name: str, default: Any) -> Any:
        """A setting of the config's `zero_optimization`."""
        value = lookup(self.config, "zero_optimization", name)
        return default if value is None else value

    @property
    def vocab_multiple(self) -> int | None:
        """Megatron's `make_vocab_size_divisible_by`, if the source has Megatron's arguments."""
        args = self._model.get("args")
        value = args.get("make_vocab_size_divisible_by") if isinstance(args, Inert) else None
        return value if type(value) is int and value > 0 else None

    @property
    def clip_grad(self) -> float:
        stored = self.optimizer.get("clip_grad", self.config.get("gradient_clipping", 0.0))
        return stored if isinstance(stored, (int, float)) else 0.0

    @property
    def loss_scaler(self) -> Inert:
        """The loss scaler as an object; with ZeRO off it is created from the fields in the state dict."""
        stored = self.optimizer.get("loss_scaler")
        if isinstance(stored, Inert):
            return stored
        fields = self.optimizer
        scale = float(fields.get("cur_scale", 1.0))
        if self.model_dtype != FLOAT16 or not fields.get("dynamic_loss_scale", False):
            return _loss_scaler_object("LossScaler", {"cur_scale": scale, "dynamic": False})
        state = {
            "cur_scale": scale,
            "dynamic": True,
            "cur_iter": fields.get("cur_iter", 0),
            "last_overflow_iter": fields.get("last_overflow_iter", -1),
            "scale_factor": fields.get("scale_factor", 2.0),
            "scale_window": fields.get("scale_window", 1000),
            "min_scale": fields.get("min_loss_scale", 1),
            "delayed_shift": 1,
            "cur_hysteresis": 1,
            "consecutive_hysteresis": False,
            "raise_error_at_min_scale": True,
            "dtype": FLOAT16,
        }
        return _loss_scaler_object("DynamicLossScaler", state)

    @property
    def dynamic_loss_scale(self) -> bool:
        return bool(self.optimizer.get("dynamic_loss_scale", self.loss_scaler.get("dynamic", False)))


def _loss_scaler_object(name: str, state: dict[str, Any]) -> Inert:
    return bare_object(_LOSS_SCALER_MODULE, name, state)


def adjusted_config(config: Mapping[str, Any], *, zero: int, dp: int, dtype: DType) -> dict[str, Any]:
    """The user's configuration with the ZeRO stage, dtype and batch size of the target."""
    adjusted = dict(config)
    section = adjusted.get("zero_optimization")
    if isinstance(section, dict) or zero:
        adjusted["zero_optimization"] = {**dict_or_empty(section), "stage": zero}
    for key, wanted in (("bf16", BFLOAT16), ("fp16", FLOAT16)):
        section = adjusted.get(key)
        if isinstance(section, dict) or dtype == wanted:
            adjusted[key] = {**dict_or_empty(section), "enabled": dtype == wanted}
    micro, steps = adjusted.get("train_micro_batch_size_per_gpu"), adjusted.get("gradient_accumulation_steps")
    if "train_batch_size" in adjusted and isinstance(micro, int) and isinstance(steps, int):
        adjusted["train_batch_size"] = micro * steps * dp
    return adjusted
