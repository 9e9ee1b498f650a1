"""Read torch.distributed.checkpoint folders, and whole state dicts that `torch.save` wrote.

The call order: find the folders (a checkpoint, Accelerate's pair of folders, or the newest step of a run), read their
metadata, sort the keys into optimizers, models and the rest, match the optimizers' parameters with the models', and
build parameters, groups and extras. Archives are opened when needed. Whole state dicts (Accelerate's FULL_STATE_DICT,
or any file with a model in it) are sorted in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Final

from ucp.containers.distcp import (
    METADATA,
    ArchiveRange,
    DcpEntry,
    DcpFolder,
    DcpObject,
    DcpTensor,
    KeyPath,
    ObjectArchives,
    TensorArchives,
    has_data_files,
    join_path,
    metadata_files,
    read_dcp_folder,
)
from ucp.containers.inert import TensorRef, check_no_foreign_tensor
from ucp.containers.torch_file import TorchFile
from ucp.containers.tree import with_atoms
from ucp.core.box import Box, whole
from ucp.core.checkpoint import (
    STEP,
    WEIGHT,
    Atom,
    Checkpoint,
    Extras,
    Fragment,
    Mesh,
    Note,
    Parameter,
    ParamGroup,
    Rank,
)
from ucp.core.region import Region
from ucp.errors import InconsistentError, IntegrityError, NotUnderstoodError, UsageError
from ucp.formats.dcp import safetensors_shards
from ucp.formats.dcp.model_keys import (
    ModelKeys,
    find_copies,
    find_models,
    find_roles,
    find_ties,
    match_numbers,
    names_in_groups,
)
from ucp.formats.dcp.optimizer_keys import (
    LIKE_WEIGHT,
    DcpParamGroup,
    EntryValues,
    OptimizerKeys,
    find_optimizers,
    read_groups,
    strip_wrappers,
    without_gradients,
)
from ucp.formats.dcp.state_dict_layout import STYLE_DETAIL, PrivateKeys, StateDictSection, nest, take_private_keys
from ucp.formats.registry import ReadOptions
from ucp.formats.sharded.shard_fragments import InlineNumber, scalar_fragments
from ucp.settings import MIB
from ucp.storage.local import SourceFiles, open_binary


def read(path: Path, options: ReadOptions) -> Checkpoint:
    """Index the checkpoint. Rules do not apply: the metadata has the offsets of all chunks."""
    if find_location(path, options.tag) is None and safetensors_shards.recognises(path / (options.tag or "")):
        return safetensors_shards.read(path / (options.tag or ""))
    location = require_location(path, options.tag)
    whole = read_full_state_dict(location.root, dict(location.whole)) if location.whole else None
    lost: dict[str, str] | None = {} if options.tolerant else None
    folders = [whole.folder] if whole else [read_dcp_folder(location.root, name, lost) for name in location.folders]
    with SourceFiles(location.root) as files:
        archives = (
            TensorArchives(location.root, lost or ()) if whole is None else FullStateDictTensors(location.root, whole)
        )
        objects = ObjectArchives(files) if whole is None else FullStateDictObjects(files, whole)
        contents = _DcpIndexBuilder(location.root, folders, EntryValues(archives, files, objects))
    sizes = {file: size for folder in folders for file, size in folder.files.items()}
    carried, skipped = sidecar_files(location, set(sizes))
    notes = contents.notes
    if location.root != path and not location.alone:
        notes.append(Note("step-folder", f"{location.root.name} is read, the newest complete save in {path}"))
    if skipped:
        text = f"files that this checkpoint does not use are not carried: {', '.join(skipped)}"
        notes.append(Note("left-behind", text))
    return Checkpoint(
        format="dcp",
        root=location.root,
        mesh=_mesh(folders),
        parameters=contents.parameters,
        framework=_framework(location, folders),
        step=contents.step,
        groups=contents.groups,
        extras=Extras(contents.trees, {name: name for name in carried}),
        notes=notes,
        sizes={**sizes, **carried},
        details={STYLE_DETAIL: contents.style},
        lost=lost or {},
    )


def _mesh(folders: list[DcpFolder]) -> Mesh:
    """The number of ranks that wrote files; their arrangement is not recorded."""
    ranks = {
        item.rank
        for folder in folders
        for entry in folder.entries.values()
        for item in (entry.chunks.values() if isinstance(entry, DcpTensor) else entry.items)
    }
    split = any(entry.pieces > 1 for folder in folders for entry in folder.tensors() if not entry.copies)
    return Mesh(dp=max(ranks, default=0) + 1, zero=3 if split else 0)


def _framework(location: DcpLocation, folders: list[DcpFolder]) -> str:
    if location.alone:
        return "torch.save"
    if location.folders != ("",) or location.whole:
        return "torch.distributed.checkpoint (Accelerate)"
    keys = folders[0].entries
    if "train_state.step" in keys or any(key.startswith("dataloader.dp_rank_") for key in keys):
        return "torch.distributed.checkpoint (torchtitan)"
    return "torch.distributed.checkpoint"


class _DcpIndexBuilder:
    """Indexes the folders as one checkpoint (Accelerate has one folder each for model and optimizer)."""

    def __init__(self, root: Path, folders: list[DcpFolder], values: EntryValues) -> None:
        self.parameters: dict[str, Parameter] = {}
        self.groups: list[ParamGroup] = []
        self.trees: dict[str, Any] = {}  # extras, by the path of the metadata file
        self.notes: list[Note] = []
        self.step: int | None = None
        self.style: dict[str, Any] = {}  # structure of the keys, for a writer to repeat
        self.root = root
        self.files = values.files
        self.archives = values.archives
        self.values = values
        self.facts = PrivateKeys()
        self.left: dict[str, list[DcpEntry]] = {folder.name: [] for folder in folders}
        optimizers: list[tuple[OptimizerKeys, list[DcpParamGroup], DcpFolder]] = []
        for folder in folders:
            found, left = find_optimizers(folder)
            facts, self.left[folder.name] = take_private_keys(left, self.values.objects.value)
            self.facts = facts if facts.buffers or facts.step is not None else self.facts
            optimizers.extend((optimizer, read_groups(optimizer, self.values), folder) for optimizer in found)
        every = [optimizer for optimizer, _, _ in optimizers]
        models: list[tuple[ModelKeys, DcpFolder]] = []
        for folder in folders:
            found_models, self.left[folder.name] = find_models(folder, self.left[folder.name], every)
            models.extend((model, folder) for model in found_models)
        self._index(models, optimizers)
        self._style(models, optimizers)
        self._extras()

    # model ------------------------------------------------------------------------------------------------------

    def _index(
        self,
        models: list[tuple[ModelKeys, DcpFolder]],
        optimizers: list[tuple[OptimizerKeys, list[DcpParamGroup], DcpFolder]],
    ) -> None:
        several = len(models) > 1
        self.notes.extend(note for model, _ in models if (note := model.note()) is not None)
        names_of: list[tuple[ModelKeys, dict[str, str]]] = []  # an optimizer's name of a tensor → our name
        tensors: dict[str, DcpTensor] = {}
        for model, _ in models:
            names = self._plain_names(model, [o for o, _, _ in optimizers])
            if several:
                prefix = join_path(model.prefix)
                names = {theirs: f"{prefix}.{ours}" if prefix else ours for theirs, ours in names.items()}
            names_of.append((model, names))
            for theirs, entry in model.tensors.items():
                tensors[names[theirs]] = entry
        trained: set[str] = set()
        owned: list[tuple[OptimizerKeys, list[DcpParamGroup], Mapping[str, str]]] = []
        for optimizer, groups, _ in optimizers:
            translate = self._translate(optimizer, groups, names_of, tensors)
            if translate is None:
                continue
            owned.append((optimizer, groups, translate))
            trained.update(translate.values())
        idle = [known[name] for optimizer, groups, known in owned for name in without_gradients(optimizer, groups)]
        trained.difference_update(idle)
        roles = find_roles(tensors, trained, has_optimizer=bool(owned))
        roles.update((name, "frozen") for name in idle if name in roles)
        roles.update((name, "buffer") for name in self.facts.buffers if name in roles and name not in trained)
        ties = find_ties(self.archives, self.files, tensors, trained, roles) if owned else {}
        parameters = self.parameters
        for name, entry in tensors.items():
            if name not in ties:
                atom = self.archives.atom(entry, name, WEIGHT)
                parameters[name] = Parameter(name, entry.shape, roles[name], {WEIGHT: atom})
        for alias, owner in ties.items():
            parameter = parameters[owner]
            parameter.aliases = (*parameter.aliases, alias)
            weight, copy = parameter.atoms[WEIGHT], self.archives.atom(tensors[alias], owner, WEIGHT)
            parameter.atoms[WEIGHT] = Atom(
                owner, WEIGHT, weight.shape, weight.dtype, weight.fragments, (*weight.replicas, copy.fragments)
            )
        for optimizer, groups, known in owned:
            self._states(optimizer, known)
            for group in groups:
                members = [known[name] for name in group.names if known[name] in parameters]
                for name in members:
                    parameters[name].group = len(self.groups)
                self.groups.append(ParamGroup(group.hyper, members))
        if idle:
            shown = ", ".join([*idle[:3], *(["…"] if len(idle) > 3 else [])])
            text = f"{len(idle)} of the optimizer's parameters have no state, and are taken as frozen: {shown}"
            self._note("idle-parameters", text)

    def _plain_names(self, model: ModelKeys, optimizers: list[OptimizerKeys]) -> dict[str, str]:
        """Stored name → parameter name, without the parts that module wrappers add."""
        plain = {name: strip_wrappers(name) for name in model.tensors}
        theirs = {name for optimizer in optimizers if not optimizer.by_number for name in optimizer.states}
        if all(name.startswith("module.") for name in plain.values()) and not any(
            name.startswith("module.") for name in theirs
        ):
            plain = {name: ours.removeprefix("module.") for name, ours in plain.items()}
        if len(set(plain.values())) != len(plain):
            return {name: name for name in plain}
        changed = next((name for name, ours in plain.items() if name != ours), None)
        if changed is not None:
            self._note("wrapper-names", f"wrappers were removed from parameter names: {changed} is {plain[changed]}")
        return plain

    # optimizer --------------------------------------------------------------------------------------------------

    def _translate(
        self,
        optimizer: OptimizerKeys,
        groups: list[DcpParamGroup],
        names_of: list[tuple[ModelKeys, dict[str, str]]],
        tensors: Mapping[str, DcpTensor],
    ) -> dict[str, str] | None:
        """The optimizer's names of parameters → our names; None if they are unknown, so that its states are extras."""
        used = list(dict.fromkeys([*optimizer.listed, *optimizer.states]))
        own = [names for model, names in names_of if any(one is optimizer for one in model.optimizers)]
        if optimizer.by_number:
            names = own[0] if own else {name: name for name in tensors}
            return self._by_number(optimizer, groups, {name: tensors[name] for name in names.values()}, names)
        best: dict[str, str] = {}
        for names in own or [names for _, names in names_of]:
            ours = {name: name for name in names.values()}
            ours = {**{strip_wrappers(theirs): name for theirs, name in names.items()}, **ours}
            known = {name: ours[strip_wrappers(name)] for name in used if strip_wrappers(name) in ours}
            best = known if len(known) > len(best) else best
        # An optimizer saved without its model still has names and shapes of its own.
        return {name: best.get(name, strip_wrappers(name)) for name in used}

    def _by_number(
        self,
        optimizer: OptimizerKeys,
        groups: list[DcpParamGroup],
        tensors: Mapping[str, DcpTensor],
        names: Mapping[str, str],
    ) -> dict[str, str] | None:
        ours = {strip_wrappers(theirs): name for theirs, name in names.items()}
        named = {number: ours.get(name, name) for number, name in names_in_groups(groups).items()}
        if named.keys() >= {*optimizer.listed, *optimizer.states} and tensors.keys() >= set(named.values()):
            return named
        found = match_numbers(optimizer, groups, tensors)
        if found is None:  # the optimizer has a tied weight once, the model under all its names
            copies = find_copies(self.archives, self.files, tensors)
            once = {name: entry for name, entry in tensors.items() if name not in copies}
            found = match_numbers(optimizer, groups, once) if copies else None
        if found is not None:
            self._note(
                "states-by-order",
                "the optimizer numbers its parameters: they were matched to names by order and shapes",
            )
            return found
        count = len(set(optimizer.listed) | optimizer.states.keys())
        self._note(
            "states-unnamed",
            f"the optimizer numbers its {count} parameters, in an unknown order: its states are extras",
        )
        name = next(iter(self.left))
        tables = (*optimizer.states.values(), *optimizer.fields.values())
        self.left[name].extend(entry for table in tables for entry in table.values())
        self.left[name].extend([optimizer.whole] if optimizer.whole is not None else [])
        return None

    def _states(self, optimizer: OptimizerKeys, translate: Mapping[str, str]) -> None:
        for theirs, states in optimizer.states.items():
            name = translate[theirs]
            for kind, entry in states.items():
                if isinstance(entry, DcpTensor):
                    atom = self.archives.atom(entry, name, kind)
                else:
                    item = entry.items[0]
                    number = InlineNumber.of(item.file, self.values.objects.value(entry), item.rank)
                    if number is None:
                        self.values.unread.append(entry)
                        continue
                    atom = Atom(name, kind, (), number.dtype, scalar_fragments(Rank(), number))
                parameter = self.parameters.get(name)
                if parameter is None:
                    shape = next((e.shape for e in states.values() if isinstance(e, DcpTensor) and e.shape), ())
                    parameter = self.parameters[name] = Parameter(name, shape)
                elif atom.shape != parameter.shape and (kind in LIKE_WEIGHT or atom.numel == parameter.numel > 1):
                    raise InconsistentError(
                        f"{self.root}: {entry.key} has the shape {list(atom.shape)},"
                        f" its parameter {list(parameter.shape)}",
                        hint="files of two models are mixed in this folder; restore those of one save",
                    )
                parameter.atoms[kind] = atom
                if kind == STEP and self.step is None:
                    value = self.values.plain(entry)
                    self.step = int(value) if isinstance(value, (int, float)) and value >= 0 else None

    # the rest -----------------------------------------------------------------------------------------------------

    def _style(
        self,
        models: list[tuple[ModelKeys, DcpFolder]],
        optimizers: list[tuple[OptimizerKeys, list[DcpParamGroup], DcpFolder]],
    ) -> None:
        style = self.style
        if len(models) == 1:
            model, folder = models[0]
            style["model"] = StateDictSection(folder.name, model.prefix).to_json()
        if len(optimizers) == 1:
            optimizer, _, folder = optimizers[0]
            style["optimizer"] = {
                **StateDictSection(folder.name, optimizer.prefix).to_json(),
                "flattened": optimizer.flattened,
            }

    def _extras(self) -> None:
        for entry in self.values.unread:
            self._note(
                "state-kept-as-extra", f"{entry.key} is neither a tensor nor a number: it is carried as an extra"
            )
        self.left[next(iter(self.left))].extend(self.values.unread)
        for folder, entries in self.left.items():
            if entries:
                self.trees[folder + METADATA] = nest(
                    {
                        entry.path: self.values.objects.value(entry)
                        if isinstance(entry, DcpObject)
                        else self.archives.atom(entry, folder + entry.key, "extra")
                        for entry in entries
                    }
                )
        large = sum(e.nbytes for entries in self.left.values() for e in entries if isinstance(e, DcpTensor))
        if large > 1 << 20:
            self._note(
                "tensors-in-extras", f"tensors of {large:,} bytes belong to no model here: they are carried as extras"
            )
        if self.facts.step is not None:
            self.step = self.facts.step
        elif self.step is None:
            self.step = _counted_step(self.trees)

    def _note(self, name: str, text: str) -> None:
        self.notes.append(Note(name, text))


