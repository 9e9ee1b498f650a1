"""Write a folder that `dcp.load` reads on any mesh: data files with tensors split by rows, and the metadata last.

`StateDictEntries` decides what is in the state dict, `RowChunkedFiles` how tensors are split over data files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final

from ucp.containers.distcp import METADATA, ArchiveRange, KeyPath, join_path
from ucp.containers.distcp_writer import ArchiveFiles, MetadataTree
from ucp.core.box import Box, Shape, whole
from ucp.core.checkpoint import MASTER, STEP, WEIGHT, Atom, Checkpoint, Mesh, Note, ParamGroup
from ucp.core.dtypes import FLOAT32, DType
from ucp.core.optimizers import counts_in_tensor, default_group_fields
from ucp.core.region import Region
from ucp.core.target import Digests, OutputFile, Target
from ucp.errors import ImpossibleError, UsageError
from ucp.formats.dcp.optimizer_keys import GROUPS, PARAMS, STATE
from ucp.formats.dcp.state_dict_layout import StateDictStyle, flatten, private_keys_of, style_of
from ucp.formats.output_files import copied_file, literal_file
from ucp.formats.registry import WriteOptions
from ucp.formats.sharded.shard_fragments import number_atom
from ucp.settings import KIB, MIB

# A chunk has about 1.5 KB of headers, so small tensors are not split.
SMALLEST_SPLIT_BYTES = 16 * KIB
# A loading rank reads chunks completely, even if it needs only a part.
LARGEST_CHUNK_BYTES = 256 * MIB
_EXTRAS: Final = "extras"
_MAX_GROUPS_DEPTH: Final = 3
_PLAIN: Final = (type(None), bool, int, float, str, bytes)


class DcpWriter:
    """Lays out model, optimizer and extras with the keys of `get_model_state_dict` and `get_optimizer_state_dict`.

    The structure of the keys is that of `options.like`, or of the source if it comes from such a folder, or
    `{"model": …, "optim": …}`. `options.dp` is the number of data files.
    """

    def __init__(self, source: Checkpoint, options: WriteOptions) -> None:
        self.source = source
        self.options = options
        self.notes: list[Note] = []
        self.mesh: Mesh | None = None  # the folder can be loaded on any mesh
        self.style = (
            style_of(options.like.details if options.like is not None else {})
            or style_of(source.details)
            or StateDictStyle()
        )
        for name in ("tp", "pp", "ep"):
            if getattr(options, name) not in (None, 1):
                raise UsageError(
                    f"--{name} {getattr(options, name)} does not apply: a dcp folder can be loaded on any mesh",
                    hint="leave it out; --dp is the number of data files",
                )
        self._files = self._file_count()
        self._last: OutputFile | None = None

    def target(self) -> Target:
        """Every file but the metadata of the last folder."""
        entries = StateDictEntries(self.source, self.style, self.options.dtype)
        data: dict[str, RowChunkedFiles] = {}
        trees: dict[str, MetadataTree] = {}
        for entry in entries:
            tree = trees.setdefault(entry.folder, MetadataTree())
            files = data.setdefault(entry.folder, RowChunkedFiles(self._files, f"{entry.folder}data"))
            if entry.path in tree:
                raise ImpossibleError(
                    f"two values would have the key {join_path(entry.path)}",
                    hint="choose other names with --like, or leave one out with --exclude",
                )
            if isinstance(entry.value, Atom):
                tree.add_tensor(entry.path, entry.value.shape, entry.value.dtype, files.tensor(entry.value))
            else:
                tree.add_object(entry.path, files.value(entry.value))
        self.notes = entries.notes
        outputs = [file for folder, files in data.items() for file in files.outputs(folder)]
        metadata = [literal_file(f"{folder}{METADATA}", tree.dump(folder + METADATA)) for folder, tree in trees.items()]
        if not metadata:
            raise ImpossibleError(
                f"{self.source.root}: nothing is left to write", hint="leave --include and --exclude out"
            )
        *others, self._last = metadata
        taken = {file.path for file in (*outputs, *metadata)}
        carried = [copied_file(self.source, name, name) for name in self.source.extras.files if name not in taken]
        return Target((*outputs, *carried, *others))

    def last(self, target: Target, digests: Digests) -> OutputFile | None:
        """The metadata: to torch, its presence marks a complete checkpoint."""
        del target, digests
        return self._last

    def _file_count(self) -> int:
        options = self.options
        count = (options.like or self.source).mesh.dp if options.dp is None else options.dp
        if options.max_shard_size:
            total = sum(prod(atom.shape) * atom.dtype.itemsize for atom in self.source.atoms())
            count = max(count, -(-total // options.max_shard_size))
        if not 1 <= count <= 65536:
            raise UsageError(f"a dcp folder cannot have {count} data files", hint="choose --dp from 1 to 65536")
        return count


@dataclass(frozen=True, slots=True)
class StateDictEntry:
    """One value of the state dict: an atom, or any value that can be pickled."""

    folder: str
    path: KeyPath
    value: Any


class StateDictEntries:
    """The entries for a source in a style. Iterate once; `notes` are complete afterwards."""

    def __init__(self, source: Checkpoint, style: StateDictStyle, dtype: DType | None) -> None:
        self.source = source
        self.style = style
        self.dtype = dtype
        self.notes: list[Note] = []

    def __iter__(self) -> Iterator[StateDictEntry]:
        yield from self._model()
        yield from self._states()
        yield from self._groups()
        yield from self._extras()
        for path, value in private_keys_of(self.source).items():
            yield StateDictEntry(self.style.model.folder, path, value)

    # model ------------------------------------------------------------------------------------------------------

    def _model(self) -> Iterator[StateDictEntry]:
        section = self.style.model
        for parameter in self.source.parameters.values():
            atom = parameter.atoms.get(MASTER) or parameter.atoms.get(WEIGHT)  # FSDP2 trains on masters directly
            if atom is None:
                continue
            if self.dtype not in (None, atom.dtype) and atom.dtype.family == "float" and parameter.role != "buffer":
                atom = replace(atom, kind=WEIGHT, dtype=self.dtype)
            for name in (parameter.name, *parameter.aliases):
                yield StateDictEntry(section.folder, (*section.prefix, name), atom)

    # optimizer --------------------------------------------------------------------------------------------------

    def _states(self) -> Iterator[StateDictEntry]:
        for parameter in self.source.parameters.values():
            states = {kind: atom for kind, atom in parameter.atoms.items() if kind not in (WEIGHT, MASTER)}
            if STEP in states:
                if states[STEP].numel != 1:
                    raise ImpossibleError(
                        f"parameter {parameter.name}: its step has the shape {list(states[STEP].shape)}"
                    )
                if states[STEP].dtype != FLOAT32:  # as torch has it
                    states[STEP] = replace(states[STEP], dtype=FLOAT32)
            elif counts_in_tensor(states):
                hyper = self.source.groups[parameter.group].hyper if parameter.group is not None else {}
                count = hyper[STEP] if type(hyper.get(STEP)) is int else self.source.step
                if count is None:
                    self._note("no-step", f"the source does not say how many steps {parameter.name} has taken")
                else:
                    states[STEP] = number_atom(parameter.name, STEP, count)
            for kind, atom in states.items():
                yield self._optimizer_entry((STATE, parameter.name, kind), atom)

    def _optimizer_entry(self, path: KeyPath, value: Any) -> StateDictEntry:
        section = self.style.optimizer
        if self.style.flattened:
            path = (join_path(path),)
        return StateDictEntry(section.folder, (*section.prefix, *path), value)

    def _groups(self) -> Iterator[StateDictEntry]:
        for number, group in enumerate(self.source.groups):
            fields = self._fields(number, group)
            for owner in group.names if self.style.flattened else (number,):
                for name, value in fields.items():
                    yield self._optimizer_entry((GROUPS, owner, name), value)
            if not self.style.flattened:
                yield self._optimizer_entry((GROUPS, number, PARAMS), list(group.names))

    def _fields(self, number: int, group: ParamGroup) -> dict[str, Any]:
        """The hyper-parameters of a group, with all fields that torch's optimizer with these states has."""
        kinds = {kind for name in group.names[:8] for kind in self.source.parameters[name].atoms}
        plain = {name: value for name, value in group.hyper.items() if _is_plain(value)}
        if len(plain) < len(group.hyper):
            left = sorted(group.hyper.keys() - plain.keys())
            self._note("hyper-left-out", f"group {number}: {', '.join(left)} are not plain values, and are left out")
        fields, filled = complete_group_fields(plain, kinds)
        if filled:
            self._note("hyper-filled-in", f"group {number}: torch's defaults stand for {', '.join(filled)}")
        return fields

    # extras -----------------------------------------------------------------------------------------------------

    def _extras(self) -> Iterator[StateDictEntry]:
        folders = dict.fromkeys((self.style.model.folder, self.style.optimizer.folder))
        foreign: dict[str, Any] = {}
        for file, tree in self.source.extras.trees.items():
            if not file.endswith(METADATA):
                if isinstance(tree, dict):
                    for key, value in tree.items():
                        foreign.setdefault(str(key), value)
                else:
                    foreign.setdefault(file, tree)
                continue
            folder = file.removesuffix(METADATA)
            for path, value in flatten(tree):
                yield StateDictEntry(folder if folder in folders else self.style.model.folder, path, value)
        yield from self._foreign(foreign)

    def _foreign(self, values: dict[str, Any]) -> Iterator[StateDictEntry]:
        """Plain values of another framework's files; its objects are left out.

        So are its own groups: a reader of this folder would take them for a second optimizer.
        """
        values = {key: value for key, value in values.items() if key != GROUPS}
        if self.source.groups:
            values = {key: value for key, value in values.items() if not _has_groups(value)}
        left = [key for key, value in values.items() if _has_groups(value) or not _is_plain(value)]
        for path, value in flatten({_EXTRAS: {key: value for key, value in values.items() if key not in left}}):
            yield StateDictEntry(self.style.model.folder, path, value)
        if left:
            names = ", ".join(sorted(left))
            self._note("extras-left-out", f"not plain values, which is all that this target can hold: {names}")

    def _note(self, kind: str, text: str) -> None:
        self.notes.append(Note(kind, text))


