"""Files of the target that contain the module's weights: model files, layer files and expert files.

The second half makes `universal_checkpoint_info`, which describes how the tensor-parallel slices of the target combine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from ucp.containers.inert import Inert, InertOrderedDict, Size
from ucp.containers.pickle_writer import NewTensor, with_state
from ucp.containers.torch_file_writer import ZeroContent, new_tensor
from ucp.core.checkpoint import Parameter
from ucp.errors import ImpossibleError
from ucp.formats.deepspeed.step_files import expert_file_name, layer_file_name, parse_layer_name
from ucp.formats.deepspeed.universal_info import DEFAULT_ORIGIN, has_tp_rules, rules_from_info
from ucp.formats.deepspeed.write.optimizer_files import (
    Segment,
    flat_tensor,
    segment,
    shaped_tensor,
    slice_of_rank,
)
from ucp.formats.deepspeed.write.source_extras import adjusted_config
from ucp.formats.deepspeed.write.target_layout import TargetLayout
from ucp.formats.output_files import missing_weight_error
from ucp.formats.sharded.assembly import ONE_RANK_ORIGIN


class ModelFiles:
    """The trees of all files of the target except the optimizer files."""

    def __init__(self, layout: TargetLayout) -> None:
        self.layout = layout

    def model_tree(
        self, pp: int, tp: int, dp: int, shapes: Sequence[InertOrderedDict] | None, optimizer: dict[str, Any] | None
    ) -> dict[str, Any]:
        """The tree of the model file of one rank; `dp` matters under ZeRO-3 only."""
        layout = self.layout
        mesh = layout.mesh
        carried = layout.extras.model(pp * mesh.tp + tp, mesh.tp * mesh.pp)
        on_stage = layout.on_stage(pp)
        frozen = [p for p in on_stage if p.role == "frozen" and layout.weight(p) is not None]
        # ZeRO-2 and 3 list frozen parameters unless saved with exclude_frozen_parameters.
        with_frozen = mesh.zero >= 2 and not any(note.id == "frozen-excluded" for note in layout.source.notes)
        first = pp == 0 and tp == 0 and dp == 0
        if shapes is not None and layout.has_experts:  # DeepSpeed then copies the tree, which has plain tuples
            shapes = [InertOrderedDict((name, tuple(shape)) for name, shape in group.items()) for group in shapes]
        frozen_shapes = InertOrderedDict((p.name, Size(layout.slicer.local(p, tp).shape)) for p in frozen)
        tree: dict[str, Any] = {
            "module": None if layout.pipeline is not None else self._module(on_stage, tp),
            "buffer_names": [p.name for p in on_stage if p.role == "buffer"],
            "optimizer": optimizer,
            "param_shapes": list(shapes) if shapes is not None else None,
            "frozen_param_shapes": frozen_shapes if with_frozen else None,
            "shared_params": (dict(layout.source.aliases()) if first else {}) if mesh.zero else None,
            "frozen_param_fragments": self._frozen(frozen, tp, dp) if with_frozen else None,
        }
        defaults = {
            "lr_scheduler": None,
            "data_sampler": None,
            "random_ltd": None,
            "skipped_steps": 0,
            "global_steps": layout.source.step or 0,
            "global_samples": 0,
        }
        tree.update({**defaults, **carried})
        tree["dp_world_size"] = mesh.dp
        tree["mp_world_size"] = mesh.tp * mesh.pp
        tree["checkpoint_parallel_dimensions"] = {"pp_degree": mesh.pp, "tp_degree": mesh.tp}
        tree["ds_config"] = self.config()
        tree["ds_version"] = layout.extras.version
        if isinstance(tree.get("args"), Inert):
            tree["args"] = self._args(tree["args"])
        info = tree.get("universal_checkpoint_info")
        info = target_info(layout, info if isinstance(info, dict) else None)
        if info is not None:
            tree["universal_checkpoint_info"] = info
        return tree

    @property
    def differs_by_rank(self) -> bool:
        """Whether model files of ZeRO-3 differ between ranks: they contain slices of frozen parameters."""
        return any(p.role == "frozen" for p in self.layout.source.parameters.values())

    def config(self) -> dict[str, Any]:
        """The DeepSpeed configuration adjusted to the target."""
        mesh = self.layout.mesh
        return adjusted_config(self.layout.settings.config, zero=mesh.zero, dp=mesh.dp, dtype=self.layout.dtype)

    def _args(self, args: Inert) -> Inert:
        """Megatron's arguments adjusted to the target: Megatron compares them with its own when it loads."""
        mesh = self.layout.mesh
        if not isinstance(args.state, dict) or "tensor_model_parallel_size" not in args.state:
            return args
        changed = {
            "tensor_model_parallel_size": mesh.tp,
            "pipeline_model_parallel_size": mesh.pp,
            "data_parallel_size": mesh.dp,
            "world_size": mesh.world,
        }
        if (padded := padded_vocab_size(self.layout)) is not None:
            changed["padded_vocab_size"] = padded
        return with_state(args, {key: changed.get(key, value) for key, value in args.state.items()})

    def _module(self, on_stage: Sequence[Parameter], tp: int) -> InertOrderedDict:
        module = InertOrderedDict()
        aliases: dict[str, NewTensor] = {}
        for parameter in on_stage:
            if parameter.expert is not None:
                continue
            tensor = self._tensor(parameter, tp)
            if tensor is None:
                continue  # a frozen parameter that the source does not contain
            module[parameter.name] = tensor
            aliases.update(dict.fromkeys(parameter.aliases, tensor))
        module.update(aliases)
        return module

    def _tensor(self, parameter: Parameter, tp: int) -> NewTensor | None:
        """A weight in the model file; under ZeRO-3 only buffers keep their data there."""
        if self.layout.mesh.zero == 3 and parameter.role != "buffer":
            return new_tensor(self.layout.dtype, (0,))
        atom = self.layout.weight(parameter)
        if atom is None:
            if parameter.role == "frozen":
                return None
            raise missing_weight_error(parameter)
        local = self.layout.slicer.local(parameter, tp)
        return shaped_tensor(atom, local.region, local.shape)

    def _frozen(self, frozen: Sequence[Parameter], tp: int, dp: int) -> InertOrderedDict:
        """Frozen parameters: whole under ZeRO-2, this rank's padded slice under ZeRO-3."""
        found = InertOrderedDict()
        for parameter in frozen:
            atom = self.layout.weight(parameter)
            assert atom is not None
            local = self.layout.slicer.local(parameter, tp)
            if self.layout.mesh.zero == 3:
                own, padding = slice_of_rank(local.region, self.layout.mesh.dp, dp)
                parts: list[Segment] = [segment(atom, own), ZeroContent(padding)]
                found[parameter.name] = flat_tensor(atom.dtype, parts)
            else:
                found[parameter.name] = shaped_tensor(atom, local.region, local.shape)
        return found

    def layer_files(self) -> Iterator[tuple[str, InertOrderedDict]]:
        """Yield the files of a pipeline: one per layer and tensor-parallel rank, with layer-local names."""
        layout = self.layout
        pipeline = layout.pipeline
        if pipeline is None:
            return
        layers: dict[int, list[tuple[str, Parameter]]] = {layer: [] for layer in pipeline.layers}
        for parameter in layout.source.parameters.values():
            found = parse_layer_name(parameter.name)
            if found is None:
                raise ImpossibleError(
                    f"parameter {parameter.name}: the names of a pipelined model must contain a layer number"
                )
            for layer in [found.layer] if found.layer is not None else pipeline.layers_of(found.tied or ""):
                layers.setdefault(layer, []).append((found.local, parameter))
        has_tp_rank = pipeline.model_axis or layout.mesh.tp > 1
        for layer, members in sorted(layers.items()):
            for tp in range(layout.mesh.tp):
                tree = InertOrderedDict()
                for local, parameter in members:
                    tensor = self._tensor(parameter, tp)
                    if tensor is not None:
                        tree[local] = tensor
                yield layer_file_name(layer, tp, has_tp_rank=has_tp_rank), tree

    def expert_files(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the files of experts: one per expert and layer, with global names."""
        layout = self.layout
        layers: dict[str, int] = {}
        files: dict[tuple[int, int], list[Parameter]] = {}
        for parameter in layout.source.parameters.values():
            if parameter.expert is not None:
                prefix = parameter.name.split("deepspeed_moe.", 1)[0]
                layer = layers.setdefault(prefix, len(layers))
                files.setdefault((layer, parameter.expert), []).append(parameter)
        for (layer, expert), members in sorted(files.items()):
            for mp in range(layout.mesh.tp * layout.mesh.pp):
                pp, tp = divmod(mp, layout.mesh.tp)
                tree = {p.name: self._tensor(p, tp) for p in members if pp in layout.stages[p.name]}
                if tree:
                    yield expert_file_name(layer, expert, mp), tree


# Keys that are valid for the tensor-parallel degree of the source only.
_SOURCE_TP_KEYS: Final = ("affine_map", "sub_param_shard_widths")


def target_info(layout: TargetLayout, info: dict[str, Any] | None) -> dict[str, Any] | None:
    """The source's info, or one made from the rules if the source has none that describes tensor parallelism.

    A single rank needs one if a vocabulary is padded: no other key records its true size.
    """
    padded = padded_vocab_size(layout)
    if info is not None and layout.mesh.tp != layout.source.mesh.tp:
        kept = {key: value for key, value in info.items() if key not in _SOURCE_TP_KEYS}
        version = kept.get("universal_checkpoint_version")
        if "sub_param_shard_widths" in info and isinstance(version, float):
            kept["universal_checkpoint_version"] = min(version, 0.3)
        info = {**kept, "padded_vocab_size": padded} if padded and "padded_vocab_size" in kept else kept
    if info is not None and has_tp_rules(info):
        return _with_replicated_patterns(layout, info)
    is_padded = any(p.rule.cut == "vocab" and p.shape[p.rule.dim] != padded for p in _trained(layout))
    return {**(info or {}), **_info_from_rules(layout)} if layout.mesh.tp > 1 or is_padded else info


def padded_vocab_size(layout: TargetLayout) -> int | None:
    """Entries of the vocabulary in the target, padding included; None if no parameter has a vocabulary."""
    for parameter in layout.source.parameters.values():
        if parameter.rule.cut == "vocab":
            return layout.slicer.local(parameter, 0).shape[parameter.rule.dim] * layout.mesh.tp
    return None


def _with_replicated_patterns(layout: TargetLayout, info: dict[str, Any]) -> dict[str, Any]:
    """The info with a pattern for every replicated parameter that its default rule would concatenate."""
    book = rules_from_info(info, "the source's universal_checkpoint_info")
    missing = [
        _pattern(parameter)
        for parameter in _trained(layout)
        if parameter.rule.cut == "replicated"
        and parameter.rule_origin != ONE_RANK_ORIGIN
        and (stored := book.find(parameter.name)) is not None
        and stored.origin == DEFAULT_ORIGIN
    ]
    if not missing:
        return info
    listed = list(info.get("tp_replicated_parameter_patterns") or ())
    return {**info, "tp_replicated_parameter_patterns": listed + missing}


def _info_from_rules(layout: TargetLayout) -> dict[str, Any]:
    """An info that describes the split of every parameter by name."""
    trained = _trained(layout)
    made: dict[str, Any] = {
        "universal_checkpoint_version": 0.2,
        "tp_replicated_parameter_patterns": [_pattern(p) for p in trained if p.rule.cut == "replicated"],
        "parameter_to_average_patterns": [_pattern(p) for p in trained if p.rule.cut == "average"],
        "vocabulary_parameter_patterns": [_pattern(p) for p in trained if p.rule.cut == "vocab"],
        "parameter_with_row_parallelism_patterns": [
            _pattern(p) for p in trained if p.rule.cut == "split" and p.rule.dim == 1 and not p.rule.parts
        ],
        "parameter_with_2_sub_params_cat_dim_0": [],
        "parameter_with_sub_params": [
            {
                "patterns": [_pattern(p)],
                "shape": (*p.shape[: p.rule.dim], p.rule.parts, *p.shape[p.rule.dim + 1 :]),
                "partition_dim": p.rule.dim,
            }
            for p in trained
            if p.rule.cut == "split" and p.rule.parts
        ],
    }
    sizes = {p.shape[p.rule.dim] for p in trained if p.rule.cut == "vocab"}
    if len(sizes) == 1:
        made["original_vocab_size"], made["padded_vocab_size"] = sizes.pop(), padded_vocab_size(layout)
    return made


def _trained(layout: TargetLayout) -> list[Parameter]:
    return [parameter for parameter in layout.source.parameters.values() if parameter.role == "trained"]


def _pattern(parameter: Parameter) -> str:
    return f"^{re.escape(parameter.name)}$"
