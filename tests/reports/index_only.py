"""Checkpoints that exist as an index only: of any size, without a byte on disk."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

from ucp.core.box import Box
from ucp.core.checkpoint import Atom, Checkpoint, Fragment, Mesh, Parameter, Rank
from ucp.core.dtypes import BFLOAT16, FLOAT32
from ucp.core.region import Region
from ucp.core.rules import Rule
from ucp.formats.sharded.shard_fragments import RankFragments

KINDS = ("master", "exp_avg", "exp_avg_sq")


def shapes(layers: int) -> Iterator[tuple[str, tuple[int, int]]]:
    for layer in range(layers):
        for name, shape in (("attn.qkv", (12288, 4096)), ("attn.proj", (4096, 4096)), ("mlp.up", (16384, 4096))):
            yield f"model.decoder.layers.{layer}.{name}.weight", shape
        yield f"model.decoder.layers.{layer}.mlp.down.weight", (4096, 16384)


def zero3(layers: int, dp: int) -> Checkpoint:
    """Every parameter split over all ranks: as many fragments as there are parameters times ranks times states."""
    files = {f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt": 1 for rank in range(dp)}

    def fragments(shape: tuple[int, int], at: int) -> RankFragments:
        whole = Region.all_of(shape)
        share = -(-prod(shape) // dp)

        def make() -> Iterator[Fragment]:
            for rank, file in enumerate(files):
                yield Fragment(whole.cut(rank * share, (rank + 1) * share), file, at, FLOAT32, Rank(dp=rank))

        return RankFragments(make, dp)

    parameters = {}
    for number, (name, shape) in enumerate(shapes(layers)):
        atoms = {kind: Atom(name, kind, shape, FLOAT32, fragments(shape, 1000 * number)) for kind in KINDS}
        parameters[name] = Parameter(name, shape, atoms=atoms)
    return Checkpoint("deepspeed", Path("nowhere"), Mesh(dp=dp, zero=3), parameters, sizes=files)


def zero1(layers: int, tp: int, dp: int) -> Checkpoint:
    """Cut over tensor-parallel ranks along the first dimension, each slice on one or two data-parallel ranks."""
    model = {f"mp_rank_{rank:02d}_model_states.pt": 1 for rank in range(tp)}
    optimizer = {f"zero_pp_rank_{d}_mp_rank_{t:02d}_optim_states.pt": 1 for d in range(dp) for t in range(tp)}
    names = list(optimizer)
    parameters = {}
    for number, (name, shape) in enumerate(shapes(layers)):
        rows = shape[0] // tp
        slices = [Region.of((Box((rank * rows, 0), (rows, shape[1])),)) for rank in range(tp)]
        weights = [
            Fragment(region, file, 0, BFLOAT16, Rank(tp=rank))
            for rank, (region, file) in enumerate(zip(slices, model, strict=True))
        ]
        home, cut = number * dp // (4 * layers), rows * 137
        states = []
        for rank, region in enumerate(slices):
            for dp_rank, part in ((home, region.cut(0, cut)), (min(home + 1, dp - 1), region.cut(cut, region.numel))):
                states.append(Fragment(part, names[dp_rank * tp + rank], 0, FLOAT32, Rank(tp=rank, dp=dp_rank)))
        atoms = {"weight": Atom(name, "weight", shape, BFLOAT16, weights)}
        atoms |= {kind: Atom(name, kind, shape, FLOAT32, states) for kind in KINDS}
        parameters[name] = Parameter(name, shape, atoms=atoms, rule=Rule("split", 0), rule_origin="made up")
    mesh = Mesh(tp=tp, dp=dp, zero=1)
    return Checkpoint("deepspeed", Path("nowhere"), mesh, parameters, sizes={**model, **optimizer})
