"""What a log holds as it is, buffers and states of optimizers that cannot be replayed: what a shadow begins with."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ucp import tunables
from ucp.engine.casting import raw_dtype
from ucp.engine.regions import read_region
from ucp.errors import InconsistentError
from ucp.files.local import SourceFiles
from ucp.log.kinds import parse_own
from ucp.log.manifest import Manifest
from ucp.model.checkpoint import MASTER, STEP, WEIGHT, Atom, Checkpoint
from ucp.model.region import Region
from ucp.shadow.held import HeldTensor, HeldValue
from ucp.shadow.state import Buffers


def holds_states(manifest: Manifest) -> bool:
    """Is this a log of states, and not of gradients?"""
    return manifest.kernel.id.endswith(" (state)")


def load_values(
    checkpoint: Checkpoint, manifest: Manifest, tensors: Sequence[HeldTensor], files: SourceFiles
) -> Buffers:
    """Give the tensors of a log of states their states with shapes of their own, and give the buffers."""
    if holds_states(manifest):
        for tensor in tensors:
            parameter = checkpoint.parameters.get(tensor.names[0]) if tensor.names else None
            for kind, atom in {} if parameter is None else parameter.atoms.items():
                is_own = kind == STEP or (parameter is not None and atom.shape != parameter.shape)
                if is_own and kind not in (WEIGHT, MASTER):
                    tensor.own[kind] = _loaded(atom, files)
    found: Buffers = {}
    for schema in manifest.streams:
        for block in schema.buffers:
            held = checkpoint.parameters.get(manifest.buffers[block.parameter].name)
            if held is not None and WEIGHT in held.atoms:
                found[schema.stream, block.id] = _loaded(held.atoms[WEIGHT], files)
    return found


def _loaded(atom: Atom, files: SourceFiles) -> HeldValue:
    out = np.empty(atom.numel, raw_dtype(atom.dtype))
    read_region(files, atom, Region.all_of(atom.shape), out)
    return HeldValue(atom.shape, atom.dtype, out.tobytes())


def check_shapes(manifest: Manifest) -> None:
    """States with shapes of their own, and buffers, must not ask for more memory than a model has any use for."""
    room = tunables.SHADOW_PADDING_ELEMENTS
    most = max((math.prod(parameter.shape) for parameter in manifest.parameters), default=0) + room
    for name in manifest.state_kinds:
        told = parse_own(name)
        if told is not None and math.prod(told[1]) > most:
            raise InconsistentError(f"state {name} has more elements than any parameter of the job")
    for schema in manifest.streams:
        for block in schema.buffers:
            where = f"stream {schema.stream}, buffer {block.id}"
            if not 0 <= block.parameter < len(manifest.buffers):
                raise InconsistentError(f"{where}: is none of the job's buffers")
            if block.count != math.prod(manifest.buffers[block.parameter].shape):
                raise InconsistentError(f"{where}: is not the whole of it")