def _counted_step(trees: Mapping[str, Any]) -> int | None:
    """The step that the user's own counters say, for optimizers that keep none."""
    for tree in trees.values():
        for path in (("train_state", "step"), ("step",), ("global_step",), ("iteration",)):
            value: Any = tree
            for part in path:
                value = value.get(part) if isinstance(value, dict) else None
            if type(value) is int and value >= 0:
                return value
    return None


_MODEL: Final = re.compile(r"pytorch_model_fsdp(?:_(\d+))?")
_OPTIMIZER: Final = re.compile(r"optimizer(?:_(\d+))?")
_STEP: Final = re.compile(r"(?:step|checkpoint|iter|epoch)[-_](\d+)")
_WEIGHT_COPIES: Final = (".safetensors", ".safetensors.index.json", ".bin.index.json")
_LARGEST_SIDECAR: Final = 16 * MIB
_TORCH_FILES: Final = (".pt", ".pth", ".ckpt", ".bin")
_ZIP: Final = b"PK\x03\x04"


@dataclass(frozen=True, slots=True)
class DcpLocation:
    """A checkpoint: `root`, and the folders with metadata in it (with a slash at the end; empty for the root itself).

    `whole` are files with complete state dicts instead, each with its path in the state dict that they form together;
    `alone` means a single such file that the user named.
    """

    root: Path
    folders: tuple[str, ...]
    whole: tuple[tuple[str, KeyPath], ...] = ()
    alone: bool = False


