"""Where a recorder sends its steps besides the log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ucp.engine.shares import Share
from ucp.log.manifest import Manifest
from ucp.shadow.addresses import Address, parse_addresses
from ucp.shadow.client import Questions
from ucp.shadow.gathering import check_shares
from ucp.shadow.sink import ShadowSink, Sinks
from ucp.train.talk import agree, gather

To = str | Sequence[str]  # addresses of shadows


def reach_shadow(to: To, wait: float, manifest: Manifest | None, run: Path, rank: int) -> Sinks:
    """A connection to every shadow for this rank's stream. Collective. `manifest` is rank 0's to tell."""
    error: BaseException | None = None
    sinks: list[ShadowSink] = []
    told = gather(manifest)[0]
    try:
        addresses = parse_addresses(to)
        if rank == 0:
            _check(addresses)
    except Exception as caught:  # noqa: BLE001
        error = caught
    agree(error)
    try:
        for address in addresses:
            sinks.append(ShadowSink(address, told, rank, run, wait=wait))
    except Exception as caught:  # noqa: BLE001 - told to the other ranks, then raised
        error = caught
    try:
        agree(error)
    except BaseException:
        for sink in sinks:
            sink.close()
        raise
    return Sinks(sinks)


def _check(addresses: Sequence[Address]) -> None:
    """Do the shadows hold everything together? Asked before any of them begins to follow this run."""
    shares = []
    for address in addresses:
        with Questions(address) as shadow:
            number, count = shadow.ask({"ask": "status"})["share"]
        shares.append((address, Share(number - 1, count)))
    check_shares(shares)