def _has_groups(value: Any, depth: int = 0) -> bool:
    """Whether a value contains an optimizer's groups: directly, in a wrapper, or in a chain of optimizers."""
    if depth > _MAX_GROUPS_DEPTH:
        return False
    if isinstance(value, dict) and GROUPS in value:
        return True
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(_has_groups(item, depth + 1) for item in items)


def _is_plain(value: Any, depth: int = 0) -> bool:
    if type(value) in _PLAIN or isinstance(value, Atom):
        return True
    if depth > 20:
        return False
    if type(value) in (list, tuple):
        return all(_is_plain(item, depth + 1) for item in value)
    if type(value) is dict:
        return all(type(key) in (str, int) and _is_plain(item, depth + 1) for key, item in value.items())
    return False


def complete_group_fields(hyper: Mapping[str, Any], kinds: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """The fields of a group whose parameters have states `kinds`: the source's own, and torch's defaults for the rest.

    Returns the fields and the names of those that were filled in.
    """
    defaults = default_group_fields(hyper, kinds)
    filled = [name for name in defaults if name not in hyper]
    fields = {**{name: defaults[name] for name in filled}, **hyper}
    # A job with an LR scheduler loads this field too: the rate that the scheduler starts from.
    if "lr" in fields:
        fields.setdefault("initial_lr", fields["lr"])
    return fields, filled


class RowChunkedFiles(ArchiveFiles):
    """The data files of one folder."""

    def tensor(self, atom: Atom) -> list[tuple[Box, ArchiveRange]]:
        """Lay out a tensor. Returns its chunks and their archives."""
        return [
            (box, self.chunk(number, atom, Region.of((box,)), box.shape))
            for number, box in row_chunks(atom.shape, atom.dtype.itemsize, len(self))
        ]


def row_chunks(shape: Shape, itemsize: int, files: int) -> Iterator[tuple[int | None, Box]]:
    """Chunks of a tensor by rows, as FSDP2 splits it, each with the number of its file; None means any file."""
    nbytes = prod(shape) * itemsize
    if not shape or nbytes < SMALLEST_SPLIT_BYTES or shape[0] < 2:
        yield None, whole(shape)
        return
    row = nbytes // shape[0]
    rows = -(-shape[0] // files)
    for number in range(files):
        start, stop = min(number * rows, shape[0]), min((number + 1) * rows, shape[0])
        step = max(1, min(stop - start, LARGEST_CHUNK_BYTES // row))
        for at in range(start, stop, step):
            yield number, Box((at, *(0,) * (len(shape) - 1)), (min(step, stop - at), *shape[1:]))
