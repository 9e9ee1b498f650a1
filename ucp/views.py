"""Open checkpoints: mappings from names to parameters and tensors, which are read when they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload
from weakref import WeakValueDictionary

from ucp.core.checkpoint import WEIGHT, Atom, Checkpoint, Extras, Parameter
from ucp.core.dtypes import DType, parse_dtype
from ucp.core.notebook import html_table
from ucp.core.selection import Selection, select
from ucp.errors import UsageError, require_torch

if TYPE_CHECKING:
    import numpy as np
    import torch

_Tensor = TypeVar("_Tensor")


class OpenCheckpoint(Mapping[str, "ParameterView"]):
    """An open checkpoint: a mapping from parameter names (or aliases) to parameters, whose states can be read."""

    index: Checkpoint  # mesh, step, rules, param groups, notes, and where the bytes are

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

    @overload
    def read(
        self, name: str, kind: str = WEIGHT, rows: slice | None = None, *, as_torch: Literal[False] = False
    ) -> np.ndarray[Any, Any]: ...

    @overload
    def read(
        self, name: str, kind: str = WEIGHT, rows: slice | None = None, *, as_torch: Literal[True]
    ) -> torch.Tensor: ...

    def read(
        self, name: str, kind: str = WEIGHT, rows: slice | None = None, *, as_torch: bool = False
    ) -> np.ndarray[Any, Any] | torch.Tensor:
        """One state of one parameter, or some rows of its first dimension; see `ParameterView.read`."""
        return self[name].read(kind, rows, as_torch=True) if as_torch else self[name].read(kind, rows)

    @overload
    def state_dict(
        self, kind: str = WEIGHT, *, dtype: str | DType | torch.dtype | None = None, as_torch: Literal[True] = True
    ) -> StateDict[torch.Tensor]: ...

    @overload
    def state_dict(
        self, kind: str = WEIGHT, *, dtype: str | DType | torch.dtype | None = None, as_torch: Literal[False]
    ) -> StateDict[np.ndarray[Any, Any]]: ...

    def state_dict(
        self, kind: str = WEIGHT, *, dtype: str | DType | torch.dtype | None = None, as_torch: bool = True
    ) -> StateDict[torch.Tensor] | StateDict[np.ndarray[Any, Any]]:
        """One state of every parameter that has it, as a mapping that `model.load_state_dict` takes.

        A tensor is read when it is looked up. Tied tensors appear under each of their names. `dtype` casts
        floating-point parameters; weights are cast from the master copy if there is one, as `ucp.convert` does. With
        `as_torch=False` the values are numpy arrays, and torch is not needed.
        """
        from ucp.read.atom_reader import read_array, read_tensor

        atoms = self._atoms(kind, floating_dtype(dtype))
        if not as_torch:
            return StateDict(self.index, atoms, read_array)
        require_torch("a state dict of tensors", "as_torch=False returns numpy arrays")
        return StateDict(self.index, atoms, read_tensor)

    def _atoms(self, kind: str, dtype: DType | None) -> dict[str, Atom]:
        """One state of each parameter, by every name of the parameter."""
        index = select(self.index, Selection("weights", dtype=dtype)) if kind == WEIGHT else self.index
        found = {p.name: p.atoms[kind] for p in index.parameters.values() if kind in p.atoms}
        if not found:
            kinds = dict.fromkeys(atom.kind for atom in self.index.atoms())
            raise UsageError(f"{self.index.root}: no parameter has {kind!r}", hint=f"it has: {', '.join(kinds)}")
        if kind != WEIGHT and dtype is not None:
            found = {n: replace(a, dtype=dtype) if a.dtype.family == "float" else a for n, a in found.items()}
        return found | {alias: found[name] for alias, name in self._aliases.items() if name in found}

    def __getitem__(self, name: str) -> ParameterView:
        return ParameterView(self.index, self.index.parameters[self._aliases.get(name, name)])

    def __iter__(self) -> Iterator[str]:
        return iter(self.index.parameters)

    def __len__(self) -> int:
        return len(self.index.parameters)

    def __repr__(self) -> str:
        return f"<{self.index.format} checkpoint of {len(self)} parameters, {self.index.mesh}>"

    def _repr_html_(self) -> str:
        index = self.index
        step = "" if index.step is None else f", step {index.step}"
        title = f"{index.root}: {index.framework or index.format}, {index.mesh}{step}"
        rows = ((p.name, _shape(p), p.rule, ", ".join(p.atoms), f"{p.nbytes:,}") for p in index.parameters.values())
        return html_table(title, ("parameter", "shape", "rule", "states", "bytes"), rows, len(self))


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

    @overload
    def read(
        self, kind: str = WEIGHT, rows: slice | None = None, *, as_torch: Literal[False] = False
    ) -> np.ndarray[Any, Any]: ...

    @overload
    def read(self, kind: str = WEIGHT, rows: slice | None = None, *, as_torch: Literal[True]) -> torch.Tensor: ...

    def read(
        self, kind: str = WEIGHT, rows: slice | None = None, *, as_torch: bool = False
    ) -> np.ndarray[Any, Any] | torch.Tensor:
        """One state, or some rows of its first dimension.

        In numpy, bfloat16 becomes float32 (exactly); other types that numpy lacks need `as_torch`.
        """
        from ucp.read.atom_reader import read_array, read_tensor

        atom = self.parameter.atoms.get(kind)
        if atom is None:
            raise UsageError(f"parameter {self.name} has no {kind!r}", hint=f"it has: {', '.join(self.kinds)}")
        if not isinstance(rows, slice | None):
            raise UsageError(f"rows={rows!r} is not a slice", hint="write rows=slice(first, last + 1)")
        if as_torch:
            require_torch("as_torch=True", "as_torch=False returns a numpy array")
            return read_tensor(self._index.root, atom, rows, self._index.computed)
        return read_array(self._index.root, atom, rows, self._index.computed)

    def __repr__(self) -> str:
        return f"<parameter {self.name} {list(self.shape)}: {', '.join(self.kinds)}>"

    def _repr_html_(self) -> str:
        rows = ((a.kind, _shape(a), a.dtype, len(a.fragments), f"{a.nbytes:,}") for a in self.parameter.atoms.values())
        title = f"{self.name}, {self.parameter.role}, {self.parameter.rule}"
        return html_table(title, ("state", "shape", "dtype", "fragments", "bytes"), rows, len(self.kinds))


class StateDict(Mapping[str, _Tensor], Generic[_Tensor]):
    """Name → tensor, read when it is looked up. The names of a tied tensor share it as long as it is in use."""

    def __init__(
        self, index: Checkpoint, atoms: Mapping[str, Atom], read: Callable[[Any, Atom, None, Any], _Tensor]
    ) -> None:
        self._index = index
        self._all = atoms
        self._read = read
        self._tied: WeakValueDictionary[str, Any] = WeakValueDictionary()

    def __getitem__(self, name: str) -> _Tensor:
        atom = self._all[name]
        tensor: _Tensor | None = self._tied.get(atom.name)
        if tensor is None:
            tensor = self._read(self._index.root, atom, None, self._index.computed)
            if self._index.parameters[atom.name].aliases:
                self._tied[atom.name] = tensor
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, name: object) -> bool:
        return name in self._all  # the method of Mapping would read the tensor

    def __repr__(self) -> str:
        kind = next(iter(self._all.values())).kind
        return f"<{kind} of {len(self)} parameters in {self._index.root}, read on access>"


def floating_dtype(dtype: str | DType | torch.dtype | None) -> DType | None:
    """The floating-point dtype that a user names."""
    if dtype is None or isinstance(dtype, DType):
        return dtype
    parsed = parse_dtype(str(dtype))
    if parsed is None or parsed.family != "float":
        raise UsageError(f"{dtype!r} is not a floating-point dtype", hint="use fp32, bf16, fp16 or fp64")
    return parsed


def _shape(sized: Parameter | Atom) -> str:
    return " × ".join(map(str, sized.shape)) or "scalar"
