"""The schema of a stream: parameters, optimizer tensors, the blocks that they are cut into, and the names of states.

A table entry refers to its state by an index into the manifest's list of state kinds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import xxhash

from ucp import settings
from ucp.core.box import Box, Shape
from ucp.core.checkpoint import Rank
from ucp.core.region import Region
from ucp.core.rules import REPLICATED, Rule, rule_from_json, rule_to_json
from ucp.errors import IntegrityError
from ucp.log.payloads import pack_json

GRADIENT: Final = "grad"
PARAM: Final = "param"  # the tensor that the optimizer updates
BUFFER: Final = "buffer"  # a buffer of the model: the block is one of the stream's buffers

# The first entries of every list of state kinds.
FIRST_KINDS: Final = (GRADIENT, PARAM, BUFFER)

_SHAPED: Final = re.compile(r"own:(.+):\(([0-9,]*)\)")
_ESCAPE: Final = "state:"  # prefix of an optimizer state whose name has a meaning of its own in a log
_RESERVED: Final = re.compile(rf"{GRADIENT}|{PARAM}|{BUFFER}|weight|master|(own|state)[:/].*", re.DOTALL)


def logged_kind(kind: str) -> str:
    """The name of an optimizer state in a log: its own name, with a prefix if that is reserved."""
    return _ESCAPE + kind if _RESERVED.fullmatch(kind) else kind


def kind_of_logged(name: str) -> str:
    """The optimizer state with this name in a log."""
    return name.removeprefix(_ESCAPE)


def shaped_kind(kind: str, shape: Shape) -> str:
    """The name of a state that does not have the parameter's shape: a counter, a factored moment.

    Its entry refers to the first block of the optimizer tensor.
    """
    return f"own:{kind}:({','.join(map(str, shape))})"


def parse_shaped_kind(name: str) -> tuple[str, Shape] | None:
    """(state, its shape) if a name is one of `shaped_kind`, else None."""
    found = _SHAPED.fullmatch(name)
    if found is None:
        return None
    return found[1], tuple(int(n) for n in found[2].split(",") if n)


@dataclass(frozen=True, slots=True)
class LoggedParameter:
    """A parameter of the model, whole and free of any parallel layout."""

    name: str
    shape: Shape
    dtype: str  # of the module's weight
    group: int  # index into the optimizer's groups
    rule: Rule = REPLICATED
    padded_shape: Shape | None = None  # if tensor-parallel ranks have more rows than the parameter

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {"name": self.name, "shape": list(self.shape), "dtype": self.dtype, "group": self.group}
        if self.rule != REPLICATED:
            out["rule"] = rule_to_json(self.rule)
        if self.padded_shape is not None:
            out["padded_shape"] = list(self.padded_shape)
        return out

    @staticmethod
    def from_json(data: Any) -> LoggedParameter:
        padded = data.get("padded_shape")
        return LoggedParameter(
            str(data["name"]),
            tuple(map(int, data["shape"])),
            str(data["dtype"]),
            int(data["group"]),
            rule_from_json(data["rule"]) if "rule" in data else REPLICATED,
            None if padded is None else tuple(map(int, padded)),
        )


@dataclass(frozen=True, slots=True)
class OptimizerTensor:
    """A tensor that the optimizer's kernel is called on: a parameter, or a flat partition of several.

    `numel` includes padding: elements that no block covers. Their gradient is zero.
    """

    numel: int
    group: int
    dtype: str  # of the tensor itself (the master)
    grad_dtype: str  # of the recorded gradient; a block may be stored narrower
    names: tuple[str, ...]  # parameters that share this tensor's step count

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "names": list(self.names)}

    @staticmethod
    def from_json(data: Any) -> OptimizerTensor:
        numel, group, names = int(data["numel"]), int(data["group"]), tuple(map(str, data["names"]))
        return OptimizerTensor(numel, group, str(data["dtype"]), str(data["grad_dtype"]), names)


@dataclass(frozen=True, slots=True)
class LogBlock:
    """At most `LOG_BLOCK_ELEMENTS` elements of one parameter that are contiguous in one optimizer tensor.

    `region` is where they are in the whole parameter, in order (it may exceed the parameter's shape: vocabulary
    padding). They are elements `[offset, offset + count)` of optimizer tensor `tensor`.
    """

    id: int
    parameter: int  # index into the manifest's parameters
    region: Region
    tensor: int  # index into the stream's tensors
    offset: int
    count: int

    def to_json(self) -> list[Any]:
        boxes = [[list(box.start), list(box.shape)] for box in self.region.boxes]
        return [self.id, self.parameter, boxes, self.region.start, self.region.stop, self.tensor, self.offset]

    @staticmethod
    def from_json(data: Any) -> LogBlock:
        number, parameter, boxes, start, stop, tensor, offset = data
        region = Region(tuple(Box(tuple(map(int, a)), tuple(map(int, n))) for a, n in boxes), int(start), int(stop))
        return LogBlock(int(number), int(parameter), region, int(tensor), int(offset), region.numel)


@dataclass(slots=True)
class StreamSchema:
    """Everything that one rank logs; does not change during an epoch."""

    stream: int
    rank: Rank
    tensors: list[OptimizerTensor] = field(default_factory=list)
    blocks: list[LogBlock] = field(default_factory=list)  # block i has id i
    buffers: list[LogBlock] = field(default_factory=list)  # numbered likewise; `parameter` is an index into the buffers

    def to_json(self) -> dict[str, Any]:
        out = {
            "stream": self.stream,
            "rank": [self.rank.pp, self.rank.tp, self.rank.dp],
            "tensors": [tensor.to_json() for tensor in self.tensors],
            "blocks": [block.to_json() for block in self.blocks],
        }
        if self.buffers:
            out["buffers"] = [block.to_json() for block in self.buffers]
        return out

    @staticmethod
    def from_json(data: Any) -> StreamSchema:
        pp, tp, dp = map(int, data["rank"])
        schema = StreamSchema(
            int(data["stream"]),
            Rank(pp, tp, dp),
            [OptimizerTensor.from_json(tensor) for tensor in data["tensors"]],
            [LogBlock.from_json(block) for block in data["blocks"]],
            [LogBlock.from_json(block) for block in data.get("buffers", ())],
        )
        if any([b.id for b in some] != list(range(len(some))) for some in (schema.blocks, schema.buffers)):
            raise IntegrityError(f"stream {schema.stream}: its blocks are not numbered 0, 1, 2, …")
        return schema

    def hash(self) -> bytes:
        """16 bytes that identify the schema in every segment of the stream."""
        return xxhash.xxh3_128_digest(pack_json(self.to_json()))

    def blocks_of(self, tensor: int) -> list[LogBlock]:
        """The blocks of an optimizer tensor, by their offset in it."""
        return sorted((block for block in self.blocks if block.tensor == tensor), key=lambda block: block.offset)

    @property
    def numel(self) -> int:
        return sum(block.count for block in self.blocks)


def cut_blocks(
    first_id: int, tensor: int, parts: Iterable[tuple[int, Region, int]], limit: int | None = None
) -> Iterator[LogBlock]:
    """Cut an optimizer tensor into blocks, given its parts as (parameter index, region, first element in the tensor).

    Cuts are at multiples of the limit from the start of the optimizer tensor: kernels that treat the last few elements
    of a tensor differently are replayed in its coordinates.
    """
    size = settings.LOG_BLOCK_ELEMENTS if limit is None else limit
    for parameter, region, start in parts:
        at, end = start, start + region.numel
        while at < end:
            stop = min(end, (at // size + 1) * size)
            yield LogBlock(first_id, parameter, region.cut(at - start, stop - start), tensor, at, stop - at)
            first_id += 1
            at = stop
