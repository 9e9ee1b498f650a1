"""The state that a shadow had after one step, as long as somebody reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ucp.errors import UsageError
from ucp.log.kinds import BUFFER
from ucp.replay.chunks import Replay, memory_of
from ucp.replay.kernels import PARAM
from ucp.shadow.held import HeldTensor, HeldValue

if TYPE_CHECKING:
    import torch

# Stream, optimizer tensor, state. Of a state with a shape of its own, that is `OWN` and its name; of a buffer, its
# number in the stream stands in the tensor's place.
Place = tuple[int, int, str]
OWN: Final = "own/"


class Snapshot:
    """The state after one step, whatever is applied later: shares memory with the live state until that changes."""

    def __init__(
        self,
        told: dict[str, Any],
        step: int,
        tensors: Sequence[HeldTensor],
        buffers: Mapping[tuple[int, int], HeldValue],
        close: Callable[[], None],
    ) -> None:
        self.told = told
        self.step = step
        self._tensors = {(tensor.stream.number, tensor.index): tensor for tensor in tensors}
        self._values: dict[Place, HeldValue] = {(*place, BUFFER): value for place, value in buffers.items()}
        for place, tensor in self._tensors.items():
            self._values.update({(*place, OWN + kind): value for kind, value in tensor.own.items()})
        self.stretches = {id(replay): replay.stretch for tensor in tensors for replay in tensor.replays}
        self.close = close

    def read_into(self, place: Place, offset: int, target: memoryview) -> None:
        """Fill `target` with bytes of a state of an optimizer tensor, or of a buffer, from byte `offset` on."""
        value = self._values.get(place)
        if value is None:
            self._read_state(place, offset, target)
            return
        if offset < 0 or offset + len(target) > len(value.data):
            raise _outside(place, offset, len(target))
        target[:] = value.data[offset : offset + len(target)]

    def _read_state(self, place: Place, offset: int, target: memoryview) -> None:
        stream, index, kind = place
        tensor = self._tensors.get((stream, index))
        if tensor is None or kind not in tensor.kinds:
            raise UsageError(f"stream {stream} has no tensor {index} with state {kind!r}")
        size = self._tensor(tensor.replays[0], kind).element_size()
        if offset < tensor.held[0] * size or offset + len(target) > tensor.held[1] * size:
            raise _outside(place, offset, len(target))
        done = 0
        while done < len(target):
            number, start = divmod(offset + done - tensor.held[0] * size, tensor.chunk * size)
            data = memory_of(self._tensor(tensor.replays[number], kind))
            some = data[start : start + len(target) - done]
            target[done : done + len(some)] = some
            done += len(some)

    def _tensor(self, replay: Replay, kind: str) -> torch.Tensor:
        import torch

        stretch = self.stretches[id(replay)]
        held = stretch.param if kind == PARAM else stretch.states.get(kind)
        return torch.zeros_like(stretch.param) if held is None else held


def _outside(place: Place, offset: int, size: int) -> UsageError:
    stream, index, kind = place
    return UsageError(f"bytes {offset} to {offset + size} of {kind} are not in stream {stream}, tensor {index}")
