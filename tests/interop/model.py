"""A tiny GPT that trains in every parallel layout DeepSpeed has: dense, Megatron-style tp, pipeline, MoE.

The fresh weights depend only on the seed and the logical name, so every layout starts from the same logical model.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.interop.spec import Spec
from tests.replay.lion import Lion


class Tp:
    """This rank's place in its tensor-parallel group."""

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None) -> None:
        self.rank, self.size, self.group = rank, size, group

    def identity_then_sum(self, x: Tensor) -> Tensor:
        return x if self.size == 1 else _IdentityThenSum.apply(x, self.group)

    def sum_then_identity(self, x: Tensor) -> Tensor:
        return x if self.size == 1 else _SumThenIdentity.apply(x, self.group)

    def gather_last(self, x: Tensor) -> Tensor:
        return x if self.size == 1 else _GatherLast.apply(x, self)


class _IdentityThenSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _SumThenIdentity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:  # noqa: ARG004
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grad, None


class _GatherLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Tp) -> Tensor:
        ctx.tp = tp
        parts = [torch.empty_like(x) for _ in range(tp.size)]
        dist.all_gather(parts, x.contiguous(), group=tp.group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.tp.size, -1)[ctx.tp.rank].contiguous(), None


class Linear(nn.Module):
    """Linear layer with its output (`cut="column"`), its input (`cut="row"`) or nothing split over tp."""

    def __init__(self, inputs: int, outputs: int, tp: Tp, cut: str | None = None, bias: bool = True) -> None:
        super().__init__()
        self.tp, self.cut = tp, cut
        rows = outputs // tp.size if cut == "column" else outputs
        columns = inputs // tp.size if cut == "row" else inputs
        self.weight = nn.Parameter(torch.empty(rows, columns))
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.cut == "column":
            return F.linear(self.tp.identity_then_sum(x), self.weight, self.bias)
        if self.cut == "row":
            out = self.tp.sum_then_identity(F.linear(x, self.weight))
            return out if self.bias is None else out + self.bias
        return F.linear(x, self.weight, self.bias)


class Attention(nn.Module):
    def __init__(self, spec: Spec, tp: Tp) -> None:
        super().__init__()
        self.heads = spec.heads // tp.size
        self.qkv = Linear(spec.hidden, 3 * spec.hidden, tp, "column")
        self.proj = Linear(spec.hidden, spec.hidden, tp, "row")
        self.register_buffer("mask", torch.tril(torch.ones(spec.positions, spec.positions)).bool())
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        # a rank's rows of qkv are its q, then its k, then its v: three sub-parameters, each split on its own
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~self.mask[:length, :length], float("-inf"))
        out = F.softmax(scores.float(), -1).to(x.dtype) @ v
        return self.proj(out.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    def __init__(self, spec: Spec, tp: Tp) -> None:
        super().__init__()
        self.swiglu = spec.swiglu
        if spec.swiglu:
            self.gate_up = Linear(spec.hidden, 2 * spec.ffn, tp, "column")
        else:
            self.up = Linear(spec.hidden, spec.ffn, tp, "column")
        self.down = Linear(spec.ffn, spec.hidden, tp, "row")

    def forward(self, x: Tensor) -> Tensor:
        if self.swiglu:
            gate, up = self.gate_up(x).chunk(2, -1)
            return self.down(F.silu(gate) * up)
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, spec: Spec, tp: Tp, moe: bool = False) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(spec.hidden)
        self.attn = Attention(spec, tp)
        self.ln2 = nn.LayerNorm(spec.hidden)
        self.moe = moe
        if moe:
            from deepspeed.moe.layer import MoE

            self.mlp: nn.Module = MoE(
                spec.hidden,
                Mlp(spec, Tp()),
                num_experts=spec.experts,
                ep_size=spec.ep,
                k=1,
                capacity_factor=float(spec.experts),  # room for every token: nothing dropped, nothing random
                min_capacity=1,
                use_rts=False,
            )
        else:
            self.mlp = Mlp(spec, tp)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        out = self.mlp(self.ln2(x))
        return x + (out[0] if self.moe else out)


class Embedding(nn.Module):
    """Vocabulary split over tp, and the tied head that uses the same weight."""

    def __init__(self, spec: Spec, tp: Tp) -> None:
        super().__init__()
        self.tp, self.vocab = tp, spec.vocab
        self.rows = spec.padded_vocab // tp.size
        self.weight = nn.Parameter(torch.empty(self.rows, spec.hidden))

    def forward(self, tokens: Tensor) -> Tensor:
        local = tokens - self.tp.rank * self.rows
        here = (local >= 0) & (local < self.rows)
        out = F.embedding(local.clamp(0, self.rows - 1), self.weight) * here.unsqueeze(-1)
        return self.tp.sum_then_identity(out)


def logits(x: Tensor, weight: Tensor, tp: Tp, vocab: int) -> Tensor:
    """Scores over the true vocabulary: the padding rows get no gradient."""
    return tp.gather_last(F.linear(tp.identity_then_sum(x), weight))[..., :vocab]


def cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.float().flatten(0, 1), targets.flatten())


class Gpt(nn.Module):
    """The whole model as one module. `forward` returns the loss."""

    def __init__(self, spec: Spec, tp: Tp) -> None:
        super().__init__()
        self.spec, self.tp = spec, tp
        self.embed = Embedding(spec, tp)
        self.pos = nn.Embedding(spec.positions, spec.hidden)
        self.scale = nn.Parameter(torch.ones(1))
        self.blocks = nn.ModuleList(Block(spec, tp, moe=bool(spec.experts) and i % 2 == 1) for i in range(spec.layers))
        self.add_module(spec.last_norm, nn.LayerNorm(spec.hidden))
        self.head = Linear(spec.hidden, spec.padded_vocab, tp, "column", bias=False)
        self.register_buffer("seen", torch.tensor([3.0, 1.5, -2.0]))
        if spec.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) + self.pos(torch.arange(tokens.shape[1]))
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        x = getattr(self, self.spec.last_norm)(x)
        return cross_entropy(logits(x, self.head.weight, self.tp, self.spec.vocab), targets)


class PipeEmbedding(nn.Module):
    """Tied layer: embedding on the first stage, head on the last."""

    def __init__(self, spec: Spec, tp: Tp) -> None:
        super().__init__()
        self.embed = Embedding(spec, tp)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens)

    def scores(self, x: Tensor) -> Tensor:
        return logits(x, self.embed.weight, self.embed.tp, self.embed.vocab)


