"""Index a universal folder: the output of DeepSpeed's `ds_to_universal`.

- `zero/<parameter>/<state>.pt` has one whole state, and keys that describe how it was split. The existence of such a
  folder does not mean that the parameter is trained: the converter also creates one, upcast and without moments, for
  every buffer, alias and frozen parameter.
- `zero/optimizer_state.pt` is rank 0's optimizer state; under ZeRO-3 it includes rank 0's shards.
- The model files were copied unchanged from the source. They have names, shapes, roles, rules and the module's own
  weights, still split as in the source. If they have no rules, the state files or their shapes provide them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, Final

from ucp.containers.inert import Inert, TensorRef
from ucp.core.box import Shape
from ucp.core.checkpoint import (
    MASTER,
    STEP,
    WEIGHT,
    Atom,
    Checkpoint,
    Extras,
    Fragment,
    Mesh,
    Parameter,
    ParamGroup,
    Rank,
    kind_of_state,
)
from ucp.core.region import Region
from ucp.core.rules import REPLICATED, Rule, RuleBook
from ucp.errors import IntegrityError, NotUnderstoodError, StorageError, first_few, storage_errors
from ucp.formats.deepspeed import step_files
from ucp.formats.deepspeed.folder import find_universal
from ucp.formats.deepspeed.read.carry_extras import TreeCarrier
from ucp.formats.deepspeed.read.optimizer_values import flat_group_owners, group_hyper_parameters, stored_scalar
from ucp.formats.deepspeed.read.rank_files import (
    RankFile,
    RankFiles,
    describe_value,
    dict_or_empty,
    dicts_in,
    lookup,
)
from ucp.formats.deepspeed.read.read_context import DeepSpeedShardTable, ReadContext
from ucp.formats.deepspeed.read.read_ranks import merge_shapes, param_shapes, zero_stage
from ucp.formats.deepspeed.read.read_weights import (
    StageNames,
    buffer_names,
    module_tensors,
    read_frozen,
    read_layers,
    read_module,
    shared_parameters,
)
from ucp.formats.deepspeed.read.read_zero3 import ZERO3_MASTERS, read_frozen_slices
from ucp.formats.deepspeed.read.reader import framework_of, step_of, universal_details
from ucp.formats.deepspeed.read.resolve_rules import assemble, merge_stage_groups, resolve_all
from ucp.formats.deepspeed.read.save_consistency import RankGrid, check_same_save, find_grid
from ucp.formats.deepspeed.universal_info import fused_rule, has_tp_rules
from ucp.formats.registry import ReadOptions
from ucp.formats.sharded.shard_fragments import scalar_fragments
from ucp.formats.sharded.shard_table import Problems, RankCoord
from ucp.storage.local import SourceFiles
from ucp.storage.paths import list_files, scan_folder

_RECONVERT_HINT: Final = "convert the source checkpoint again, or look for a file of another save"


def read(path: Path, options: ReadOptions) -> Checkpoint:
    """Index a universal folder."""
    root = find_universal(path, options.tag)
    with SourceFiles(root) as source:
        problems = Problems(str(root))
        context = ReadContext("", RankFiles(root), source, problems, DeepSpeedShardTable(problems))
        return _UniversalReader(context, root, options).read()


@dataclass(slots=True)
class _UniversalReader:
    """One universal folder while it is being indexed."""

    context: ReadContext
    root: Path
    options: ReadOptions
    lost: dict[str, str] = field(default_factory=dict)  # state files that cannot be read, for a tolerant reader

    def read(self) -> Checkpoint:
        names = self._model_names()
        grid = self._grid(names)
        models = self._models(names, grid)
        folders = state_folders(self.root, step_files.STATES_FOLDER)
        first = models[0][0]
        shared = {alias: owner for members in models for alias, owner in shared_parameters(members[0]).items()}
        if names.layers:
            shapes = [group for members in models for group in (param_shapes(members[0], None) or [])]
            trained = merge_shapes(shapes)
            read_layers(self.context, names.layers, {0: StageNames(trained, _buffer_names(models))})
        for index, members in enumerate(models):
            self._read_model(RankCoord(index // grid.tp, index % grid.tp), members, folders, shared, grid)
        self._put_in_order(models)
        info = first.mapping().get("universal_checkpoint_info")
        info = info if isinstance(info, dict) else None
        rules = self.options.rules
        if grid.tp > 1 and not (info and has_tp_rules(info)):
            rules = rules_from_states(self.context, rules, folders)
        resolved = resolve_all(self.context, grid.tp, rules, info, first.name)
        parameters = assemble(self.context, resolved)
        self._add_states(parameters, folders)
        optimizer: RankFile | None = None
        if (self.root / step_files.OPTIMIZER_STATE).is_file():
            optimizer = self.context.files.open(step_files.OPTIMIZER_STATE)
            self._read_optimizer(parameters, optimizer, models, grid)
        else:
            self.context.note("universal-no-optimizer", f"{step_files.OPTIMIZER_STATE} is missing: no hyper-parameters")
        self.context.problems.raise_any(_RECONVERT_HINT)
        groups = merge_stage_groups(self.context, parameters)
        trees: dict[str, Any] = {}  # without the tensors that became atoms or repeat them
        for file in (*(file for members in models for file in members), *([optimizer] if optimizer else [])):
            tree = TreeCarrier(self.context, file, file.name).carry()
            trees.update({} if tree is None else {file.name: tree})
        stage = zero_stage(optimizer.mapping()) if optimizer is not None else 1
        return Checkpoint(
            "deepspeed-universal",
            self.root,
            Mesh(grid.tp, grid.pp, grid.dp_world, 1, stage),
            parameters,
            framework=framework_of(first),
            step=step_of(first),
            groups=groups,
            extras=Extras(trees),
            notes=self.context.notes,
            sizes=dict(list_files(self.root)),
            details=universal_details(self.context, first),
            lost=self.lost,
        )

    def _model_names(self) -> step_files.StepFiles:
        with scan_folder(self.root) as entries:
            found = step_files.classify_files([entry.name for entry in entries if entry.is_file()])
        if found.model:  # a folder for all stages has both kinds; those without dp rank contain the weights
            whole = len(found.model) == 1 and all(tp == 0 for _, tp in found.layers)
            return step_files.StepFiles(model=found.model, layers=found.layers if whole else {}, other=found.other)
        if found.sharded_model:
            return step_files.StepFiles(sharded_model=found.sharded_model, other=found.other)
        raise NotUnderstoodError(
            f"{self.root}: a universal folder without model files (mp_rank_*_model_states.pt)",
            hint="copy them from the checkpoint that it was made from",
        )

    def _grid(self, names: step_files.StepFiles) -> RankGrid:
        # Ignore its report of missing files: unlike a native checkpoint, a universal folder has no optimizer files.
        grid = find_grid(names, self.context.files, "", Problems(""))
        mps = range(max([*names.model, *(mp for _, mp in names.sharded_model), grid.mp - 1]) + 1)
        if names.model:
            missing = [step_files.model_file_name(mp) for mp in mps if mp not in names.model]
        else:
            wanted = [(dp, mp) for mp in mps for dp in range(grid.dp_world)]
            missing = [
                step_files.sharded_model_file_name(dp, mp) for dp, mp in wanted if (dp, mp) not in names.sharded_model
            ]
        for name in missing:
            self.context.problems.add(f"model file {name} is missing")
        self.context.problems.raise_any("copy it from the checkpoint that the folder was made from")
        return grid

    def _models(self, names: step_files.StepFiles, grid: RankGrid) -> list[list[RankFile]]:
        """The model files of each model-parallel rank: one, or under ZeRO-3 one per data-parallel rank."""
        files = self.context.files
        if names.model:
            models = [[files.open(names.model[mp])] for mp in range(grid.mp)]
        else:
            ranks = range(grid.dp_world)
            models = [[files.open(names.sharded_model[dp, mp]) for dp in ranks] for mp in range(grid.mp)]
        check_same_save({file.name: file for members in models for file in members}, {}, self.context.problems)
        self.context.problems.raise_any(_RECONVERT_HINT)
        return models

    def _read_model(
        self,
        coord: RankCoord,
        members: Sequence[RankFile],
        folders: Mapping[str, StateFolder],
        shared: Mapping[str, str],
        grid: RankGrid,
    ) -> None:
        file = members[0]
        trained = merge_shapes(param_shapes(file, None))
        if not trained:  # ZeRO off: the parameters that the optimizer has states of
            module = module_tensors(file)
            refs = {name: module.get(name) for name, folder in folders.items() if folder.has_moments}
            trained = {name: ref.shape for name, ref in refs.items() if isinstance(ref, TensorRef)}
        read_module(self.context, coord, file, trained, shared)
        if grid.sharded_model:
            read_frozen_slices(self.context, coord, members, len(members))
        else:
            read_frozen(self.context, coord, file)
        for name, shape in trained.items():
            self.context.shards.put(name, coord, shape, "trained", file.name)

    def _put_in_order(self, models: Sequence[Sequence[RankFile]]) -> None:
        """Remove aliases, and sort by layer for a pipeline, whose layer files DeepSpeed does not copy."""
        shards = self.context.shards
        shards.roles = {name: role for name, role in shards.roles.items() if name not in shards.aliases}
        if self.context.pipeline or any(module_tensors(members[0]) for members in models):
            return
        lost = sorted(_buffer_names(models))
        shards.roles = dict(
            sorted(
                shards.roles.items(),
                key=lambda item: -1 if (layer := step_files.layer_number(item[0])) is None else layer,
            )
        )
        self.context.note(
            "universal-no-module",
            "a universal folder does not contain a pipeline's layer files: module weights are missing"
            + (f", and {len(lost)} buffers are lost ({first_few(lost, 5)})" if lost else ""),
        )

    def _add_states(self, parameters: dict[str, Parameter], folders: Mapping[str, StateFolder]) -> None:
        problems, aliases = self.context.problems, self.context.shards.aliases
        copies = 0
        for name, folder in folders.items():
            parameter = parameters.get(name)
            if not folder.has_moments and (name in aliases or (parameter is not None and parameter.role != "trained")):
                copies += 1
                continue
            if parameter is None:
                parameter = parameters[name] = self._unknown(folder)
            for kind, path in folder.kinds.items():
                shape = parameter.shape if kind != STEP else None
                try:
                    atom = read_state(self.context.files, name, kind, path, shape)
                except (IntegrityError, StorageError) as error:
                    if not self.options.tolerant or kind == MASTER:
                        raise
                    self.lost[path] = error.what
                    continue
                if atom is None:
                    continue
                if kind != STEP and atom.shape not in ((), parameter.shape):
                    problems.add(f"{path}: shape {list(atom.shape)}, but parameter {name} has {list(parameter.shape)}")
                kind = WEIGHT if kind == MASTER and parameter.role != "trained" else kind
                parameter.atoms[kind] = atom if kind == atom.kind else replace(atom, kind=kind)
            order = sorted(parameter.atoms, key=lambda kind: (kind != WEIGHT, kind != MASTER))
            parameter.atoms = {kind: parameter.atoms[kind] for kind in order}
        for name, parameter in parameters.items():
            if parameter.role == "trained" and MASTER not in parameter.atoms:
                problems.add(f"parameter {name} is trained, but {step_files.STATES_FOLDER}/{name}/fp32.pt is missing")
        if copies:
            self.context.note(
                "universal-copies",
                f"{copies} folders below {step_files.STATES_FOLDER}/ are upcast copies of buffers, aliases and frozen"
                " parameters: not used",
            )

    def _unknown(self, folder: StateFolder) -> Parameter:
        """The parameter of a state folder that no model file lists: trained if it has optimizer states."""
        text = f"{folder.name}: no model file lists it; the shape was taken from its state file"
        self.context.note("universal-unlisted", text)
        atom = read_state(self.context.files, folder.name, MASTER, next(iter(folder.kinds.values())), None)
        shape = atom.shape if atom is not None else ()
        role: Any = "trained" if folder.has_moments else "frozen"
        return Parameter(folder.name, shape, role, rule_origin="universal: whole")

    def _read_optimizer(
        self,
        parameters: Mapping[str, Parameter],
        optimizer: RankFile,
        models: Sequence[Sequence[RankFile]],
        grid: RankGrid,
    ) -> None:
        states = dict_or_empty(lookup(optimizer.tree, "optimizer_state_dict", "state"))
        for index in range(0, len(models), grid.tp):
            shapes = param_shapes(models[index][0], None) or []
            self.context.shards.groups[RankCoord(index // grid.tp, 0)] = read_groups(self.context, optimizer, shapes)
            # ZeRO-3 keeps the step here, by sub-group, and not in the folder of the parameter.
            for sub_group, names in enumerate(shapes):
                value = lookup(states.get(sub_group), STEP)
                number = stored_scalar(optimizer, value, 0) if value is not None else None
                for name in names:
                    if number is not None and name in parameters and STEP not in parameters[name].atoms:
                        fragments = scalar_fragments(Rank(), number)
                        parameters[name].atoms[STEP] = Atom(name, STEP, (), number.dtype, fragments)
        # Rank 0's shards under ZeRO-3 repeat part of the states in the folders of the parameters.
        self.context.claim_all([optimizer.mapping().get(ZERO3_MASTERS), states])


def _buffer_names(models: Sequence[Sequence[RankFile]]) -> set[str]:
    return {name for members in models for name in buffer_names(members[0])}


_MAX_FOLDER_DEPTH: Final = 8  # nested folders; deeper ones are not parameter names but cyclic links


@dataclass(slots=True)
class StateFolder:
    """The state files of one name. `kinds` maps the kind of state to the file's path relative to the root."""

    name: str
    kinds: dict[str, str] = field(default_factory=dict)

    @property
    def has_moments(self) -> bool:
        """Whether there are optimizer states. If not, the name may not be a trained parameter."""
        return bool(self.kinds.keys() - {MASTER})


