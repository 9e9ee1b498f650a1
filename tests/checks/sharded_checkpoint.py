"""A small handmade sharded checkpoint without any defect, for tests to damage."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from tests.engine.shards import Cut, pick, regions
from ucp.core.checkpoint import Atom, Checkpoint, Fragment, Mesh, Parameter, ParamGroup, Rank
from ucp.core.dtypes import BFLOAT16, FLOAT32, DType
from ucp.core.region import Region
from ucp.core.rules import REPLICATED, Rule
from ucp.read.casting import cast

Array = np.ndarray[Any, Any]

SPLIT = Rule("split", dim=1)
KINDS = ("master", "exp_avg", "exp_avg_sq")


def make(root: Path) -> Checkpoint:
    """tp 2 × dp 2: a matrix that is split along its columns and then flat, and a norm that both tp ranks hold."""
    root.mkdir(parents=True, exist_ok=True)
    for tp in range(2):
        (root / f"tp{tp}").write_bytes(b"")  # where the steps come from
    random = np.random.default_rng(7)
    parameters: dict[str, Parameter] = {}
    for name, shape, rule in (("layer.weight", (6, 4), SPLIT), ("norm.weight", (10,), REPLICATED)):
        master = random.standard_normal(shape).astype(np.float32)
        values: dict[str, tuple[Array, DType]] = {
            "weight": (cast(master, FLOAT32, BFLOAT16), BFLOAT16),
            "master": (master, FLOAT32),
            "exp_avg": (random.standard_normal(shape).astype(np.float32), FLOAT32),
            "exp_avg_sq": (random.random(shape).astype(np.float32), FLOAT32),
        }
        atoms = {kind: _atom(root, name, kind, *held, rule) for kind, held in values.items()}
        atoms["step"] = Atom(name, "step", (), FLOAT32, (step(0, 3),), ((step(1, 3),),))
        parameters[name] = Parameter(name, shape, atoms=atoms, rule=rule, group=0)
    sizes = {file.name: file.stat().st_size for file in root.iterdir()}
    groups = [ParamGroup({"lr": 0.1}, list(parameters))]
    return Checkpoint("made", root, Mesh(tp=2, dp=2, zero=1), parameters, step=3, groups=groups, sizes=sizes)


def step(tp: int, value: float) -> Fragment:
    """A number of steps as one tensor-parallel rank has it."""
    data = struct.pack("<f", value)
    return Fragment(Region.all_of(()), f"tp{tp}", 0, FLOAT32, Rank(tp=tp), inline=data)


def _atom(root: Path, name: str, kind: str, values: Array, dtype: DType, rule: Rule) -> Atom:
    # Weights are whole on every tp rank, everything else is cut over two dp ranks at an odd place.
    marks = () if kind == "weight" else (450,)
    if rule.cut == "split":
        cut = regions(Cut(rule, 2, marks), values.shape)
        return Atom(name, kind, values.shape, dtype, _write(root, name, kind, values, dtype, cut, 0))
    cut = regions(Cut(rule, 1, marks), values.shape)
    covers = [_write(root, name, kind, values, dtype, cut, tp) for tp in range(2)]
    return Atom(name, kind, values.shape, dtype, covers[0], tuple(covers[1:]))


def _write(
    root: Path, name: str, kind: str, values: Array, dtype: DType, cut: list[Region], tp: int
) -> tuple[Fragment, ...]:
    fragments = []
    for number, region in enumerate(cut):
        file = f"{name}.{kind}.tp{tp}.{number}"
        (root / file).write_bytes(b"\xa5" * 16 + pick(values, region).tobytes() + b"\xa5" * 16)
        fragments.append(Fragment(region, file, 16, dtype, Rank(tp=tp, dp=number)))
    return tuple(fragments)


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)
