"""`_extra_state`: what modules keep beside tensors. Megatron refuses sharded checkpoints that lack these entries."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from ucp.formats.megatron.arguments import Arguments
from ucp.formats.megatron.names import expert_of, is_prediction, layer_of
from ucp.formats.megatron.pipeline import Chunk

EXTRA: Final = "._extra_state"
OUTPUT_EXTRA: Final = "output_layer._extra_state"
_LINEAR: Final = re.compile(r"^(.*\.(?:linear_\w+|eh_proj|in_proj|out_proj)|output_layer)\.(?:weight|bias)$")


def extra_states(carried: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Every entry over the whole model but the output layer's: the source's, and None for other linear modules."""
    found = dict.fromkeys(f"{match[1]}{EXTRA}" for name in names if (match := _LINEAR.match(name)))
    return {name: value for name, value in {**found, **carried}.items() if name != OUTPUT_EXTRA}


def on_chunk(states: Mapping[str, Any], chunk: Chunk, experts: range) -> dict[str, Any]:
    """Those of one model chunk of a rank with these experts, by name over the whole model."""
    found: dict[str, Any] = {}
    for name, value in states.items():
        inside = layer_of(name) is not None or is_prediction(name)
        expert = expert_of(name)
        if inside and chunk.holds(name) and (expert is None or expert in experts):
            found[name] = value
    return found


def interleaved(tensors: Sequence[tuple[str, Any]], states: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors with the entry of each module behind its last tensor, as `state_dict` has them; the others at the end."""
    last: dict[str, int] = {}
    for i, (name, _) in enumerate(tensors):
        last[name.rpartition(".")[0]] = i
    entries: dict[str, Any] = {}
    for i, (name, tensor) in enumerate(tensors):
        entries[name] = tensor
        module = name.rpartition(".")[0]
        if last[module] == i and module + EXTRA in states:
            entries[module + EXTRA] = states[module + EXTRA]
    entries.update((name, value) for name, value in states.items() if name not in entries)
    return entries


def experts_of(arguments: Arguments, ep: int) -> range:
    """The experts of an expert-parallel rank, numbered over the whole model."""
    each = arguments.number("num_experts", 0) // arguments.ep
    return range(ep * each, (ep + 1) * each)
