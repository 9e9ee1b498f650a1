"""A tiny model of plain linear layers, which DeepSpeed's AutoTP splits over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.interop.model import cross_entropy
from tests.interop.spec import Spec


class Block(nn.Module):
    """Attention and a gated MLP; `fused` has query, key and value in one layer."""

    def __init__(self, spec: Spec, *, fused: bool) -> None:
        super().__init__()
        self.head_size = spec.hidden // spec.heads
        names = ("qkv_proj",) if fused else ("q_proj", "k_proj", "v_proj")
        for name in names:
            self.add_module(name, nn.Linear(spec.hidden, spec.hidden * 3 // len(names)))
        self.o_proj = nn.Linear(spec.hidden, spec.hidden)
        self.gate_proj, self.up_proj = nn.Linear(spec.hidden, spec.ffn), nn.Linear(spec.hidden, spec.ffn)
        self.down_proj = nn.Linear(spec.ffn, spec.hidden)
        self.ln1, self.ln2 = nn.LayerNorm(spec.hidden), nn.LayerNorm(spec.hidden)
        self.names = names

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln1(x)
        parts = [getattr(self, name)(y) for name in self.names]
        if len(parts) == 1:
            parts = list(parts[0].chunk(3, -1))
        q, k, v = (part.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in parts)
        x = x + self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.ln2(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class PlainGpt(nn.Module):
    """Called as the tests' GPT is: tokens and targets in, loss out."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        patterns = str(spec.config["tensor_parallel"]["partition_config"]["layer_specs"])
        self.embed = nn.Embedding(spec.vocab, spec.hidden)
        self.blocks = nn.ModuleList(Block(spec, fused="qkv" in patterns) for _ in range(spec.layers))
        self.ln_f = nn.LayerNorm(spec.hidden)
        self.lm_out = nn.Linear(spec.hidden, spec.vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor, **_: Any) -> Tensor:
        """The mean loss of one micro-batch."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.lm_out(self.ln_f(x)), targets)


def build(spec: Spec) -> nn.Module:
    """The same fresh weights on every rank: AutoTP cuts them afterwards."""
    torch.manual_seed(spec.seed)
    return PlainGpt(spec)
