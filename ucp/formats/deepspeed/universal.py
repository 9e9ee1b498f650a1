"""DeepSpeed's universal folders (the output of `ds_to_universal`) as a source.

`zero/<parameter>/<state>.pt` holds whole states. The model files beside it were copied unchanged: they give names,
shapes, roles, rules and the module's own weights, still cut as the source was. A folder below `zero/` proves nothing
about its name: the converter also makes one, upcast and without moments, for every buffer, alias and frozen parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ucp.errors import NotUnderstoodError
from ucp.files.inert import TensorRef
from ucp.files.local import SourceFiles
from ucp.files.paths import files_below, scan
from ucp.formats.deepspeed.assemble import assemble, merge_groups
from ucp.formats.deepspeed.description import framework_of, step_of, universal_details
from ucp.formats.deepspeed.extras import TreeCarrier
from ucp.formats.deepspeed.fragments import scalar_fragments
from ucp.formats.deepspeed.grid import Grid, check_same_save, find_grid
from ucp.formats.deepspeed.holdings import Holder, Holdings
from ucp.formats.deepspeed.names import StepFiles, model_name, sharded_model_name, sort_names
from ucp.formats.deepspeed.pipeline import StageNames, read_layers
from ucp.formats.deepspeed.problems import Problems
from ucp.formats.deepspeed.reading import Reading
from ucp.formats.deepspeed.rulings import rule_all
from ucp.formats.deepspeed.shards import RankFile, RankFiles, shapes_of
from ucp.formats.deepspeed.ucinfo import speaks_of_tp
from ucp.formats.deepspeed.universal_folder import OPTIMIZER_STATE, STATES, find, recognises
from ucp.formats.deepspeed.universal_optimizer import read_groups, shards, steps, zero_stage
from ucp.formats.deepspeed.universal_rules import rules_of_states
from ucp.formats.deepspeed.universal_states import StateFolder, read_state, state_folders
from ucp.formats.deepspeed.weights import buffers_of, module_of, read_frozen, read_module, shared_of
from ucp.formats.deepspeed.zero3 import read_frozen_slices
from ucp.formats.registry import ReadOptions
from ucp.model.box import Shape
from ucp.model.checkpoint import MASTER, STEP, WEIGHT, Atom, Checkpoint, Extras, Parameter
from ucp.model.layout import Mesh, Rank

__all__ = ["read", "recognises"]

_HINT: Final = "convert the source checkpoint again, or look for a file of another save"


def read(path: Path, options: ReadOptions) -> Checkpoint:
    """Index a universal folder."""
    root = find(path, options.tag)
    with SourceFiles(root) as source:
        problems = Problems(str(root))
        reading = Reading("", RankFiles(root), source, problems, Holdings(problems))
        return _Universal(reading, root, options).read()


@dataclass(slots=True)
class _Universal:
    """One universal folder on its way into the index."""

    reading: Reading
    root: Path
    options: ReadOptions

    def read(self) -> Checkpoint:
        names = self._model_names()
        grid = self._grid(names)
        models = self._models(names, grid)
        folders = state_folders(self.root, STATES)
        first = models[0][0]
        shared = {alias: owner for members in models for alias, owner in shared_of(members[0]).items()}
        if names.layers:
            read_layers(self.reading, names.layers, {0: StageNames(_trained(models), _buffers(models))})
        for index, members in enumerate(models):
            self._read_model(Holder(index // grid.tp, index % grid.tp), members, folders, shared, grid)
        self._put_in_order(models)
        info = first.mapping().get("universal_checkpoint_info")
        info = info if isinstance(info, dict) else None
        rules = self.options.rules
        if grid.tp > 1 and not (info and speaks_of_tp(info)):
            rules = rules_of_states(self.reading, rules, folders)
        rulings = rule_all(self.reading, grid.tp, rules, info, first.name)
        parameters = assemble(self.reading, rulings, grid.tp)
        self._add_states(parameters, folders)
        optimizer = self._optimizer()
        if optimizer is not None:
            self._read_optimizer(parameters, optimizer, models, grid)
        self.reading.problems.raise_any(_HINT)
        groups = merge_groups(self.reading.holdings, parameters)
        stage = zero_stage(optimizer) if optimizer is not None else 1
        return Checkpoint(
            "deepspeed-universal",
            self.root,
            Mesh(grid.tp, grid.pp, grid.dp_world, 1, stage),
            parameters,
            framework=framework_of(first),
            step=step_of(first),
            groups=groups,
            extras=Extras(self._trees(models, optimizer)),
            notes=self.reading.notes,
            sizes=_sizes(self.root),
            details=universal_details(self.reading, first),
        )

    def _model_names(self) -> StepFiles:
        with scan(self.root) as entries:
            found = sort_names([entry.name for entry in entries if entry.is_file()])
        if found.model:  # a folder made for both families has both kinds; the plain ones hold the weights
            whole = len(found.model) == 1 and all(tp == 0 for _, tp in found.layers)
            return StepFiles(model=found.model, layers=found.layers if whole else {}, other=found.other)
        if found.sharded_model:
            return StepFiles(sharded_model=found.sharded_model, other=found.other)
        raise NotUnderstoodError(
            f"{self.root}: a universal folder without model files (mp_rank_*_model_states.pt)",
            hint="copy them from the checkpoint that it was made from",
        )

    def _grid(self, names: StepFiles) -> Grid:
        # The check for missing files is for native checkpoints, which have optimizer files: ours follows.
        grid = find_grid(names, self.reading.files, "", Problems(""))
        mps = range(max([*names.model, *(mp for _, mp in names.sharded_model), grid.mp - 1]) + 1)
        if names.model:
            missing = [model_name(mp) for mp in mps if mp not in names.model]
        else:
            wanted = [(dp, mp) for mp in mps for dp in range(grid.dp_world)]
            missing = [sharded_model_name(dp, mp) for dp, mp in wanted if (dp, mp) not in names.sharded_model]
        for name in missing:
            self.reading.problems.add(f"model file {name} is missing")
        self.reading.problems.raise_any("copy it from the checkpoint that the folder was made from")
        return grid

    def _models(self, names: StepFiles, grid: Grid) -> list[list[RankFile]]:
        """By model-parallel rank its model files: one, or one a data-parallel rank under ZeRO-3."""
        files = self.reading.files
        if names.model:
            models = [[files.open(names.model[mp])] for mp in range(grid.mp)]
        else:
            ranks = range(grid.dp_world)
            models = [[files.open(names.sharded_model[dp, mp]) for dp in ranks] for mp in range(grid.mp)]
        check_same_save({file.name: file for members in models for file in members}, {}, self.reading.problems)
        self.reading.problems.raise_any(_HINT)
        return models

    def _read_model(
        self,
        holder: Holder,
        members: Sequence[RankFile],
        folders: Mapping[str, StateFolder],
        shared: Mapping[str, str],
        grid: Grid,
    ) -> None:
        file = members[0]
        trained = {name: shape for group in _shapes(file) for name, shape in group.items()}
        if not trained:  # ZeRO off: what the optimizer kept anything for
            module = module_of(file)
            refs = {name: module.get(name) for name, folder in folders.items() if folder.has_moments}
            trained = {name: ref.shape for name, ref in refs.items() if isinstance(ref, TensorRef)}
        read_module(self.reading, holder, file, trained, shared)
        if grid.sharded_model:
            read_frozen_slices(self.reading, holder, members, len(members))
        else:
            read_frozen(self.reading, holder, file)
        for name, shape in trained.items():
            self.reading.holdings.put(name, holder, shape, "trained", file.name)

    def _put_in_order(self, models: Sequence[Sequence[RankFile]]) -> None:
        """Aliases out; and layer by layer for a pipeline, whose layer files DeepSpeed does not copy."""
        holdings = self.reading.holdings
        holdings.roles = {name: role for name, role in holdings.roles.items() if name not in holdings.aliases}
        if self.reading.pipeline or any(module_of(members[0]) for members in models):
            return
        lost = sorted(_buffers(models))
        holdings.roles = dict(sorted(holdings.roles.items(), key=lambda item: _layer(item[0])))
        self.reading.note(
            "universal-no-module",
            "a pipeline's layer files are not part of a universal folder: no module weights"
            + (
                f", and {len(lost)} buffers are lost ({', '.join(lost[:5])}{', …' if len(lost) > 5 else ''})"
                if lost
                else ""
            ),
        )

    def _add_states(self, parameters: dict[str, Parameter], folders: Mapping[str, StateFolder]) -> None:
        problems, aliases = self.reading.problems, self.reading.holdings.aliases
        made_up = 0
        for name, folder in folders.items():
            parameter = parameters.get(name)
            if not folder.has_moments and (name in aliases or (parameter is not None and parameter.role != "trained")):
                made_up += 1
                continue
            if parameter is None:
                parameter = parameters[name] = self._unknown(folder)
            for kind, path in folder.kinds.items():
                shape = parameter.shape if kind != STEP else None
                atom = read_state(self.reading.files, name, kind, path, shape)
                if atom is None:
                    continue
                if kind != STEP and atom.shape not in ((), parameter.shape):
                    problems.add(f"{path}: shape {list(atom.shape)}, but parameter {name} has {list(parameter.shape)}")
                kind = WEIGHT if kind == MASTER and parameter.role != "trained" else kind
                parameter.atoms[kind] = atom if kind == atom.kind else replace(atom, kind=kind)
            _sort_kinds(parameter)
        for name, parameter in parameters.items():
            if parameter.role == "trained" and MASTER not in parameter.atoms:
                problems.add(f"parameter {name} is trained, but {STATES}/{name}/fp32.pt is missing")
        if made_up:
            self.reading.note(
                "universal-copies",
                f"{made_up} folders below {STATES}/ upcast of buffers, aliases and frozen parameters: not used",
            )

    def _unknown(self, folder: StateFolder) -> Parameter:
        """A folder whose name no model file has: trained if the optimizer kept anything for it."""
        self.reading.note("universal-unlisted", f"{folder.name}: no model file lists it; its shape is the state file's")
        atom = read_state(self.reading.files, folder.name, MASTER, next(iter(folder.kinds.values())), None)
        shape = atom.shape if atom is not None else ()
        role: Any = "trained" if folder.has_moments else "frozen"
        return Parameter(folder.name, shape, role, rule_origin="universal: whole")

    def _optimizer(self) -> RankFile | None:
        if not (self.root / OPTIMIZER_STATE).is_file():
            self.reading.note("universal-no-optimizer", f"{OPTIMIZER_STATE} is missing: no hyper-parameters")
            return None
        return self.reading.files.open(OPTIMIZER_STATE)

    def _read_optimizer(
        self,
        parameters: Mapping[str, Parameter],
        optimizer: RankFile,
        models: Sequence[Sequence[RankFile]],
        grid: Grid,
    ) -> None:
        for index in range(0, len(models), grid.tp):
            shapes = _shapes(models[index][0])
            self.reading.holdings.groups[Holder(index // grid.tp, 0)] = read_groups(self.reading, optimizer, shapes)
            for name, number in steps(optimizer, shapes):
                if name in parameters and STEP not in parameters[name].atoms:
                    fragments = scalar_fragments(Rank(), number)
                    parameters[name].atoms[STEP] = Atom(name, STEP, (), number.dtype, fragments)
        for ref in shards(optimizer):
            self.reading.take(ref)

    def _trees(self, models: Sequence[Sequence[RankFile]], optimizer: RankFile | None) -> dict[str, Any]:
        """What model files and optimizer state say besides: without what became atoms or repeats it."""
        trees = {}
        for file in (*(file for members in models for file in members), *([optimizer] if optimizer else [])):
            tree = TreeCarrier(self.reading, file, file.name).carry()
            if tree is not None:
                trees[file.name] = tree
        return trees


def _trained(models: Sequence[Sequence[RankFile]]) -> dict[str, Shape]:
    return {name: shape for members in models for group in _shapes(members[0]) for name, shape in group.items()}


def _buffers(models: Sequence[Sequence[RankFile]]) -> set[str]:
    return {name for members in models for name in buffers_of(members[0])}


def _shapes(file: RankFile) -> list[dict[str, Shape]]:
    groups = file.mapping().get("param_shapes")
    if not isinstance(groups, (list, tuple)):
        return []
    return [shapes_of(group, f"{file.name}: param_shapes") for group in groups]


def _layer(name: str) -> int:
    number, dot, _ = name.partition(".")
    return int(number) if dot and number.isascii() and number.isdigit() else -1


def _sort_kinds(parameter: Parameter) -> None:
    order = sorted(parameter.atoms, key=lambda kind: (kind != WEIGHT, kind != MASTER))
    parameter.atoms = {kind: parameter.atoms[kind] for kind in order}


def _sizes(root: Path) -> dict[str, int]:
    return dict(files_below(root))