def recognises(path: Path) -> bool:
    """Whether `path` is a folder with `.metadata` (or data files without it), Accelerate's pair of such folders or of
    files, a folder of steps, shards of HuggingFaceStorageWriter, or one file of `torch.save`."""
    try:
        return find_location(path, None) is not None or safetensors_shards.recognises(path)
    except NotUnderstoodError:
        return True  # `read` reports what is wrong with it


def find_location(path: Path, tag: str | None) -> DcpLocation | None:
    """The checkpoint at `path`, or step `tag` (by default the newest) in a folder of steps; None if there is none."""
    if not path.is_dir():
        return _one_file(path) if tag is None else None
    if tag is not None:
        return _direct(path / tag)
    found = _direct(path)
    if found is not None:
        return found
    steps = sorted(
        (int(match[1]), child) for child in path.iterdir() if (match := _STEP.fullmatch(child.name)) and child.is_dir()
    )
    incomplete: DcpLocation | None = None
    for _, child in reversed(steps):
        location = _direct(child)
        if location is not None and (
            location.whole or all(metadata_files(location.root / folder) for folder in location.folders)
        ):
            return location
        incomplete = incomplete or location
    # An interrupted save has no metadata: use the newest complete one. If there is none, `read` reports that.
    return incomplete


def _direct(path: Path) -> DcpLocation | None:
    if not path.is_dir():
        return None
    if metadata_files(path) or has_data_files(path):
        if (path / "common.pt").is_file() and (path / "metadata.json").is_file():
            return None  # Megatron's own use of the same container
        return DcpLocation(path, ("",))
    children = sorted(child.name for child in path.iterdir() if child.is_dir())
    models = [name for name in children if _MODEL.fullmatch(name) and metadata_files(path / name)]
    optimizers = [name for name in children if _OPTIMIZER.fullmatch(name) and metadata_files(path / name)]
    if len(models) > 1 or len(optimizers) > 1:
        raise NotUnderstoodError(
            f"{path}: contains several models or optimizers ({', '.join([*models, *optimizers])})",
            hint="give the folder of one of them",
        )
    if not models and not optimizers:
        return _whole_pair(path)
    return DcpLocation(path, tuple(f"{name}/" for name in (*models, *optimizers)))


