"""AutoEP under ZeRO-3: every rank's files say which experts it holds and with whom it shares them. Do they agree?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ucp.formats.deepspeed.experts import Sharers, sharers
from ucp.formats.deepspeed.reading import Reading
from ucp.formats.deepspeed.shards import RankFile
from ucp.formats.deepspeed.spread import Spread, entries_of, spreads_of


def check_spread(reading: Reading, models: Sequence[RankFile], data_first: bool) -> None:
    """Report model files that deal the experts out in another way than the first, or are of another rank."""
    spreads = reading.holdings.spreads
    for dp, model in enumerate(models if spreads else ()):
        if dp and spreads_of(model.mapping(), model.name) != spreads:
            reading.problems.add(f"{model.name} (dp rank {dp}): deals experts out in another way than {models[0].name}")
            continue
        for entry in entries_of(model.mapping(), model.name):
            spread = spreads[f"{entry['expert_key_prefix']}.w1"]
            said, ep = entry.get("ep_rank"), _ep_rank(spread, len(models), dp, data_first)
            if type(said) is int and said != ep:
                reading.problems.add(
                    f"{model.name} (dp rank {dp}): says that it is of expert-parallel rank {said}, expected {ep}:"
                    " files were exchanged"
                )
                break


def _ep_rank(spread: Spread, dp: int, rank: int, data_first: bool) -> int | None:
    return next((s.ep for s in sharing_ranks(spread, dp, data_first) if rank in s.ranks), None)


def sharing_ranks(spread: Spread | None, dp: int, data_first: bool) -> list[Sharers]:
    """Who cuts a parameter among themselves under ZeRO-3, of `dp` ranks: all, or those with the same experts."""
    if spread is None or dp % spread.degree:
        return [Sharers(tuple(range(dp)))]
    return sharers(dp, dp // spread.degree, data_first)


def check_partition(
    reading: Reading, file: RankFile, top: Mapping[Any, Any], index: int, dp: int, own: Sharers
) -> None:
    """Report an optimizer file that says of itself that it shares sub-group `index` with other ranks."""
    said = top.get("ds_zero_partition_groups")
    entry = said[index] if isinstance(said, (list, tuple)) and index < len(said) else None
    if not isinstance(entry, dict):
        return
    ranks, rank = entry.get("partition_ranks"), entry.get("partition_rank")
    if (ranks is not None and ranks != list(own.ranks)) or (rank is not None and rank != own.ranks.index(dp)):
        reading.problems.add(
            f"{file.name} (dp rank {dp}): says that it has part {rank} of sub-group {index}, which ranks {ranks} share,"
            f" expected part {own.ranks.index(dp)} and ranks {list(own.ranks)}: files were exchanged"
        )
