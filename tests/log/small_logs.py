"""Small logs for tests, written without a trainer."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ucp.core.checkpoint import Mesh, Rank
from ucp.core.dtypes import BFLOAT16, DType
from ucp.core.region import Region
from ucp.log.codecs import bits_type
from ucp.log.epoch_manifest import EpochManifest, KernelFingerprint, OptimizerGroup, ParentEpoch, write_manifest
from ucp.log.frames import FrameType
from ucp.log.payloads import GradientStage, GroupScalars, StateDigest, StepRecord, pack_digests, pack_json
from ucp.log.reader import Log, epoch_folder, stream_folder
from ucp.log.segment_writer import SegmentWriter, append_step, encode_block
from ucp.log.stream_schema import LoggedParameter, OptimizerTensor, StreamSchema, cut_blocks
from ucp.log.writer import StreamWriter

SHAPE = (6, 10)


def small_manifest(
    streams: int = 1, *, epoch: int = 0, start: int = 0, parent: ParentEpoch | None = None
) -> EpochManifest:
    """One parameter of 60 elements, cut over `streams` ranks, in blocks of 16 elements."""
    numel = 60
    per = -(-numel // streams)
    schemas = []
    for number in range(streams):
        region = Region.all_of(SHAPE).cut(number * per, (number + 1) * per)
        tensor = OptimizerTensor(per, 0, "float32", "bfloat16", ("w",))
        blocks = list(cut_blocks(0, 0, [(0, region, 0)], limit=16))
        schemas.append(StreamSchema(number, Rank(0, 0, number), [tensor], blocks))
    return EpochManifest(
        "run",
        epoch,
        start,
        Mesh(1, 1, streams, 1, 1 if streams > 1 else 0),
        KernelFingerprint("torch.adamw.single", torch="2.13.0", cpu_capability="AVX2", vector_bytes=32),
        "AdamW",
        [LoggedParameter("w", SHAPE, "bfloat16", 0)],
        [OptimizerGroup({"lr": 0.1}, ("w",))],
        schemas,
        parent,
    )


def gradient(stream: int, step: int, block: int, count: int, dtype: DType = BFLOAT16) -> np.ndarray:
    """Bit patterns that are those of no other block."""
    random = np.random.default_rng([stream, step, block])
    return random.integers(1, 2 ** (8 * dtype.itemsize), count, bits_type(dtype))


def record(step: int, *, skipped: bool = False) -> StepRecord:
    group = GroupScalars(0, 0.1 / step, 0.9, 0.999, 1e-8, 0.01, opt_step=step - 1)
    return StepRecord((group,), GradientStage.REDUCED, np.float32(1 / 3), skipped, 2, 8 * step, 123)


def write_log(
    run: Path,
    steps: range,
    manifest: EpochManifest | None = None,
    *,
    skipped: tuple[int, ...] = (),
    per_segment: int = 1000,
    end: bool = True,
    compress: bool = False,
) -> EpochManifest:
    """Write a log of these steps; a segment ends after every `per_segment` of them."""
    manifest = manifest or small_manifest()
    folder = epoch_folder(run / "log", manifest.epoch)
    write_manifest(folder, manifest)
    for schema in manifest.streams:
        writer = SegmentWriter(stream_folder(folder, schema.stream), manifest.epoch, schema.stream, schema.hash())
        for step in steps:
            blocks = [
                encode_block(b.id, gradient(schema.stream, step, b.id, b.count), BFLOAT16, compress=compress)
                for b in schema.blocks
            ]
            skip = step in skipped
            scalars = record(step, skipped=skip)
            append_step(writer, step, scalars, [] if skip else blocks, aux={"s": step}, batch_end=True)
            writer.sync()
            if (step - steps.start + 1) % per_segment == 0:
                writer.close_segment()
        if end:
            writer.append(FrameType.DIGEST, steps.stop - 1, [pack_digests([StateDigest(0, "master", "0" * 32)])])
            writer.append(FrameType.EPOCH_END, steps.stop - 1, [pack_json({"reason": "closed"})])
        writer.close_segment()
    return manifest


def segments(run: Path, stream: int = 0, epoch: int = 0) -> list[Path]:
    """The segment files of a stream."""
    return sorted(stream_folder(epoch_folder(run / "log", epoch), stream).glob("*.ugl"))


def contents(log: Log, upto: int | None = None) -> dict[int, dict[tuple[int, int], bytes]]:
    """Step → (stream, block) → bit patterns, of every complete step."""
    found: dict[int, dict[tuple[int, int], bytes]] = {}
    for span in log.spans(upto):
        for step in range(span.first, span.last + 1):
            found[step] = {}
            for stream in span.epoch.streams.values():
                assert stream.record(step).groups[0].lr == 0.1 / step
                for block in stream.schema.blocks:
                    stored = stream.read_block(step, block.id)
                    if stored is not None:
                        found[step][stream.number, block.id] = stored.bits().tobytes()
    return found


def expected(steps: range, streams: int = 1, skipped: tuple[int, ...] = ()) -> dict[int, dict[tuple[int, int], bytes]]:
    manifest = small_manifest(streams)
    return {
        step: {
            (s.stream, b.id): gradient(s.stream, step, b.id, b.count).tobytes()
            for s in manifest.streams
            for b in s.blocks
            if step not in skipped
        }
        for step in steps
    }


def begin(run: Path, manifest: EpochManifest | None = None, **settings: int) -> StreamWriter:
    manifest = manifest or small_manifest()
    folder = epoch_folder(run / "log", manifest.epoch)
    write_manifest(folder, manifest)
    return StreamWriter(stream_folder(folder, 0), manifest.epoch, manifest.streams[0], **settings)


def put(writer: StreamWriter, step: int, *, skipped: bool = False) -> None:
    slot = writer.acquire()
    slot.step, slot.record = step, record(step, skipped=skipped)
    for block, array in enumerate(slot.arrays):
        if not skipped:
            array[:] = gradient(0, step, block, len(array))
            slot.present.append(block)
    writer.submit(slot)
