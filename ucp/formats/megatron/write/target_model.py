"""How a parameter is spelled in the target: in a rank's module, and as a key of a sharded checkpoint.

The model as the target cuts it: the tensors of each rank's module, and the atoms that fill them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final

from ucp.containers.pickle_writer import NewTensor
from ucp.containers.torch_file_writer import RegionContent, new_tensor
from ucp.core.box import Box, Shape
from ucp.core.checkpoint import MASTER, WEIGHT, Atom, Checkpoint, Parameter
from ucp.core.dtypes import FLOAT32, DType, parse_dtype
from ucp.core.region import Region
from ucp.core.rules import REPLICATED, Rule, resolve
from ucp.errors import UsageError, first_few
from ucp.formats.megatron.job_arguments import JobArguments
from ucp.formats.megatron.mcore_modules import (
    block_of,
    expert_of,
    is_expert,
    is_prediction,
    layer_of,
    shift_expert,
    shift_layer,
    split_rule,
)
from ucp.formats.megatron.rank_layout import GlobalParam, ModuleRank, ModuleTensor, PackedParam, module_tensors
from ucp.formats.megatron.write.target_job import TargetJob
from ucp.formats.registry import WriteOptions

_FUSED_MLP: Final = (re.compile(r"\.pre_mlp_layernorm\.(weight|bias)$"), r".mlp.linear_fc1.layer_norm_\1")
_FUSED_ATTENTION: Final = (
    (re.compile(r"\.input_layernorm\.(weight|bias)$"), r".self_attention.linear_qkv.layer_norm_\1"),
)
_FUSED_LATENT: Final = (
    (re.compile(r"\.q_layernorm\.(weight|bias)$"), r".linear_q_up_proj.layer_norm_\1"),
    (re.compile(r"\.kv_layernorm\.(weight|bias)$"), r".linear_kv_up_proj.layer_norm_\1"),
)
_FUSED_DELTA: Final = ((re.compile(r"\.input_layernorm\.(weight|bias)$"), r".self_attention.in_proj.layer_norm_\1"),)
_FUSED_MIXER: Final = (
    re.compile(r"(\.layers\.\d+)\.norm\.(weight|bias)$"),
    r"\1.mixer.in_proj.layer_norm_\2",
)
_LAYER: Final = re.compile(r"^decoder\.layers\.\d+\.")
_EXPERT: Final = re.compile(r"\.experts\.local_experts\.\d+\.")
_FREQUENCIES: Final = ("moe_layer_freq", "linear_attention_freq")


@dataclass(frozen=True, slots=True)
class LayerTraits:
    """What the layer of a parameter is made of, as far as names depend on it."""

    has_experts: bool = False
    is_delta: bool = False  # a gated delta net in place of attention
    is_hybrid: bool = False  # of a model with Mamba's layers, which are never stacked


def name_in_module(name: str, arguments: JobArguments, layer: LayerTraits) -> str:
    """The name with its norm where the target's modules have it: Transformer Engine fuses some into linear layers."""
    if not arguments.has_transformer_engine:
        return name
    attention = _FUSED_LATENT if arguments.flag("multi_latent_attention") else _FUSED_ATTENTION
    if layer.is_delta:
        attention = _FUSED_DELTA
    for pattern, new in (*attention, _FUSED_MIXER) if layer.has_experts else (*attention, _FUSED_MIXER, _FUSED_MLP):
        name = pattern.sub(new, name)
    return name


@dataclass(frozen=True, slots=True)
class StackPosition:
    """A parameter in a sharded checkpoint: at `index` of the leading axes, of these lengths, of the tensor `key`."""

    key: str
    index: Shape
    lengths: Shape

    def box(self, box: Box) -> Box:
        """A block of the parameter as a block of the stack."""
        return Box((*self.index, *box.start), ((1,) * len(self.index)) + box.shape)

    def shard(self) -> str:
        """The suffix that an object at this place has."""
        index, lengths = self.index or (0,), self.lengths or (1,)
        return f"/shard_{'.'.join(map(str, index))}_{'.'.join(map(str, lengths))}"


