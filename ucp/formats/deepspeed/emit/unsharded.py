"""The optimizer of ZeRO off: one entry a parameter, in the model file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ucp.files.torchzip_writer import NewTensor
from ucp.formats.deepspeed.emit.slices import Local
from ucp.formats.deepspeed.emit.states import Scalars, element_kinds
from ucp.formats.deepspeed.emit.tensors import shaped_tensor, whole_tensor
from ucp.formats.deepspeed.emit.world import LocalGroup, World
from ucp.model.checkpoint import MASTER, WEIGHT, Atom, state_of_kind
from ucp.model.dtypes import FLOAT16, FLOAT32


def optimizer_tree(world: World, groups: Sequence[LocalGroup], scalars: Scalars) -> dict[str, Any]:
    """The value of `optimizer`: a torch state dict for fp32, that and the masters for 16 bit."""
    state: dict[int, Any] = {}
    listed: list[dict[str, Any]] = []
    masters: list[list[NewTensor]] = []
    at = 0
    for group in groups:
        for number, member in enumerate(group.members, at):
            entries = _entries(world, member, scalars)
            if entries:
                state[number] = entries
        listed.append({**group.hyper, "params": list(range(at, at + len(group.members)))})
        at += len(group.members)
        masters.append([_whole(world, member) for member in group.members])
    optimizer = {"state": state, "param_groups": listed}
    if world.dtype == FLOAT32:
        return optimizer
    carried = world.carried
    scaler = carried.loss_scaler
    tree: dict[str, Any] = {
        "dynamic_loss_scale": carried.dynamic_loss_scale,
        "cur_scale": scaler.get("cur_scale", 1.0),
        "cur_iter": carried.optimizer.get("cur_iter", scaler.get("cur_iter", world.source.step or 0)),
    }
    if world.dtype == FLOAT16 and carried.dynamic_loss_scale:
        tree["last_overflow_iter"] = carried.optimizer.get("last_overflow_iter", scaler.get("last_overflow_iter", -1))
        tree["scale_factor"] = carried.optimizer.get("scale_factor", scaler.get("scale_factor", 2.0))
        tree["scale_window"] = carried.optimizer.get("scale_window", scaler.get("scale_window", 1000))
    tree["optimizer_state_dict"] = optimizer
    tree["fp32_groups"] = masters
    return tree


def _entries(world: World, member: Local, scalars: Scalars) -> dict[str, Any]:
    numbers = scalars.each(member)
    entries: dict[str, Any] = {kind: value for kind, value in numbers.items() if kind == "step"}
    odd = _odd_states(member)
    for kind in element_kinds([member], without=odd):
        atom = world.state(member.parameter, kind)
        assert atom is not None
        entries[kind] = shaped_tensor(atom, member.region, member.shape)
    entries.update((kind, whole_tensor(atom)) for kind, atom in odd.items())
    entries.update((kind, value) for kind, value in numbers.items() if kind != "step")
    return {state_of_kind(kind): value for kind, value in entries.items()}


def _odd_states(member: Local) -> dict[str, Atom]:
    """States of a shape of their own (Adafactor's rows and columns, tables): where nothing is cut, they stay whole."""
    parameter = member.parameter
    if member.shape != parameter.shape:
        return {}
    kinds = {kind: atom for kind, atom in parameter.atoms.items() if kind not in (WEIGHT, MASTER)}
    return {kind: atom for kind, atom in kinds.items() if atom.shape not in ((), parameter.shape)}


def _whole(world: World, member: Local) -> NewTensor:
    return shaped_tensor(world.master(member.parameter), member.region, member.shape)
