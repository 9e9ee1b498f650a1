#!/usr/bin/env python
"""Make DeepSpeed checkpoints of any size without training: GPT-like shapes, random numbers, DeepSpeed's own classes.

    synthetic_deepspeed.py DEST --gb 2                          # ZeRO-1, dp 4, bf16
    synthetic_deepspeed.py DEST --gb 2 --tp 2 --dp 2            # with universal_checkpoint_info
    synthetic_deepspeed.py DEST --gb 2 --zero 3 --dp 6
    synthetic_deepspeed.py DEST --gb 1000 --dp 1024 --sparse    # 1 TB of holes: needs no disk space

Key trees, flat layout, padding and shared storages are those that `engine.save_checkpoint` writes, so DeepSpeed's own
tools read the result. Weights are the masters rounded to bf16, and tensor-parallel replicas are equal. One rank file is
in memory at a time. In sparse files every header, pickle and offset is right; their tensors read as zeros.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from deepspeed import __version__ as ds_version
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch._subclasses.fake_tensor import FakeTensorMode

STEP = 100
TAG = f"global_step{STEP}"
KINDS = ("master", "exp_avg", "exp_avg_sq")
BYTES_PER_PARAMETER = {1: 14, 3: 12}  # three float32 states, and a bfloat16 weight below stage 3
SUB_GROUP_ELEMENTS = 1_000_000_000  # DeepSpeed's default for stage 3

# How names are split over tensor-parallel ranks, as a client of DeepSpeed would specify it.
VOCABULARY = [r"embed\.weight$"]
ROW_PARALLEL = [r".*\.(proj|down)\.weight$"]
REPLICATED = [r"pos\.weight$", r".*ln\w*\.(weight|bias)$", r".*\.(proj|down)\.bias$"]


@dataclass(frozen=True)
class Gpt:
    """The shape of a model. `vocab` rows are in use; the embedding has `padded_vocab`."""

    hidden: int
    layers: int
    vocab: int
    padded_vocab: int

    @staticmethod
    def of_size(parameters: int) -> Gpt:
        """A model of about this many parameters with sensible proportions."""
        hidden = next((h for h in (8192, 4096, 2048, 1024, 512, 256, 128) if 8 * 12 * h * h <= parameters), 64)
        padded_vocab = max(128, min(50304, parameters // (4 * hidden)) // 128 * 128)
        layers = max(1, round((parameters - (padded_vocab + 1024) * hidden) / (12 * hidden * hidden + 13 * hidden)))
        return Gpt(hidden, layers, padded_vocab - 47, padded_vocab)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter with its whole shape, in the model's order."""
        h = self.hidden
        shapes: dict[str, tuple[int, ...]] = {"embed.weight": (self.padded_vocab, h), "pos.weight": (1024, h)}
        for layer in range(self.layers):
            block = f"blocks.{layer}"
            for name, rows, columns in (
                ("attn.qkv", 3 * h, h),
                ("attn.proj", h, h),
                ("mlp.up", 4 * h, h),
                ("mlp.down", h, 4 * h),
            ):
                shapes[f"{block}.{name}.weight"] = (rows, columns)
                shapes[f"{block}.{name}.bias"] = (rows,)
            for name in ("ln1", "ln2"):
                shapes[f"{block}.{name}.weight"] = shapes[f"{block}.{name}.bias"] = (h,)
        shapes["ln_f.weight"] = shapes["ln_f.bias"] = (h,)
        return shapes


def _matches(patterns: list[str], name: str) -> bool:
    return any(re.match(pattern, name) for pattern in patterns)