def state_folders(root: Path, states: str) -> dict[str, StateFolder]:
    """Every folder of states below `root/states`, by parameter name, sorted. Names with `/` are nested folders."""
    found: dict[str, StateFolder] = {}
    with storage_errors(root / states):
        _find_state_folders(root, states, "", found)
    return found


def _find_state_folders(root: Path, states: str, above: str, found: dict[str, StateFolder]) -> None:
    with scan_folder(root / states / above) as entries:
        names = sorted(above + entry.name for entry in entries if entry.is_dir())
    for parameter in names:
        with scan_folder(root / states / parameter) as entries:
            files = {entry.name: entry.is_dir() for entry in entries}
        folder = StateFolder(parameter)
        for name in sorted(files):
            if name.endswith(step_files.STATE_SUFFIX) and not files[name]:
                stem = name.removesuffix(step_files.STATE_SUFFIX)
                kind = MASTER if stem == step_files.MASTER_FILE else kind_of_state(stem)
                folder.kinds[kind] = f"{states}/{parameter}/{name}"
        has_folders = any(files.values())
        if folder.kinds or not has_folders:
            found[parameter] = folder
        if has_folders and parameter.count("/") < _MAX_FOLDER_DEPTH:
            _find_state_folders(root, states, f"{parameter}/", found)


