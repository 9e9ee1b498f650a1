"""Buffers of a model in a log: absolute values, whenever they have changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucp.errors import UsageError
from ucp.log.codecs import bits_type
from ucp.log.kinds import BUFFER, FIRST_KINDS
from ucp.log.schema import StreamSchema
from ucp.log.values import Value
from ucp.train.live import LiveJob, dtype_of, local_part

if TYPE_CHECKING:
    import torch


class BufferWatch:
    """The buffers that this rank logs, and what was last logged of each.

    A module may put another tensor in a buffer's place, so they are looked up in their modules every time.
    """

    def __init__(self, job: LiveJob, model: Any, schema: StreamSchema, held: list[int]) -> None:
        """`held` says which of the job's buffers each of the stream's is."""
        wanted = {id(job.buffers[number].tensor): (place, number) for place, number in enumerate(held)}
        self._names = [job.buffers[number].share.name for number in held]
        self._owners: list[tuple[Any, str]] = [(None, "")] * len(held)
        for part in model.modules():
            for name, buffer in part._buffers.items():
                if id(buffer) in wanted:
                    self._owners[wanted[id(buffer)][0]] = part, name
        self._state = FIRST_KINDS.index(BUFFER)
        self._known = [_copy(job.buffers[number].tensor) for number in held]
        self._dtypes = [dtype_of(known) for known in self._known]
        self._counts = [block.count for block in schema.buffers]

    def changed(self) -> list[Value]:
        """Those that are not what was last logged (or what the log started from)."""
        import torch

        found = []
        for place, (part, name) in enumerate(self._owners):
            now = part._buffers[name]
            known = self._known[place]
            if now is None or now.dtype != known.dtype or now.numel() != self._counts[place]:
                raise UsageError(
                    f"buffer {self._names[place]} has another shape or element type than when recording began",
                    hint="close the recorder and record again after changing the model",
                )
            if not torch.equal(_bytes(local_part(now).reshape(-1)), _bytes(known)):
                new = self._known[place] = _copy(now)
                dtype = self._dtypes[place]
                bits = _bytes(new).numpy().view(bits_type(dtype))
                found.append(Value(place, self._state, dtype, bits, chained=False))
        return found


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return local_part(tensor).reshape(-1).cpu().clone()


def _bytes(flat: torch.Tensor) -> torch.Tensor:
    import torch

    return flat.cpu().view(torch.uint8)
