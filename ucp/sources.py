"""Open a source: index a checkpoint, a state of a logged run or a shadow, and read its parameters as arrays."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucp.core.checkpoint import Checkpoint, Extras, Parameter
from ucp.errors import UsageError
from ucp.formats.registry import ReadOptions
from ucp.formats.registry import open_checkpoint as index_checkpoint
from ucp.storage.paths import is_shadow, parse_path

if TYPE_CHECKING:
    import numpy as np
    import torch


def read_options(
    tag: str | None = None, rules: str | Path | None = None, preset: str | None = None, repair: bool = False
) -> ReadOptions:
    """How to read a source. Rules of a file win over those of a preset, and both over the checkpoint's own."""
    if tag is not None:
        tag = tag.rstrip("/") or tag  # shell completion appends it
    if rules is None and preset is None:
        return ReadOptions(tag, repair=repair)
    from ucp.formats.sharded.rule_files import load_rule_book

    return ReadOptions(tag, load_rule_book(rules, preset), repair)


def index_state(
    path: str | os.PathLike[str],
    options: ReadOptions,
    log: str | os.PathLike[str] | None = None,
    step: int | str | None = None,
    exact: bool = False,
) -> Checkpoint:
    """The index of a checkpoint; with a `log`, of the state after `step` (a number or `latest`), replayed on it.

    If that state may differ from the job's own, there is a note; with `exact` it is an error.
    """
    if is_shadow(path):
        if log is not None or step is not None:
            raise UsageError(
                f"{path}: a shadow holds only the newest step, so --log and --step are not supported",
                hint="give the run or a checkpoint instead of the shadow to get another step",
            )
        from ucp.training.shadow.client import open_shadow

        return open_shadow(path, options)
    if log is None and step is None and not exact:
        return index_checkpoint(parse_path(path), options)
    from ucp.replay.open_at import open_at

    return open_at(path, options, log, step, exact=exact)


def renamed(
    checkpoint: Checkpoint, names: str | os.PathLike[str] | None, model_config: str | os.PathLike[str] | None
) -> Checkpoint:
    """The checkpoint under other names and in another layout; unchanged if `names` is None."""
    if names is None:
        return checkpoint
    from ucp.names.select_table import rename_parameters

    return rename_parameters(checkpoint, os.fspath(names), None if model_config is None else Path(model_config))


class OpenCheckpoint(Mapping[str, "ParameterView"]):
    """An open checkpoint: a mapping from parameter names (or aliases) to parameters, whose states can be read."""

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
        """The stored states: `weight`, `master`, `exp_avg`, …"""
        return list(self.parameter.atoms)

    def read(
        self, kind: str = "weight", rows: slice | None = None, *, as_torch: bool = False
    ) -> np.ndarray[Any, Any] | torch.Tensor:
        """One state, or some rows of its first dimension.

        In numpy, bfloat16 becomes float32 (exactly); other types that numpy lacks need `as_torch`.
        """
        from ucp.read.arrays import read_array, read_tensor

        atom = self.parameter.atoms.get(kind)
        if atom is None:
            raise UsageError(f"parameter {self.name} has no {kind!r}", hint=f"it has: {', '.join(self.kinds)}")
        if not isinstance(rows, slice | None):
            raise UsageError(f"rows={rows!r} is not a slice", hint="write rows=slice(first, last + 1)")
        read = read_tensor if as_torch else read_array
        return read(self._index.root, atom, rows, self._index.computed)

    def __repr__(self) -> str:
        return f"<parameter {self.name} {list(self.shape)}: {', '.join(self.kinds)}>"
