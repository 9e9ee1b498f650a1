"""The checkpoint index: which bytes of which file are which part of which atom.

Every reader produces a `Checkpoint`, every command, writer and check consumes one. It never holds tensor bytes.

Fragments that are made when someone looks at them: an index of many ranks never needs them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Protocol, overload, runtime_checkable

from ucp.core.box import Shape
from ucp.core.dtypes import DType
from ucp.core.mesh import Mesh, Rank
from ucp.core.region import Region
from ucp.core.rules import REPLICATED, Rule

Role = Literal["trained", "frozen", "buffer"]

# Kinds with a meaning of their own. Every other kind is an optimizer state under the optimizer's own name.
WEIGHT = "weight"  # as the module holds it
MASTER = "master"  # the optimizer's high-precision copy
STEP = "step"  # scalar

_STATES_CALLED_LIKE_US = {f"state_{kind}": kind for kind in (WEIGHT, MASTER)}


def kind_of_state(name: object) -> str:
    """The kind of an optimizer state: its own name, out of the way of the two names that we gave a meaning."""
    text = str(name)
    return f"state_{text}" if text in (WEIGHT, MASTER) else text


def state_of_kind(kind: str) -> str:
    """What the optimizer calls a state of this kind."""
    return _STATES_CALLED_LIKE_US.get(kind, kind)


COMPUTED: Final = "computed:/"  # names of computed files begin so; no relative path does


class Fragment(NamedTuple):
    """A region of an atom and where its bytes are.

    `offset` is the byte offset of the region's first element in `file` (a path relative to the checkpoint's root);
    from there the region is contiguous, unless `strides` (in elements, one per dimension of the region's only box)
    says otherwise. A scalar that the file keeps as a plain number has its bytes in `inline` instead. The stored
    value is the logical value times `scale`.
    """

    region: Region
    file: str
    offset: int
    dtype: DType
    rank: Rank = Rank()
    strides: Shape | None = None
    inline: bytes | None = None
    scale: float = 1.0

    @property
    def nbytes(self) -> int:
        return self.region.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Atom:
    """One state of one parameter, whole and free of any parallel layout.

    `fragments` cover it exactly once. Each entry of `replicas` is a further set of fragments that must hold the same
    bytes wherever it covers (tensor-parallel copies, tied copies on other stages). With `combine="average"` the atom
    is the mean of `fragments` and every replica instead. Where a fragment's dtype is not the atom's, reading casts.
    """

    name: str
    kind: str
    shape: Shape
    dtype: DType
    fragments: Sequence[Fragment]
    replicas: Sequence[Sequence[Fragment]] = ()
    combine: Literal["copy", "average"] = "copy"
    computed: bool = False  # the fragments are in the checkpoint's computed files

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name}|{self.kind}"


@dataclass(slots=True)
class Parameter:
    """A parameter (or buffer) of the model with all its states."""

    name: str
    shape: Shape
    role: Role = "trained"
    atoms: dict[str, Atom] = field(default_factory=dict)
    rule: Rule = REPLICATED
    rule_origin: str = "one tensor-parallel rank"
    padded_shape: Shape | None = None  # of the source's whole, where padding was removed
    group: int | None = None  # index into Checkpoint.groups
    aliases: tuple[str, ...] = ()  # other names of the same tensor (tied weights)
    stages: tuple[int, ...] = (0,)  # pipeline stages that hold it
    expert: int | None = None  # global expert number

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return sum(atom.nbytes for atom in self.atoms.values())


@dataclass(slots=True)
class ParamGroup:
    """An optimizer parameter group: its hyper-parameters as stored, and its parameters in the source's order."""

    hyper: dict[str, Any]
    names: list[str]


@dataclass(frozen=True, slots=True)
class Note:
    """Something a person should know about how the source was read. Never silent, never fatal."""

    id: str  # stable, for scripts: "rule-inferred", "slice-mappings-wrong", …
    text: str


@dataclass(slots=True)
class Extras:
    """Everything that is not a parameter state, as inert values; carried through unchanged, never executed.

    `trees` maps a source file's name to its inert tree; tensors stand in it as atoms of kind `extra`. `files` maps the
    name of a neighbour that is carried as bytes to where it lies, relative to the checkpoint's root.
    """

    trees: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)


class ComputedFiles(Protocol):
    """Bytes that lie in no file and are computed when they are asked for; fragments name them like files.

    Computing one state of some elements may give the others as well: who reads all states of a stretch of elements
    before the next stretch has each computed once.
    """

    identity: str  # what the bytes depend on: two sources with the same identity give the same bytes

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        """Fill `target` with the bytes of `file`, whose name begins with `COMPUTED`, from byte `offset` on."""


@runtime_checkable
class ForkableFiles(ComputedFiles, Protocol):
    """Computed files that forks of this process can read as well, each for itself."""

    def before_fork(self) -> bool:
        """Load what every fork would load; say no where something is in use that two processes cannot share."""

    def in_fork(self, workers: int) -> None:
        """This process is one of so many forks: keep no more than its share, and compute in one thread."""


@dataclass(slots=True)
class Checkpoint:
    """An index of where the bytes of each parameter lie."""

    format: str  # name in the format registry: "deepspeed", "atoms", …
    root: Path
    mesh: Mesh
    parameters: dict[str, Parameter]  # in the model's own order
    framework: str = ""  # "DeepSpeed 0.19.8"
    step: int | None = None  # optimizer steps taken
    groups: list[ParamGroup] = field(default_factory=list)
    extras: Extras = field(default_factory=Extras)
    notes: list[Note] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)  # every file of the checkpoint, relative path → bytes
    details: dict[str, Any] = field(default_factory=dict)  # format-specific facts worth showing, JSON values only
    computed: ComputedFiles | None = None  # where fragments name files that do not exist
    # Parameter → the step that it is of, where that is not `step`: in a snapshot that was spread over steps, which is
    # no state of the job before a log has brought all of it to one step.
    steps: dict[str, int] = field(default_factory=dict)
    lease: object = None  # keeps the bytes as they are, as long as the index lives, where a job writes beside us

    def atoms(self) -> Iterator[Atom]:
        """Every atom, parameter by parameter."""
        for parameter in self.parameters.values():
            yield from parameter.atoms.values()

    @property
    def nbytes(self) -> int:
        return sum(atom.nbytes for atom in self.atoms())

    def aliases(self) -> Mapping[str, str]:
        """Alias name → name of the parameter that owns the tensor."""
        return {alias: p.name for p in self.parameters.values() for alias in p.aliases}

    def __repr__(self) -> str:
        """One line: a notebook shows what a call gives, and the index of a large model would fill it for minutes."""
        return f"<index of {self.root}: {self.format}, {len(self.parameters)} parameters, {self.mesh}>"


class LazyFragments(Sequence[Fragment]):
    """What `make` gives, made once. `count` is how many there will be, where that is known."""

    __slots__ = ("_count", "_held", "_make")

    def __init__(self, make: Callable[[], Iterable[Fragment]], count: int | None = None) -> None:
        self._make = make
        self._count = count
        self._held: tuple[Fragment, ...] | None = None

    def __len__(self) -> int:
        if self._count is None:
            self._count = len(self._all())
        return self._count

    def __iter__(self) -> Iterator[Fragment]:
        return iter(self._all())

    @overload
    def __getitem__(self, index: int) -> Fragment: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Fragment]: ...

    def __getitem__(self, index: int | slice) -> Fragment | Sequence[Fragment]:
        return self._all()[index]

    def _all(self) -> tuple[Fragment, ...]:
        if self._held is None:
            self._held = tuple(self._make())
        return self._held
