"""Write universal folders, for DeepSpeed's `checkpoint: {load_universal: true}` in every ZeRO stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ucp.containers.pickle_writer import bare_object
from ucp.containers.torch_file_writer import torch_file
from ucp.containers.tree import with_tensors
from ucp.core.checkpoint import MASTER, STEP, WEIGHT, Checkpoint, Mesh, Note, Parameter, state_of_kind
from ucp.core.dtypes import FLOAT32
from ucp.core.target import Target
from ucp.errors import ImpossibleError
from ucp.formats.deepspeed import step_files
from ucp.formats.deepspeed.write.model_files import ModelFiles
from ucp.formats.deepspeed.write.optimizer_files import (
    ScalarStates,
    element_kinds,
    flat_groups,
    shapes_of,
    sub_groups,
    whole_tensor,
    zero_stage_object,
)
from ucp.formats.deepspeed.write.target_layout import TargetLayout
from ucp.formats.output_files import literal_file
from ucp.formats.registry import FormatWriter, WriteOptions
from ucp.storage.local import SourceFiles


class UniversalWriter(FormatWriter):
    """Lays out `DST/latest_universal` and `DST/<tag>_universal/`.

    Every state file has a dict with the whole tensor and the keys by which the loader slices it. The model file has two
    names, that of stage 3 and that of the others, and `optimizer_state.pt` has the keys that both loaders read.
    """

    def __init__(self, source: Checkpoint, options: WriteOptions) -> None:
        self.source = source
        self.notes: list[Note] = []
        self.mesh = None
        _check_groups(source)
        self._options = WriteOptions(dtype=options.dtype)
        self.layout = TargetLayout(source, Mesh(zero=1), self._options)
        self._stacked = self.layout.extras.stacked
        tag = source.details.get("tag")
        named = tag.replace("/", "_") if isinstance(tag, str) else f"global_step{source.step or 0}"
        self.folder = f"{named}_universal"
        self._note_loader_defects()

    def _note_loader_defects(self) -> None:
        """Note the defects of DeepSpeed's loader that affect this checkpoint."""
        unaffected = "the output of `--to deepspeed` is not affected"
        if len(self.source.groups) > 1:
            text = "loading universal folders, DeepSpeed's stage 3 uses the hyper-parameters of group 0 for every group"
            self.notes.append(Note("stage-3-groups", f"{text}; {unaffected}"))
        if self.source.details.get("zero", {}).get("round_robin_gradients"):
            text = (
                "an engine with round_robin_gradients loads the states of a universal folder into the wrong places"
                " (it uses param_slice_mappings, which DeepSpeed computes from the wrong order); set"
                " round_robin_gradients to false together with load_universal"
            )
            self.notes.append(Note("universal-round-robin", f"{text}; {unaffected}"))
        if self.layout.has_experts:
            text = (
                "an engine with expert parallelism numbers the experts of every rank from 0 and looks these numbers up"
                " in the folder, so all its ranks load the same first experts; load with an ep_size of 1"
            )
            self.notes.append(Note("universal-experts", f"{text}; {unaffected}"))
        numbers = {
            kind: parameter.name
            for parameter in self.source.parameters.values()
            for kind, atom in parameter.atoms.items()
            if kind not in (WEIGHT, MASTER, STEP) and not atom.shape and parameter.shape  # such as NAdam's mu_product
        }
        if numbers:
            listed = ", ".join(f"{kind} of {name}" for kind, name in sorted(numbers.items()))
            text = (
                "step is the only number that DeepSpeed's stages 1 and 2 load from a universal folder; they fail at"
                f" {listed}"
            )
            self.notes.append(Note("universal-numbers", f"{text}; {unaffected}"))

    def target(self) -> Target:
        """Every file of the folder."""
        with SourceFiles(self.source.root) as files:
            scalars = ScalarStates(files)
            made = [torch_file(f"{self.folder}/{name}", with_tensors(tree)) for name, tree in self._trees(scalars)]
        return Target((*made, literal_file(step_files.LATEST_UNIVERSAL, self.folder.encode())))

    def _trees(self, scalars: ScalarStates) -> Iterator[tuple[str, Any]]:
        for parameter in self.source.parameters.values():
            # A slash makes nested folders, which DeepSpeed's loader finds.
            parts = parameter.name.split("/")
            if "\0" in parameter.name or any(
                p in ("", ".", "..") or p.endswith(step_files.STATE_SUFFIX) for p in parts
            ):
                raise ImpossibleError(
                    f"parameter {parameter.name!r}: cannot be used as a folder name, as universal folders require"
                )
            for kind, tree in self._states(parameter, scalars):
                yield f"{step_files.STATES_FOLDER}/{parameter.name}/{kind}{step_files.STATE_SUFFIX}", tree
        yield step_files.OPTIMIZER_STATE, self._optimizer_state(scalars)
        yield from self._model_files()

    def _states(self, parameter: Parameter, scalars: ScalarStates) -> Iterator[tuple[str, Any]]:
        if parameter.role != "trained":
            # Like DeepSpeed's own converter: without optimizer state, fp32 is the weight itself.
            weight = parameter.atoms.get(WEIGHT)
            if weight is not None:
                yield step_files.MASTER_FILE, {"param": whole_tensor(replace(weight, dtype=FLOAT32))}
            return
        if parameter.name in self._stacked:  # the keys by which AutoEP's loader slices experts for an ep rank
            keys = {"cat_dim": 0, "is_expert_param": True, "ep_num_experts": self._stacked[parameter.name]}
        else:
            keys = _tp_slicing_keys(parameter)
        master = replace(self.layout.master(parameter), shape=parameter.shape)  # the loader pads vocabularies itself
        yield step_files.MASTER_FILE, {"param": whole_tensor(master), **keys}
        local = self.layout.slicer.local(parameter, 0)
        for kind in element_kinds([local]):
            yield state_of_kind(kind), {"param": whole_tensor(parameter.atoms[kind]), **keys}
        for kind, value in scalars.of([local]).items():
            yield state_of_kind(kind), value

    def _optimizer_state(self, scalars: ScalarStates) -> dict[str, Any]:
        extras = self.layout.extras
        groups = self.layout.groups(0, 0, 0)
        listed = [{**group.hyper, "params": [number]} for number, group in enumerate(groups)]
        steps = scalars.of(groups[0].members) if groups else {}
        return {
            "loss_scaler": extras.loss_scaler,
            "dynamic_loss_scale": extras.dynamic_loss_scale,
            "overflow": extras.optimizer.get("overflow", False),
            "clip_grad": extras.clip_grad,
            "zero_stage": zero_stage_object(max(1, self.source.mesh.zero)),
            "group_paddings": [0] * len(groups),
            "partition_count": [self.source.mesh.dp] * len(groups),
            "ds_version": extras.version,
            "param_groups": listed,
            # Stage 3 looks for the step and the hyper-parameters here.
            "optimizer_state_dict": {"state": {0: {"step": steps.get("step", 0)}}, "param_groups": listed},
        }

    def _model_files(self) -> Iterator[tuple[str, Any]]:
        models = ModelFiles(self.layout)
        shapes = [shapes_of(group.members) for group in flat_groups(self.layout, 0, 0, 0)]
        yield step_files.model_file_name(0), self._of_source(models.model_tree(0, 0, 0, shapes, None))
        if not self.layout.has_experts:
            zero3 = TargetLayout(self.source, Mesh(zero=3), self._options)
            subs = sub_groups(zero3, zero3.groups(0, 0, 0))
            tree = ModelFiles(zero3).model_tree(0, 0, 0, [shapes_of(sub.members) for sub in subs], None)
            yield step_files.sharded_model_file_name(0, 0), self._of_source(tree)
        yield from models.layer_files()
        yield from models.expert_files()

    def _of_source(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Keep the configuration of the saved run. (`mp_world_size` must be the number of model files.)"""
        tree["dp_world_size"] = self.source.mesh.dp
        tree["ds_config"] = self.layout.extras.config
        return tree


def _check_groups(source: Checkpoint) -> None:
    """Refuse a source without parameter groups: DeepSpeed loads by group, so the job would keep its initial weights."""
    trained = next((p.name for p in source.parameters.values() if p.role == "trained"), None)
    if trained is None or source.groups:
        return
    unknown = any(note.id == "optimizer-unnamed" for note in source.notes)
    reason = "the states of the source's optimizer have no names" if unknown else "the source has no optimizer"
    raise ImpossibleError(
        f"{reason}, and DeepSpeed loads universal folders by the optimizer's groups: it would silently load neither"
        f" {trained} nor any other parameter",
        hint="use --to deepspeed --zero 0, 1 or 2 and load with load_module_only=True; or --to safetensors",
    )


def _tp_slicing_keys(parameter: Parameter) -> dict[str, Any]:
    """The keys next to `param` by which DeepSpeed's loader slices it for tensor parallelism."""
    rule = parameter.rule
    if rule.cut == "vocab":
        return {"cat_dim": rule.dim, "vocab_tensor": True}
    if rule.cut != "split":
        return {}
    if not rule.parts:
        return {"cat_dim": rule.dim}
    if rule.dim == 0 and len(rule.parts) == 2 and rule.parts[0] == rule.parts[1]:
        return {"cat_dim": 0, "param_n_sub_params": 2}
    shape = (*parameter.shape[: rule.dim], rule.parts, *parameter.shape[rule.dim + 1 :])
    state = {"patterns": [f"^{parameter.name}$"], "shape": shape, "partition_dim": rule.dim}
    return {"sub_param_shape": bare_object("deepspeed.checkpoint.universal_checkpoint", "SubparamShape", state)}
