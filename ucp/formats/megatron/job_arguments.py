"""The arguments of the job that saved: every Megatron checkpoint stores its command line as a namespace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ucp.containers.inert import Inert
from ucp.errors import NotUnderstoodError

# Tokenizers whose size is given by the user, and how many entries they add to it.
_USER_VOCABULARIES: Final = {"NullTokenizer": 1, "NullMultimodalTokenizer": 1, "TikTokenizer": 0}
_GATED: Final = ("swiglu", "geglu", "quick_geglu", "gated_linear_unit")


@dataclass(frozen=True, slots=True)
class JobArguments:
    """The fields of one rank's namespace."""

    fields: Mapping[str, Any]

    def number(self, name: str, default: int = 1) -> int:
        """Return a positive integer field, or `default` if it is absent or anything else."""
        value = self.fields.get(name)
        return value if type(value) is int and value > 0 else default

    def flag(self, name: str) -> bool:
        return self.fields.get(name) is True

    @property
    def tp(self) -> int:
        return self.number("tensor_model_parallel_size")

    @property
    def pp(self) -> int:
        return self.number("pipeline_model_parallel_size")

    @property
    def vpp(self) -> int:
        """Model chunks per pipeline rank."""
        return self.number("virtual_pipeline_model_parallel_size")

    @property
    def ep(self) -> int:
        return self.number("expert_model_parallel_size")

    @property
    def etp(self) -> int:
        """Tensor-parallel degree of experts."""
        return self.number("expert_tensor_parallel_size", self.tp)

    @property
    def dp(self) -> int:
        """Ranks over which the state of dense parameters is sharded; context parallelism counts as data parallelism."""
        return max(1, self.number("world_size", self.tp * self.pp) // (self.tp * self.pp))

    @property
    def expert_dp(self) -> int:
        """Ranks over which the state of experts is sharded."""
        return max(1, self.number("world_size", self.tp * self.pp) // (self.etp * self.ep * self.pp))

    @property
    def experts_per_rank(self) -> int:
        return self.number("num_experts", 0) // self.ep

    def experts_on(self, ep: int) -> range:
        """Return the experts of an expert-parallel rank, numbered over the whole model."""
        return range(ep * self.experts_per_rank, (ep + 1) * self.experts_per_rank)

    @property
    def has_expert_ranks(self) -> bool:
        """Whether experts are distributed over ranks in another way than dense parameters."""
        return self.ep > 1 or self.etp != self.tp

    @property
    def has_expert_optimizer(self) -> bool:
        """Whether experts have an optimizer of their own, because they have their own ranks."""
        return self.number("num_experts", 0) > 0 and self.has_expert_ranks

    @property
    def layers(self) -> int | None:
        value = self.fields.get("num_layers", self.fields.get("encoder_num_layers"))
        return value if type(value) is int and value > 0 else None

    @property
    def prediction_layers(self) -> int:
        """Layers of multi-token prediction (`mtp.layers.N`)."""
        return self.number("mtp_num_layers", 0)

    @property
    def tied(self) -> bool:
        """Whether the output layer is the word embedding."""
        return self.fields.get("untie_embeddings_and_output_weights") is not True

    @property
    def shares_embedding(self) -> bool:
        """Whether the last pipeline stage has a copy of the word embedding, as output layer or for prediction."""
        return self.pp > 1 and (self.tied or self.prediction_layers > 0)

    @property
    def gated(self) -> bool:
        """Whether the first MLP matrix is a gate and a projection."""
        return any(self.flag(name) for name in _GATED)

    @property
    def has_transformer_engine(self) -> bool:
        return bool(self.fields.get("transformer_impl", "transformer_engine") != "local")

    @property
    def vocabulary(self) -> int | None:
        """The size of the tokenizer's vocabulary, if it can be derived: Megatron stores its padded size and the user's.

        Checkpoints converted from another framework have `true_vocab_size`.
        """
        known = self.number("true_vocab_size", 0)
        if 0 < known <= self.number("padded_vocab_size", 0):
            return known
        extra = _USER_VOCABULARIES.get(str(self.fields.get("tokenizer_type")))
        typed = self.fields.get("vocab_size")
        if extra is None or type(typed) is not int or typed <= 0:
            return None
        unit = self.number("make_vocab_size_divisible_by", 128) * self.tp
        padded = -(-(typed + extra) // unit) * unit
        return typed + extra if padded == self.fields.get("padded_vocab_size") else None

    @property
    def is_distributed_optimizer(self) -> bool:
        return self.flag("use_distributed_optimizer")

    @property
    def has_muon(self) -> bool:
        """Whether Muon trains the matrices, and Adam the rest: `muon`, `dist_muon`, `adaptive_muon`."""
        return "muon" in str(self.fields.get("optimizer"))

    @property
    def is_layer_wise(self) -> bool:
        """Whether each data-parallel rank keeps the states of whole parameters."""
        return str(self.fields.get("optimizer")).startswith("dist_")


def arguments_of(value: Any, where: str) -> JobArguments:
    """Return the arguments in an `argparse.Namespace` of a file."""
    if isinstance(value, Inert) and isinstance(value.state, dict):
        return JobArguments(value.state)
    raise NotUnderstoodError(
        f"{where}: does not contain the arguments of the job (`args`), which determine how its parameters were split",
        hint="was it written by Megatron's save_checkpoint? Tools that only export weights may leave them out",
    )