def position_in_stack(name: str, arguments: JobArguments, of: LayerTraits) -> StackPosition:
    """Where a sharded checkpoint has a parameter or an extra state: layers and experts are axes.

    Norms are called as Transformer Engine calls them, whatever the implementation; not so with multi-latent attention.
    """
    layer, expert = layer_of(name), expert_of(name)
    if arguments.has_transformer_engine:
        key = name_in_module(name, arguments, of)
    elif arguments.flag("multi_latent_attention") or of.is_hybrid:
        key = name
    else:
        key = name
        for pattern, new in (*_FUSED_ATTENTION, _FUSED_MLP):
            key = pattern.sub(new, key)
    index: Shape = ()
    lengths: Shape = ()
    if layer is not None and has_equal_layers(arguments) and not of.is_hybrid:
        key = _LAYER.sub("decoder.layers.", key)
        index, lengths = (layer,), (arguments.layers or 0,)
    if expert is not None:
        key = _EXPERT.sub(".experts.experts.", key)
        index, lengths = (*index, expert), (*lengths, arguments.number("num_experts"))
    return StackPosition(key, index, lengths)


def has_equal_layers(arguments: JobArguments) -> bool:
    """Whether all layers are alike, so that megatron-core stacks them."""
    if arguments.flag("hetereogenous_dist_checkpoint") or arguments.fields.get("heterogeneous_layers_config_path"):
        return False
    every = (arguments.fields.get(name) for name in _FREQUENCIES)
    return all(value is None or (type(value) is int and value <= 1) for value in every)


_KNOWN: Final = re.compile(r"^(?:embedding|decoder|mtp\.layers\.\d+|output_layer)\.")
_NO_RULE_ORIGINS: Final = ("one tensor-parallel rank", "not cut in the checkpoint")  # origins of rules that nobody gave
_GROUPED_EXPERT: Final = re.compile(r"\.local_experts\.(\d+)\.linear_fc([12])\.(weight|bias)$")


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor of a rank's module under its name there."""

    name: str
    tensor: ModuleTensor
    shape: Shape
    parameter: Parameter  # the first that lies in it

    @property
    def is_trained(self) -> bool:
        return self.parameter.role == "trained"


