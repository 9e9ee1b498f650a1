"""The model as the target cuts it: the tensors of each rank's module, and the atoms that fill them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final

from ucp.errors import UsageError
from ucp.files.torchzip_writer import Fill, NewTensor, new_tensor
from ucp.formats.megatron.emit.job import Job
from ucp.formats.megatron.emit.spelling import Layer, in_module
from ucp.formats.megatron.local_module import Lodger, ModuleRank, ModuleTensor, Whole, module_of
from ucp.formats.megatron.names import (
    block_of,
    expert_of,
    is_expert,
    is_prediction,
    with_expert_after,
    with_layer_after,
)
from ucp.formats.megatron.splits import rule_of
from ucp.formats.registry import WriteOptions
from ucp.model.box import Box, Shape
from ucp.model.checkpoint import MASTER, WEIGHT, Atom, Checkpoint, Parameter
from ucp.model.dtypes import FLOAT32, DType, parse_dtype
from ucp.model.region import Region
from ucp.model.rules import REPLICATED, Rule, resolve

_KNOWN: Final = re.compile(r"^(?:embedding|decoder|mtp\.layers\.\d+|output_layer)\.")
_UNCUT: Final = ("one tensor-parallel rank", "not cut in the checkpoint")  # origins of rules that nobody gave
_GROUPED_EXPERT: Final = re.compile(r"\.local_experts\.(\d+)\.linear_fc([12])\.(weight|bias)$")


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tensor of a rank's module under its name there."""

    name: str
    tensor: ModuleTensor
    shape: Shape
    parameter: Parameter  # the first that lies in it

    @property
    def is_trained(self) -> bool:
        return self.parameter.role == "trained"


