"""Which ranks write files in the legacy layout, and what of shared state is in whose file. Arithmetic only.

Inside a pipeline stage ranks are numbered with tensor parallelism fastest. For dense parameters the rest counts
data-parallel copies. For experts the same numbers are dealt again: their own tensor-parallel degree fastest, then
experts, then copies.
"""

from __future__ import annotations

from dataclasses import dataclass

from ucp.formats.megatron.arguments import Arguments


@dataclass(frozen=True, slots=True)
class FileRank:
    """A rank whose file others like it read too. `place` numbers it inside its stage."""

    place: int
    tp: int
    ep: int
    etp: int
    leads_dense: bool  # the first of the ranks that share the state of these dense parameters
    leads_experts: bool  # the first of those that share the state of these experts


def file_ranks(arguments: Arguments) -> list[FileRank]:
    """One rank for every pair of numbers that the folders of a stage are named after, in order of place."""
    tp, ep, etp = arguments.tp, arguments.ep, arguments.etp
    found: dict[tuple[int, int], FileRank] = {}
    for place in range(tp * arguments.dp):
        key = place % tp, place // etp % ep
        if key not in found:
            found[key] = FileRank(place, *key, place % etp, place < tp, place < etp * ep)
    return list(found.values())
