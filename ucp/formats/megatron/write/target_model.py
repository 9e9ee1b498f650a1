"""The model of the target's job: the tensors of each rank's module, their names there, and the atoms that fill them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from ucp.containers.pickle_writer import NewTensor
from ucp.containers.torch_file_writer import RegionContent, new_tensor
from ucp.core.box import Box, Shape
from ucp.core.checkpoint import MASTER, WEIGHT, Atom, Checkpoint, Parameter
from ucp.core.dtypes import FLOAT32, DType, parse_dtype
from ucp.core.region import Region
from ucp.core.rules import REPLICATED, Rule, resolve
from ucp.errors import ImpossibleError, first_few
from ucp.formats.megatron import mcore_modules as mcore
from ucp.formats.megatron.job_arguments import JobArguments
from ucp.formats.megatron.rank_layout import GlobalParam, ModuleRank, ModuleTensor, module_tensors
from ucp.formats.megatron.write.target_job import TargetJob
from ucp.formats.registry import WriteOptions
from ucp.formats.sharded.assembly import ONE_RANK_ORIGIN
from ucp.formats.sharded.slicer import (
    ParamSlicer,
    master_atom,
    no_rule_error,
    region_of,
    weight_atom,
    with_vocab_padding,
)

_DECODER: Final = re.compile(r"^(?:embedding|decoder|mtp\.layers\.\d+|output_layer)\.")
_NO_RULE_ORIGINS: Final = (ONE_RANK_ORIGIN, mcore.NOT_CUT_ORIGIN)  # of rules that were not needed
_GROUPED_EXPERT: Final = re.compile(r"\.local_experts\.(\d+)\.linear_fc([12])\.(weight|bias)$")

# Norms that Transformer Engine fuses into the linear layer after them: name in atoms → name in the module.
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
    """The properties of a layer that the names of its parameters depend on."""

    has_experts: bool = False
    is_delta: bool = False  # a gated delta net in place of attention
    is_hybrid: bool = False  # of a model with Mamba layers, which are never stacked


def name_in_module(name: str, arguments: JobArguments, layer: LayerTraits) -> str:
    """Return the name of a parameter in the target's modules: Transformer Engine fuses norms into linear layers."""
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
    """Where a sharded checkpoint stores a parameter: at `index` of the leading axes of tensor `key`.

    `lengths` are those of the leading axes.
    """

    key: str
    index: Shape
    lengths: Shape

    def box(self, box: Box) -> Box:
        """Return a block of the parameter as a block of the stack."""
        return Box((*self.index, *box.start), ((1,) * len(self.index)) + box.shape)

    def object_suffix(self) -> str:
        """Return the suffix of the key of an object at this position."""
        index, lengths = self.index or (0,), self.lengths or (1,)
        return f"/shard_{'.'.join(map(str, index))}_{'.'.join(map(str, lengths))}"


def position_in_stack(name: str, arguments: JobArguments, traits: LayerTraits) -> StackPosition:
    """Return where a sharded checkpoint stores a parameter or an extra state: layers and experts are axes.

    Norms are named as in Transformer Engine even with the local implementation, except with multi-latent attention.
    """
    layer, expert = mcore.layer_of(name), mcore.expert_of(name)
    key = name
    if arguments.has_transformer_engine:
        key = name_in_module(name, arguments, traits)
    elif not arguments.flag("multi_latent_attention") and not traits.is_hybrid:
        for pattern, new in (*_FUSED_ATTENTION, _FUSED_MLP):
            key = pattern.sub(new, key)
    index: Shape = ()
    lengths: Shape = ()
    if layer is not None and has_equal_layers(arguments) and not traits.is_hybrid:
        key = _LAYER.sub("decoder.layers.", key)
        index, lengths = (layer,), (arguments.layers or 0,)
    if expert is not None:
        key = _EXPERT.sub(".experts.experts.", key)
        index, lengths = (*index, expert), (*lengths, arguments.number("num_experts"))
    return StackPosition(key, index, lengths)


