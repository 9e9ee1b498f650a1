"""Logs written without a recorder: a small torch job that writes its own frames, which tests can damage."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ucp
from ucp.core.checkpoint import Checkpoint, Mesh, Rank
from ucp.core.dtypes import BY_NAME
from ucp.core.region import Region
from ucp.log.base_folders import BaseCheckpoint, base_folder, write_base
from ucp.log.codecs import EncodedBlock, bits_type, encode_difference
from ucp.log.epoch_manifest import EpochManifest, KernelFingerprint, OptimizerGroup, ParentEpoch, write_manifest
from ucp.log.frames import FrameType
from ucp.log.payloads import GradientStage, GroupScalars, LrKind, StateDigest, StepRecord, pack_digests
from ucp.log.reader import epoch_folder, stream_folder
from ucp.log.segment_writer import SegmentWriter, append_blocks, append_step, encode_block
from ucp.log.stream_schema import LoggedParameter, OptimizerTensor, StreamSchema, cut_blocks
from ucp.views import OpenCheckpoint

State = dict[str, torch.Tensor]  # "name|kind" → a copy


class RareGradientNet(torch.nn.Module):
    """Odd sizes, one parameter larger than a block, one that gets no gradient every third step."""

    def __init__(self, large: int = 37) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.large = torch.nn.Parameter(torch.randn(large, 11, generator=generator))
        self.small = torch.nn.Parameter(torch.randn(7, generator=generator))
        self.rare = torch.nn.Parameter(torch.randn(3, 5, generator=generator))
        self.register_buffer("mask", torch.ones(2))


@dataclass
class Run:
    """A job that keeps its state after every step."""

    folder: Path
    net: RareGradientNet
    optimizer: torch.optim.Optimizer
    kernel: KernelFingerprint
    epoch: int = 0
    step: int = 0
    streams: int = 1
    history: dict[int, State] = field(default_factory=dict)
    writers: list[SegmentWriter] = field(default_factory=list)
    schemas: list[StreamSchema] = field(default_factory=list)
    kinds: list[str] = field(default_factory=lambda: ["grad", "param", "exp_avg", "exp_avg_sq"])
    scale: float | None = None
    notes: list[str] = field(default_factory=list)
    skipped: frozenset[int] = frozenset({4})

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def named(self) -> list[tuple[str, torch.nn.Parameter]]:
        return list(self.net.named_parameters())

    def group_of(self, parameter: torch.Tensor) -> int:
        return next(n for n, g in enumerate(self.optimizer.param_groups) if any(p is parameter for p in g["params"]))

    def open_epoch(self, parent: ParentEpoch | None = None, base: str | None = None) -> None:
        """Write the manifest of a new epoch that continues from the current step."""
        names = [name for name, _ in self.named()]
        self.schemas, self.writers = [], []
        for number in range(self.streams):
            schema = StreamSchema(number, Rank(dp=number))
            for index, (name, p) in enumerate(self.named()):
                if index % self.streams == number:
                    tensor = len(schema.tensors)
                    dtype = str(p.dtype).removeprefix("torch.")
                    schema.tensors.append(OptimizerTensor(p.numel(), self.group_of(p), dtype, dtype, (name,)))
                    share = (index, Region.all_of(tuple(p.shape)), 0)
                    schema.blocks.extend(cut_blocks(len(schema.blocks), tensor, [share]))
            self.schemas.append(schema)
        manifest = EpochManifest(
            "run",
            self.epoch,
            self.step,
            Mesh(),
            self.kernel,
            type(self.optimizer).__name__,
            [
                LoggedParameter(name, tuple(p.shape), str(p.dtype).removeprefix("torch."), self.group_of(p))
                for name, p in self.named()
            ],
            [
                OptimizerGroup(
                    {k: v for k, v in g.items() if k != "params" and not isinstance(v, torch.Tensor)},
                    tuple(n for n in names if any(p is self.net.get_parameter(n) for p in g["params"])),
                )
                for g in self.optimizer.param_groups
            ],
            self.schemas,
            parent,
            base,
            self.kinds,
            self.notes,
        )
        folder = epoch_folder(self.log, self.epoch)
        write_manifest(folder, manifest)
        self.writers = [
            SegmentWriter(stream_folder(folder, s.stream), self.epoch, s.stream, s.hash()) for s in self.schemas
        ]
        for s in self.schemas:
            stream_folder(folder, s.stream).mkdir(parents=True, exist_ok=True)

    def gradients(self, step: int) -> list[torch.Tensor | None]:
        generator = torch.Generator().manual_seed(step)
        made = [torch.randn(p.shape, generator=generator) for _, p in self.named()]
        return [
            None if name == "rare" and step % 3 == 0 else g for (name, _), g in zip(self.named(), made, strict=True)
        ]

    def train(self, steps: int) -> None:
        """Train and log some steps."""
        for _ in range(steps):
            self.step += 1
            for group in self.optimizer.param_groups:
                group["lr"] = 1e-2 * 0.9**self.step
            skipped = self.step in self.skipped
            reduced = [g if g is None else g.bfloat16().float() for g in self.gradients(self.step)]
            if not skipped:
                for (_, p), g in zip(self.named(), reduced, strict=True):
                    factor = torch.tensor(1.0 if self.scale is None else self.scale, dtype=torch.float32)
                    p.grad = None if g is None else (g * factor).to(p.dtype)
            scalars = tuple(self._scalars(n, g) for n, g in enumerate(self.optimizer.param_groups))
            if not skipped:
                self.optimizer.step()
            scale = None if self.scale is None else np.float32(self.scale)
            for schema, writer in zip(self.schemas, self.writers, strict=True):
                blocks = [] if skipped else self._blocks(schema, reduced)
                record = StepRecord(
                    () if skipped else scalars,
                    GradientStage.CONSUMED if scale is None else GradientStage.REDUCED,
                    None if skipped else scale,
                    skipped,
                )
                append_step(writer, self.step, record, blocks)
            self.history[self.step] = self.state()

    def _scalars(self, number: int, group: dict[str, Any]) -> GroupScalars:
        betas = group.get("betas", (math.nan, math.nan))
        states = [self.optimizer.state.get(p, {}) for p in group["params"]]
        counted = max((int(s["step"]) for s in states if "step" in s), default=0)
        return GroupScalars(
            number,
            group["lr"],
            *betas,
            group.get("eps", math.nan),
            group["weight_decay"],
            group.get("momentum", math.nan),
            group.get("dampening", math.nan),
            LrKind.FLOAT,
            opt_step=counted,
        )

    def _blocks(self, schema: StreamSchema, gradients: Sequence[torch.Tensor | None]) -> list[EncodedBlock]:
        found = []
        for block in schema.blocks:
            gradient = gradients[block.parameter]
            if gradient is not None:
                part = gradient.reshape(-1)[block.offset : block.offset + block.count].contiguous()
                found.append(encode_block(block.id, bits(part), BY_NAME[str(part.dtype).removeprefix("torch.")]))
        return found

    def state(self) -> State:
        """A copy of everything that is trained."""
        found: State = {}
        for name, p in self.named():
            found[f"{name}|weight"] = p.detach().clone()
            for kind, value in self.optimizer.state.get(p, {}).items():
                if isinstance(value, torch.Tensor):
                    found[f"{name}|{kind}"] = value.clone()
        return found

    def save(self, number: int, steps: dict[str, int] | None = None) -> Path:
        """Save a base of the current state; returns its checkpoint."""
        base = BaseCheckpoint(base_folder(self.folder, number), number, self.step, self.epoch, steps=steps or {})
        base.folder.mkdir(parents=True)
        ucp.save(base.path, self.net, self.optimizer).wait()
        write_base(base)
        return base.path

    def digest(self) -> None:
        """Log digests of the current state."""
        import xxhash

        names = [name for name, _ in self.named()]
        for schema, writer in zip(self.schemas, self.writers, strict=True):
            digests = []
            for index, tensor in enumerate(schema.tensors):
                p = self.net.get_parameter(tensor.names[0])
                assert tensor.names[0] in names
                for kind, value in {"param": p.detach(), **self.optimizer.state[p]}.items():
                    if kind != "step":
                        digests.append(
                            StateDigest(index, kind, xxhash.xxh3_128_hexdigest(bits(value.reshape(-1)).tobytes()))
                        )
            writer.append(FrameType.DIGEST, self.step, [pack_digests(digests)])

    def store(self, before: State | None, since: int = -1) -> None:
        """Log the current state in full, or as a difference from an earlier one."""
        for schema, writer in zip(self.schemas, self.writers, strict=True):
            made = []
            for block in schema.blocks:
                name = self.named()[block.parameter][0]
                for number, kind in enumerate(self.kinds[1:], start=1):
                    key = f"{name}|{'weight' if kind == 'param' else kind}"
                    now = self.state().get(key)
                    if now is None:
                        continue
                    part = slice(block.offset, block.offset + block.count)
                    new = bits(now.reshape(-1)[part])
                    if before is None:
                        made.append(encode_block(block.id, new, BY_NAME["float32"], state=number))
                    else:
                        encoding, data = encode_difference(bits(before[key].reshape(-1)[part]), new)
                        made.append(EncodedBlock(block.id, encoding, BY_NAME["float32"], len(new), data, number))
            kind_of = FrameType.FULL if before is None else FrameType.DIFF
            append_blocks(writer, kind_of, self.step, made, base_step=since)


def bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Bit patterns of a flat tensor."""
    raw = tensor.contiguous().view(torch.uint8).numpy()
    return raw.view(bits_type(BY_NAME[str(tensor.dtype).removeprefix("torch.")]))


