"""Multi-token prediction as a target: the stages of its layers, their arguments, and impossible jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.formats.megatron import legacy_model
from ucp.api import convert, plan
from ucp.containers.torch_file import TorchFile
from ucp.errors import NotUnderstoodError, UsageError
from ucp.formats.megatron.job_arguments import JobArguments
from ucp.formats.megatron.mcore_modules import order_key
from ucp.formats.megatron.rank_layout import model_chunks
from ucp.formats.registry import ReadOptions, open_checkpoint

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def save(root: Path, *, depths: int = 1, **fields: Any) -> Path:
    """One rank with `depths` depths of prediction; the arguments are those of such a job, unless `fields` differ."""
    tree = legacy_model.rank_tree(1, 1, 0, 0, optimizer=False)
    output = tree["model"].pop(OUTPUT)
    for depth in range(depths):
        stem = f"mtp.layers.{depth}"
        tree["model"][f"{stem}.enorm.weight"] = tree["model"]["decoder.final_layernorm.weight"] + depth
        tree["model"][f"{stem}.eh_proj.weight"] = output[: legacy_model.HIDDEN].repeat(1, 2) + depth
        for name in [name for name in tree["model"] if name.startswith("decoder.layers.1.")]:
            inner = name.removeprefix("decoder.layers.1.")
            tree["model"][f"{stem}.transformer_layer.{inner}"] = tree["model"][name]
    if fields.get("untie_embeddings_and_output_weights", True):
        tree["model"][OUTPUT] = output
    tree["args"] = legacy_model.arguments(1, 1, mtp_num_layers=depths, **fields)
    return legacy_model.save(root, {"mp_rank_00": tree})


def held(root: Path, rank: str) -> list[str]:
    return [
        name
        for name, ref in TorchFile(root / "iter_0000007" / rank / "model_optim_rng.pt").tree["model"].items()
        if ref
    ]


def test_the_last_stage_has_prediction_layers_and_a_copy_of_the_embedding(tmp_path: Path) -> None:
    source = save(tmp_path / "source", depths=2)
    convert(source, tmp_path / "out", to="megatron", pp=2)
    first, last = held(tmp_path / "out", "mp_rank_00_000"), held(tmp_path / "out", "mp_rank_00_001")
    assert not any(name.startswith("mtp.") for name in first)
    assert first[0] == last[0] == EMBEDDING
    assert last[-1] == OUTPUT
    assert [name for name in last if "mtp.layers.1" in name][:2] == [
        "mtp.layers.1.enorm.weight",
        "mtp.layers.1.eh_proj.weight",
    ]
    copies = open_checkpoint(tmp_path / "out", ReadOptions()).parameters[EMBEDDING].atoms["weight"].replicas
    assert len(copies) == 1
    convert(tmp_path / "out", tmp_path / "back", to="megatron", pp=1)
    again = open_checkpoint(tmp_path / "back", ReadOptions())
    assert list(again.parameters) == list(open_checkpoint(source, ReadOptions()).parameters)


def test_keys_of_prediction_layers_are_numbered(tmp_path: Path) -> None:
    convert(save(tmp_path / "source"), tmp_path / "out", to="torch-dist", tp=2)
    found = open_checkpoint(tmp_path / "out", ReadOptions())
    assert "mtp.layers.0.transformer_layer.input_layernorm.weight" in found.parameters
    assert found.parameters["mtp.layers.0.eh_proj.weight"].rule.dim == 0


def test_excluded_prediction_layers_are_removed_from_the_arguments(tmp_path: Path) -> None:
    fields = {"pipeline_model_parallel_layout": "EttmL"}
    source = save(tmp_path / "source", **fields)
    made_plan = plan(source, tmp_path / "out", to="megatron", exclude=("mtp.*",))
    assert "no-prediction" in {note.id for note in made_plan.writer.notes}
    convert(source, tmp_path / "out", to="megatron", exclude=("mtp.*",))
    args = TorchFile(tmp_path / "out/iter_0000007/mp_rank_00/model_optim_rng.pt").tree["args"].state
    assert args["mtp_num_layers"] is None
    assert args["pipeline_model_parallel_layout"] == "EttL"


def test_arguments_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    source = save(tmp_path / "source", depths=2)
    with pytest.raises(UsageError, match=r"has 2 layers of multi-token prediction .* parameters of 1"):
        convert(source, tmp_path / "out", to="torch-dist", exclude=("mtp.layers.1.*",))


def test_a_tied_embedding_on_another_stage_is_refused(tmp_path: Path) -> None:
    source = save(tmp_path / "source", untie_embeddings_and_output_weights=False)
    with pytest.raises(NotUnderstoodError, match="tied embeddings is on another pipeline stage"):
        convert(source, tmp_path / "out", to="megatron", pp=2)
    convert(source, tmp_path / "one", to="megatron")
    convert(source, tmp_path / "out", to="torch-dist", pp=2)


def test_a_pipeline_layout_places_prediction_layers() -> None:
    fields = {"num_layers": 2, "mtp_num_layers": 2, "pipeline_model_parallel_size": 4}
    even = model_chunks(JobArguments({**fields, "num_layers": 4}))
    assert [chunk.prediction for chunk in even] == [False, False, False, True]
    spelled = model_chunks(JobArguments({**fields, "pipeline_model_parallel_layout": "Et|t|mm|L"}))
    assert [chunk.prediction for chunk in spelled] == [False, False, True, False]
    assert spelled[2].holds(EMBEDDING)
    assert spelled[2].holds("mtp.layers.1.enorm.weight")
    assert not spelled[3].holds(EMBEDDING)


def test_modules_of_prediction_layers_are_in_order() -> None:
    stem = "mtp.layers.0"
    names = [
        "decoder.final_layernorm.weight",
        f"{stem}.enorm.weight",
        f"{stem}.hnorm.weight",
        f"{stem}.eh_proj.weight",
        f"{stem}.transformer_layer.input_layernorm.weight",
        f"{stem}.transformer_layer.self_attention.linear_proj.weight",
        f"{stem}.transformer_layer.self_attention.linear_qkv.weight",
        f"{stem}.transformer_layer.mlp.experts.local_experts.1.linear_fc1.weight",
        f"{stem}.final_layernorm.weight",
        "mtp.layers.1.enorm.weight",
        OUTPUT,
    ]
    backwards = names[::-1]
    assert sorted(backwards, key=order_key) == names
