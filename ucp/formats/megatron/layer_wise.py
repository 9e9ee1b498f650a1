"""The layer-wise distributed optimizer (`dist_muon`): every data-parallel rank keeps the states of whole parameters.

Each writes a file of its own. Which parameters it has follows from their sizes: they are dealt like cards, the smallest
first, to all ranks in turn and then back again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from ucp.errors import InconsistentError
from ucp.formats.megatron.arguments import Arguments
from ucp.formats.megatron.holdings import Group, Holder
from ucp.formats.megatron.plain_optimizer import GroupMatcher, groups_of, optimizers_of, read_states
from ucp.formats.megatron.rankfile import Entry, RankFile

_FILE: Final = re.compile(r"layer_wise_optimizer_(\d+)\.pt")

Card = TypeVar("Card")


def layer_wise_files(root: Path, folder: str) -> dict[int, RankFile]:
    """The files of the data-parallel ranks that share a rank folder, by number."""
    names = ((match, child.name) for child in (root / folder).iterdir() if (match := _FILE.fullmatch(child.name)))
    return {int(match[1]): RankFile(root, f"{folder}/{name}") for match, name in sorted(names, key=lambda x: x[1])}


def read_layer_wise(
    files: Mapping[int, RankFile], entries: Sequence[Entry], holder: Holder, arguments: Arguments
) -> Iterator[Group]:
    """Give the entries of a rank folder the states that the files beside them hold."""
    missing = sorted(set(copies_of(holder.tp, holder.ep, arguments)) - set(files))
    if missing:
        raise InconsistentError(
            f"{file_name(missing[0])} is missing beside the model of {holder}: data-parallel rank {missing[0]} kept the"
            " states of its parameters there",
            hint="copy it from the node that wrote it; without it the checkpoint is not whole",
        )
    for dp, file in files.items():
        groups = [group for optimizer in optimizers_of(file.tree) for group in groups_of(optimizer)]
        matcher = GroupMatcher(entries, arguments)
        hands = [Hand(matcher.all_of(group), group.get("is_expert_parallel") is True) for group in groups]
        mine = dealt(hands, _numel, holder.tp, dp, arguments)
        yield from read_states(file, file.tree, _Share(iter(mine)))


def _numel(entry: Entry) -> int:
    return entry.ref.numel


class _Share:
    """The parameters of one rank, group after group."""

    def __init__(self, groups: Iterator[list[Entry]]) -> None:
        self._groups = groups

    def next_of(self, group: Mapping[str, Any], shapes: Sequence[tuple[int, ...] | None]) -> list[Entry] | None:
        del group
        mine = next(self._groups)
        fits = len(mine) == len(shapes) and all(
            shape in (None, entry.ref.shape) for shape, entry in zip(shapes, mine, strict=True)
        )
        return mine if fits else None


def file_name(dp: int) -> str:
    """Of the file of a data-parallel rank."""
    return f"layer_wise_optimizer_{dp}.pt"


def copies_of(tp: int, ep: int, arguments: Arguments) -> list[int]:
    """The data-parallel ranks that write into the folder of these tensor- and expert-parallel ranks."""
    places = ((dp, tp + arguments.tp * dp) for dp in range(arguments.dp))
    return [dp for dp, place in places if place // arguments.etp % arguments.ep == ep]


@dataclass(frozen=True, slots=True)
class Hand(Generic[Card]):
    """The parameters of a group, in the order of the module."""

    cards: Sequence[Card]
    of_experts: bool  # which have data-parallel ranks of their own


def dealt(
    groups: Sequence[Hand[Card]], numel: Callable[[Card], int], tp: int, dp: int, arguments: Arguments
) -> list[list[Card]]:
    """What data-parallel rank `dp` has of each group."""
    if arguments.dp == 1:
        return [list(group.cards) for group in groups]
    mine: list[list[Card]] = [[] for _ in groups]
    expert_dp = (tp + arguments.tp * dp) // (arguments.etp * arguments.ep)
    for of_experts, player, players in ((False, dp, arguments.dp), (True, expert_dp, arguments.expert_dp)):
        cards = [
            (card, number)
            for number, group in enumerate(groups)
            if group.of_experts == of_experts
            for card in group.cards
        ]
        cards.sort(key=lambda one: numel(one[0]))
        for turn, (card, number) in enumerate(cards):
            lap, seat = divmod(turn, players)
            if (players - 1 - seat if lap % 2 else seat) == player:
                mine[number].append(card)
    return mine