def _whole_pair(path: Path) -> DcpLocation | None:
    """Accelerate's FULL_STATE_DICT: one file for the model and one for the optimizer, if there is one of each."""
    found = [name for name in ("pytorch_model_fsdp.bin", "optimizer.bin") if (path / name).is_file()]
    if not found or not found[0].startswith("pytorch"):
        return None
    prefixes: tuple[KeyPath, ...] = (("model",), ("optimizer",))
    return DcpLocation(path, ("",), tuple(zip(found, prefixes, strict=False)))


def _one_file(path: Path) -> DcpLocation | None:
    """A file that the user wrote with `torch.save`, but not one of Hugging Face's weight files."""
    if path.suffix not in _TORCH_FILES or path.name.startswith(("pytorch_model", "adapter_model")):
        return None
    if not path.is_file():
        return None
    with open_binary(path) as file:
        if file.read(len(_ZIP)) != _ZIP:
            return None
    return DcpLocation(path.parent, ("",), ((path.name, ()),), alone=True)


def require_location(path: Path, tag: str | None) -> DcpLocation:
    """Like `find_location`, but raises an error if there is none."""
    location = find_location(path, tag)
    if location is not None:
        return location
    if tag is not None:
        raise UsageError(f"{path / tag}: is not a checkpoint folder", hint="`--tag` names a folder in the given one")
    raise NotUnderstoodError(f"{path}: is not a torch.distributed.checkpoint folder")