class Model:
    """The source's parameters, cut for a job."""

    def __init__(self, source: Checkpoint, job: Job, options: WriteOptions) -> None:
        self.source = source
        self.job = job
        self.lost_padding: set[str] = set()  # vocabularies that got rows which the source has not
        named = source.details.get("dtype")
        self._stored_dtype = (parse_dtype(named) if isinstance(named, str) else None) or FLOAT32
        self.dtype = options.dtype or self._stored_dtype  # of the module's weights
        self._options = options
        self._atoms: dict[tuple[str, str], Atom | None] = {}
        self._rules = {p.name: self._rule(p) for p in source.parameters.values()}
        self._check()
        self.wholes = {p.name: self._whole(p) for p in source.parameters.values() if p.atoms}
        self._moe_blocks = {block_of(name) for name in self.wholes if ".router." in name}
        self._delta_blocks = {block_of(name) for name in self.wholes if name.endswith(".self_attention.A_log")}
        self.is_hybrid = any(name.endswith(".mixer.A_log") for name in self.wholes)

    @property
    def vocabulary(self) -> int | None:
        """The padded size of the vocabulary, or None where nothing is cut by it."""
        return next((w.shape[w.rule.dim] for w in self.wholes.values() if w.rule.cut == "vocab"), None)

    def layer(self, name: str) -> Layer:
        """What the layer is made of that the parameter is of."""
        block = block_of(name)
        known = block is not None
        return Layer(known and block in self._moe_blocks, known and block in self._delta_blocks, self.is_hybrid)

    def tenants(self, rank: ModuleRank) -> Iterator[Tenant]:
        """The tensors of one rank's module, in the module's order."""
        arguments = self.job.arguments
        firsts = {chunk.vp: chunk.first for chunk in self.job.chunks if chunk.pp == rank.pp}
        experts = rank.ep * (arguments.number("num_experts", 0) // arguments.ep)
        for tensor in module_of(rank, self.wholes, arguments):
            name = tensor.alias or tensor.lodgers[0].name
            parameter = self.source.parameters[tensor.lodgers[0].name]
            yield Tenant(
                self._local_name(name, tensor, firsts[tensor.chunk], experts), tensor, _shape(tensor), parameter
            )

    def _local_name(self, name: str, tensor: ModuleTensor, layers: int, experts: int) -> str:
        """The name in the rank's module: numbers are local, norms may be part of the next module."""
        arguments = self.job.arguments
        layer = self.layer(name)
        name = with_layer_after(name, -layers)
        if is_expert(name) and tensor.lodgers[0].transposed:
            stem = name[: name.index(".local_experts.")]
            return f"{stem}.weight{1 if '.linear_fc1.' in name else 2}"
        if expert_of(name) is not None:
            name = with_expert_after(name, -experts)
            if arguments.has_transformer_engine and arguments.flag("moe_grouped_gemm"):
                name = _GROUPED_EXPERT.sub(r".linear_fc\2.\3\1", name)
            return name
        return in_module(name, arguments, layer)

    def tensor(self, tenant: Tenant, kind: str, attributes: dict[str, Any] | None = None) -> NewTensor | None:
        """One state of a tensor of the module; None where the source has none."""
        contents = self.fills(tenant.tensor, kind)
        if contents is None:
            return None
        atom = self.atom(tenant.tensor.lodgers[0].name, kind)
        assert atom is not None
        made = new_tensor(atom.dtype, tenant.shape, *contents)
        return replace(made, attributes=attributes) if attributes is not None else made

    def fills(self, tensor: ModuleTensor, kind: str) -> list[Fill] | None:
        """What one state of a tensor of the module is made of, end to end; None where the source has none."""
        contents: list[Fill] = []
        for lodger in tensor.lodgers:
            atom = self.atom(lodger.name, kind)
            if atom is None:
                return None
            region = _region(lodger)
            if region.numel:
                contents.append(Fill(atom, region))
        return contents

    def atom(self, name: str, kind: str) -> Atom | None:
        """A state of a parameter, with the padding rows that the source still has; the same object each time."""
        if (name, kind) not in self._atoms:
            parameter = self.source.parameters[name]
            stored = parameter.atoms.get(kind)
            if kind == WEIGHT and (stored is None or stored.dtype != self.wholes[name].dtype):
                precise = parameter.atoms.get(MASTER, stored)
                assert precise is not None
                stored = replace(precise, kind=WEIGHT, dtype=self.wholes[name].dtype)
            if stored is None and kind == MASTER:
                stored = replace(parameter.atoms[WEIGHT], kind=MASTER, dtype=FLOAT32)
            self._atoms[name, kind] = stored and self._padded(parameter, stored)
        return self._atoms[name, kind]

    def _check(self) -> None:
        """Refuse what no module of megatron-core's has, and what nobody knows how to cut."""
        source, arguments = self.source, self.job.arguments
        strange = [name for name in source.parameters if not _KNOWN.match(name)]
        if strange:
            raise UsageError(
                f"{_some(strange)}: not parameters of a megatron-core decoder, so nothing says where they belong",
                hint="leave them out with --exclude, or map the names with --names FILE",
            )
        depths = {name.split(".")[2] for name in source.parameters if is_prediction(name)}
        if depths != {str(depth) for depth in range(arguments.prediction_layers)}:
            raise UsageError(
                f"the job has {arguments.prediction_layers} layers of multi-token prediction (mtp_num_layers), but the"
                f" source has parameters of {len(depths)}",
                hint="leave --include and --exclude out, or set mtp_num_layers with --model-config",
            )
        if not source.parameters:
            raise UsageError(f"{source.root}: there is nothing to write")
        if arguments.tp > 1:
            shapes = {name: parameter.shape for name, parameter in source.parameters.items()}
            uncut = [
                p.name
                for p in source.parameters.values()
                if _is_unsaid(p) and rule_of(p.name, [p.shape], arguments, shapes.get) is None
            ]
            if uncut:
                raise UsageError(
                    f"no rule says how to cut {_some(uncut)} over tp={arguments.tp}", hint="give one with --rules FILE"
                )

    def _padded(self, parameter: Parameter, atom: Atom) -> Atom:
        rule = self._rules[parameter.name]
        if rule.cut != "vocab" or atom.shape != parameter.shape:
            return atom
        padded = parameter.padded_shape
        if padded is not None and sum(f.region.numel for f in atom.fragments) >= prod(padded):
            atom = replace(atom, shape=padded)
        dim = rule.dim
        if atom.shape[dim] < self.wholes[parameter.name].shape[dim]:
            self.lost_padding.add(parameter.name)
        return atom

    def _whole(self, parameter: Parameter) -> Whole:
        """The parameter with its rule, padded by Megatron's rule where it is a vocabulary."""
        rule = self._rules[parameter.name]
        shape = parameter.padded_shape or parameter.shape
        if rule.cut == "pieces":
            if self.job.mesh.tp > 1:
                raise UsageError(
                    f"parameter {parameter.name}: its slices are spelled out for the source's ranks only"
                    f" ({parameter.rule_origin})",
                    hint="give a rule for it with --rules",
                )
            rule = REPLICATED
        if self.job.mesh.tp != self.source.mesh.tp:
            rule = replace(rule, widths=None)
        if rule.cut == "vocab":
            size = self._vocabulary(parameter, rule)
            shape = (*parameter.shape[: rule.dim], size, *parameter.shape[rule.dim + 1 :])
        return Whole(shape, rule, self._dtype(parameter))

    def _dtype(self, parameter: Parameter) -> DType:
        """The dtype of a weight in the target: the model's own, unless the module keeps this one in another."""
        stored = parameter.atoms.get(WEIGHT)
        if stored is None:
            return self.dtype if MASTER in parameter.atoms else next(iter(parameter.atoms.values())).dtype
        return self.dtype if parameter.role == "trained" and stored.dtype == self._stored_dtype else stored.dtype

    def _rule(self, parameter: Parameter) -> Rule:
        """How the parameter is cut: as the source says, or as megatron-core does where nobody has said anything."""
        if not _is_unsaid(parameter):
            return parameter.rule

        def shape_of(name: str) -> Shape | None:
            other = self.source.parameters.get(name)
            return other.shape if other is not None else None

        rule = rule_of(parameter.name, [parameter.shape], self.job.arguments, shape_of)
        return parameter.rule if rule is None else resolve(rule, [parameter.shape], parameter.name)

    def _vocabulary(self, parameter: Parameter, rule: Rule) -> int:
        real = parameter.shape[rule.dim]
        unit = self.job.arguments.number("make_vocab_size_divisible_by", 128) * self.job.mesh.tp
        like = self._options.like.parameters.get(parameter.name) if self._options.like is not None else None
        size = self._options.vocab_size
        if size is None and like is not None:
            size = (like.padded_shape or like.shape)[rule.dim]
        if size is None:
            size = -(-real // unit) * unit
        if size < real:
            raise UsageError(f"parameter {parameter.name}: a vocabulary of {real} does not fit a size of {size}")
        return size


def _is_unsaid(parameter: Parameter) -> bool:
    return parameter.rule == REPLICATED and parameter.rule_origin in _UNCUT


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _shape(tensor: ModuleTensor) -> Shape:
    """The declared shape. Grouped experts are one matrix, whatever their memory is."""
    first = tensor.lodgers[0]
    if not first.transposed:
        return first.shape
    count = len(tensor.lodgers)
    rows, columns = first.shape
    return (columns, count * rows) if ".linear_fc1." in first.name else (count * columns, rows)


def _region(lodger: Lodger) -> Region:
    at = 0
    for piece in lodger.pieces:
        if piece.offset != at or piece.scale != 1.0:
            raise UsageError(f"parameter {lodger.name}: its slices are cut in a way that cannot be written again")
        at += piece.box.numel
    if not lodger.transposed:
        return Region.of(piece.box for piece in lodger.pieces)
    return Region.of(_columns([piece.box for piece in lodger.pieces]))


def _columns(boxes: Sequence[Box]) -> Iterator[Box]:
    """The transpose of a matrix that is made of these boxes, one above the other: column by column."""
    for column in range(boxes[0].shape[1]):
        for box in boxes:
            yield Box((box.start[0], box.start[1] + column), (box.shape[0], 1))
