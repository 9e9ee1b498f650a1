"""The computed files of a span of a log: a stretch is replayed when it is read, and kept until its other states are."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future

from ucp import tunables
from ucp.files.local import SourceFiles
from ucp.model.checkpoint import ComputedFiles, ForkableFiles
from ucp.replay.chunks import Replay, ReplayedTensor, memory_of

Chunk = dict[str, memoryview]  # the bytes of every state of a stretch


class ReplayedFiles:
    """The computed files of one span of a log. Keeps a few stretches; threads that want the same one wait for it."""

    def __init__(
        self, base: SourceFiles, tensors: Sequence[ReplayedTensor], identity: str, inner: ComputedFiles | None
    ) -> None:
        """`inner` has the computed files of older spans, on which these are built."""
        self.identity = identity
        self._base = base
        self.inner = inner
        self._places = {f"{tensor.file}/{kind}": (tensor, kind) for tensor in tensors for kind in tensor.kinds}
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, int], Future[Chunk]] = OrderedDict()
        self._kept_bytes = tunables.REPLAY_CACHE_BYTES  # at most, or four stretches
        self.replayed = 0  # elements times updates, so far
        weakref.finalize(self, base.close)

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        """As `ComputedFiles.read_into`."""
        place = self._places.get(file)
        if place is None:
            if self.inner is None:
                raise AssertionError(f"{file} is not computed here")
            self.inner.read_into(file, offset, target)
            return
        tensor, kind = place
        size = tensor.chunk * tensor.kinds[kind].itemsize
        done = 0
        while done < len(target):
            number, start = divmod(offset + done, size)
            data = self._chunk(tensor, number)[kind]
            some = data[start : start + len(target) - done]
            target[done : done + len(some)] = some
            done += len(some)

    def before_fork(self) -> bool:
        """As `ForkableFiles.before_fork`: torch and operators are loaded once and not by every fork."""
        tensors = [tensor for tensor, _ in self._places.values()]
        if self._base.is_remote or any(tensor.stream.is_remote for tensor in tensors):
            return False
        import torch  # noqa: F401

        for kernel in {tensor.kernel.id: tensor.kernel for tensor in tensors if tensor.kernel is not None}.values():
            kernel.prepare()
        return self.inner is None or (isinstance(self.inner, ForkableFiles) and self.inner.before_fork())

    def in_fork(self, workers: int) -> None:
        """As `ForkableFiles.in_fork`."""
        import torch

        # Also because the threads that torch computes in, where it has begun to, were not forked with us.
        torch.set_num_threads(1)
        self._kept_bytes = tunables.REPLAY_CACHE_BYTES // workers
        if isinstance(self.inner, ForkableFiles):
            self.inner.in_fork(workers)

    def _chunk(self, tensor: ReplayedTensor, number: int) -> Chunk:
        key = tensor.file, number
        with self._lock:
            future = self._kept.get(key)
            mine = future is None
            if future is None:
                future = self._kept[key] = Future()
                self._evict(tensor)
            else:
                self._kept.move_to_end(key)
        if mine:
            try:
                future.set_result(self._compute(tensor, number))
            except BaseException as error:
                future.set_exception(error)
                with self._lock:
                    self._kept.pop(key, None)
                raise
        return future.result()

    def _evict(self, tensor: ReplayedTensor) -> None:
        nbytes = sum(dtype.itemsize for dtype in tensor.kinds.values()) * min(tensor.chunk, tensor.numel)
        room = max(4, self._kept_bytes // max(1, nbytes))
        for key in list(self._kept):
            if len(self._kept) <= room:
                break
            if self._kept[key].done():
                del self._kept[key]

    def _compute(self, tensor: ReplayedTensor, number: int) -> Chunk:
        import torch

        with torch.no_grad():
            replay = Replay(tensor, number, self._base)
            stretch = replay.run(tensor.last)
        self.replayed += replay.taken * stretch.param.numel()
        return {kind: memory_of(replay.tensor_of(kind)) for kind in tensor.kinds}
