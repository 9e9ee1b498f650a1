"""The checkpoint index: which bytes of which file hold which part of which atom, and the mesh that wrote them.

Every reader produces a `Checkpoint`; every command, writer and check consumes one. It never holds tensor bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Protocol, overload, runtime_checkable

from ucp.core.box import Shape
from ucp.core.dtypes import DType
from ucp.core.region import Region
from ucp.core.rules import REPLICATED, Rule
from ucp.errors import escaped


@dataclass(frozen=True, slots=True)
class Mesh:
    """Degrees of tensor, pipeline, data and expert parallelism, and the ZeRO stage (0 if states are not sharded)."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    zero: int = 0

    @property
    def world(self) -> int:
        """Number of ranks. Expert parallelism reuses data-parallel ranks, so `ep` is not a factor."""
        return self.tp * self.pp * self.dp

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    def __str__(self) -> str:
        text = f"tp {self.tp} × pp {self.pp} × dp {self.dp}"
        return (text + f", ep {self.ep}" if self.ep > 1 else text) + f", ZeRO {self.zero}"


class Rank(NamedTuple):
    """Coordinates of the rank that wrote a fragment; `ep` is None if the file is not specific to an expert rank."""

    pp: int = 0
    tp: int = 0
    dp: int = 0
    ep: int | None = None

    def __str__(self) -> str:
        text = f"pp {self.pp} tp {self.tp} dp {self.dp}"
        return text if self.ep is None else text + f" ep {self.ep}"


Role = Literal["trained", "frozen", "buffer"]

# Kinds with a fixed meaning. Every other kind is an optimizer state, under the name that the optimizer uses.
WEIGHT = "weight"  # as the module holds it
MASTER = "master"  # the optimizer's high-precision copy
STEP = "step"  # scalar

COMPUTED: Final = "computed:/"  # prefix of the names of computed files; no relative path starts with it


def kind_of_state(name: object) -> str:
    """The kind of an optimizer state: its name, prefixed with `state_` if that name is "weight" or "master"."""
    text = str(name)
    return f"state_{text}" if text in (WEIGHT, MASTER) else text


def state_of_kind(kind: str) -> str:
    """The optimizer's name for a state of this kind; the inverse of `kind_of_state`."""
    return kind.removeprefix("state_") if kind in (f"state_{WEIGHT}", f"state_{MASTER}") else kind


class Fragment(NamedTuple):
    """A region of an atom and the location of its bytes.

    `offset` is the byte offset of the region's first element in `file` (a path relative to the checkpoint's root).
    From there the region is contiguous, unless `strides` (in elements, one per dimension of the region's only box) is
    set. A scalar that the file stores as a plain number has its bytes in `inline` instead. The stored value is the
    logical value times `scale`.
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

    `fragments` cover it exactly once. Each entry of `replicas` is another set of fragments that must hold the same
    bytes for the elements it covers (tensor-parallel copies, tied copies on other stages). With `combine="average"`,
    the atom is the mean of `fragments` and all replicas instead. If a fragment's dtype differs from the atom's,
    reading casts.
    """

    name: str
    kind: str
    shape: Shape
    dtype: DType
    fragments: Sequence[Fragment]
    replicas: Sequence[Sequence[Fragment]] = ()
    combine: Literal["copy", "average"] = "copy"
    computed: bool = False  # the fragments refer to the checkpoint's computed files

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
    padded_shape: Shape | None = None  # shape in the source, including padding that was removed
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
    """An optimizer parameter group: its hyperparameters as stored, and its parameters in the source's order."""

    hyper: dict[str, Any]
    names: list[str]


@dataclass(frozen=True, slots=True)
class Note:
    """A remark for the user about how the source was read: an assumption, or something that was ignored."""

    id: str  # stable, for scripts: "rule-inferred", "slice-mappings-wrong", …
    text: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", escaped(self.text))


@dataclass(slots=True)
class Extras:
    """Everything that is not a parameter state, as inert values; carried through unchanged, never executed.

    `trees` maps the name of a source file to its inert tree, in which tensors are atoms of kind `extra`. `files` maps
    the name of an additional file that is copied as it is to its path relative to the checkpoint's root.
    """

    trees: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)


class ComputedFiles(Protocol):
    """Virtual files whose bytes are computed on demand; fragments refer to them by name like to real files.

    Computing one optimizer state of a range of elements may produce the others as well, so reading all states of one
    range before moving on to the next computes each of them only once.
    """

    identity: str  # identifies everything the bytes depend on: equal identities mean equal bytes

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        """Fill `target` with the bytes of `file` (a name that starts with `COMPUTED`) from byte `offset` on."""


@runtime_checkable
class ForkableFiles(ComputedFiles, Protocol):
    """Computed files that forked worker processes can read too, independently of each other."""

    def before_fork(self) -> bool:
        """Load what all workers need. Returns False if something is in use that processes cannot share."""

    def in_fork(self, workers: int) -> None:
        """Called in each of `workers` forked processes: use one thread and a proportional amount of memory."""


@dataclass(slots=True)
class Checkpoint:
    """An index of where the bytes of each parameter are."""

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
    computed: ComputedFiles | None = None  # computes the files whose names start with COMPUTED
    # Parameter → its step, if that is not `step`. Only for snapshots that were taken over several steps: such a
    # snapshot is a consistent state only after a gradient log has advanced every parameter to the same step.
    steps: dict[str, int] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)  # files that fragments refer to, but cannot be read → reason
    lease: object = None  # while it is alive, a running job does not overwrite the indexed bytes (mapped stores)

    def atoms(self) -> Iterator[Atom]:
        """Yield every atom, parameter by parameter."""
        for parameter in self.parameters.values():
            yield from parameter.atoms.values()

    @property
    def nbytes(self) -> int:
        return sum(atom.nbytes for atom in self.atoms())

    def aliases(self) -> Mapping[str, str]:
        """Alias name → name of the parameter that owns the tensor."""
        return {alias: p.name for p in self.parameters.values() for alias in p.aliases}

    def __repr__(self) -> str:
        """One line, because notebooks print return values and a full index can have millions of entries."""
        return f"<index of {self.root}: {self.format}, {len(self.parameters)} parameters, {self.mesh}>"


class LazyFragments(Sequence[Fragment]):
    """Fragments that `make` creates on first access. `count` is their number, if known in advance.

    An index of thousands of ranks would not fit into memory with all of its fragments, and no command needs them all.
    """

    __slots__ = ("_count", "_fragments", "_make")

    def __init__(self, make: Callable[[], Iterable[Fragment]], count: int | None = None) -> None:
        self._make = make
        self._count = count
        self._fragments: tuple[Fragment, ...] | None = None

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
        if self._fragments is None:
            self._fragments = tuple(self._make())
        return self._fragments