def read_state(files: RankFiles, name: str, kind: str, path: str, shape: Shape | None) -> Atom | None:
    """One state file as an atom of `shape` (None: as stored); None if it is a number of more than 64 bits.

    A tensor with the same number of elements but another shape (ZeRO-3 states are flat, fused ones may be viewed) gets
    `shape`. Any other shape stays as stored for the caller to check, and so does a number.
    """
    file = files.open(path)
    value = file.tree.get("param") if isinstance(file.tree, dict) else file.tree
    if isinstance(value, TensorRef) and (value.shape or kind != STEP):
        if shape is not None and value.shape and prod(shape) == value.numel and value.is_contiguous:
            return _state_atom(file, value, name, kind, shape)
        return _state_atom(file, value, name, kind, value.shape)
    number = stored_scalar(file, value, 0)
    if number is None and not isinstance(value, int):
        raise NotUnderstoodError(f"{path}: expected a tensor or a number, found {describe_value(value)}")
    return Atom(name, kind, (), number.dtype, scalar_fragments(Rank(), number)) if number is not None else None


def _state_atom(file: RankFile, ref: TensorRef, name: str, kind: str, shape: Shape) -> Atom:
    strides = None if ref.is_contiguous else ref.strides
    fragments = [Fragment(Region.all_of(shape), file.name, file.locate(ref).offset, ref.dtype, strides=strides)]
    return Atom(name, kind, shape, ref.dtype, fragments if ref.numel else ())


