"""What a recorder logs besides gradients: the job after a step as JSON, and digests of its optimizer state."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from ucp.errors import UsageError
from ucp.log.kinds import PARAM, logged_kind
from ucp.log.payloads import Digest
from ucp.log.schema import StreamSchema
from ucp.model.checkpoint import kind_of_state
from ucp.train.extras import COUNTERS, SCALER_FIELDS, live_scaler
from ucp.train.live import LiveJob, flat_view, local_part
from ucp.train.optimizers import is_counter
from ucp.train.pieces import digest_of
from ucp.train.recording.kernel import plain_hyper

SCHEDULED: Final = ("lr", "betas", "eps", "weight_decay", "momentum", "dampening")  # what is different in every step
_LEFT_OUT: Final = object()


def job_notes(job: LiveJob) -> dict[str, Any]:
    """Counters, LR scheduler and loss scaler of a DeepSpeed engine as they are now, as far as JSON can keep them."""
    engine = job.engine
    if engine is None:
        return {}
    notes: dict[str, Any] = {"counters": {name: int(getattr(engine, name)) for name in COUNTERS}}
    # The scheduler has taken its step: these are for the next one.
    notes["hyper"] = [plain_hyper({key: group[key] for key in SCHEDULED if key in group}) for group in job.groups]
    if hasattr(engine.lr_scheduler, "state_dict"):
        notes["lr_scheduler"] = _kept(engine.lr_scheduler.state_dict())
    scaler = live_scaler(engine.optimizer)
    if scaler is not None:
        fields = {name: getattr(scaler, name, None) for name in (*SCALER_FIELDS, "min_loss_scale")}
        notes["scaler"] = {name: value for name, value in fields.items() if isinstance(value, (int, float))}
    return notes


def _kept(value: Any) -> Any:
    """A scheduler's state as JSON, with the states of the schedulers in it. What is not plain data is left out."""
    if isinstance(value, dict):
        found = {key: _kept(item) for key, item in value.items() if isinstance(key, str)}
        return {key: item for key, item in found.items() if item is not _LEFT_OUT}
    if isinstance(value, (list, tuple)):
        items = [_kept(item) for item in value]
        return _LEFT_OUT if any(item is _LEFT_OUT for item in items) else items
    if hasattr(value, "item") and getattr(value, "numel", lambda: value.size)() == 1:
        value = value.item()
    return value if value is None or isinstance(value, (bool, int, float, str)) else _LEFT_OUT


def plain_notes(value: Any) -> Any:
    """What the user gave, which must be JSON."""
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"what aux= gave is no JSON: {error}", hint="give numbers, text, lists and dictionaries"
        ) from error
    return value


def state_digests(optimizer: Any, schema: StreamSchema, keys: Sequence[Any]) -> list[Digest]:
    """XXH3-128 of every optimizer tensor of a stream and of its states, over its blocks end to end."""
    import torch

    found = []
    for number, key in enumerate(keys):
        blocks = schema.blocks_of(number)
        if not blocks:
            continue  # a tensor without elements
        states = {
            logged_kind(kind_of_state(name)): value
            for name, value in optimizer.state.get(key, {}).items()
            if isinstance(value, torch.Tensor) and value.shape == key.shape and not is_counter(name, value)
        }
        for kind, tensor in {PARAM: key, **states}.items():
            flat = flat_view(tensor)
            flat = local_part(tensor).reshape(-1) if flat is None else flat
            parts = [flat[block.offset : block.offset + block.count] for block in blocks]
            found.append(Digest(number, kind, digest_of(parts[0] if len(parts) == 1 else torch.cat(parts))))
    return found
