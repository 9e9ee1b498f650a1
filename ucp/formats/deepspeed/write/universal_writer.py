"""Writes universal folders, for DeepSpeed's `checkpoint: {load_universal: true}`: one that loads in every stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ucp.containers.pickle_writer import bare_object
from ucp.containers.torch_file_writer import torch_file
from ucp.containers.tree import with_tensors
from ucp.core.checkpoint import MASTER, STEP, WEIGHT, Atom, Checkpoint, Note, Parameter, state_of_kind
from ucp.core.dtypes import FLOAT32
from ucp.core.mesh import Mesh
from ucp.core.target import Digests, Literal, OutputFile, Target
from ucp.errors import UsageError
from ucp.formats.deepspeed import step_files
from ucp.formats.deepspeed.universal_folder import (
    LATEST_UNIVERSAL,
    MASTER_FILE,
    OPTIMIZER_STATE,
    STATE_SUFFIX,
    STATES_FOLDER,
)
from ucp.formats.deepspeed.write.model_files import ModelFiles
from ucp.formats.deepspeed.write.optimizer_files import flat_groups, sub_groups, zero_stage_object
from ucp.formats.deepspeed.write.state_tensors import ScalarStates, element_kinds, whole_tensor
from ucp.formats.deepspeed.write.target_layout import TargetLayout
from ucp.formats.registry import WriteOptions
from ucp.formats.sharded.slicer import TargetSlice
from ucp.storage.local import SourceFiles


class UniversalWriter:
    """Lays out `DST/latest_universal` and `DST/<tag>_universal/`.

    Every state file holds a dict with the whole tensor and how to cut it. Model files come under both names, that of
    stage 3 and that of the others; `optimizer_state.pt` has what both loaders look for.
    """

    def __init__(self, source: Checkpoint, options: WriteOptions) -> None:
        self.source = source
        self.notes: list[Note] = []
        self.mesh = None
        _check_groups(source)
        self._options = WriteOptions(dtype=options.dtype)
        self.world = TargetLayout(source, Mesh(zero=1), self._options)
        self._stacked = self.world.carried.stacked
        tag = source.details.get("tag")
        named = tag.replace("/", "_") if isinstance(tag, str) else f"global_step{source.step or 0}"
        self.folder = f"{named}_universal"
        if len(source.groups) > 1:
            self.notes.append(
                Note(
                    "stage-3-groups",
                    "DeepSpeed's stage 3 gives every group the hyper-parameters of group 0 when it loads a universal"
                    " folder; what `--to deepspeed` writes does not suffer from that",
                )
            )
        if source.details.get("zero", {}).get("round_robin_gradients"):
            self.notes.append(
                Note(
                    "universal-round-robin",
                    "an engine with round_robin_gradients puts what it loads from a universal folder into the wrong"
                    " places (it goes by param_slice_mappings, which DeepSpeed computes from the wrong order); set"
                    " round_robin_gradients to false where load_universal is true, or take `--to deepspeed`",
                )
            )
        if self.world.has_experts:
            self.notes.append(
                Note(
                    "universal-experts",
                    "an engine with expert parallelism numbers the experts of every rank from 0, and takes those"
                    " numbers for the folder's: each of its ranks loads the same first experts; load with an"
                    " ep_size of 1, or take `--to deepspeed`",
                )
            )
        numbers = {
            k: p.name for p in source.parameters.values() for k, a in p.atoms.items() if _is_extra_number(p, k, a)
        }
        if numbers:
            listed = ", ".join(f"{kind} of {name}" for kind, name in sorted(numbers.items()))
            self.notes.append(
                Note(
                    "universal-numbers",
                    f"of an optimizer's numbers, DeepSpeed's stages 1 and 2 load no other than step from a universal"
                    f" folder, and fail at {listed}; what `--to deepspeed` writes does not suffer from that",
                )
            )

    def target(self) -> Target:
        """Every file of the folder."""
        with SourceFiles(self.source.root) as files:
            scalars = ScalarStates(files)
            made = [torch_file(f"{self.folder}/{name}", with_tensors(tree)) for name, tree in self._trees(scalars)]
        latest = self.folder.encode()
        return Target((*made, OutputFile(LATEST_UNIVERSAL, len(latest), (Literal(0, latest),))))

    def last(self, target: Target, digests: Digests) -> OutputFile | None:
        """Nothing: the format has no manifest."""
        del target, digests
        return None

    def _trees(self, scalars: ScalarStates) -> Iterator[tuple[str, Any]]:
        for parameter in self.source.parameters.values():
            _check_name(parameter.name)
            for kind, tree in self._states(parameter, scalars):
                yield f"{STATES_FOLDER}/{parameter.name}/{kind}{STATE_SUFFIX}", tree
        yield OPTIMIZER_STATE, self._optimizer_state(scalars)
        yield from self._model_files()

    def _states(self, parameter: Parameter, scalars: ScalarStates) -> Iterator[tuple[str, Any]]:
        if parameter.role != "trained":
            # As DeepSpeed's own converter does: these have no optimizer state, and their fp32 is the weight itself.
            weight = parameter.atoms.get(WEIGHT)
            if weight is not None:
                yield MASTER_FILE, {"param": whole_tensor(replace(weight, dtype=FLOAT32))}
            return
        cut = _tp_slicing_keys(parameter) if parameter.name not in self._stacked else self._how_to_spread(parameter)
        master = replace(self.world.master(parameter), shape=parameter.shape)  # the loader pads vocabularies itself
        yield MASTER_FILE, {"param": whole_tensor(master), **cut}
        local = self._whole(parameter)
        for kind in element_kinds([local]):
            yield state_of_kind(kind), {"param": whole_tensor(parameter.atoms[kind]), **cut}
        for kind, value in scalars.each(local).items():
            yield state_of_kind(kind), value

    def _how_to_spread(self, parameter: Parameter) -> dict[str, Any]:
        """The keys that tell DeepSpeed's loader to slice stacked experts for the ep rank of an AutoEP job."""
        return {"cat_dim": 0, "is_expert_param": True, "ep_num_experts": self._stacked[parameter.name]}

    def _whole(self, parameter: Parameter) -> TargetSlice:
        return self.world.slicer.local(parameter, 0)

    def _optimizer_state(self, scalars: ScalarStates) -> dict[str, Any]:
        carried = self.world.carried
        groups = self.world.groups(0, 0, 0)
        listed = [{**group.hyper, "params": [number]} for number, group in enumerate(groups)]
        steps = scalars.of(groups[0].members) if groups else {}
        return {
            "loss_scaler": carried.loss_scaler,
            "dynamic_loss_scale": carried.dynamic_loss_scale,
            "overflow": carried.optimizer.get("overflow", False),
            "clip_grad": carried.clip_grad,
            "zero_stage": zero_stage_object(max(1, self.source.mesh.zero)),
            "group_paddings": [0] * len(groups),
            "partition_count": [self.source.mesh.dp] * len(groups),
            "ds_version": carried.version,
            "param_groups": listed,
            # Stage 3 looks for the step and the hyper-parameters here.
            "optimizer_state_dict": {"state": {0: {"step": steps.get("step", 0)}}, "param_groups": listed},
        }

    def _model_files(self) -> Iterator[tuple[str, Any]]:
        models = ModelFiles(self.world)
        shapes = [group.shapes for group in flat_groups(self.world, 0, 0, 0)]
        yield step_files.model_file_name(0), self._of_source(models.model_tree(0, 0, 0, shapes, None))
        third = TargetLayout(self.source, Mesh(zero=3), self._options) if not self.world.has_experts else None
        if third is not None:
            subs = sub_groups(third, third.groups(0, 0, 0))
            tree = ModelFiles(third).model_tree(0, 0, 0, [sub.shapes for sub in subs], None)
            yield step_files.sharded_model_file_name(0, 0), self._of_source(tree)
        yield from models.layer_files()
        yield from models.expert_files()

    def _of_source(self, tree: dict[str, Any]) -> dict[str, Any]:
        """The configuration stays that of the run that was saved. `mp_world_size` must be the number of model files."""
        tree["dp_world_size"] = self.source.mesh.dp
        tree["ds_config"] = self.world.carried.config
        return tree


