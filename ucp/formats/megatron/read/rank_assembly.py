"""From holdings to parameters with atoms: which ranks' slices make the whole, which are copies of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from ucp.core.box import Shape, whole
from ucp.core.checkpoint import MASTER, WEIGHT, Atom, Fragment, Note, Parameter
from ucp.core.mesh import Rank
from ucp.core.rules import REPLICATED, Rule, RuleBook, SlicePiece, logical_shape, resolve, slice_pieces, whole_shape
from ucp.errors import InconsistentError
from ucp.formats.megatron.job_arguments import JobArguments
from ucp.formats.megatron.mcore_modules import (
    EMBEDDING,
    OUTPUT,
    RULE_ORIGIN,
    expert_of,
    is_expert,
    order_key,
    split_rule,
)
from ucp.formats.megatron.read.rank_shards import (
    MegatronRank,
    MegatronShard,
    MegatronShardTable,
    MegatronSlice,
    MegatronStored,
    fragments_of,
)
from ucp.formats.sharded.rule_inference import LocalSlice, RuleInference
from ucp.storage.local import SourceFiles

_RESTORE: Final = "restore the missing files; without them the checkpoint is not whole"

Row = list[tuple[MegatronRank, MegatronShard]]


class MegatronAssembly:
    """Makes the parameters of a checkpoint from what its ranks hold."""

    def __init__(
        self, holdings: MegatronShardTable, arguments: JobArguments, user: RuleBook | None, files: SourceFiles
    ) -> None:
        self._holdings = holdings
        self._arguments = arguments
        self._user = user
        self._files = files
        self.notes: list[Note] = []

    def parameters(self) -> dict[str, Parameter]:
        """Every parameter in the model's order."""
        cuts = {name: self._by_slice(name) for name in self._holdings}
        rulings = self._rulings(cuts)
        names = sorted(self._holdings, key=order_key)
        return {name: self._parameter(name, cuts[name], *rulings[name]) for name in names}

    def _by_slice(self, name: str) -> list[Row]:
        """The holders of a parameter by the slice that they hold; experts are cut by their own degree."""
        degree = self._arguments.etp if is_expert(name) else self._arguments.tp
        cut: list[Row] = [[] for _ in range(degree)]
        for holder, held in self._holdings.row(name):
            cut[holder.tp % degree].append((holder, held))
        lacking = [str(rank) for rank, row in enumerate(cut) if not row]
        if lacking:
            raise InconsistentError(
                f"parameter {name} is missing on tensor-parallel rank {', '.join(lacking)}", hint=_RESTORE
            )
        return cut

    def _rulings(self, cuts: Mapping[str, list[Row]]) -> dict[str, tuple[Rule, str]]:
        found: dict[str, tuple[Rule, str]] = {}
        open_names: dict[str, Sequence[LocalSlice]] = {}

        def shape_of(name: str) -> Shape | None:
            return cuts[name][0][0][1].shape if name in cuts else None

        for name, cut in cuts.items():
            local = [row[0][1].shape for row in cut]
            named = self._user.find(name) if self._user is not None else None
            rule = named.rule if named is not None else split_rule(name, local, self._arguments, shape_of)
            if rule is not None:
                found[name] = resolve(rule, local, name), named.origin if named is not None else RULE_ORIGIN
            elif len(local) == 1:
                found[name] = REPLICATED, "one tensor-parallel rank"
            else:
                open_names[name] = [_evidence(row) for row in cut]
        if open_names:
            for name, (rule, origin) in RuleInference(self._files).rules_for(open_names).items():
                local = [row[0][1].shape for row in cuts[name]]
                found[name] = resolve(rule, local, name), origin
                self.notes.append(Note("rule-inferred", f"{name}: {found[name][0]} ({origin})"))
        return found

    def _parameter(self, name: str, cut: list[Row], rule: Rule, origin: str) -> Parameter:
        padded = whole_shape(rule, [row[0][1].shape for row in cut], name)
        shape = logical_shape(rule, padded)
        for rank, row in enumerate(cut):
            odd = next((item for item in row if item[1].shape != row[0][1].shape), None)
            if odd is not None:
                raise InconsistentError(
                    f"parameter {name}: slice {rank} has shape {list(row[0][1].shape)} on {row[0][0]}, but"
                    f" {list(odd[1].shape)} on {odd[0]}"
                )
        parameter = Parameter(
            name,
            shape,
            self._holdings.roles[name],
            rule=rule,
            rule_origin=origin,
            padded_shape=padded if padded != shape else None,
            aliases=(OUTPUT,) if name == EMBEDDING and self._arguments.tied else (),
            stages=tuple(sorted({holder.pp for row in cut for holder, _ in row})),
            expert=expert_of(name),
        )
        slices = [slice_pieces(rule, padded, len(cut), rank, name) for rank in range(len(cut))]
        kinds = dict.fromkeys(kind for row in cut for _, held in row for kind in held.kinds)
        for kind in sorted(kinds, key=lambda kind: (kind != WEIGHT, kind != MASTER)):
            parameter.atoms[kind] = _atom(name, kind, shape, rule, cut, slices)
        for kind in dict.fromkeys(kind for row in cut for _, held in row for kind in held.scalars):
            parameter.atoms[kind] = _scalar_atom(name, kind, cut)
        return parameter


def _rank(holder: MegatronRank, name: str) -> Rank:
    return Rank(holder.pp, holder.tp, 0, holder.ep if is_expert(name) else None)


def _evidence(row: Row) -> LocalSlice:
    holder, held = row[0]
    part = MegatronSlice((SlicePiece(whole(held.shape), 0),), held.shape, _rank(holder, held.name))
    return LocalSlice(held.shape, fragments_of([(part, held.kinds[WEIGHT])]))


def _atom(
    name: str, kind: str, shape: Shape, rule: Rule, cut: list[Row], slices: Sequence[tuple[SlicePiece, ...]]
) -> Atom:
    """The first holder of every slice makes the whole; every further one is a copy."""
    main: list[tuple[MegatronSlice, MegatronStored]] = []
    copies: list[tuple[MegatronSlice, MegatronStored]] = []
    for rank, row in enumerate(cut):
        held = [
            (MegatronSlice(slices[rank], h.shape, _rank(holder, name)), h.kinds[kind])
            for holder, h in row
            if kind in h.kinds
        ]
        if not held:
            raise InconsistentError(f"parameter {name}: tensor-parallel rank {rank} has no '{kind}'", hint=_RESTORE)
        if rule.cut == "replicated" and rank:
            copies += held
        else:
            main.append(held[0])
            copies += held[1:]
    dtypes = {stored.dtype for _, stored in (*main, *copies)}
    if len(dtypes) > 1:
        listed = ", ".join(sorted(map(str, dtypes)))
        raise InconsistentError(f"parameter {name}: '{kind}' has a different dtype on different ranks: {listed}")
    replicas: list[Sequence[Fragment]] = [fragments_of([copy]) for copy in copies]
    return Atom(name, kind, shape, main[0][1].dtype, fragments_of(main), tuple(replicas))


def _scalar_atom(name: str, kind: str, cut: list[Row]) -> Atom:
    held = [(holder, h.scalars[kind]) for row in cut for holder, h in row if kind in h.scalars]
    fragments = [(scalar.fragment(_rank(holder, name)),) for holder, scalar in held]
    return Atom(name, kind, (), held[0][1].dtype, fragments[0], tuple(fragments[1:]))
