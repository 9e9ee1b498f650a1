"""A checkpoint to read from, in Python: parameters by name, states as arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ucp.errors import UsageError
from ucp.model.checkpoint import Checkpoint, Extras, Parameter

if TYPE_CHECKING:
    import numpy as np
    import torch


class OpenCheckpoint(Mapping[str, "ParameterView"]):
    """A checkpoint to read from: a mapping from parameter name (or alias) to its states."""

    def __init__(self, index: Checkpoint) -> None:
        self.index = index
        self._aliases = index.aliases()

    @property
    def parameters(self) -> dict[str, ParameterView]:
        """Every parameter and buffer in the model's order, without aliases."""
        return {name: ParameterView(self.index, parameter) for name, parameter in self.index.parameters.items()}

    @property
    def extras(self) -> Extras:
        """Everything that is not a parameter state, as inert values."""
        return self.index.extras

    def __getitem__(self, name: str) -> ParameterView:
        return ParameterView(self.index, self.index.parameters[self._aliases.get(name, name)])

    def __iter__(self) -> Iterator[str]:
        return iter(self.index.parameters)

    def __len__(self) -> int:
        return len(self.index.parameters)

    def __repr__(self) -> str:
        return f"<{self.index.format} checkpoint of {len(self)} parameters, {self.index.mesh}>"


class ParameterView:
    """One parameter of an open checkpoint."""

    def __init__(self, index: Checkpoint, parameter: Parameter) -> None:
        self._index = index
        self.parameter = parameter

    @property
    def name(self) -> str:
        return self.parameter.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parameter.shape

    @property
    def kinds(self) -> list[str]:
        """The states that are stored: `weight`, `master`, `exp_avg`, …"""
        return list(self.parameter.atoms)

    def read(
        self, kind: str = "weight", rows: slice | None = None, *, as_torch: bool = False
    ) -> np.ndarray[Any, Any] | torch.Tensor:
        """One state, whole or some rows of its first dimension.

        As numpy, bfloat16 comes widened to float32 (exactly); other types that numpy lacks need `as_torch`.
        """
        from ucp.engine.arrays import read_array, read_tensor

        atom = self.parameter.atoms.get(kind)
        if atom is None:
            raise UsageError(f"parameter {self.name} has no {kind!r}", hint=f"it has: {', '.join(self.kinds)}")
        if not isinstance(rows, slice | None):
            raise UsageError(f"rows={rows!r} is not a slice", hint="write rows=slice(first, last + 1)")
        read = read_tensor if as_torch else read_array
        return read(self._index.root, atom, rows, self._index.computed)

    def __repr__(self) -> str:
        return f"<parameter {self.name} {list(self.shape)}: {', '.join(self.kinds)}>"