def read_groups(context: ReadContext, optimizer: RankFile, shapes: Sequence[Mapping[str, Shape]]) -> list[ParamGroup]:
    """Parameter groups of one pipeline stage; `shapes` has one dict per flat group (sub-group under ZeRO-3)."""
    found = optimizer.mapping().get("param_groups") or lookup(optimizer.tree, "optimizer_state_dict", "param_groups")
    stored = dicts_in(found)
    groups = [ParamGroup(group_hyper_parameters(context, optimizer, group), []) for group in stored]
    owners = flat_group_owners(stored)
    is_listed = sorted(owners) == list(range(len(shapes)))  # else groups correspond by position
    for index, names in enumerate(shapes):
        owner = owners[index] if is_listed else index
        if owner < len(groups):
            groups[owner].names.extend(names)
    return groups


def rules_from_states(context: ReadContext, user: RuleBook | None, folders: Mapping[str, StateFolder]) -> RuleBook:
    """Rules if the model files have none: the user's, those of the state files, or from whole and local shapes."""
    book = RuleBook()
    for name, folder in folders.items():
        path = folder.kinds.get(MASTER)
        named = user.find(name) if user is not None else None
        if named is not None:
            book.add(f"^{re.escape(name)}$", named.rule, named.origin)
        if named is not None or path is None or not folder.has_moments or name not in context.shards:
            continue
        tree = context.files.open(path).tree
        stored = _stored_rule(tree)
        local = next(iter(context.shards.row(name).values())).shape
        param = tree.get("param") if isinstance(tree, dict) else tree
        whole = param.shape if isinstance(param, TensorRef) else local
        origin = "as the state file says" if stored is not None else "whole and local shape compared"
        book.add(f"^{re.escape(name)}$", _effective_rule(stored, whole, local, tree), f"universal: {origin}")
    return book