def sidecar_files(location: DcpLocation, used: set[str]) -> tuple[dict[str, int], list[str]]:
    """Other files in the folders: the small ones to copy, with their sizes in bytes, and the names of the rest."""
    carried: dict[str, int] = {}
    skipped: list[str] = []
    if location.alone:
        return carried, skipped
    for folder in dict.fromkeys(("", *location.folders)):
        for path in sorted((location.root / folder).iterdir()):
            name = folder + path.name
            if not path.is_file() or name in used or path.name.startswith(".") or path.name.endswith(".metadata"):
                continue
            size = path.stat().st_size
            if path.suffix == ".distcp" and size == 0:
                continue  # of a rank without data
            if path.suffix == ".distcp" or path.name.endswith(_WEIGHT_COPIES) or size > _LARGEST_SIDECAR:
                skipped.append(name)
            else:
                carried[name] = size
    return carried, skipped


_MAX_DEPTH: Final = 50


@dataclass(slots=True)
class FullStateDict:
    """The entries of the files, and the location of the tensor or the value of each entry."""

    folder: DcpFolder = field(default_factory=lambda: DcpFolder(""))
    fragments: dict[str, Fragment] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


def read_full_state_dict(root: Path, files: Mapping[str, KeyPath]) -> FullStateDict:
    """Index the files, each at its path in the state dict that they form together."""
    found = FullStateDict()
    for name, prefix in files.items():
        archive = TorchFile(root / name)
        if not isinstance(archive.tree, dict):
            raise NotUnderstoodError(f"{root / name}: is not a state dict")
        found.folder.files[name] = archive.size
        for path, value in _walk(prefix, archive.tree):
            _add(found, archive, ArchiveRange(name, 0, archive.size), path, value)
    return found


