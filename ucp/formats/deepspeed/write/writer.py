"""Writes DeepSpeed's own files for any world, as `engine.save_checkpoint` would have written them there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from ucp.containers.torch_file_writer import PickledTree, torch_file
from ucp.containers.tree import with_tensors
from ucp.core.checkpoint import Checkpoint, Note
from ucp.core.dtypes import BFLOAT16
from ucp.core.mesh import Mesh
from ucp.core.target import Digests, Literal, OutputFile, Target
from ucp.errors import UsageError
from ucp.formats.deepspeed import step_files
from ucp.formats.deepspeed.experts import experts_per_layer
from ucp.formats.deepspeed.write import optimizer_files
from ucp.formats.deepspeed.write.model_files import ModelFiles
from ucp.formats.deepspeed.write.state_tensors import ScalarStates
from ucp.formats.deepspeed.write.target_layout import TargetLayout
from ucp.formats.output_files import copied_file
from ucp.formats.registry import WriteOptions
from ucp.storage.local import SourceFiles


class DeepSpeedWriter:
    """Lays out the source for the world that the options ask for."""

    def __init__(self, source: Checkpoint, options: WriteOptions) -> None:
        self.source = source
        self.notes: list[Note] = []
        self.mesh = target_mesh(source, options)
        self.world = TargetLayout(source, self.mesh, options)
        if self.world.carried.stacked:
            raise UsageError(
                f"{next(iter(self.world.carried.stacked))} has experts that AutoEP stacks and spreads, and the files of"
                " an AutoEP job are not written",
                hint="use --to deepspeed-universal, which AutoEP jobs of other dp and ep load with load_universal",
            )
        if self.mesh.zero == 0 and optimizer_files.is_bf16_optimizer(self.world):
            raise UsageError(
                "a bf16 pipeline with ZeRO off: DeepSpeed fails to load such checkpoints, its own included",
                hint="use --zero 1",
            )
        self._check_optimizer()
        self.models = ModelFiles(self.world)
        tag = source.details.get("tag")
        self.tag = tag if isinstance(tag, str) else f"global_step{source.step or 0}"

    def _check_optimizer(self) -> None:
        """A source of weights alone has no place in files that keep them with the optimizer."""
        if self.source.groups or not any(p.role == "trained" for p in self.source.parameters.values()):
            if self.source.groups and "lr_scheduler" not in self.world.carried.model(0, 1):
                text = "where the source keeps the state of an LR scheduler is not known: load the target with"
                self.notes.append(Note("no-scheduler", f"{text} load_lr_scheduler_states=False, and set yours"))
            if self.source.groups and not any(group.hyper for group in self.source.groups):
                text = "the source has no hyper-parameters (elastic checkpoints keep none)"
                self.notes.append(Note("no-hyper-parameters", f"{text}; {self._hyper_parameters()}"))
            return
        if self.mesh.zero == 3:
            raise UsageError(
                "the source has no optimizer, and DeepSpeed keeps the weights of ZeRO-3 in the optimizer's files",
                hint="use --zero 0, 1 or 2 and load with load_module_only=True; or --to safetensors",
            )
        if self.mesh.zero == 0 and self._unnamed(step_files.model_file_name(0)) is not None:
            return
        text = "the source has no optimizer state: load the target with load_module_only=True"
        if any(note.id == "optimizer-unnamed" for note in self.source.notes):
            text = "nobody can tell whose states the source's optimizer has: load the target with load_module_only=True"
        self.notes.append(Note("no-optimizer", text))

    def _hyper_parameters(self) -> str:
        """Where a target's job gets them from when the source has none."""
        if self.mesh.zero in (1, 2) and optimizer_files.is_elastic(self.world):
            return "the job that loads the target keeps its own, its learning rate as well"
        taken = "those of the configuration were taken" if self.world.carried.configured_hyper else "none written"
        return f"{taken}: after load_checkpoint, put yours into engine.optimizer.param_groups before the first step"

    def target(self) -> Target:
        """Every file of the checkpoint; DeepSpeed has no manifest."""
        with SourceFiles(self.source.root) as files:
            scalars = ScalarStates(files)
            made = [torch_file(f"{self.tag}/{name}", _with_tensors(tree)) for name, tree in self._trees(scalars)]
        if self.world.lost_padding:
            listed = ", ".join(sorted(self.world.lost_padding))
            text = f"padding rows of the vocabulary are zero: the source no longer has them ({listed})"
            self.notes.append(Note("vocabulary-padding", text))
        latest = self.tag.encode()
        made.append(OutputFile("latest", len(latest), (Literal(0, latest),)))
        return Target((*made, *self._neighbours()))

    def last(self, target: Target, digests: Digests) -> OutputFile | None:
        """Nothing: `latest` is an ordinary file, and the folder appears whole."""
        del target, digests
        return None

    def _trees(self, scalars: ScalarStates) -> Iterator[tuple[str, Any]]:
        for pp in range(self.mesh.pp):
            for tp in range(self.mesh.tp):
                if self.mesh.zero == 3:
                    yield from self._zero3(pp, tp, scalars)
                elif self.mesh.zero:
                    yield from self._flat(pp, tp, scalars)
                else:
                    yield from self._unsharded(pp, tp, scalars)
        yield from self.models.layer_files()
        yield from self.models.expert_files()

    def _flat(self, pp: int, tp: int, scalars: ScalarStates) -> Iterator[tuple[str, Any]]:
        mp = pp * self.mesh.tp + tp
        by_ep = [optimizer_files.flat_groups(self.world, pp, tp, ep) for ep in range(self.mesh.ep)]
        states = [[scalars.group(group.members) for group in groups] for groups in by_ep]
        shapes = [group.shapes for group in by_ep[0]]
        yield step_files.model_file_name(mp), self.models.model_tree(pp, tp, 0, shapes, None)
        for dp in range(self.mesh.dp):
            ep = dp % self.mesh.ep
            groups = by_ep[ep]
            index = [dp // group.group.ep for group in groups]
            tree = optimizer_files.zero12_optimizer_tree(self.world, groups, states[ep], index)
            yield self._optim_name(dp, mp), self._optim_file(tree)

    def _zero3(self, pp: int, tp: int, scalars: ScalarStates) -> Iterator[tuple[str, Any]]:
        mp = pp * self.mesh.tp + tp
        groups = self.world.groups(pp, tp, 0)
        subs = optimizer_files.sub_groups(self.world, groups)
        shapes = [sub.shapes for sub in subs]
        states = [scalars.group(sub.members) for sub in subs]
        model: Any = None
        for dp in range(self.mesh.dp):
            if dp < 2 or self.models.has_shares:  # rank 0 is special, the others hold the same
                model = PickledTree(with_tensors(self.models.model_tree(pp, tp, dp, shapes, None)), self.tag)
            yield step_files.sharded_model_file_name(dp, mp), model
            tree = optimizer_files.zero3_optimizer_tree(self.world, groups, subs, states, dp)
            yield self._optim_name(dp, mp), self._optim_file(tree)

    def _unsharded(self, pp: int, tp: int, scalars: ScalarStates) -> Iterator[tuple[str, Any]]:
        mp = pp * self.mesh.tp + tp
        name = step_files.model_file_name(mp)
        if not self.world.has_experts:
            tree = self._unnamed(name) or optimizer_files.zero0_optimizer_tree(
                self.world, self.world.groups(pp, tp, 0), scalars
            )
            yield name, self.models.model_tree(pp, tp, 0, None, tree)
            return
        yield name, self.models.model_tree(pp, tp, 0, None, None)
        for ep in range(self.mesh.ep):
            name = step_files.expert_optimizer_file_name(ep, mp)
            tree = self._unnamed(name) or optimizer_files.zero0_optimizer_tree(
                self.world, self.world.groups(pp, tp, ep), scalars
            )
            yield name, {"optimizer": tree}

    def _unnamed(self, file: str) -> dict[str, Any] | None:
        """The optimizer of a source whose states nobody could name, where the target's rank wants it as it is."""
        source, mesh = self.source.mesh, self.mesh
        same = (source.zero, source.tp, source.pp, source.ep) == (mesh.zero, mesh.tp, mesh.pp, mesh.ep)
        kept = self.world.carried.unnamed_optimizer(file) if same and not self.world.recast else None
        return dict(kept) if kept is not None else None

    def _optim_name(self, dp: int, mp: int) -> str:
        return step_files.optimizer_file_name(dp, mp, is_bf16=self.world.dtype == BFLOAT16)

    def _optim_file(self, tree: dict[str, Any]) -> dict[str, Any]:
        return {
            "optimizer_state_dict": tree,
            "ds_config": self.models.config(),
            "ds_version": self.world.carried.version,
        }

    def _neighbours(self) -> Iterator[OutputFile]:
        """Files beside the step folder that the source carries: scheduler, RNG states, configs, tokenizers."""
        for name, tree in self.source.extras.trees.items():
            if name.endswith(".json"):
                data = json.dumps(tree, indent=2).encode() + b"\n"
                yield OutputFile(name, len(data), (Literal(0, data),))
            elif "/" not in name and not step_files.is_state_file(PurePosixPath(name).name):
                yield torch_file(name, with_tensors(tree))
        for name in self.source.extras.files:
            yield copied_file(self.source, name, name)


def _with_tensors(tree: Any) -> Any:
    return tree if isinstance(tree, PickledTree) else with_tensors(tree)


def target_mesh(source: Checkpoint, options: WriteOptions) -> Mesh:
    """The mesh that the options ask for: theirs, else that of the checkpoint to be like, else the source's.

    Experts that are no DeepSpeed experts (another framework's, under its own names or Hugging Face's) are dense here.
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