def _local_shape(name: str, shape: tuple[int, ...], tp: int) -> tuple[int, ...]:
    if tp == 1 or _matches(REPLICATED, name):
        return shape
    dim = 1 if _matches(ROW_PARALLEL, name) else 0
    return (*shape[:dim], shape[dim] // tp, *shape[dim + 1 :])


class Noise:
    """Random numbers by name: any range of any state of any parameter, from one reused block."""

    def __init__(self) -> None:
        values = torch.randn(1_048_583, generator=torch.Generator().manual_seed(0)) * 0.02
        self._blocks = {"master": values, "exp_avg": values * 1e-3, "exp_avg_sq": values * values * 1e-3}

    def fill(self, out: torch.Tensor, name: str, kind: str, tp_rank: int, start: int) -> None:
        """Elements `[start, start + len(out))` of a tensor-parallel rank's slice, cast to `out`'s type."""
        block = self._blocks[kind]
        seed = crc32(name.encode()) + (0 if _matches(REPLICATED, name) else 7919 * tp_rank)
        done = 0
        while done < len(out):
            at = (seed + start + done) % len(block)
            count = min(len(out) - done, len(block) - at)
            out[done : done + count] = block[at : at + count]
            done += count


class FlatGroup:
    """One flat buffer: concatenated parameters, in elements; `total` includes zeros up to a multiple of `align`."""

    def __init__(self, shapes: OrderedDict[str, torch.Size], align: int) -> None:
        self.shapes = shapes
        self._names = list(shapes)
        self._edges = [0, *accumulate(shape.numel() for shape in shapes.values())]
        self.content = self._edges[-1]
        self.total = -(-self.content // align) * align

    def overlaps(self, start: int, stop: int) -> Iterator[tuple[str, int, int, int]]:
        """Parameters in `[start, stop)`: name, first element in the parameter, first in the range, count."""
        first = max(0, bisect_right(self._edges, start) - 1)
        for number in range(first, len(self._names)):
            lo, hi = max(start, self._edges[number]), min(stop, self._edges[number + 1])
            if lo >= hi:
                return
            yield self._names[number], lo - self._edges[number], lo - start, hi - lo


class Maker:
    """Writes the files of one checkpoint."""

    def __init__(self, save_dir: Path, model: Gpt, *, zero: int, tp: int, dp: int, sparse: bool) -> None:
        self.folder = save_dir / TAG
        self.model, self.zero, self.tp, self.dp, self.sparse = model, zero, tp, dp, sparse
        self.noise = Noise()
        local = {name: torch.Size(_local_shape(name, shape, tp)) for name, shape in model.shapes().items()}
        decay = OrderedDict((name, shape) for name, shape in local.items() if len(shape) > 1)
        rest = OrderedDict((name, shape) for name, shape in local.items() if len(shape) == 1)
        self.local = local
        self.groups = [decay, rest]

    def write(self) -> None:
        self.folder.mkdir(parents=True)
        with self._saving() as save:
            for tp_rank in range(self.tp):
                if self.zero == 3:
                    self._write_stage3(save, tp_rank)
                else:
                    self._write_stage1(save, tp_rank)
        (self.folder.parent / "latest").write_text(TAG)

    @contextmanager
    def _saving(self) -> Iterator[Callable[[dict[str, Any], str], None]]:
        def save(tree: dict[str, Any], name: str) -> None:
            torch.save(tree, self.folder / name)

        if not self.sparse:
            yield save
            return
        with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
            yield save

    def _write_stage1(self, save: Callable[[dict[str, Any], str], None], tp_rank: int) -> None:
        flat = [FlatGroup(shapes, 2 * self.dp) for shapes in self.groups]
        module: OrderedDict[str, torch.Tensor] = OrderedDict((name, torch.empty(0)) for name in self.local)
        for group in flat:
            buffer = torch.zeros(group.total, dtype=torch.bfloat16)
            for name, _, at, count in group.overlaps(0, group.total):
                if not self.sparse:
                    self.noise.fill(buffer[at : at + count], name, "master", tp_rank, 0)
                module[name] = buffer[at : at + count].view(group.shapes[name])
        name = f"mp_rank_{tp_rank:02d}_model_states.pt"
        save(self._model_tree(module, [group.shapes for group in flat]), name)
        if self.sparse and self.tp > 1:
            _mark_rank(self.folder / name, flat, tp_rank)
        del module, buffer
        for dp_rank in range(self.dp):
            save(self._optimizer_stage1(flat, tp_rank, dp_rank), self._optimizer_name(tp_rank, dp_rank))

    def _optimizer_stage1(self, flat: list[FlatGroup], tp_rank: int, dp_rank: int) -> dict[str, Any]:
        masters, states, paddings, mappings = [], {}, [], []
        for number, group in enumerate(flat):
            size = group.total // self.dp
            start, stop = dp_rank * size, (dp_rank + 1) * size
            tensors = {kind: torch.zeros(size) for kind in KINDS}
            mapping = OrderedDict()
            for name, first, at, count in group.overlaps(start, stop):
                mapping[name] = fragment_address(numel=count, start=at)
                for kind, tensor in () if self.sparse else tensors.items():
                    self.noise.fill(tensor[at : at + count], name, kind, tp_rank, first)
            padding = min(size, max(0, stop - group.content))
            master = tensors.pop("master")
            masters.append(master[: size - padding])  # a view, as DeepSpeed saves it
            states[number] = {"step": torch.tensor(float(STEP)), **tensors}
            paddings.append(padding)
            mappings.append(mapping)
        return self._optimizer_tree(
            {
                "loss_scaler": LossScaler(scale=1.0),
                "dynamic_loss_scale": False,
                "overflow": False,
                "clip_grad": 1.0,
                "base_optimizer_state": {"state": states, "param_groups": self._param_groups()},
                "single_partition_of_fp32_groups": masters,
                "zero_stage": ZeroStageEnum(1),
                "group_paddings": paddings,
                "param_alignment_paddings": [[0] * len(group.shapes) for group in flat],
                "partition_count": [self.dp] * len(flat),
                "ds_version": ds_version,
                "param_slice_mappings": mappings,
            }
        )

    def _write_stage3(self, save: Callable[[dict[str, Any], str], None], tp_rank: int) -> None:
        sub_groups, members = self._sub_groups()
        module = OrderedDict((name, torch.empty(0, dtype=torch.bfloat16)) for name in self.local)
        for dp_rank in range(self.dp):
            name = f"zero_pp_rank_{dp_rank}_mp_rank_{tp_rank:02d}_model_states.pt"
            save(self._model_tree(module, sub_groups), name)
            masters, states = [], {}
            for number, shapes in enumerate(sub_groups):
                tensors = {kind: self._stage3_flat(shapes, kind, tp_rank, dp_rank) for kind in KINDS}
                masters.append(tensors.pop("master"))
                states[number] = {"step": torch.tensor(float(STEP)), **tensors}
            tree = {
                "zero_stage": ZeroStageEnum(3),
                "loss_scaler": LossScaler(scale=1.0),
                "dynamic_loss_scale": False,
                "overflow": False,
                "partition_count": self.dp,
                "optimizer_state_dict": {"state": states, "param_groups": self._param_groups(members)},
                "fp32_flat_groups": masters,
            }
            save(self._optimizer_tree(tree), self._optimizer_name(tp_rank, dp_rank))

    def _sub_groups(self) -> tuple[list[OrderedDict[str, torch.Size]], list[list[int]]]:
        """Each group, split when a rank's part reaches the limit, and which sub-groups belong to each group."""
        sub_groups: list[OrderedDict[str, torch.Size]] = []
        members: list[list[int]] = []
        for group in self.groups:
            members.append([])
            held = SUB_GROUP_ELEMENTS
            for name, shape in group.items():
                if held >= SUB_GROUP_ELEMENTS:
                    members[-1].append(len(sub_groups))
                    sub_groups.append(OrderedDict())
                    held = 0
                sub_groups[-1][name] = shape
                held += -(-shape.numel() // self.dp)
        return sub_groups, members

    def _stage3_flat(self, shapes: OrderedDict[str, torch.Size], kind: str, tp_rank: int, dp_rank: int) -> torch.Tensor:
        """This rank's part of every parameter, each padded to the same length on all ranks."""
        out = torch.zeros(sum(-(-shape.numel() // self.dp) for shape in shapes.values()))
        at = 0
        for name, shape in () if self.sparse else shapes.items():
            per = -(-shape.numel() // self.dp)
            count = max(0, min(per, shape.numel() - dp_rank * per))
            self.noise.fill(out[at : at + count], name, kind, tp_rank, dp_rank * per)
            at += per
        return out

    def _optimizer_name(self, tp_rank: int, dp_rank: int) -> str:
        return f"bf16_zero_pp_rank_{dp_rank}_mp_rank_{tp_rank:02d}_optim_states.pt"

    def _optimizer_tree(self, state: dict[str, Any]) -> dict[str, Any]:
        return {"optimizer_state_dict": state, "ds_config": self._config(), "ds_version": ds_version}

    def _param_groups(self, members: list[list[int]] | None = None) -> list[dict[str, Any]]:
        common = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "amsgrad": False, "maximize": False}
        return [
            {"weight_decay": decay, "name": name, **common, "params": members[number] if members else [number]}
            for number, (name, decay) in enumerate((("decay", 0.1), ("no_decay", 0.0)))
        ]

    def _config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": self.zero},
            "bf16": {"enabled": True},
        }

    def _model_tree(
        self, module: OrderedDict[str, torch.Tensor], shapes: list[OrderedDict[str, torch.Size]]
    ) -> dict[str, Any]:
        stage3 = self.zero == 3
        return {
            "module": module,
            "buffer_names": [],
            "optimizer": None,
            "param_shapes": shapes,
            "frozen_param_shapes": OrderedDict() if stage3 else None,
            "shared_params": {},
            "frozen_param_fragments": OrderedDict() if stage3 else None,
            "lr_scheduler": {"last_batch_iteration": STEP},
            "data_sampler": None,
            "random_ltd": None,
            "sparse_tensor_module_names": set(),
            "skipped_steps": 0,
            "global_steps": STEP,
            "global_samples": STEP * 4 * self.dp,
            "dp_world_size": self.dp,
            "mp_world_size": self.tp,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": self.tp},
            "ds_config": self._config(),
            "ds_version": ds_version,
            "iteration": STEP,
            "universal_checkpoint_info": self._universal_info(),
        }

    def _universal_info(self) -> dict[str, Any]:
        info: dict[str, Any] = {"universal_checkpoint_version": 0.2}
        if self.tp > 1:
            info |= {
                "original_vocab_size": self.model.vocab,
                "padded_vocab_size": self.model.padded_vocab,
                "vocabulary_parameter_patterns": VOCABULARY,
                "tp_replicated_parameter_patterns": REPLICATED,
                "parameter_with_row_parallelism_patterns": ROW_PARALLEL,
            }
        return info


def _mark_rank(path: Path, flat: list[FlatGroup], tp_rank: int) -> None:
    """Write the rank at the start of each sliced weight: slices that are only holes would look like copies."""
    reader = torch._C.PyTorchFileReader(str(path))
    mark = bytes([1 + tp_rank % 255]) * 64
    with path.open("r+b", buffering=0) as file:
        for group in flat:
            keys = (record for record in reader.get_all_records() if record.startswith("data/"))
            key = next(key for key in keys if reader.get_record_size(key) == 2 * group.total)
            for name, _, at, count in group.overlaps(0, group.total):
                if not _matches(REPLICATED, name):
                    file.seek(reader.get_record_offset(key) + 2 * at)
                    file.write(mark[: 2 * count])


def make(save_dir: Path, nbytes: float, *, zero: int = 1, tp: int = 1, dp: int = 4, sparse: bool = False) -> Gpt:
    """Write a checkpoint of about `nbytes` below `save_dir` (with `latest`); returns its model."""
    model = Gpt.of_size(int(nbytes / BYTES_PER_PARAMETER[zero]))
    Maker(save_dir, model, zero=zero, tp=tp, dp=dp, sparse=sparse).write()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dest", type=Path, help="save folder to make")
    parser.add_argument("--gb", type=float, default=2.0, help="size of all files together, in 10⁹ bytes")
    parser.add_argument("--zero", type=int, choices=sorted(BYTES_PER_PARAMETER), default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dp", type=int, default=4)
    parser.add_argument("--sparse", action="store_true", help="holes instead of numbers: costs no disk")
    given = parser.parse_args()
    model = make(given.dest, given.gb * 1e9, zero=given.zero, tp=given.tp, dp=given.dp, sparse=given.sparse)
    files = [file.stat() for file in (given.dest / TAG).iterdir()]
    parameters = sum(prod(shape) for shape in model.shapes().values())
    print(
        f"{given.dest}: {parameters:,} parameters, {len(files):,} files, {sum(f.st_size for f in files):,} bytes,"
        f" {512 * sum(f.st_blocks for f in files):,} of them on disk",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
