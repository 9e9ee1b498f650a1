"""Digests in a log prove or refute that a replay gives the job's own bits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import xxhash

from ucp.files.local import SourceFiles
from ucp.log.payloads import Digest
from ucp.model.checkpoint import STEP
from ucp.replay.chunks import Replay, ReplayedTensor, memory_of
from ucp.replay.derive import Derived
from ucp.replay.exactness import Approximate
from ucp.replay.stored import PARAM_NAMES
from ucp.replay.stretch import PARAM


@dataclass(slots=True)
class Proof:
    """What digests say about a replay."""

    step: int  # that was wanted
    compared: int = 0  # digests
    proven: dict[str, int] = field(
        default_factory=dict
    )  # parameter → newest step at which all its states are the job's
    refuted: list[Approximate] = field(default_factory=list)

    @property
    def proven_step(self) -> int | None:
        """The newest step at which every parameter is proven; None where there is none."""
        step = min(self.proven.values(), default=-1)
        return None if step < 0 or self.refuted else step

    def remaining(self, labels: Sequence[Approximate]) -> list[Approximate]:
        """The labels that are left: a digest of the very step proves what it covers, a wrong one refutes it."""
        if self.refuted:
            return [*self.refuted, *labels]
        everything = bool(self.proven) and all(step >= self.step for step in self.proven.values())
        return [] if everything else list(labels)


def prove(derived: Derived) -> Proof:
    """Replay every tensor of the newest span past its digests, stretch by stretch, and compare."""
    checkpoint = derived.checkpoint
    proof = Proof(checkpoint.step or 0)
    inner = getattr(checkpoint.computed, "inner", None)
    with SourceFiles(checkpoint.root, computed=inner) as base:
        for tensor in derived.tensors:
            _prove_tensor(proof, tensor, base)
    return proof


def _prove_tensor(proof: Proof, tensor: ReplayedTensor, base: SourceFiles) -> None:
    import torch

    if any(tensor.origins[block.parameter].is_padded(block.region) for block in tensor.blocks):
        proof.proven.update(dict.fromkeys({origin.name for origin in tensor.origins.values()}, -1))
        return  # rows beyond the vocabulary are in the job's digest, and not in the base
    names = sorted({origin.name for origin in tensor.origins.values()})
    begin = max(origin.step for origin in tensor.origins.values()) if tensor.origins else tensor.last
    known = {
        step: [digest for digest in digests if digest.tensor == tensor.index and not _is_counter(digest, tensor)]
        for step, digests in sorted(tensor.stream.digests().items())
        if (begin <= step if tensor.kernel is not None else step == tensor.last) and step <= tensor.last
    }
    known = {step: digests for step, digests in known.items() if digests}
    running = {(step, d.kind): xxhash.xxh3_128() for step, digests in known.items() for d in digests}
    for number in range(-(-tensor.numel // tensor.chunk)):
        replay = Replay(tensor, number, base)
        for step, digests in known.items():
            with torch.no_grad():
                replay.run(step)
            for digest in digests:
                _add(running[step, digest.kind], replay, _kind(digest))
    for name in names:
        proof.proven.setdefault(name, -1)
    for step, digests in known.items():
        wrong = [d for d in digests if running[step, d.kind].hexdigest() != d.value]
        proof.compared += len(digests)
        if wrong:
            kinds = ", ".join(_kind(d) for d in wrong)
            reason = f"the replay differs from the job's own digest ({kinds})"
            proof.refuted += [Approximate(step, name, reason) for name in names]
            return
        if {_kind(d) for d in digests} >= set(tensor.kinds):
            for name in names:
                proof.proven[name] = max(proof.proven[name], step)


def _is_counter(digest: Digest, tensor: ReplayedTensor) -> bool:
    """Is it of the number of updates? Logs of parameters that are numbers once had digests of it."""
    return digest.kind == STEP and tensor.numel == 1


def _kind(digest: Digest) -> str:
    return PARAM if digest.kind in PARAM_NAMES else digest.kind


def _add(running: xxhash.xxh3_128, replay: Replay, kind: str) -> None:
    """The stretch's elements without padding: its blocks end to end."""
    values = replay.tensor_of(kind)
    for low, high in _covered(replay):
        running.update(memory_of(values[low:high]))


def _covered(replay: Replay) -> Iterable[tuple[int, int]]:
    for block in replay.blocks:
        low, high = max(block.offset, replay.start), min(block.offset + block.count, replay.stop)
        yield low - replay.start, high - replay.start
