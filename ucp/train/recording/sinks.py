"""Where a recorder sends its steps besides the log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ucp.engine.shares import Share
from ucp.errors import UsageError
from ucp.log.manifest import Manifest, Parent
from ucp.shadow.addresses import Address, parse_addresses
from ucp.shadow.client import Questions
from ucp.shadow.gathering import check_shares
from ucp.shadow.sink import ShadowSink, Sinks
from ucp.train.talk import agree, gather

To = str | Sequence[str]  # addresses of shadows


def go_on_from_shadows(manifest: Manifest, to: To) -> None:
    """Make a manifest that no log knows the next epoch of what the shadows follow, where they do. On rank 0."""
    told = []
    for address in parse_addresses(to):
        with Questions(address) as shadow:
            told.append(shadow.ask({"ask": "status"}))
    following = [one for one in told if one["step"] is not None]
    if not following:
        return
    if any(one["feeds"] for one in following):
        raise UsageError(
            "another job feeds this shadow now", hint="wait until its connections have ended, or start another shadow"
        )
    newest = max(following, key=lambda one: int(one["epoch"]))
    manifest.run, manifest.epoch = str(newest["run"]), int(newest["epoch"]) + 1
    if all((one["run"], one["epoch"]) == (newest["run"], newest["epoch"]) for one in told):
        # A share gives older steps as well: whether it has this one is its own to say.
        manifest.parent = Parent(int(newest["epoch"]), manifest.start)


def reach_shadow(to: To, wait: float, manifest: Manifest | None, run: Path | None, rank: int) -> Sinks:
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
