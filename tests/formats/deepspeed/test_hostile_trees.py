"""Whatever a file contains, reading returns a checkpoint or raises a `UcpError`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.formats.deepspeed.synthetic import SHAPES, even_optim, flat_optim, model_state, read, save
from ucp.errors import UcpError

JUNK: tuple[Any, ...] = (
    None, 0, -1, 3, 2**70, 1.5, float("nan"), "x", "", b"q", [], [1], {}, {"a": 1}, {1: 2}, (), (1, 2), True,
    torch.zeros(4), [torch.zeros(2, 2)], {"a": torch.zeros(())}, [None], [[]], (-1,), [{}], [{"a": ()}],
)  # fmt: skip


def mutated(tree: Any, chance: random.Random, depth: int = 0) -> Any:
    """A copy of the tree with one node replaced, removed or added, anywhere."""
    if depth > chance.randint(0, 6) or not isinstance(tree, (dict, list)) or not tree:
        return chance.choice(JUNK)
    copy: Any = dict(tree) if isinstance(tree, dict) else list(tree)
    where: Any = chance.choice(list(tree)) if isinstance(tree, dict) else chance.randrange(len(tree))
    if chance.random() < 0.15:
        del copy[where]
    else:
        copy[where] = mutated(tree[where], chance, depth + 1)
    return copy


def files(stage: int) -> dict[str, Any]:
    if stage < 3:
        optims = {f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt": flat_optim(2, rank) for rank in range(2)}
        return {"mp_rank_00_model_states.pt": model_state(), **optims}
    made: dict[str, Any] = {}
    for rank in range(2):
        made[f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"] = model_state({n: torch.zeros(0) for n in SHAPES})
        made[f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = even_optim(2, rank)
    return made


@pytest.mark.parametrize("seed", range(120))
@pytest.mark.parametrize("stage", [1, 3])
def test_one_wrong_node(tmp_path: Path, stage: int, seed: int) -> None:
    chance = random.Random(seed)
    held = files(stage)
    name = chance.choice(sorted(held))
    held[name] = mutated(held[name], chance)
    try:
        checkpoint = read(save(tmp_path / "c", held))
    except UcpError as error:
        assert error.what  # noqa: PT017 - either outcome is fine; anything else is a bug
    else:
        assert all(fragment.nbytes for atom in checkpoint.atoms() for fragment in atom.fragments)
