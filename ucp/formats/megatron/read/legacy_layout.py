"""The legacy `torch` layout: one folder per tensor-, pipeline- and expert-parallel rank, each with local names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Final, Literal

from ucp.containers.inert import TensorRef, check_no_foreign_tensor
from ucp.core.box import Shape
from ucp.core.checkpoint import WEIGHT, Note, Parameter, ParamGroup, Rank, Role
from ucp.core.rules import REPLICATED, RuleBook, resolve
from ucp.errors import InconsistentError, NotUnderstoodError, UcpError
from ucp.formats.megatron import mcore_modules as mcore
from ucp.formats.megatron.folder import MODEL_FILE, OPTIMIZER_FILE, OPTIMIZER_MISSING, model_files, rank_folder_name
from ucp.formats.megatron.job_arguments import JobArguments, arguments_of
from ucp.formats.megatron.read.legacy_files import (
    GroupMatcher,
    MegatronFile,
    ModuleEntry,
    chunks_of,
    count_layers,
    layer_wise_files,
    params_of_entry,
    read_buffers,
    read_layer_wise,
    read_states,
)
from ucp.formats.sharded.assembly import ONE_RANK_ORIGIN, Assembler, ResolvedRule, infer_rules, merge_groups
from ucp.formats.sharded.lost_files import LostFiles, nearest
from ucp.formats.sharded.rank_identity import (
    COPY_HINT,
    TRUST_HINT,
    GridPosition,
    RankContent,
    find_copies,
    misplaced_ranks,
    rank_tensors,
)
from ucp.formats.sharded.shard_table import Problems, RankCoord, Shard, ShardTable
from ucp.storage.local import SourceFiles

_RESTORE: Final = "restore the files of one save; nothing was written"
_RESTORE_MISSING: Final = "restore the missing files; without them the checkpoint is incomplete"
_COPY_MISSING: Final = "copy it from the node that wrote it; without it the checkpoint is incomplete"
_OLDEST_VERSION: Final = 2.0  # before it, q, k and v were interleaved in other ways
_EQUAL_ARGUMENTS: Final = (  # of all ranks
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "padded_vocab_size",
)


@dataclass(slots=True)
class MegatronRankFiles:
    """The opened files of one rank. `place` is the name of a model file at its position of the grid."""

    place: str
    model: MegatronFile
    chunks: list[dict[str, Any]]
    optimizer: MegatronFile | None = None
    layer_wise: dict[int, MegatronFile] = field(default_factory=dict)  # by data-parallel rank


class LegacyShardTable(ShardTable):
    """The shard table of rank files. Experts have a tensor-parallel degree of their own."""

    def __init__(self, problems: Problems, arguments: JobArguments) -> None:
        super().__init__(problems)
        self._arguments = arguments

    def degree(self, name: str) -> int:
        """Return the number of slices of a parameter."""
        return self._arguments.etp if mcore.is_expert(name) else self._arguments.tp

    def slice_index(self, name: str, coord: RankCoord) -> int:
        return coord.tp % self.degree(name)


class LegacyReader:
    """Reads the rank files of one iteration.

    Order of calls: construct (opens and checks every file, fills the table), `parameters`, `groups`, `notes`.
    """

    def __init__(
        self,
        root: Path,
        source: SourceFiles,
        trusted: Literal["recorded", "file-names"] | None = None,
        lost: LostFiles | None = None,
    ) -> None:
        """With `lost`, files that are missing or cannot be opened are added to it instead of raising an error."""
        self.root = root
        self._lost = lost
        places = {numbers: f"{folder}/{MODEL_FILE}" for numbers, folder in model_files(root).items()}
        opened = {numbers: file for numbers, name in places.items() if (file := self._open(name)) is not None}
        if not opened:
            raise InconsistentError(f"{root}: no rank's {MODEL_FILE} can be opened", hint=_RESTORE_MISSING)
        first = next(iter(opened.values()))
        self.arguments: JobArguments = arguments_of(first.mapping().get("args"), str(root / first.name))
        self.notes: list[Note] = []
        self._problems = Problems(str(root))
        self._table = LegacyShardTable(self._problems, self.arguments)
        _check_same_save(list(opened.values()), self.arguments)
        if trusted == "recorded" or (trusted is None and lost is None):
            opened = self._placed_by_writer(opened, trusted == "recorded")
        self.files = {
            _coord_of_folder(numbers, self.arguments, file.name): self._open_beside(places[numbers], file)
            for numbers, file in opened.items()
        }
        if lost is not None:
            self._add_stand_ins(lost)
        else:
            self._check_grid()
        if trusted != "file-names" and lost is None:
            self._check_copies(source)
        self._fill_table()

    def parameters(self, user: RuleBook | None, files: SourceFiles) -> dict[str, Parameter]:
        """Return every parameter, in the order of the model."""
        self._check_shards()
        self._problems.raise_any(_RESTORE_MISSING)
        parameters = Assembler(self._table).parameters(self._rules(user, files))
        self._problems.raise_any(_RESTORE_MISSING)
        return parameters

    def groups(self, parameters: Mapping[str, Parameter]) -> list[ParamGroup]:
        """Return the parameter groups; those of ranks with the same settings are one."""
        by_rank = [groups for _, groups in sorted(self._table.groups.items())]
        return merge_groups(by_rank, parameters, by_position=False)

    def _placed_by_writer(
        self, opened: dict[GridPosition, MegatronFile], trusted: bool
    ) -> dict[GridPosition, MegatronFile]:
        """The model files by position, checked against the global ranks that wrote them, or `trusted` to follow these.

        Tools that write all files in one process leave the same rank in each, which says nothing.
        """
        writers = {
            numbers: rank for numbers, file in opened.items() if type(rank := _arguments(file).get("rank")) is int
        }
        by_rank: dict[int, MegatronFile] = {}
        if len(set(writers.values())) > 1:
            for numbers, rank in writers.items():
                other = by_rank.setdefault(rank, opened[numbers])
                if other is not opened[numbers]:
                    name = opened[numbers].name
                    text = f"{name}: was written by rank {rank}, and so was {other.name}: one is a copy of the other"
                    self._problems.add(text, "grid", name, Rank(tp=numbers[0]))
        self._problems.raise_any(_RESTORE)
        if len(writers) != len(by_rank):
            return opened
        wrong = dict(misplaced_ranks(writers))
        if trusted:
            return {**opened, **{numbers: by_rank[rank] for numbers, rank in wrong.items()}}
        for numbers, rank in wrong.items():
            name = opened[numbers].name
            text = f"{name}: was written by rank {writers[numbers]}, where a file of rank {rank} belongs"
            self._problems.add(f"{text} ({by_rank[rank].name})", "grid", name, Rank(tp=numbers[0]))
        self._problems.raise_any(TRUST_HINT)
        return opened

    def _check_copies(self, source: SourceFiles) -> None:
        """Check that no rank's files are copies of another's.

        If every model file has the rank that wrote it, only tensor-parallel ranks are compared: experts or layers that
        were made as copies of others are equal before the first step.
        """
        are_known = len({_arguments(files.model).get("rank") for files in self.files.values()}) == len(self.files)
        has_steps = bool(next(iter(self.files.values())).model.mapping().get("iteration"))
        groups: dict[tuple[str, int, int], list[RankContent]] = {}
        for coord, files in sorted(self.files.items()):
            pp, ep = (coord.pp, coord.ep) if are_known else (0, 0)
            model = RankContent(files.model.name, files.model.archive, rank_tensors(files.chunks))
            groups.setdefault(("model", pp, ep), []).append(model)
            if files.optimizer is not None:
                file = files.optimizer
                optimizer = RankContent(file.name, file.archive, rank_tensors(file.tree))
                groups.setdefault(("optimizer", 0, 0 if has_steps else ep), []).append(optimizer)
        for contents in groups.values():
            for name, other in find_copies(contents, source):
                text = f"{name}: has the same tensors as {other}: one is a copy of the other"
                self._problems.add(text, "grid", name)
        self._problems.raise_any(COPY_HINT)

    def _open(self, name: str) -> MegatronFile | None:
        """Open a file; None if it cannot be opened, and the reader is tolerant."""
        try:
            return MegatronFile(self.root, name)
        except UcpError as error:
            if self._lost is None:
                raise
            self._lost.add(name, error.what)
            return None

    def _add_stand_ins(self, lost: LostFiles) -> None:
        """Replace lost files by those of another tensor- or expert-parallel rank of the same pipeline stage."""
        survivors = dict(self.files)
        has_optimizer = [coord for coord, files in survivors.items() if files.optimizer is not None]
        for coord in self._missing_ranks():
            folder = self._rank_folder(coord)
            found = nearest(coord, survivors, (1, 2))
            model = survivors[found].model if found is not None else None
            name = f"{folder}/{MODEL_FILE}"
            lost.add(name, f"{self.root / name}: is missing", model.name if model is not None else None)
            if found is not None and model is not None:
                self.files[coord] = MegatronRankFiles(name, model.standing_in_for(name), survivors[found].chunks)
        for coord, files in self.files.items():
            found = nearest(coord, has_optimizer, (1, 2)) if files.optimizer is None else None
            optimizer = survivors[found].optimizer if found is not None else None
            name = f"{Path(files.model.name).parent}/{OPTIMIZER_FILE}"
            if optimizer is not None:
                lost.add(name, f"{self.root / name}: is missing", optimizer.name)
                files.optimizer = optimizer.standing_in_for(name)
            elif files.optimizer is None and has_optimizer:
                lost.add(name, f"{self.root / name}: is missing")

    def _open_beside(self, place: str, model: MegatronFile) -> MegatronRankFiles:
        """Open what is next to a model file."""
        folder = str(Path(model.name).parent)
        has_optimizer = (self.root / folder / OPTIMIZER_FILE).is_file()
        return MegatronRankFiles(
            place,
            model,
            chunks_of(model.mapping(), model.name),
            self._open(f"{folder}/{OPTIMIZER_FILE}") if has_optimizer else None,
            layer_wise_files(self.root, folder) if self.arguments.is_layer_wise else {},
        )

    def _check_grid(self) -> None:
        """Check that every rank has its folder, and its optimizer file if others have one."""
        arguments = self.arguments
        for coord in self._missing_ranks():
            raise InconsistentError(
                f"{self.root}: rank folder {self._rank_folder(coord)} is missing (tp {arguments.tp} × pp"
                f" {arguments.pp} × ep {arguments.ep})",
                hint=_COPY_MISSING,
            )
        without = [files.model.name for files in self.files.values() if files.optimizer is None]
        if 0 < len(without) < len(self.files):
            raise InconsistentError(
                f"{self.root}: {OPTIMIZER_FILE} is missing next to {', '.join(without[:5])}, but other ranks have it",
                hint=_COPY_MISSING,
            )

    def _missing_ranks(self) -> Iterator[RankCoord]:
        """Yield the ranks without a folder.

        With fewer expert-tensor-parallel ranks than tensor-parallel ranks, not every tp rank writes for every ep rank.
        """
        arguments = self.arguments
        for pp, tp in product(range(arguments.pp), range(arguments.tp)):
            found = {coord.ep for coord in self.files if (coord.pp, coord.tp) == (pp, tp)}
            if arguments.etp == arguments.tp:
                yield from (RankCoord(pp, tp, ep) for ep in range(arguments.ep) if ep not in found)
            elif not found:
                yield RankCoord(pp, tp, 0)

    def _rank_folder(self, coord: RankCoord) -> str:
        arguments = self.arguments
        return rank_folder_name(
            (coord.tp, *((coord.pp,) if arguments.pp > 1 else ()), *((coord.ep,) if arguments.ep > 1 else ()))
        )

    def _fill_table(self) -> None:
        if self.arguments.tied:
            self._table.aliases[mcore.OUTPUT] = mcore.EMBEDDING
        offsets = self._layer_offsets()
        has_optimizer = False
        for coord, files in sorted(self.files.items()):
            entries = [
                entry
                for number, chunk in enumerate(files.chunks)
                for entry in self._entries(files.model, chunk, number, offsets[number, coord.pp], coord)
            ]
            trained = [entry for entry in entries if self._table.roles[entry.param_names[0]] == "trained"]
            has_optimizer = self._read_optimizer(coord, files, trained) or has_optimizer
        stored = [files.model.mapping().get("optimizer") for files in self.files.values()]
        if not has_optimizer and any(tree is not None for tree in stored):
            text = f"no optimizer state: there are no {OPTIMIZER_FILE} files, only weights were read"
            self.notes.append(Note(OPTIMIZER_MISSING, text))

    def _entries(
        self, file: MegatronFile, chunk: Mapping[str, Any], number: int, offsets: Mapping[str, int], coord: RankCoord
    ) -> list[ModuleEntry]:
        """Put the tensors of a model chunk into the table; `offsets` has the layers before it, by stack."""
        entries: list[ModuleEntry] = []
        for name, ref in chunk.items():
            if not isinstance(ref, TensorRef) or name.endswith("_extra_state"):
                check_no_foreign_tensor(ref, name, file.name)
                continue
            role: Role = "trained" if ref.dtype.family == "float" and not mcore.is_buffer(name) else "buffer"
            params = params_of_entry(chunk, name, offsets, coord.ep, self.arguments)
            shards: list[Shard] = []
            for param in params:
                # Ranks that only differ in ep hold copies of dense parameters, and different experts.
                at = RankCoord(coord.pp, coord.tp)
                shards.append(self._table.put(param.name, at, param.shape, role, file.name))
                expert = mcore.expert_of(param.name)
                if expert is not None:
                    self._table.experts[param.name] = expert, coord.ep
            entry = ModuleEntry(name, ref, number, params, shards)
            entry.add_state(WEIGHT, file, ref)
            entries.append(entry)
        return entries

    def _read_optimizer(self, coord: RankCoord, files: MegatronRankFiles, entries: list[ModuleEntry]) -> bool:
        """Add the optimizer states of one rank; False if it has none."""
        arguments, tree = self.arguments, files.model.mapping().get("optimizer")
        if files.optimizer is not None:
            groups = read_buffers(files.optimizer, files.model, tree, entries, coord.pp, arguments)
        elif files.layer_wise:
            groups = read_layer_wise(files.layer_wise, entries, coord, arguments)
        elif tree is not None and not arguments.is_distributed_optimizer:
            groups = read_states(files.model, tree, GroupMatcher(entries, arguments).next_of)
        else:
            return False
        self._table.groups[coord] = list(groups)
        return True

    def _layer_offsets(self) -> dict[tuple[int, int], dict[str, int]]:
        """Return the layers before each (chunk, stage): chunk 0 of all stages comes first, then chunk 1, …"""
        counts: dict[tuple[int, int], dict[str, int]] = {}
        for coord, files in self.files.items():
            for number, chunk in enumerate(files.chunks):
                here = count_layers(chunk)
                if counts.setdefault((number, coord.pp), here) != here:
                    raise InconsistentError(
                        f"{self.root / files.model.name}: holds {sum(here.values())} layers, other ranks of its stage"
                        f" {sum(counts[number, coord.pp].values())}",
                        hint=_RESTORE,
                    )
        self._assume_lost_layers(counts)
        offsets: dict[tuple[int, int], dict[str, int]] = {}
        total: dict[str, int] = {}
        for place in sorted(counts):
            offsets[place] = dict(total)
            for stack, count in counts[place].items():
                total[stack] = total.get(stack, 0) + count
        expected = self.arguments.layers
        if self._lost is None and expected is not None and len(total) == 1 and sum(total.values()) != expected:
            raise InconsistentError(
                f"{self.root}: the rank files hold {sum(total.values())} layers, but the job had {expected}",
                hint=_RESTORE,
            )
        return offsets

    def _assume_lost_layers(self, counts: dict[tuple[int, int], dict[str, int]]) -> None:
        """Distribute the layers that no surviving file has evenly over the stages of which all files are lost."""
        if self._lost is None:
            return
        chunks = {number for number, _ in counts}
        lost = [(number, pp) for number in chunks for pp in range(self.arguments.pp) if (number, pp) not in counts]
        for stack in {stack for here in counts.values() for stack in here} if lost else ():
            known = sum(here.get(stack, 0) for here in counts.values())
            share = max(0, (self.arguments.layers or 0) - known) // len(lost)
            for place in lost:
                counts.setdefault(place, {})[stack] = share

    def _check_shards(self) -> None:
        """Report parameters and states that a tensor-parallel rank lacks, and copies of different shapes."""
        for name in self._table.roles:
            row = self._table.row(name)
            slices: dict[int, list[tuple[RankCoord, Shard]]] = {}
            for coord, shard in row.items():
                slices.setdefault(self._table.slice_index(name, coord), []).append((coord, shard))
            missing = [str(index) for index in range(self._table.degree(name)) if index not in slices]
            if missing:
                self._problems.add(f"parameter {name} is missing on tensor-parallel rank {', '.join(missing)}")
                continue
            kinds = {kind for shard in row.values() for kind in shard.kinds if kind not in shard.shapes}
            for index, ((first, shard), *others) in sorted(slices.items()):
                for coord, other in others:
                    if other.shape != shard.shape:
                        self._problems.add(
                            f"parameter {name}: slice {index} has shape {list(shard.shape)} on {first}, but"
                            f" {list(other.shape)} on {coord}"
                        )
                for kind in sorted(kinds.difference(shard.kinds, *(other.kinds for _, other in others))):
                    self._problems.add(f"parameter {name}: tensor-parallel rank {index} has no '{kind}'")

    def _rules(self, user: RuleBook | None, files: SourceFiles) -> dict[str, ResolvedRule]:
        rows = {name: self._table.first_stage(name) for name in sorted(self._table.roles, key=mcore.order_key)}

        def shape_of(name: str) -> Shape | None:
            return rows[name][0].shape if name in rows else None

        rules: dict[str, ResolvedRule] = {}
        for name, row in rows.items():
            shapes = [shard.shape for shard in row]
            named = user.find(name) if user is not None else None
            rule = named.rule if named is not None else mcore.split_rule(name, shapes, self.arguments, shape_of)
            if rule is not None:
                origin = named.origin if named is not None else mcore.RULE_ORIGIN
                rules[name] = ResolvedRule(resolve(rule, shapes, name), origin)
            elif len(row) == 1:
                rules[name] = ResolvedRule(REPLICATED, ONE_RANK_ORIGIN)
        unknown = {name: row for name, row in rows.items() if name not in rules}
        rules.update(infer_rules(files, unknown, lambda id, text: self.notes.append(Note(id, text))))
        return {name: rules[name] for name in rows}


def _arguments(file: MegatronFile) -> Mapping[str, Any]:
    return arguments_of(file.mapping().get("args"), file.name).fields


def _coord_of_folder(numbers: tuple[int, ...], arguments: JobArguments, file: str) -> RankCoord:
    """Return the rank of folder `mp_rank_TT[_PPP][_EEE]`: with two numbers, the arguments decide what the second is."""
    tp, *rest = numbers
    expected = (arguments.pp > 1) + (arguments.ep > 1)
    if len(rest) != expected and not (len(rest) == 1 and expected == 0):
        raise InconsistentError(
            f"{file}: its folder names {len(numbers)} numbers, but the job had pp {arguments.pp} and ep {arguments.ep}",
            hint=_RESTORE,
        )
    pp = rest.pop(0) if rest and (arguments.pp > 1 or expected == 0) else 0
    return RankCoord(pp, tp, rest.pop(0) if rest else 0)


def _check_same_save(files: list[MegatronFile], arguments: JobArguments) -> None:
    first, *others = files
    version = first.mapping().get("checkpoint_version", 0)
    if not isinstance(version, (int, float)) or version < _OLDEST_VERSION:
        raise NotUnderstoodError(
            f"{first.name}: has checkpoint version {version}, from before 2021",
            hint="load and save it again with a Megatron of 2021 or later",
        )
    for file in others:
        for key in ("iteration", "checkpoint_version"):
            if file.mapping().get(key) != first.mapping().get(key):
                raise InconsistentError(
                    f"{file.name}: {key} {file.mapping().get(key)}, but {first.name} has {first.mapping().get(key)}:"
                    " files of different saves are mixed",
                    hint=_RESTORE,
                )
        theirs = arguments_of(file.mapping().get("args"), file.name)
        for key in _EQUAL_ARGUMENTS:
            if theirs.fields.get(key) != arguments.fields.get(key):
                raise InconsistentError(
                    f"{file.name}: was saved with {key} {theirs.fields.get(key)}, but {first.name} with"
                    f" {arguments.fields.get(key)}",
                    hint=_RESTORE,
                )