def _walk(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    """Values by their paths, by torch's rules: dicts are entered, and lists that contain tensors or dicts."""
    if len(path) > _MAX_DEPTH:
        raise IntegrityError(f"{'.'.join(map(str, path[:4]))}…: the state dict is nested too deeply")
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _walk((*path, str(key)), item)
    elif type(value) is list and any(isinstance(item, (dict, TensorRef)) for item in value):
        for number, item in enumerate(value):
            yield from _walk((*path, number), item)
    else:
        yield path, value


def _add(found: FullStateDict, archive: TorchFile, item: ArchiveRange, path: KeyPath, value: Any) -> None:
    key = join_path(path)
    if key in found.folder.entries:
        raise IntegrityError(f"{archive.path}: two values have the key {key}")
    entry: DcpEntry
    if isinstance(value, TensorRef):
        box = whole(value.shape)
        entry = DcpTensor(key, path, value.shape, value.dtype, {box: item} if prod(value.shape) else {}, pieces=1)
        strides = None if value.is_contiguous else value.strides
        place = archive.position(value) if prod(value.shape) else 0
        found.fragments[key] = Fragment(Region.of((box,)), item.file, place, value.dtype, strides=strides)
    else:
        check_no_foreign_tensor(value, key, archive.path)
        entry = DcpObject(key, path, [item])
        found.values[key] = with_atoms(value, archive, item.file, key, Rank(dp=item.rank))
    found.folder.entries[key] = entry


class FullStateDictTensors(TensorArchives):
    """Tensors by their keys."""

    def __init__(self, root: Path, content: FullStateDict) -> None:
        super().__init__(root)
        self._content = content

    def locate(self, entry: DcpTensor, box: Box, item: ArchiveRange, files: SourceFiles) -> Fragment:
        """The location of the tensor."""
        del box, item, files
        return self._content.fragments[entry.key]


class FullStateDictObjects(ObjectArchives):
    """Values by their keys."""

    def __init__(self, files: SourceFiles, content: FullStateDict) -> None:
        super().__init__(files)
        self._content = content

    def value(self, entry: DcpObject) -> Any:
        """The value, with atoms of kind `extra` for the tensors in it."""
        return self._content.values[entry.key]
