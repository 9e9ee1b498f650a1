"""Where a recorder sends its steps besides the log."""

from __future__ import annotations

from pathlib import Path

from ucp.log.manifest import Manifest
from ucp.shadow.sink import ShadowSink
from ucp.shadow.wire import parse_address
from ucp.train.talk import agree, gather


def reach_shadow(to: str, wait: float, manifest: Manifest | None, run: Path, rank: int) -> ShadowSink:
    """A connection to the shadow for this rank's stream. Collective. `manifest` is rank 0's to tell."""
    error: BaseException | None = None
    sink: ShadowSink | None = None
    told = gather(manifest)[0]
    try:
        sink = ShadowSink(parse_address(to), told, rank, run, wait=wait)
    except Exception as caught:  # noqa: BLE001 - told to the other ranks, then raised
        error = caught
    try:
        agree(error)
    except BaseException:
        if sink is not None:
            sink.close()
        raise
    assert sink is not None
    return sink
