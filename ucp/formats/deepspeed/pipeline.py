"""Pipeline checkpoints: one file a layer, with layer-local names, and tied layers that several stages own."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from ucp.files.inert import TensorRef
from ucp.formats.deepspeed.holdings import Holder
from ucp.formats.deepspeed.names import has_model_axis, layer_name
from ucp.formats.deepspeed.reading import Reading
from ucp.formats.deepspeed.shards import RankFile, flat_tensors, texts_of
from ucp.model.box import Shape
from ucp.model.checkpoint import WEIGHT, Role

_TIED: Final = re.compile(r"tied_modules\.([^.]+)\.(.+)")
_TIED_IN_PATTERN: Final = re.compile(r"tied_modules\\?\.(\w+)")
_OF_LAYER: Final = re.compile(r"(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class StageNames:
    """The names that the files of one pipeline stage know: the optimizer's parameters with shapes, and buffers."""

    trained: Mapping[str, Shape | None]  # None: the files do not say
    buffers: Collection[str]


def read_layers(reading: Reading, layers: Mapping[tuple[int, int], str], stages: Mapping[int, StageNames]) -> None:
    """Put the weights of all layer files into the holdings. `layers`: (layer, tp rank) → file; `stages`: pp → names."""
    stage_of = _stages_of_layers(sorted({layer for layer, _ in layers}), stages)
    tied = _tied_modules(stages)
    keys_of: dict[int, str | None] = {}
    untied = list(tied)  # tied modules that no layer file has claimed yet, in the order of the model
    for (layer, tp), name in sorted(layers.items()):
        file = reading.files.open(reading.prefix + name)
        tensors = {key: value for key, value in flat_tensors(file.mapping()).items() if isinstance(value, TensorRef)}
        if layer not in keys_of:
            keys_of[layer] = _tied_key(layer, tensors, tied, untied, stages)
        _read_layer(reading, Holder(stage_of[layer], tp), file, layer, keys_of[layer], tensors, stages)
    reading.pipeline = {
        "layers": sorted(keys_of),
        "tied": {key: layer for layer, key in sorted(keys_of.items(), reverse=True) if key is not None},
        "model_axis": any(has_model_axis(name) for name in layers.values()),
    }
    first = set(reading.pipeline["tied"].values())
    again = {str(layer): key for layer, key in sorted(keys_of.items()) if key is not None and layer not in first}
    if again:
        reading.pipeline["again"] = again


def _read_layer(
    reading: Reading,
    holder: Holder,
    file: RankFile,
    layer: int,
    tied_key: str | None,
    tensors: Mapping[str, TensorRef],
    stages: Mapping[int, StageNames],
) -> None:
    for local, ref in tensors.items():
        full = f"tied_modules.{tied_key}.{local}" if tied_key is not None else f"{layer}.{local}"
        reading.take(ref)
        reading.holdings.put(full, holder, ref.shape, _role(full, stages), file.name).add(WEIGHT, file.whole(ref))


def _role(name: str, stages: Mapping[int, StageNames]) -> Role:
    if any(name in stage.trained for stage in stages.values()):
        return "trained"
    if any(name in stage.buffers for stage in stages.values()):
        return "buffer"
    # Where the files name no trained parameter at all (ZeRO off), the optimizer decides later.
    return "frozen" if any(stage.trained for stage in stages.values()) else "trained"


def _tied_modules(stages: Mapping[int, StageNames]) -> dict[str, dict[str, Shape | None]]:
    """Key of a tied module → its local names and shapes, from the names of the optimizer's parameters."""
    found: dict[str, dict[str, Shape | None]] = {}
    for _, stage in sorted(stages.items()):
        for name, shape in stage.trained.items():
            if tied := _TIED.fullmatch(name):
                found.setdefault(tied[1], {})[tied[2]] = shape
    return found


