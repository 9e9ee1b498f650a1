"""File names of a step folder."""

from __future__ import annotations

import pytest

from ucp.errors import InconsistentError
from ucp.formats.deepspeed.step_files import (
    classify_files,
    is_state_file,
    layer_file_name,
    model_file_name,
    names_tp_rank,
    optimizer_file_name,
    sharded_model_file_name,
)


def test_every_spelling_has_its_role() -> None:
    files = classify_files(
        [
            "mp_rank_00_model_states.pt",
            "mp_rank_11_model_states.pt",
            "zero_pp_rank_3_mp_rank_01_model_states.pt",
            "bf16_zero_pp_rank_10_mp_rank_00_optim_states.pt",
            "zero_pp_rank_2_mp_rank_00_optim_states.pt",
            "layer_07-model_01-model_states.pt",
            "layer_123-model_states.pt",
            "layer_0_expert_12_mp_rank_00_model_states.pt",
            "expert_5_mp_rank_00_model_states.pt",
            "expp_rank_1_mp_rank_00_optim_states.pt",
            "notes.txt",
        ]
    )
    assert files.model == {0: "mp_rank_00_model_states.pt", 11: "mp_rank_11_model_states.pt"}
    assert files.sharded_model == {(3, 1): "zero_pp_rank_3_mp_rank_01_model_states.pt"}
    assert set(files.optim) == {(10, 0), (2, 0)}
    assert set(files.layers) == {(7, 1), (123, 0)}
    assert set(files.experts) == {(0, 12, 0), (-1, 5, 0)}
    assert set(files.expert_optim) == {(1, 0)}
    assert files.other == ["notes.txt"]


def test_the_oldest_spelling_without_underscore() -> None:
    files = classify_files(["zero_pp_rank_0_mp_rank_00optim_states.pt"])
    assert files.optim == {(0, 0): "zero_pp_rank_0_mp_rank_00optim_states.pt"}


@pytest.mark.parametrize(
    "name",
    [
        "mp_rank_00_model_states.pt.tmp",
        "xmp_rank_00_model_states.pt",
        "mp_rank_00_model_states_pt",
        "zero_pp_rank_0_mp_rank_00_model_states",
        "layer_00-model_states.pt",
    ],
)
def test_similar_names_are_not_state_files(name: str) -> None:
    assert not is_state_file(name)


def test_two_files_of_one_rank_are_refused() -> None:
    names = ["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"]
    with pytest.raises(InconsistentError, match=r"bf16_zero_pp_rank_0.*zero_pp_rank_0.*two saves"):
        classify_files(names)


def test_names_of_missing_files_follow_their_siblings() -> None:
    assert model_file_name(3) == "mp_rank_03_model_states.pt"
    assert sharded_model_file_name(12, 0) == "zero_pp_rank_12_mp_rank_00_model_states.pt"
    assert optimizer_file_name(4, 1, "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt") == (
        "bf16_zero_pp_rank_4_mp_rank_01_optim_states.pt"
    )
    assert (
        optimizer_file_name(4, 1, "zero_pp_rank_0_mp_rank_00optim_states.pt")
        == "zero_pp_rank_4_mp_rank_01optim_states.pt"
    )
    assert (
        layer_file_name(3, 1, has_tp_rank=names_tp_rank("layer_00-model_00-model_states.pt"))
        == "layer_03-model_01-model_states.pt"
    )
    assert layer_file_name(3, 0, has_tp_rank=names_tp_rank("layer_00-model_states.pt")) == "layer_03-model_states.pt"