def has_equal_layers(arguments: JobArguments) -> bool:
    """Whether all layers have the same parameters, so that megatron-core stacks them."""
    if arguments.flag("hetereogenous_dist_checkpoint") or arguments.fields.get("heterogeneous_layers_config_path"):
        return False
    every = (arguments.fields.get(name) for name in _FREQUENCIES)
    return all(value is None or (type(value) is int and value <= 1) for value in every)


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor of a rank's module under its name there."""

    name: str
    tensor: ModuleTensor
    shape: Shape
    parameter: Parameter  # the first one in it

    @property
    def is_trained(self) -> bool:
        return self.parameter.role == "trained"


class TargetModel:
    """The source's parameters, sliced for a job."""

    def __init__(self, source: Checkpoint, job: TargetJob, options: WriteOptions) -> None:
        self.source = source
        self.job = job
        self.grown_vocabularies: set[str] = set()  # parameters with more padding rows than the source has
        named = source.details.get("dtype")
        self._stored_dtype = (parse_dtype(named) if isinstance(named, str) else None) or FLOAT32
        self.dtype = options.dtype or self._stored_dtype  # of the module's weights
        self._atoms: dict[tuple[str, str], Atom | None] = {}
        # The source's rules, or megatron-core's if the source did not need one.
        unruled = [p for p in source.parameters.values() if _has_no_rule(p)]
        core = {p.name: (p.shape, rule) for p in unruled if (rule := self._core_rule(p)) is not None}
        rules = {name: resolve(rule, [shape], name) for name, (shape, rule) in core.items()}
        multiple = job.arguments.number("make_vocab_size_divisible_by", 128)
        slicer = ParamSlicer(source, job.mesh.tp, options.vocab_size, options.like, multiple, rules, grows_vocab=True)
        self._check_parameters()
        self.params: dict[str, GlobalParam] = {}
        for parameter in source.parameters.values():
            if parameter.atoms:
                rule, shape = slicer.rule(parameter)
                self.params[parameter.name] = GlobalParam(shape, rule, self._weight_dtype(parameter))
        self._moe_blocks = {mcore.block_of(name) for name in self.params if ".router." in name}
        self._delta_blocks = {mcore.block_of(name) for name in self.params if name.endswith(".self_attention.A_log")}
        self.is_hybrid = any(name.endswith(".mixer.A_log") for name in self.params)

    @property
    def padded_vocab_size(self) -> int | None:
        """The padded size of the vocabulary, or None if no parameter is split by it."""
        return next((p.shape[p.rule.dim] for p in self.params.values() if p.rule.cut == "vocab"), None)

    def layer_traits(self, name: str) -> LayerTraits:
        """Return the traits of the layer that a parameter belongs to."""
        block = mcore.block_of(name)
        known = block is not None
        return LayerTraits(known and block in self._moe_blocks, known and block in self._delta_blocks, self.is_hybrid)

    def named_tensors(self, rank: ModuleRank) -> Iterator[NamedTensor]:
        """Yield the tensors of one rank's module, in the order of the module."""
        arguments = self.job.arguments
        first_layers = {chunk.vp: chunk.first for chunk in self.job.chunks if chunk.pp == rank.pp}
        first_expert = rank.ep * arguments.experts_per_rank
        for tensor in module_tensors(rank, self.params, arguments):
            first = tensor.packed_params[0]
            name = self._local_name(tensor.alias or first.name, tensor, first_layers[tensor.chunk], first_expert)
            yield NamedTensor(name, tensor, _shape_in_module(tensor), self.source.parameters[first.name])

    def _local_name(self, name: str, tensor: ModuleTensor, first_layer: int, first_expert: int) -> str:
        """Return the name in the rank's module, where layers and experts have local numbers."""
        arguments = self.job.arguments
        traits = self.layer_traits(name)
        name = mcore.shift_layer(name, -first_layer)
        if mcore.is_expert(name) and tensor.packed_params[0].transposed:
            stem = name[: name.index(".local_experts.")]
            return f"{stem}.weight{1 if '.linear_fc1.' in name else 2}"
        if mcore.expert_of(name) is not None:
            name = mcore.shift_expert(name, -first_expert)
            if arguments.has_transformer_engine and arguments.flag("moe_grouped_gemm"):
                name = _GROUPED_EXPERT.sub(r".linear_fc\2.\3\1", name)
            return name
        return name_in_module(name, arguments, traits)

    def tensor(self, named: NamedTensor, kind: str, attributes: dict[str, Any] | None = None) -> NewTensor | None:
        """Return one state of a tensor of the module; None if the source does not have it."""
        contents = self.contents(named.tensor, kind)
        if contents is None:
            return None
        atom = self.atom(named.tensor.packed_params[0].name, kind)
        assert atom is not None
        made = new_tensor(atom.dtype, named.shape, *contents)
        return replace(made, attributes=attributes) if attributes is not None else made

    def contents(self, tensor: ModuleTensor, kind: str) -> list[RegionContent] | None:
        """Return what fills one state of a tensor of the module, end to end; None if the source does not have it."""
        contents: list[RegionContent] = []
        for packed in tensor.packed_params:
            atom = self.atom(packed.name, kind)
            if atom is None:
                return None
            region = region_of(packed.pieces, packed.name)
            if packed.transposed:  # column by column of the boxes, which are one above the other
                boxes = [piece.box for piece in packed.pieces]
                region = Region.of(
                    Box((box.start[0], box.start[1] + column), (box.shape[0], 1))
                    for column in range(boxes[0].shape[1])
                    for box in boxes
                )
            if region.numel:
                contents.append(RegionContent(atom, region))
        return contents

    def atom(self, name: str, kind: str) -> Atom | None:
        """Return a state of a parameter, with the padding rows that the source has; the same object each time."""
        if (name, kind) not in self._atoms:
            parameter = self.source.parameters[name]
            atom = parameter.atoms.get(kind)
            if kind == WEIGHT:
                atom = weight_atom(parameter, self.params[name].dtype)
            elif kind == MASTER:
                atom = master_atom(parameter)
            param = self.params[name]
            if atom is not None and param.rule.cut == "vocab" and atom.shape == parameter.shape:
                atom = with_vocab_padding(parameter, atom)
                if atom.shape[param.rule.dim] < param.shape[param.rule.dim]:
                    self.grown_vocabularies.add(name)
            self._atoms[name, kind] = atom
        return self._atoms[name, kind]

    def _check_parameters(self) -> None:
        """Refuse parameters that megatron-core's modules do not have, or that have no rule."""
        source, arguments = self.source, self.job.arguments
        strange = [name for name in source.parameters if not _DECODER.match(name)]
        if strange:
            raise ImpossibleError(
                f"{first_few(strange, 5)}: not parameters of a megatron-core decoder",
                hint="leave them out with --exclude, or map the names with --names FILE",
            )
        depths = {name.split(".")[2] for name in source.parameters if mcore.is_prediction(name)}
        if depths != {str(depth) for depth in range(arguments.prediction_layers)}:
            raise ImpossibleError(
                f"the job has {arguments.prediction_layers} layers of multi-token prediction (mtp_num_layers), but the"
                f" source has parameters of {len(depths)}",
                hint="leave --include and --exclude out, or set mtp_num_layers with --model-config",
            )
        if not source.parameters:
            raise ImpossibleError(f"{source.root}: has no parameters to write")
        if arguments.tp > 1:
            unknown = [p.name for p in source.parameters.values() if _has_no_rule(p) and self._core_rule(p) is None]
            if unknown:
                raise no_rule_error(unknown, arguments.tp)

    def _weight_dtype(self, parameter: Parameter) -> DType:
        """Return the dtype of a weight in the target: the model's, unless the source's module has another for it."""
        stored = parameter.atoms.get(WEIGHT)
        if stored is None:
            return self.dtype if MASTER in parameter.atoms else next(iter(parameter.atoms.values())).dtype
        return self.dtype if parameter.role == "trained" and stored.dtype == self._stored_dtype else stored.dtype

    def _core_rule(self, parameter: Parameter) -> Rule | None:
        def shape_of(name: str) -> Shape | None:
            other = self.source.parameters.get(name)
            return other.shape if other is not None else None

        return mcore.split_rule(parameter.name, [parameter.shape], self.job.arguments, shape_of)


def _has_no_rule(parameter: Parameter) -> bool:
    return parameter.rule == REPLICATED and parameter.rule_origin in _NO_RULE_ORIGINS


def _shape_in_module(tensor: ModuleTensor) -> Shape:
    """Return the declared shape. Grouped experts are one matrix, although their memory is one matrix per expert."""
    first = tensor.packed_params[0]
    if not first.transposed:
        return first.shape
    count = len(tensor.packed_params)
    rows, columns = first.shape
    return (columns, count * rows) if ".linear_fc1." in first.name else (count * columns, rows)
