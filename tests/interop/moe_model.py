"""A tiny Hugging Face mixture of experts, which DeepSpeed's AutoEP takes apart and spreads over expert ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

from tests.interop.model import cross_entropy
from tests.interop.spec import Spec


class TinyMixtral(MixtralForCausalLM):  # type: ignore[misc]
    """Mixtral that is called as the tests' GPT is: tokens and targets in, loss out. AutoEP knows it by its name."""

    def forward(self, tokens: Tensor, targets: Tensor, **_: Any) -> Tensor:
        """The mean loss of one micro-batch."""
        return cross_entropy(super().forward(input_ids=tokens, use_cache=False).logits, targets)


def build(spec: Spec) -> nn.Module:
    """The same fresh weights on every rank and in every layout: AutoEP cuts them afterwards."""
    torch.manual_seed(spec.seed)
    return TinyMixtral(
        MixtralConfig(
            vocab_size=spec.vocab,
            hidden_size=spec.hidden,
            intermediate_size=spec.ffn,
            num_hidden_layers=spec.layers,
            num_attention_heads=spec.heads,
            num_key_value_heads=spec.heads,
            max_position_embeddings=spec.positions,
            num_local_experts=spec.experts,
            num_experts_per_tok=2,
            tie_word_embeddings=spec.tied,
            attn_implementation="eager",
        )
    ).float()