def here(kernel_id: str) -> KernelFingerprint:
    """The fingerprint of this machine."""
    return KernelFingerprint(kernel_id, str(torch.__version__), str(torch.backends.cpu.get_cpu_capability()))


def start(
    folder: Path,
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None,
    kernel: str = "torch.adamw.single",
    **options: Any,
) -> Run:
    """A run at step 0 with an open epoch."""
    large = options.pop("large", 37)
    net = RareGradientNet(large)
    groups = [
        {"params": [net.large, net.rare], "weight_decay": 0.1},
        {"params": [net.small], "weight_decay": 0.0},
    ]
    optimizer = (make or (lambda g: torch.optim.AdamW(g, foreach=False)))(groups)
    run = Run(folder, net, optimizer, here(kernel), **options)
    run.history[0] = run.state()
    run.open_epoch()
    return run


def state_of(checkpoint: Checkpoint) -> State:
    """A copy of everything that is trained."""
    view = OpenCheckpoint(checkpoint)
    return {
        f"{name}|{kind}": torch.as_tensor(parameter.read(kind, as_torch=True)).clone()
        for name, parameter in view.parameters.items()
        if parameter.parameter.role == "trained"
        for kind in parameter.kinds
    }


def assert_same(found: State, expected: State) -> None:
    """Equal in every bit."""
    assert sorted(found) == sorted(expected)
    for key, value in expected.items():
        assert found[key].shape == value.shape, key
        assert torch.equal(found[key].view(-1).view(torch.int32), value.view(-1).view(torch.int32)), key