class TargetModel:
    """The source's parameters, cut for a job."""

    def __init__(self, source: Checkpoint, job: TargetJob, options: WriteOptions) -> None:
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

    def layer(self, name: str) -> LayerTraits:
        """What the layer is made of that the parameter is of."""
        block = block_of(name)
        known = block is not None
        return LayerTraits(known and block in self._moe_blocks, known and block in self._delta_blocks, self.is_hybrid)

    def named_tensors(self, rank: ModuleRank) -> Iterator[NamedTensor]:
        """The tensors of one rank's module, in the module's order."""
        arguments = self.job.arguments
        firsts = {chunk.vp: chunk.first for chunk in self.job.chunks if chunk.pp == rank.pp}
        experts = rank.ep * (arguments.number("num_experts", 0) // arguments.ep)
        for tensor in module_tensors(rank, self.wholes, arguments):
            name = tensor.alias or tensor.packed_params[0].name
            parameter = self.source.parameters[tensor.packed_params[0].name]
            yield NamedTensor(
                self._local_name(name, tensor, firsts[tensor.chunk], experts), tensor, _shape(tensor), parameter
            )

    def _local_name(self, name: str, tensor: ModuleTensor, layers: int, experts: int) -> str:
        """The name in the rank's module: numbers are local, norms may be part of the next module."""
        arguments = self.job.arguments
        layer = self.layer(name)
        name = shift_layer(name, -layers)
        if is_expert(name) and tensor.packed_params[0].transposed:
            stem = name[: name.index(".local_experts.")]
            return f"{stem}.weight{1 if '.linear_fc1.' in name else 2}"
        if expert_of(name) is not None:
            name = shift_expert(name, -experts)
            if arguments.has_transformer_engine and arguments.flag("moe_grouped_gemm"):
                name = _GROUPED_EXPERT.sub(r".linear_fc\2.\3\1", name)
            return name
        return name_in_module(name, arguments, layer)

    def tensor(
        self, named_tensor: NamedTensor, kind: str, attributes: dict[str, Any] | None = None
    ) -> NewTensor | None:
        """One state of a tensor of the module; None where the source has none."""
        contents = self.fills(named_tensor.tensor, kind)
        if contents is None:
            return None
        atom = self.atom(named_tensor.tensor.packed_params[0].name, kind)
        assert atom is not None
        made = new_tensor(atom.dtype, named_tensor.shape, *contents)
        return replace(made, attributes=attributes) if attributes is not None else made

    def fills(self, tensor: ModuleTensor, kind: str) -> list[RegionContent] | None:
        """What one state of a tensor of the module is made of, end to end; None where the source has none."""
        contents: list[RegionContent] = []
        for packed in tensor.packed_params:
            atom = self.atom(packed.name, kind)
            if atom is None:
                return None
            region = _region(packed)
            if region.numel:
                contents.append(RegionContent(atom, region))
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
                f"{first_few(strange, 5)}: not parameters of a megatron-core decoder,"
                " so nothing says where they belong",
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
                if _has_no_rule(p) and split_rule(p.name, [p.shape], arguments, shapes.get) is None
            ]
            if uncut:
                raise UsageError(
                    f"no rule says how to cut {first_few(uncut, 5)} over tp={arguments.tp}",
                    hint="give one with --rules FILE",
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

    def _whole(self, parameter: Parameter) -> GlobalParam:
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
        return GlobalParam(shape, rule, self._dtype(parameter))

    def _dtype(self, parameter: Parameter) -> DType:
        """The dtype of a weight in the target: the model's own, unless the module keeps this one in another."""
        stored = parameter.atoms.get(WEIGHT)
        if stored is None:
            return self.dtype if MASTER in parameter.atoms else next(iter(parameter.atoms.values())).dtype
        return self.dtype if parameter.role == "trained" and stored.dtype == self._stored_dtype else stored.dtype

    def _rule(self, parameter: Parameter) -> Rule:
        """How the parameter is cut: as the source says, or as megatron-core does where nobody has said anything."""
        if not _has_no_rule(parameter):
            return parameter.rule

        def shape_of(name: str) -> Shape | None:
            other = self.source.parameters.get(name)
            return other.shape if other is not None else None

        rule = split_rule(parameter.name, [parameter.shape], self.job.arguments, shape_of)
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


def _has_no_rule(parameter: Parameter) -> bool:
    return parameter.rule == REPLICATED and parameter.rule_origin in _NO_RULE_ORIGINS


def _shape(tensor: ModuleTensor) -> Shape:
    """The declared shape. Grouped experts are one matrix, whatever their memory is."""
    first = tensor.packed_params[0]
    if not first.transposed:
        return first.shape
    count = len(tensor.packed_params)
    rows, columns = first.shape
    return (columns, count * rows) if ".linear_fc1." in first.name else (count * columns, rows)


def _region(packed: PackedParam) -> Region:
    at = 0
    for piece in packed.pieces:
        if piece.offset != at or piece.scale != 1.0:
            raise UsageError(f"parameter {packed.name}: its slices are cut in a way that cannot be written again")
        at += piece.box.numel
    if not packed.transposed:
        return Region.of(piece.box for piece in packed.pieces)
    return Region.of(_columns([piece.box for piece in packed.pieces]))


def _columns(boxes: Sequence[Box]) -> Iterator[Box]:
    """The transpose of a matrix that is made of these boxes, one above the other: column by column."""
    for column in range(boxes[0].shape[1]):
        for box in boxes:
            yield Box((box.start[0], box.start[1] + column), (box.shape[0], 1))
