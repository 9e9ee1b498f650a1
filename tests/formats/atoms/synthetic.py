"""Folders of atoms made from arrays, as a source for tests that need no framework."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ucp.core.checkpoint import Atom, Checkpoint, Fragment, Mesh, Parameter
from ucp.core.dtypes import BY_NAME
from ucp.core.region import Region
from ucp.engine.plan import Plan
from ucp.formats.registry import WriteOptions, make_writer


def write_atoms(folder: Path, weights: dict[str, np.ndarray[Any, Any]]) -> Checkpoint:
    """A folder of atoms with these weights and nothing else."""
    raw = folder.with_name(f"{folder.name}-raw")
    raw.mkdir()
    parameters = {}
    for number, (name, values) in enumerate(weights.items()):
        (raw / str(number)).write_bytes(values.tobytes())
        dtype = BY_NAME[values.dtype.name]
        fragment = Fragment(Region.all_of(values.shape), str(number), 0, dtype)
        parameters[name] = Parameter(
            name, values.shape, atoms={"weight": Atom(name, "weight", values.shape, dtype, (fragment,))}
        )
    sizes = {file.name: file.stat().st_size for file in raw.iterdir()}
    source = Checkpoint("arrays", raw, Mesh(), parameters, sizes=sizes)
    writer = make_writer("atoms", source, WriteOptions())
    Plan(source, writer, writer.target(), folder).run(jobs=1)
    return source
