"""Model files of another ZeRO stage than the save's: of another save into the same folder, and to be left alone.

ZeRO-3 writes a model file a rank, the other stages one a model-parallel rank. Names of the two kinds do not collide, so
a save replaces only its own kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ucp.formats.deepspeed.names import StepFiles
from ucp.formats.deepspeed.shards import RankFiles
from ucp.formats.deepspeed.zero3 import MASTERS

FOREIGN: Final = "file-foreign"


def told_apart(files: StepFiles, opened: RankFiles, prefix: str) -> StepFiles:
    """The files without the model files that the optimizer's did not come with."""
    if not files.model or not files.sharded_model:
        return files
    return of_stage(files, sharded=_is_sharded(files, opened, prefix))


def of_stage(files: StepFiles, *, sharded: bool) -> StepFiles:
    """The files of a save of ZeRO-3 (`sharded`) or of another stage; model files of the other kind are `foreign`."""
    others: Mapping[Any, str] = files.model if sharded else files.sharded_model
    if not others or not (files.sharded_model if sharded else files.model):
        return files
    return StepFiles(
        model={} if sharded else files.model,
        sharded_model=files.sharded_model if sharded else {},
        optim=files.optim,
        layers=files.layers,
        experts=files.experts,
        expert_optim=files.expert_optim,
        other=files.other,
        foreign=sorted(others.values()),
    )


def _is_sharded(files: StepFiles, opened: RankFiles, prefix: str) -> bool:
    """Whether ZeRO-3 wrote the optimizer: its states lie in a table of their own, and with ZeRO off in the model file.

    Where all of it is lost, weights that are whole are not taken for what was saved.
    """
    if not files.optim:
        model = opened.open(prefix + files.model[min(files.model)])
        return not files.expert_optim and model.mapping().get("optimizer") is None
    states = opened.open(prefix + files.optim[min(files.optim)]).mapping().get("optimizer_state_dict")
    return isinstance(states, dict) and MASTERS in states