def _stored_rule(tree: Any) -> Rule | None:
    """The rule that a state file records for its parameter; None if it does not (replicated, averaged, affine map)."""
    if not isinstance(tree, Mapping):
        return None
    dim = tree.get("cat_dim")
    fused = tree.get("sub_param_shape")
    if isinstance(fused, Inert):
        sizes, at = fused.get("shape"), fused.get("partition_dim")
        if isinstance(sizes, (list, tuple)) and isinstance(at, int) and -len(sizes) <= at < len(sizes):
            return fused_rule(at % len(sizes), sizes[at], None)
        return None
    parts = tree.get("param_n_sub_params")
    if isinstance(parts, int) and parts > 1:
        return Rule("split", dim if isinstance(dim, int) else 0, ratio=(1,) * parts)
    return Rule("split", dim) if isinstance(dim, int) else None


def _effective_rule(stored: Rule | None, whole: Shape, local: Shape, tree: Any) -> Rule:
    if stored is None or stored.cut != "split":
        dims = [dim for dim, (a, b) in enumerate(zip(whole, local, strict=False)) if a != b]
        return Rule("split", dims[0]) if len(dims) == 1 else REPLICATED
    if isinstance(tree, dict) and tree.get("vocab_tensor") and stored.dim == 0 and whole:
        return replace(stored, cut="vocab", true_size=whole[0])
    return stored