def _check_groups(source: Checkpoint) -> None:
    """DeepSpeed loads group by group: of a folder without any it loads nothing, and its job keeps fresh weights."""
    trained = next((p.name for p in source.parameters.values() if p.role == "trained"), None)
    if trained is None or source.groups:
        return
    unknown = any(note.id == "optimizer-unnamed" for note in source.notes)
    why = "nobody can tell whose states the source's optimizer has" if unknown else "the source has no optimizer"
    raise UsageError(
        f"{why}, and DeepSpeed loads universal folders by the optimizer's groups: of {trained} and all others it would"
        " load nothing, without a word",
        hint="use --to deepspeed --zero 0, 1 or 2 and load with load_module_only=True; or --to safetensors",
    )


def _is_extra_number(parameter: Parameter, kind: str, atom: Atom) -> bool:
    """Is it one number for the whole parameter (NAdam's `mu_product`), and not the step?"""
    return kind not in (WEIGHT, MASTER, STEP) and not atom.shape and bool(parameter.shape)


def _tp_slicing_keys(parameter: Parameter) -> dict[str, Any]:
    """The keys beside `param` that tell DeepSpeed's loader how to slice it for tensor parallelism."""
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


def _check_name(name: str) -> None:
    """DeepSpeed joins names to paths: `/` in one makes folders in folders, which its loader finds as well."""
    parts = name.split("/")
    if "\0" in name or any(part in ("", ".", "..") or part.endswith(STATE_SUFFIX) for part in parts):
        raise UsageError(f"parameter {name!r}: universal folders use names as folder names, and this one cannot be one")
