"""Native mixture of experts: which data-parallel ranks share an expert, and the global numbers of local experts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

_EXPERT: Final = re.compile(r"(.*\.?deepspeed_moe\.experts\.deepspeed_experts\.)(\d+)(\..*)")


@dataclass(frozen=True, slots=True)
class Sharers:
    """The data-parallel ranks that cut one copy of a group among themselves, in partition order."""

    ranks: tuple[int, ...]
    ep: int | None = None  # their expert-parallel rank; None for dense groups


def expert_number(name: str) -> int | None:
    """The expert number in a parameter name, or None for a dense parameter."""
    found = _EXPERT.fullmatch(name)
    return int(found[2]) if found else None


def split_name(name: str) -> tuple[str, int, str] | None:
    """An expert's name as the part before its number, the number, and the part after; None for a dense parameter."""
    found = _EXPERT.fullmatch(name)
    return (found[1], int(found[2]), found[3]) if found else None


def local_experts(names: Iterable[str]) -> dict[str, int]:
    """MoE layer (name up to the expert number) → how many experts one rank has of it."""
    highest: dict[str, int] = {}
    for name in names:
        if found := _EXPERT.fullmatch(name):
            highest[found[1]] = max(highest.get(found[1], 0), int(found[2]) + 1)
    return highest


def layer_degrees(names: Sequence[str], slots: Mapping[int, int], largest: int) -> dict[str, int]:
    """MoE layer → its expert-parallel degree, from all its parameters and from how many a rank has of each degree.

    Where no way or more than one of giving layers the degrees of `slots` comes out even, all have the `largest`.
    """
    totals = Counter(split[0] for name in names if (split := split_name(name)))
    experts = local_experts(names)
    layers = list(totals)

    @cache
    def ways(at: int, left: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The first two ways to give the layers from `at` on their degrees, with so many slots left of each."""
        if at == len(layers):
            return () if any(left) else ((),)
        found: list[tuple[int, ...]] = []
        for position, degree in enumerate(degrees):
            taken, odd = divmod(totals[layers[at]], degree)
            if not odd and experts[layers[at]] % degree == 0 and taken <= left[position] and len(found) < 2:
                rest = (*left[:position], left[position] - taken, *left[position + 1 :])
                found += [(degree, *way) for way in ways(at + 1, rest)]
        return tuple(found[:2])

    degrees = sorted(slots)
    possible = ways(0, tuple(slots[degree] for degree in degrees))
    if len(possible) != 1:
        return {layer: largest if experts[layer] % largest == 0 else 1 for layer in layers}
    return dict(zip(layers, possible[0], strict=True))


def global_name(name: str, ep: int, experts: dict[str, int]) -> str:
    """A rank's local name with the expert's global number in it: rank `ep` holds the `ep`-th block of experts."""
    found = _EXPERT.fullmatch(name)
    if found is None:
        return name
    return f"{found[1]}{ep * experts[found[1]] + int(found[2])}{found[3]}"


def named_degree(hyper: Mapping[str, Any]) -> int | None:
    """The expert-parallel degree after which DeepSpeed names a group of experts."""
    name = hyper.get("name")
    number = name.removeprefix("ep_size_") if isinstance(name, str) and name.startswith("ep_size_") else ""
    return int(number) if number.isascii() and number.isdigit() and int(number) > 0 else None


def sharers(dp: int, partitions: int, data_first: bool) -> list[Sharers]:
    """Who shares an expert group that is cut into `partitions` over `dp` ranks.

    Ranks with equal `rank % ep` belong together; with `use_data_before_expert_parallelism` (`data_first`) consecutive
    ranks do.
    """
    ep = dp // partitions
    if data_first:
        return [Sharers(tuple(range(e * partitions, (e + 1) * partitions)), e) for e in range(ep)]
    return [Sharers(tuple(range(e, dp, ep)), e) for e in range(ep)]
