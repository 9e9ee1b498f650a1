"""What a log holds as it is: buffers, and states with a shape of their own. Offered as computed files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ucp.log.kinds import BUFFER
from ucp.log.reader import Span, StoredBlock
from ucp.model.box import Shape
from ucp.model.checkpoint import COMPUTED, WEIGHT, Atom, ComputedFiles, ForkableFiles, Fragment, Parameter
from ucp.model.region import Region
from ucp.replay.stored import StoredStates


class LoggedFiles:
    """Values of a log by the names of their computed files; all others are `inner`'s."""

    def __init__(self, values: Mapping[str, StoredBlock], inner: ComputedFiles) -> None:
        self.identity = inner.identity
        self.inner = inner
        self._values = values

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        """As `ComputedFiles.read_into`."""
        found = self._values.get(file)
        if found is None:
            self.inner.read_into(file, offset, target)
        else:
            target[:] = found.bits().tobytes()[offset : offset + len(target)]

    def before_fork(self) -> bool:
        """As `ForkableFiles.before_fork`. Values were read with the log."""
        return isinstance(self.inner, ForkableFiles) and self.inner.before_fork()

    def in_fork(self, workers: int) -> None:
        """As `ForkableFiles.in_fork`."""
        assert isinstance(self.inner, ForkableFiles)
        self.inner.in_fork(workers)


def logged_atom(name: str, kind: str, shape: Shape, value: StoredBlock, file: str) -> Atom:
    """An atom that is in the log as it is: a number itself, anything else as a computed file."""
    region = Region.all_of(shape)
    if not shape:
        data = value.bits().tobytes()
        return Atom(name, kind, shape, value.dtype, (Fragment(region, "", 0, value.dtype, inline=data),))
    return Atom(name, kind, shape, value.dtype, (Fragment(region, file, 0, value.dtype),), computed=True)


def with_buffers(
    parameters: Mapping[str, Parameter], span: Span, stored: Mapping[int, StoredStates]
) -> tuple[dict[str, Parameter], dict[str, StoredBlock]]:
    """Parameters with the buffers as they are after the span, and the values of those that have changed."""
    found = dict(parameters)
    values: dict[str, StoredBlock] = {}
    buffers = span.epoch.manifest.buffers
    for number, stream in span.epoch.streams.items():
        for block in stream.schema.buffers:
            name = buffers[block.parameter].name
            held = found.get(name)
            atom = None if held is None else held.atoms.get(WEIGHT)
            value = stored[number].newest(block.id, BUFFER, span.last)
            if held is None or atom is None or value is None:
                continue  # left out of the base, or not changed
            file = f"{COMPUTED}epoch-{span.epoch.number:06d}/stream-{number:05d}/buffer-{block.id:04d}@{span.last}"
            values[file] = value
            fragments = (Fragment(Region.all_of(atom.shape), file, 0, value.dtype),)
            changed = replace(atom, fragments=fragments, replicas=(), combine="copy", computed=True)
            found[name] = replace(held, atoms={**held.atoms, WEIGHT: changed})
    return found, values
