"""Which rank writes which file, compared with megatron-core's own numbering of ranks."""

from __future__ import annotations

from typing import Any

import pytest

from ucp.formats.megatron.job_arguments import JobArguments
from ucp.formats.megatron.rank_layout import file_ranks


@pytest.mark.parametrize(
    "tp, etp, ep, dp",
    [(1, 1, 1, 1), (2, 2, 2, 2), (2, 1, 2, 2), (4, 1, 2, 1), (4, 2, 4, 4), (2, 1, 8, 4), (2, 2, 2, 6), (4, 1, 1, 3)],
)
def test_files_are_those_of_megatrons_ranks(tp: int, etp: int, ep: int, dp: int) -> None:
    state: Any = pytest.importorskip("megatron.core.parallel_state", reason="megatron-core is not installed")
    order = "tp-cp-ep-dp-pp"
    world = tp * dp
    dense = state.RankGenerator(tp=tp, ep=1, dp=dp, pp=1, cp=1, order=order)
    experts = state.RankGenerator(tp=etp, ep=ep, dp=world // (etp * ep), pp=1, cp=1, order=order)

    def place_in(groups: list[list[int]], rank: int) -> int:
        return next(group.index(rank) for group in groups if rank in group)

    numbers: dict[tuple[int, int], list[int]] = {}
    for rank in range(world):
        key = place_in(dense.get_ranks("tp"), rank), place_in(experts.get_ranks("ep"), rank)
        numbers.setdefault(key, []).append(rank)
    fields = {
        "tensor_model_parallel_size": tp,
        "expert_tensor_parallel_size": etp,
        "expert_model_parallel_size": ep,
        "world_size": world,
    }
    found = file_ranks(JobArguments(fields))
    assert {(held.tp, held.ep): held.place for held in found} == {key: ranks[0] for key, ranks in numbers.items()}
    for held in found:
        mine = numbers[held.tp, held.ep]
        assert {place_in(experts.get_ranks("tp"), rank) for rank in mine} == {held.etp}
        assert held.leads_dense == any(place_in(dense.get_ranks("dp"), rank) == 0 for rank in mine)
        assert held.leads_experts == any(place_in(experts.get_ranks("dp"), rank) == 0 for rank in mine)
