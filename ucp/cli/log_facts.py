"""What commands tell about a log, as JSON values."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ucp.log.bases import list_bases, usable_bases
from ucp.log.codecs import Encoding
from ucp.log.frames import TABLE_TYPES
from ucp.log.payloads import StepRecord
from ucp.log.reader import Epoch, Log, Stream

SCHEMA = 1  # of what `ucp log … --json` prints


def listing(log: Log) -> dict[str, Any]:
    usable = {base.number for base in usable_bases(log)}
    return {
        "schema": SCHEMA,
        "root": str(log.root),
        "recoverable_step": log.recoverable_step,
        "epochs": [
            {
                "epoch": epoch.number,
                "start": epoch.manifest.start,
                "first_step": epoch.steps.start if epoch.steps else None,
                "last_step": epoch.steps.stop - 1 if epoch.steps else None,
                "parent": None
                if epoch.manifest.parent is None
                else {"epoch": epoch.manifest.parent.epoch, "step": epoch.manifest.parent.step},
                "streams": len(epoch.manifest.streams),
                "mesh": epoch.manifest.mesh.to_json(),
                "kernel": epoch.manifest.kernel.to_json(),
                "optimizer": epoch.manifest.optimizer,
                "base": epoch.manifest.base,
                "notes": epoch.manifest.notes,
                "bytes": bytes_of(epoch),
                "defects": len(epoch.defects),
            }
            for epoch in log.epochs
        ],
        "bases": [
            {
                "number": base.number,
                "step": base.step,
                "epoch": base.epoch,
                "path": str(base.path),
                "usable": base.number in usable,
            }
            for base in list_bases(log.run_folder)
        ],
    }


def statistics(epoch: Epoch) -> dict[str, Any]:
    numel = sum(schema.numel for schema in epoch.manifest.streams)
    encodings: Counter[str] = Counter()
    streams = []
    total = steps = 0
    for stream in epoch.streams.values():
        size = sum(_step_bytes(stream, step) for step in stream.steps)
        total += size
        for step in stream.steps[-1:]:
            logged = stream.scan.steps[step]
            for ref in (*logged.grads, *(other for other in logged.others if other.header.type in TABLE_TYPES)):
                encodings.update(Encoding(int(code)).name.lower() for code in stream.table(ref)["encoding"])
        steps = max(steps, len(stream.steps))
        streams.append(
            {
                "stream": stream.number,
                "rank": str(stream.schema.rank),
                "steps": [stream.steps.start, stream.steps.stop - 1] if stream.steps else None,
                "segments": len(stream.scan.segments),
                "elements": stream.schema.numel,
                "blocks": len(stream.schema.blocks),
                "bytes": sum(segment.size for segment in stream.scan.segments),
                "closed": stream.scan.ended,
                "digests": sorted(stream.digests()),
                "defects": [str(defect) for defect in stream.defects],
            }
        )
    skipped = [step for step in epoch.steps if next(iter(epoch.streams.values())).record(step).skipped]
    return {
        "epoch": epoch.number,
        "optimizer": epoch.manifest.optimizer,
        "kernel": epoch.manifest.kernel.id,
        "elements": numel,
        "steps": [epoch.steps.start, epoch.steps.stop - 1] if epoch.steps else None,
        "skipped": skipped,
        "bytes_per_step": total / steps if steps else None,
        "bytes_per_element": total / steps / numel if steps and numel else None,
        "encodings": dict(encodings),
        "notes": epoch.manifest.notes,
        "streams": streams,
    }


def scalars_of(record: StepRecord) -> dict[str, Any]:
    names = ("group", "lr", "beta1", "beta2", "eps", "weight_decay", "momentum", "dampening", "opt_step")
    return {
        "stage": record.stage.name.lower(),
        "skipped": record.skipped,
        "scale": None if record.scale is None else float(record.scale),
        "micro_batches": record.micro_batches,
        "consumed_samples": record.consumed_samples,
        "time_ns": record.time_ns,
        "groups": [
            {name: None if (value := getattr(group, name)) != value else value for name in names}
            for group in record.groups
        ],
    }


def _step_bytes(stream: Stream, step: int) -> int:
    """Everything that a step takes in its file, headers and padding included."""
    logged = stream.scan.steps[step]
    refs = [*logged.grads, *logged.others, logged.commit, *([logged.aux] if logged.aux is not None else [])]
    step_frame = 64 + -(-len(logged.record.pack()) // 64) * 64
    return step_frame + sum(ref.header.end - ref.header.offset for ref in refs)


def steps_of(epoch: Epoch) -> str:
    return f"{epoch.steps.start}-{epoch.steps.stop - 1}" if epoch.steps else "none"


def bytes_of(epoch: Epoch) -> int:
    return sum(segment.size for stream in epoch.streams.values() for segment in stream.scan.segments)
