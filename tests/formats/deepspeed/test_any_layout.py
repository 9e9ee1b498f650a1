"""Random models written for random layouts and read back: every state is the same, bit for bit."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.shards import values_of
from ucp.core.box import Shape
from ucp.core.checkpoint import Atom, Checkpoint, Fragment, Mesh, Parameter, ParamGroup
from ucp.core.dtypes import BFLOAT16, FLOAT32, INT64
from ucp.core.region import Region
from ucp.core.rules import Rule, RuleBook
from ucp.engine.plan import Plan
from ucp.formats.registry import ReadOptions, WriteOptions, make_writer, open_checkpoint
from ucp.read.atom_reader import read_array
from ucp.read.casting import cast, raw_dtype

TP = (1, 2, 3)


@st.composite
def rules(draw: st.DrawFn) -> tuple[Rule, Shape]:
    """A rule and a logical shape that divides over every tensor-parallel degree in TP."""
    unit = 6
    kind = draw(st.sampled_from(["replicated", "split", "parts", "vocab", "inner"]))
    tail = tuple(draw(st.lists(st.integers(1, 4), max_size=2)))
    if kind == "replicated":
        return Rule("replicated"), (draw(st.integers(1, 9)), *tail)
    if kind == "vocab":
        size = draw(st.integers(1, 40))
        return Rule("vocab", dim=0, true_size=size), (size, draw(st.integers(1, 4)))
    size = unit * draw(st.integers(1, 3))
    if kind == "split":
        return Rule("split", dim=0), (size, *tail)
    if kind == "inner":
        return Rule("split", dim=1), (draw(st.integers(1, 5)), size, *tail[:1])
    dim = draw(st.integers(0, 1))
    shape = (size + unit, *tail) if dim == 0 else (draw(st.integers(1, 4)), size + unit)
    return Rule("split", dim=dim, parts=(size, unit)), shape


@st.composite
def models(draw: st.DrawFn) -> list[tuple[Rule, Shape, int]]:
    """Parameters with rule, shape and group; every group has one."""
    made = [(*draw(rules()), draw(st.integers(0, 1))) for _ in range(draw(st.integers(2, 6)))]
    made[0], made[1] = (*made[0][:2], 0), (*made[1][:2], 1)
    return made


def build(folder: Path, model: list[tuple[Rule, Shape, int]], flags: dict[str, Any]) -> Checkpoint:
    """A source on one rank, as if it had been trained."""
    parameters: dict[str, Parameter] = {}
    groups = [ParamGroup({"lr": 0.1 * (g + 1), "weight_decay": float(g)}, []) for g in range(2)]
    for number, (rule, shape, group) in enumerate(model):
        name = f"layers.{number}.w"
        atoms: dict[str, Atom] = {}
        for seed, kind in enumerate(("master", "exp_avg", "exp_avg_sq")):
            file = f"{number}.{kind}"
            values = np.random.default_rng(10 * number + seed).standard_normal(shape).astype(np.float32)
            (folder / file).write_bytes(values.tobytes())
            atoms[kind] = Atom(name, kind, shape, FLOAT32, (Fragment(Region.all_of(shape), file, 0, FLOAT32),))
        step = Fragment(Region.all_of(()), "", 0, INT64, inline=(5).to_bytes(8, "little"))
        atoms["step"] = Atom(name, "step", (), INT64, (step,))
        parameters[name] = Parameter(name, shape, atoms=atoms, rule=rule, rule_origin="test", group=group)
        groups[group].names.append(name)
    mask = values_of((3, 2), FLOAT32)
    (folder / "mask").write_bytes(mask.tobytes())
    held = Atom("mask", "weight", (3, 2), FLOAT32, (Fragment(Region.all_of((3, 2)), "mask", 0, FLOAT32),))
    parameters["mask"] = Parameter("mask", (3, 2), role="buffer", atoms={"weight": held})
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1, **flags}}
    checkpoint = Checkpoint(
        "made", folder, Mesh(zero=1), parameters, step=5, groups=groups, details={"dtype": "bfloat16"}
    )
    checkpoint.extras.trees["global_step5/mp_rank_00_model_states.pt"] = {"ds_config": config, "ds_version": "0.19.8"}
    checkpoint.sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    return checkpoint


def rulebook(source: Checkpoint) -> RuleBook:
    book = RuleBook()
    for name, parameter in source.parameters.items():
        book.add(f"^{re.escape(name)}$", parameter.rule, "test")
    return book


@settings(max_examples=60)
@given(data=st.data())
def test_every_layout_has_the_same_state(data: st.DataObject) -> None:
    model = data.draw(models())
    zero = data.draw(st.integers(0, 3))
    flags: dict[str, Any] = {}
    if zero in (1, 2):
        flags["round_robin_gradients"] = data.draw(st.booleans())
        flags["parameter_alignment"] = data.draw(st.booleans())
    if zero == 3:
        flags["sub_group_size"] = data.draw(st.integers(1, 60))
    tp, dp = data.draw(st.sampled_from(TP)), data.draw(st.integers(1, 5))
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "source").mkdir()
        source = build(Path(name) / "source", model, flags)
        writer = make_writer("deepspeed", source, WriteOptions(tp=tp, dp=dp, zero=zero))
        Plan(source, writer, writer.target(), Path(name) / "out").run(jobs=1)
        back = open_checkpoint(Path(name) / "out", ReadOptions(rules=rulebook(source)))
        assert (back.mesh.tp, back.mesh.zero, back.step) == (tp, zero, 5)
        assert set(back.parameters) == set(source.parameters)
        for parameter in source.parameters.values():
            other = back.parameters[parameter.name]
            assert other.shape == parameter.shape
            for kind, atom in parameter.atoms.items():
                assert read_array(back.root, other.atoms[kind]).tobytes() == read_array(source.root, atom).tobytes()
            if "master" in parameter.atoms and zero < 3:
                rounded = cast(read_array(source.root, parameter.atoms["master"]), FLOAT32, BFLOAT16)
                assert other.atoms["weight"].dtype == BFLOAT16
                stored = read_array(back.root, other.atoms["weight"]).view(np.uint32) >> 16
                assert np.array_equal(stored.astype(raw_dtype(BFLOAT16)), rounded)
        for group, original in zip(back.groups, source.groups, strict=True):
            assert set(group.names) == set(original.names)
            assert {key: group.hyper[key] for key in original.hyper} == original.hyper