def _tied_key(
    layer: int,
    tensors: Mapping[str, TensorRef],
    tied: Mapping[str, Mapping[str, Shape | None]],
    untied: list[str],
    stages: Mapping[int, StageNames],
) -> str | None:
    """Which tied module a layer file holds, or None for a layer of its own.

    The file does not say. A layer of its own has its number in the optimizer's names; a tied one has not, and holds
    every name of its module in its shape. Of several that fit, the first that no layer has claimed is meant: tied
    modules are built in the order of the layers.
    """
    if any(f"{layer}.{local}" in stage.trained for stage in stages.values() for local in tensors):
        return None
    fitting = [
        key
        for key, names in tied.items()
        if all(local in tensors and shape in (None, tensors[local].shape) for local, shape in names.items())
    ]
    chosen = next((key for key in fitting if key in untied), fitting[0] if fitting else None)
    if chosen in untied:
        untied.remove(chosen)
    return chosen


def _stages_of_layers(layers: list[int], stages: Mapping[int, StageNames]) -> dict[int, int]:
    """Layer → pipeline stage. Layers without parameters lie where the layer before them lies."""
    known: dict[int, int] = {}
    for pp, stage in sorted(stages.items()):
        for name in (*stage.trained, *stage.buffers):
            if found := _OF_LAYER.fullmatch(name):
                known.setdefault(int(found[1]), pp)
    result: dict[int, int] = {}
    current = 0
    for layer in layers:
        current = known.get(layer, current)
        result[layer] = current
    return result


def name_tied(reading: Reading, info: object) -> None:
    """Give the parameters of tied modules their names, where the optimizer names nothing (ZeRO off).

    Only the patterns of a universal_checkpoint_info (`info`) may say how a tied module is called. Which layer it is
    shows in the stages that hold it; where one stage has all its uses, in the names inside the layer.
    """
    patterns = texts_of(info.get("pipeline_replicated_parameter_patterns") if isinstance(info, dict) else None)
    keys = sorted({found[1] for text in patterns if (found := _TIED_IN_PATTERN.search(text))})
    layers: dict[int, dict[str, str]] = {}  # layer → its parameters: local name → name
    for name in reading.holdings.roles:
        if found := _OF_LAYER.fullmatch(name):
            layers.setdefault(int(found[1]), {})[found[2]] = name
    for layer, members in layers.items():
        shared = {local: name for local, name in members.items() if _stages_that_hold(reading, name) > 1}
        if len(keys) == 1 and shared:
            _rename_tied(reading, keys[0], layer, shared)
        for name in shared.values() if len(keys) != 1 else ():
            reading.note("tied-name-unknown", f"{name}: tied over stages; DeepSpeed's own name for it is not recorded")
    for key in keys:
        names = [text for text in patterns if (found := _TIED_IN_PATTERN.search(text)) and found[1] == key]
        for layer, members in layers.items() if key not in reading.pipeline["tied"] else ():
            if any(_matches(text, f"tied_modules.{key}.{local}") for local in members for text in names):
                _rename_tied(reading, key, layer, members)
                break


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.fullmatch(pattern, name) is not None
    except (re.error, RecursionError, OverflowError):
        return False


def _stages_that_hold(reading: Reading, name: str) -> int:
    return len({holder.pp for holder in reading.holdings.row(name)})


def _rename_tied(reading: Reading, key: str, layer: int, members: Mapping[str, str]) -> None:
    for local, name in members.items():
        reading.holdings.rename(name, f"tied_modules.{key}.{local}")
    reading.pipeline["tied"][key] = layer


def missing_layer_files(layers: Mapping[tuple[int, int], str], stages: Mapping[int, StageNames], tp: int) -> list[str]:
    """Names of layer files that must exist, because the optimizer has parameters of that layer, and do not."""
    like = next(iter(layers.values()))
    needed = {
        int(found[1]) for stage in stages.values() for name in stage.trained if (found := _OF_LAYER.fullmatch(name))
    }
    needed |= {layer for layer, _ in layers}
    return [layer_name(layer, t, like) for layer in sorted(needed) for t in range(tp) if (layer, t) not in layers]
