"""Weights as the module holds them: parameters, persistent buffers, frozen parameters, and aliases of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ucp.files.inert import TensorRef
from ucp.formats.deepspeed.experts import expert_number
from ucp.formats.deepspeed.holdings import Holder
from ucp.formats.deepspeed.missing import unlisted_copies
from ucp.formats.deepspeed.reading import Reading
from ucp.formats.deepspeed.shards import RankFile, flat_tensors, shapes_of, tensor_of, texts_of
from ucp.model.box import Shape
from ucp.model.checkpoint import WEIGHT, Role


def module_of(file: RankFile) -> dict[str, Any]:
    """The module's state dict by dotted name; empty with a pipeline."""
    module = file.mapping().get("module")
    return flat_tensors(module) if isinstance(module, dict) else {}


def buffers_of(file: RankFile) -> list[str]:
    """Names of the persistent buffers."""
    return texts_of(file.mapping().get("buffer_names"))


def shared_of(file: RankFile) -> dict[str, str]:
    """Alias → owner, as rank 0 wrote it (other ranks write an empty dict)."""
    shared = file.mapping().get("shared_params")
    return {str(k): str(v) for k, v in shared.items()} if isinstance(shared, dict) else {}


def frozen_shapes_of(file: RankFile) -> dict[str, Shape]:
    """Shapes of the parameters that the optimizer does not own (ZeRO-2 and 3; includes parameters of no elements)."""
    shapes = file.mapping().get("frozen_param_shapes")
    return shapes_of(shapes, f"{file.name}: frozen_param_shapes") if isinstance(shapes, dict) else {}


def read_module(
    reading: Reading,
    holder: Holder,
    file: RankFile,
    trained: Mapping[str, Shape] | None,
    shared: Mapping[str, str],
) -> None:
    """Put the weights of one model file into the holdings.

    `trained` has the shapes of the optimizer's parameters; None where the files do not name them (ZeRO off): then every
    parameter counts as trained until the optimizer says otherwise. Under ZeRO-3 parameters are empty tensors here; they
    give only the order.
    """
    module = module_of(file)
    buffers = frozenset(buffers_of(file))
    frozen = frozen_shapes_of(file)
    listed = isinstance(file.mapping().get("frozen_param_shapes"), dict)  # then it lists all frozen parameters
    owners = _owners(module, buffers, trained or {}, _told(module, {**frozen, **(trained or {})}, shared))
    elsewhere = not any(_has_elements(module.get(name)) for name in trained or {})
    owners.update(unlisted_copies(reading, file, module, trained or {}, {*buffers, *frozen, *owners}))
    for name, value in module.items():
        if not isinstance(value, TensorRef):
            continue
        reading.take(value)
        owner = owners.get(name, name)
        if owner != name:
            reading.holdings.aliases[name] = owner
            if value.numel and not _same_place(value, module.get(owner)):
                reading.holdings.put(owner, holder, value.shape, "trained", file.name).add(WEIGHT, file.whole(value))
            continue
        role = _role(name, buffers, trained, frozen)
        known = trained.get(name) if trained and role == "trained" else frozen.get(name)
        if known is not None and value.numel == 0 and value.shape != known:
            reading.holdings.roles.setdefault(name, role)  # ZeRO-3: the values are elsewhere
            continue
        if role == "frozen" and value.shape == (0,) and known is None and elsewhere:
            reading.valueless.setdefault(name, file.name)
            continue  # ZeRO-3 without its frozen parameters: a name and nothing else
        if role == "frozen" and known is None and listed:
            reading.note("weight-unexplained", f"{name}: neither parameter nor buffer as far as {file.name} says; kept")
        reading.holdings.put(name, holder, value.shape, role, file.name).kinds.setdefault(WEIGHT, []).insert(
            0, file.whole(value)
        )


def check_module(reading: Reading, holder: Holder, file: RankFile, trained: Mapping[str, Shape]) -> None:
    """Report parameters of the optimizer that the module lacks or that have another shape there."""
    module = module_of(file)
    aliased = set(reading.holdings.aliases.values())
    for name, shape in trained.items():
        value = module.get(name)
        is_expert = expert_number(name) is not None or name in reading.holdings.spreads
        if value is None and not is_expert and name not in aliased:
            reading.problems.add(
                f"parameter {name} ({holder}) is in the optimizer, but not in the module of {file.name}"
            )
        elif isinstance(value, TensorRef) and value.shape != shape and value.shape != (0,):
            reading.problems.add(
                f"parameter {name} ({holder}) has shape {list(value.shape)} in the module of {file.name}, but"
                f" {list(shape)} in its param_shapes"
            )


def read_frozen(reading: Reading, holder: Holder, file: RankFile) -> None:
    """Frozen parameters that ZeRO-2 keeps whole beside the module."""
    fragments = file.mapping().get("frozen_param_fragments")
    if not isinstance(fragments, dict):
        return
    module = module_of(file)
    for name, shape in frozen_shapes_of(file).items():
        if name not in fragments:
            continue
        ref = reading.take(tensor_of(fragments[name], f"{file.name}: frozen_param_fragments, {name}"))
        if ref.shape != shape:
            reading.problems.add(
                f"frozen parameter {name} ({holder}) has shape {list(ref.shape)} in {file.name}, but {list(shape)} in"
                " its frozen_param_shapes"
            )
        elif not _same_place(ref, module.get(name)):
            # Of what AutoEP spreads, the one model file has the share of ep rank 0; expert files have all.
            owner = reading.holdings.at(name, holder)
            reading.holdings.put(name, owner, shape, "frozen", file.name).add(WEIGHT, file.whole(ref))


def _role(
    name: str, buffers: Collection[str], trained: Mapping[str, Shape] | None, frozen: Mapping[str, Shape]
) -> Role:
    if name in buffers:
        return "buffer"
    if name in frozen:
        return "frozen"
    return "trained" if trained is None or name in trained else "frozen"


def _told(module: Mapping[str, Any], shapes: Mapping[str, Shape], shared: Mapping[str, str]) -> dict[str, str]:
    """The aliases that can be believed. DeepSpeed goes by addresses, and parameters of no elements have the same one.

    Under ZeRO-3, which goes by number, every tensor of the module is empty; `shapes` says which parameters are.
    """
    nothing: Shape = (0,)
    return {
        alias: owner
        for alias, owner in shared.items()
        if alias in module and (_has_elements(module[alias]) or 0 not in shapes.get(owner, nothing))
    }


def _has_elements(value: object) -> bool:
    return isinstance(value, TensorRef) and value.numel > 0


def _owners(
    module: Mapping[str, Any], buffers: Collection[str], trained: Collection[str], shared: Mapping[str, str]
) -> dict[str, str]:
    """Alias → owner: what rank 0 declared, and names of the very same view of the same storage."""
    owners = {alias: owner for alias, owner in shared.items() if alias not in trained}
    places: dict[object, list[str]] = {}
    for name, value in module.items():
        if isinstance(value, TensorRef) and value.numel and name not in buffers and name not in owners:
            places.setdefault((value.storage.key, value.offset, value.shape, value.strides, value.dtype), []).append(
                name
            )
    for names in places.values():
        owner = next((name for name in names if name in trained), names[0])
        owners.update({name: owner for name in names if name != owner and name not in trained})
    return owners


def _same_place(ref: TensorRef, other: object) -> bool:
    return isinstance(other, TensorRef) and (ref.storage.key, ref.offset, ref.shape) == (
        other.storage.key,
        other.offset,
        other.shape,
    )