class PipeHead(nn.Module):
    def __init__(self, spec: Spec, tp: Tp) -> None:
        super().__init__()
        self.tp, self.vocab = tp, spec.vocab
        self.proj_out = Linear(spec.hidden, spec.padded_vocab, tp, "column", bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return logits(x, self.proj_out.weight, self.tp, self.vocab)


class PipePositions(nn.Module):
    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.pos = nn.Embedding(spec.positions, spec.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.pos(torch.arange(x.shape[1]))


def _scores(layer: PipeEmbedding, x: Tensor) -> Tensor:
    return layer.scores(x)


def pipeline_layers(spec: Spec, tp: Tp) -> list[Any]:
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    first = TiedLayerSpec("embed", PipeEmbedding, spec, tp, tied_weight_attr="embed.weight")
    last = TiedLayerSpec("embed", PipeEmbedding, spec, tp, forward_fn=_scores, tied_weight_attr="embed.weight")
    return [
        first if spec.tied else LayerSpec(PipeEmbedding, spec, tp),
        LayerSpec(PipePositions, spec),
        *(LayerSpec(Block, spec, tp) for _ in range(spec.layers)),
        LayerSpec(nn.LayerNorm, spec.hidden),
        last if spec.tied else LayerSpec(PipeHead, spec, tp),
    ]


# ----------------------------------------------------------------------------------------------------------------------
# Fresh weights


def fill(module: nn.Module, spec: Spec, tp: Tp, ep_rank: int = 0) -> None:
    """Give every parameter its fresh value, a function of seed and logical name alone."""
    for name, parameter in module.named_parameters():
        whole = fresh(logical_name(name, spec, ep_rank), whole_shape(name, parameter, tp), spec)
        with _writable(parameter), torch.no_grad():
            parameter.copy_(tp_slice(name, whole, tp))


def _writable(parameter: nn.Parameter) -> Any:
    """Gathers a parameter that deepspeed.zero.Init has partitioned already."""
    if not hasattr(parameter, "ds_id"):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)


def logical_name(name: str, spec: Spec, ep_rank: int) -> str:
    """The name with the expert's global number in place of its local one."""
    experts_here = spec.experts // spec.ep if spec.experts else 0
    return re.sub(r"(deepspeed_experts\.)(\d+)", lambda m: f"{m[1]}{ep_rank * experts_here + int(m[2])}", name)


def fresh(name: str, shape: tuple[int, ...], spec: Spec) -> Tensor:
    if VOCABULARY.match(name) and shape[0] > spec.vocab:  # the true rows do not depend on the padding
        true = fresh(name, (spec.vocab, *shape[1:]), spec)
        return torch.cat([true, fresh(name + " padding", (shape[0] - spec.vocab, *shape[1:]), spec)])
    generator = torch.Generator().manual_seed(spec.seed * 1_000_003 + zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator) * 0.2
    return values + 1 if re.search(r"(ln\w*\.weight|scale|^\d+\.weight)$", name) else values


VOCABULARY = re.compile(r".*(embed|head|proj_out)\.weight$")
ROW = re.compile(r".*(proj|down)\.weight$")
COLUMN = re.compile(r".*(qkv|gate_up|up)\.(weight|bias)$|.*(embed|head|proj_out)\.weight$")
SUB_PARAMETERS = {"qkv": 3, "gate_up": 2}


def cut_dimension(name: str) -> int | None:
    """Which dimension tp splits, None for replicated. Experts are never split."""
    if "deepspeed_experts" in name:
        return None
    if ROW.match(name):
        return 1
    return 0 if COLUMN.match(name) else None


def whole_shape(name: str, parameter: nn.Parameter, tp: Tp) -> tuple[int, ...]:
    shape = list(getattr(parameter, "ds_shape", parameter.shape))
    dim = cut_dimension(name)
    if dim is not None:
        shape[dim] *= tp.size
    return tuple(shape)


def tp_slice(name: str, whole: Tensor, tp: Tp) -> Tensor:
    dim = cut_dimension(name)
    if dim is None or tp.size == 1:
        return whole
    parts = next((n for key, n in SUB_PARAMETERS.items() if f".{key}." in name), 1)
    return torch.cat([part.chunk(tp.size, dim)[tp.rank] for part in whole.chunk(parts, dim)], dim)


def universal_info(spec: Spec) -> dict[str, Any]:
    """How tp slices combine, in DeepSpeed's own words. Like Megatron-DeepSpeed, only version 0.2 without tp."""
    info: dict[str, Any] = {"universal_checkpoint_version": 0.2}
    if spec.is_pipeline and spec.tied:
        info["pipeline_replicated_parameter_patterns"] = [r"tied_modules\.embed\.embed\.weight"]
    if spec.tp == 1:
        return info
    h = spec.hidden
    return {
        **info,
        "original_vocab_size": spec.vocab,
        "padded_vocab_size": spec.padded_vocab,
        "vocabulary_parameter_patterns": [r".*(embed|head|proj_out)\.weight$"],
        "tp_replicated_parameter_patterns": [
            r".*pos\.weight",
            r".*ln\d\.(weight|bias)",
            r".*(proj|down)\.bias",
            r"(ln_f|\d+)\.(weight|bias)$",
            r"scale$",
        ],
        "parameter_to_average_patterns": [],
        "parameter_with_row_parallelism_patterns": [r".*(proj|down)\.weight"],
        "parameter_with_2_sub_params_cat_dim_0": [r".*gate_up\.(weight|bias)"] if spec.swiglu else [],
        "parameter_with_sub_params": [
            {"patterns": [r".*qkv\.weight"], "shape": ((h, h, h), h), "partition_dim": 0},
            {"patterns": [r".*qkv\.bias"], "shape": ((h, h, h),), "partition_dim": 0},
        ],
    }


# ----------------------------------------------------------------------------------------------------------------------
# Optimizers and data


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda groups, lr: torch.optim.AdamW(groups, lr=lr, foreach=False),
    "amsgrad": lambda groups, lr: torch.optim.AdamW(groups, lr=lr, foreach=False, amsgrad=True),
    "sgd": lambda groups, lr: torch.optim.SGD(groups, lr=lr, momentum=0.9, foreach=False),
    "sgd_plain": lambda groups, lr: torch.optim.SGD(groups, lr=lr, foreach=False),
    "adagrad": lambda groups, lr: torch.optim.Adagrad(groups, lr=lr, foreach=False),
    "rmsprop": lambda groups, lr: torch.optim.RMSprop(groups, lr=lr, momentum=0.9, centered=True, foreach=False),
    "adafactor": lambda groups, lr: torch.optim.Adafactor(groups, lr=lr, foreach=False),
    "nadam": lambda groups, lr: torch.optim.NAdam(groups, lr=lr, foreach=False),
    "adam_as_adamw": lambda groups, lr: torch.optim.Adam(
        [{**group, "lr": torch.tensor(group.get("lr", lr))} for group in groups],
        foreach=False,
        maximize=True,
        decoupled_weight_decay=True,
    ),
    "lion": lambda groups, lr: Lion(groups, lr=lr / 10),
}


def parameter_groups(module: nn.Module, spec: Spec) -> list[dict[str, Any]]:
    """The optimizer's groups: matrices with decay, the rest without, and with 3 groups `scale` (or biases) alone."""
    decay, no_decay, tiny = [], [], []
    for name, p in module.named_parameters():
        if not p.requires_grad:
            continue
        if spec.groups == 1:
            decay.append(p)
        elif spec.groups == 3 and name == "scale":
            tiny.append(p)
        else:
            (decay if len(getattr(p, "ds_shape", p.shape)) > 1 else no_decay).append(p)
    groups = [
        {"params": decay, "weight_decay": 0.1, "name": "decay"},
        {"params": no_decay, "weight_decay": 0.0, "name": "no_decay"},
        {"params": tiny, "weight_decay": 0.0, "lr": spec.lr / 4, "name": "tiny"},
    ]
    return [group for group in groups if group["params"]]


def global_batch(spec: Spec, step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one step, the same for every world."""
    generator = torch.Generator().manual_seed(spec.data_seed * 7919 + step)
    tokens = torch.randint(spec.vocab, (spec.batch, spec.positions + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
