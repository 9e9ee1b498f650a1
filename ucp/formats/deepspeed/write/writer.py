"""Write DeepSpeed's native files for any parallel layout, as `engine.save_checkpoint` would write them there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from ucp.containers.torch_file_writer import PickledTree, torch_file
from ucp.containers.tree import with_tensors
from ucp.core.checkpoint import Checkpoint, Mesh, Note
from ucp.core.dtypes import BFLOAT16
from ucp.core.target import OutputFile, Target
from ucp.errors import ImpossibleError
from ucp.formats.deepspeed import step_files
from ucp.formats.deepspeed.experts import experts_per_layer
from ucp.formats.deepspeed.write.model_files import ModelFiles
from ucp.formats.deepspeed.write.optimizer_files import (
    ScalarStates,
    flat_groups,
    is_bf16_optimizer,
    is_elastic,
    shapes_of,
    sub_groups,
    zero0_optimizer_tree,
    zero3_optimizer_tree,
    zero12_optimizer_tree,
)
from ucp.formats.deepspeed.write.target_layout import TargetLayout
from ucp.formats.output_files import copied_file, literal_file
from ucp.formats.registry import FormatWriter, WriteOptions
from ucp.storage.local import SourceFiles


class DeepSpeedWriter(FormatWriter):
    """Lays out a checkpoint for the mesh that the options ask for.

    1. `target_mesh` determines the mesh; `TargetLayout` checks it and assigns parameters to stages, ranks and groups.
    2. `target` creates the tree of every file, rank by rank: `ModelFiles` those with weights (model, layer and expert
       files), `optimizer_files` those with optimizer state.
    3. The tensors of these trees are described by the regions of atoms that fill them. Only scalars are read.
    4. `torch_file` turns each tree into an output file with write items, which the engine copies later.
    """

    def __init__(self, source: Checkpoint, options: WriteOptions) -> None:
        self.source = source
        self.notes: list[Note] = []
        self.mesh = target_mesh(source, options)
        self.layout = TargetLayout(source, self.mesh, options)
        if self.layout.extras.stacked:
            raise ImpossibleError(
                f"{next(iter(self.layout.extras.stacked))} has the stacked experts of an AutoEP layer, and the"
                " native files of AutoEP jobs cannot be written",
                hint="use --to deepspeed-universal, which AutoEP jobs with any dp and ep load with load_universal",
            )
        if self.mesh.zero == 0 and is_bf16_optimizer(self.layout):
            raise ImpossibleError(
                "a bf16 pipeline with ZeRO off: DeepSpeed fails to load such checkpoints, its own included",
                hint="use --zero 1",
            )
        self._check_optimizer()
        self.models = ModelFiles(self.layout)
        tag = source.details.get("tag")
        self.tag = tag if isinstance(tag, str) else f"global_step{source.step or 0}"

    def _check_optimizer(self) -> None:
        """Note what the target will lack, and refuse a source without optimizer if the target keeps weights there."""
        if self.source.groups or not any(p.role == "trained" for p in self.source.parameters.values()):
            if self.source.groups and "lr_scheduler" not in self.layout.extras.model(0, 1):
                text = "no state of an LR scheduler was found in the source: load the target with"
                self.notes.append(Note("no-scheduler", f"{text} load_lr_scheduler_states=False, and set your own"))
            if self.source.groups and not any(group.hyper for group in self.source.groups):
                text = "the source has no hyper-parameters (elastic checkpoints do not store them)"
                if self.mesh.zero in (1, 2) and is_elastic(self.layout):
                    then = "the job that loads the target keeps its own, including the learning rate"
                else:
                    written = "those of the configuration" if self.layout.extras.configured_hyper else "none"
                    then = f"{written} were written: after load_checkpoint, set engine.optimizer.param_groups before"
                    then += " the first step"
                self.notes.append(Note("no-hyper-parameters", f"{text}; {then}"))
            return
        if self.mesh.zero == 3:
            raise ImpossibleError(
                "the source has no optimizer, and DeepSpeed stores the weights of ZeRO-3 in the optimizer files",
                hint="use --zero 0, 1 or 2 and load with load_module_only=True; or --to safetensors",
            )
        if self.mesh.zero == 0 and self._unnamed_optimizer(step_files.model_file_name(0)) is not None:
            return
        text = "the source has no optimizer state: load the target with load_module_only=True"
        if any(note.id == "optimizer-unnamed" for note in self.source.notes):
            text = "the states of the source's optimizer have no names: load the target with load_module_only=True"
        self.notes.append(Note("no-optimizer", text))

    def target(self) -> Target:
        """Every file of the checkpoint; DeepSpeed has no manifest."""
        with SourceFiles(self.source.root) as files:
            scalars = ScalarStates(files)
            made = []
            for name, tree in self._trees(scalars):
                tree = tree if isinstance(tree, PickledTree) else with_tensors(tree)
                made.append(torch_file(f"{self.tag}/{name}", tree))
        if self.layout.lost_padding:
            listed = ", ".join(sorted(self.layout.lost_padding))
            text = f"padding rows of the vocabulary are zero: the source no longer has them ({listed})"
            self.notes.append(Note("vocabulary-padding", text))
        return Target((*made, literal_file("latest", self.tag.encode()), *self._neighbours()))

    def _trees(self, scalars: ScalarStates) -> Iterator[tuple[str, Any]]:
        for pp in range(self.mesh.pp):
            for tp in range(self.mesh.tp):
                if self.mesh.zero == 3:
                    yield from self._zero3(pp, tp, scalars)
                elif self.mesh.zero:
                    yield from self._zero12(pp, tp, scalars)
                else:
                    yield from self._zero0(pp, tp, scalars)
        yield from self.models.layer_files()
        yield from self.models.expert_files()

    def _zero12(self, pp: int, tp: int, scalars: ScalarStates) -> Iterator[tuple[str, Any]]:
        mp = pp * self.mesh.tp + tp
        by_ep = [flat_groups(self.layout, pp, tp, ep) for ep in range(self.mesh.ep)]
        states = [[scalars.group(group.members) for group in groups] for groups in by_ep]
        shapes = [shapes_of(group.members) for group in by_ep[0]]
        yield step_files.model_file_name(mp), self.models.model_tree(pp, tp, 0, shapes, None)
        for dp in range(self.mesh.dp):
            ep = dp % self.mesh.ep
            groups = by_ep[ep]
            index = [dp // group.group.ep for group in groups]
            tree = zero12_optimizer_tree(self.layout, groups, states[ep], index)
            yield self._optimizer_file(dp, mp, tree)

    def _zero3(self, pp: int, tp: int, scalars: ScalarStates) -> Iterator[tuple[str, Any]]:
        mp = pp * self.mesh.tp + tp
        groups = self.layout.groups(pp, tp, 0)
        subs = sub_groups(self.layout, groups)
        shapes = [shapes_of(sub.members) for sub in subs]
        states = [scalars.group(sub.members) for sub in subs]
        model: Any = None
        for dp in range(self.mesh.dp):
            if dp < 2 or self.models.differs_by_rank:  # rank 0 differs; all others are equal
                model = PickledTree(with_tensors(self.models.model_tree(pp, tp, dp, shapes, None)), self.tag)
            yield step_files.sharded_model_file_name(dp, mp), model
            tree = zero3_optimizer_tree(self.layout, groups, subs, states, dp)
            yield self._optimizer_file(dp, mp, tree)

    def _zero0(self, pp: int, tp: int, scalars: ScalarStates) -> Iterator[tuple[str, Any]]:
        mp = pp * self.mesh.tp + tp
        name = step_files.model_file_name(mp)
        if not self.layout.has_experts:
            yield name, self.models.model_tree(pp, tp, 0, None, self._zero0_optimizer(name, pp, tp, 0, scalars))
            return
        yield name, self.models.model_tree(pp, tp, 0, None, None)
        for ep in range(self.mesh.ep):
            name = step_files.expert_optimizer_file_name(ep, mp)
            yield name, {"optimizer": self._zero0_optimizer(name, pp, tp, ep, scalars)}

    def _zero0_optimizer(self, file: str, pp: int, tp: int, ep: int, scalars: ScalarStates) -> dict[str, Any]:
        groups = self.layout.groups(pp, tp, ep)
        return self._unnamed_optimizer(file) or zero0_optimizer_tree(self.layout, groups, scalars)

    def _unnamed_optimizer(self, file: str) -> dict[str, Any] | None:
        """The source's optimizer without names, to be copied unchanged if the target has the same layout; else None."""
        source, mesh = self.source.mesh, self.mesh
        same = (source.zero, source.tp, source.pp, source.ep) == (mesh.zero, mesh.tp, mesh.pp, mesh.ep)
        kept = self.layout.extras.unnamed_optimizer(file) if same and not self.layout.recast else None
        return dict(kept) if kept is not None else None

    def _optimizer_file(self, dp: int, mp: int, tree: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        name = step_files.optimizer_file_name(dp, mp, is_bf16=self.layout.dtype == BFLOAT16)
        version = self.layout.extras.version
        return name, {"optimizer_state_dict": tree, "ds_config": self.models.config(), "ds_version": version}

    def _neighbours(self) -> Iterator[OutputFile]:
        """The carried files next to the step folder: scheduler and RNG states, configurations, tokenizers."""
        for name, tree in self.source.extras.trees.items():
            if name.endswith(".json"):
                yield literal_file(name, json.dumps(tree, indent=2).encode() + b"\n")
            elif "/" not in name and not step_files.is_state_file(PurePosixPath(name).name):
                yield torch_file(name, with_tensors(tree))
        for name in self.source.extras.files:
            yield copied_file(self.source, name, name)


def target_mesh(source: Checkpoint, options: WriteOptions) -> Mesh:
    """The mesh of the target: degrees from the options, else from the checkpoint `like`, else from the source.

    Experts that do not have DeepSpeed-MoE's names (of another framework or Hugging Face) count as dense parameters.
    """
    base = options.like.mesh if options.like is not None else source.mesh
    if not experts_per_layer(source.parameters):
        base = replace(base, ep=1)

    def choose(asked: int | None, kept: int) -> int:
        return kept if asked is None else asked

    return Mesh(
        choose(options.tp, base.tp),
        choose(options.pp, base.pp),
        choose(options.dp, base.dp),
        choose(options.ep, base.ep),
        choose(options.zero, base.zero),
    )
