"""Gradients of a chunk are those that were logged, for any cut of tensors into blocks and chunks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.replay.logged_job import bits
from ucp.core.box import Box
from ucp.core.checkpoint import Rank
from ucp.core.dtypes import BY_NAME
from ucp.core.region import Region
from ucp.errors import InconsistentError
from ucp.log.payloads import StepRecord
from ucp.log.reader import LogStream
from ucp.log.segment_writer import SegmentWriter, append_step, encode_block
from ucp.log.stream_recovery import scan_stream
from ucp.log.stream_schema import OptimizerTensor, StreamSchema, cut_blocks
from ucp.replay.gradients import Gradients

STEPS = 3


def logged(
    folder: Path, sizes: list[int], gap: int, limit: int, dtype: str, compress: bool, leave_out: int | None = None
) -> tuple[LogStream, list[torch.Tensor]]:
    """A log of one optimizer tensor: parameters of these sizes, `gap` elements of padding after each."""
    generator = torch.Generator().manual_seed(sum(sizes))
    shares, at = [], 0
    for number, size in enumerate(sizes):
        shares.append((number, Region.of([Box((0,), (size,))]), at))
        at += size + gap
    kind: torch.dtype = getattr(torch, dtype.removesuffix(" narrow"))
    tensor = OptimizerTensor(at, 0, "float32", str(kind).removeprefix("torch."), tuple(map(str, range(len(sizes)))))
    schema = StreamSchema(0, Rank(), [tensor], list(cut_blocks(0, 0, shares, limit)))
    writer = SegmentWriter(folder, 0, 0, schema.hash())
    whole = []
    for step in range(1, STEPS + 1):
        gradient = torch.zeros(at, dtype=kind)
        for _, region, start in shares:
            values = torch.randn(region.numel, generator=generator)
            gradient[start : start + region.numel] = values.bfloat16() if dtype.endswith("narrow") else values
        blocks = [
            encode_block(b.id, bits(gradient[b.offset : b.offset + b.count]), BY_NAME[tensor.grad_dtype], compress=zip_)
            for b in schema.blocks
            for zip_ in [compress and b.id % 2 == 0]
            if b.id != leave_out
        ]
        append_step(writer, step, StepRecord(), blocks)
        whole.append(gradient)
    writer.close_segment()
    return LogStream(folder, schema, scan_stream(folder, 0, schema)), whole


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    view: Any = {2: torch.int16, 4: torch.int32}[expected.element_size()]
    return found.dtype == expected.dtype and torch.equal(found.view(view), expected.view(view))


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    gap=st.sampled_from([0, 0, 5]),
    limit=st.sampled_from([64, 128, 1024]),
    chunk=st.sampled_from([64, 192, 1024]),
    dtype=st.sampled_from(["bfloat16", "float32", "float32 narrow", "float16"]),
    compress=st.booleans(),
)
def test_every_cut_returns_the_logged_gradient(
    sizes: list[int], gap: int, limit: int, chunk: int, dtype: str, compress: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        stream, whole = logged(Path(folder), sizes, gap, limit, dtype, compress)
        numel = len(whole[0])
        for start in range(0, numel, chunk):
            stop = min(start + chunk, numel)
            blocks = [b for b in stream.schema.blocks if b.offset < stop and b.offset + b.count > start]
            gradients = Gradients(blocks, [str(b.parameter) for b in blocks], start, stop)
            for step, expected in enumerate(whole, start=1):
                for wanted in (torch.float32, expected.dtype):
                    found = gradients.read(stream, step, wanted)
                    assert same_bits(found, expected[start:stop].to(wanted))
                    found.fill_(7.0)  # the caller may change it: that must have no effect later
        stream.close()


def test_a_missing_block_is_named(tmp_path: Path) -> None:
    stream, _ = logged(tmp_path, [100, 100], 0, 64, "bfloat16", compress=False, leave_out=1)
    names = ["first", "second"]
    gradients = Gradients(stream.schema.blocks, [names[b.parameter] for b in stream.schema.blocks], 0, 200)
    with pytest.raises(InconsistentError, match=r"no gradient of block 1 \(first\)"):
        gradients.read(stream, 2, torch.float32)
    stream.close()


def test_threads_do_not_share_memory(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    stream, whole = logged(tmp_path, [500], 0, 1024, "bfloat16", compress=False)
    gradients = Gradients(stream.schema.blocks, ["it"], 0, 500)
    mine = gradients.read(stream, 1, torch.float32)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: gradients.read(stream, 2, torch.float32).clone()).result()
    assert same_bits(mine, whole[0].float())
    assert same_bits(other, whole[1].float())
    stream.close()
