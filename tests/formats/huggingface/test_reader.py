"""Folders of weights as sources: complete and in shards, safetensors and pickles, tied and damaged."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import ucp
from tests.names.small_models import LLAMA, gpt2_shapes, llama_shapes, numbers, write_weights
from ucp.errors import InconsistentError, IntegrityError, UsageError


def test_a_single_file(tmp_path: Path) -> None:
    tensors = numbers(llama_shapes())
    folder = write_weights(tmp_path / "hf", tensors, LLAMA)
    (folder / "tokenizer.json").write_text("{}")
    for path in (folder, folder / "model.safetensors"):
        opened = ucp.open(path)
        assert list(opened) == list(tensors)
        assert all((np.asarray(opened[name].read()) == array).all() for name, array in tensors.items())
        assert opened.index.format == "safetensors"
    assert sorted(ucp.open(folder).extras.files) == ["config.json", "tokenizer.json"]
    assert ucp.verify(folder, "deep").ok


def test_shards_that_ucp_wrote_are_read(tmp_path: Path) -> None:
    folder = write_weights(tmp_path / "hf", numbers(llama_shapes()), LLAMA)
    ucp.convert(folder, tmp_path / "shards", to="safetensors", max_shard_size=3000)
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert ucp.diff(folder, tmp_path / "shards").same
    (tmp_path / "shards/model.safetensors.index.json").unlink()
    assert ucp.diff(folder, tmp_path / "shards").same


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_weights(tmp_path / "hf", numbers(llama_shapes()), LLAMA)
    ucp.convert(folder, tmp_path / "shards", to="safetensors", max_shard_size=3000)
    (tmp_path / "shards/model.safetensors.index.json").unlink()
    next((tmp_path / "shards").glob("model-00002-*")).unlink()
    with pytest.raises(InconsistentError, match=r"numbers \[2\] are missing"):
        ucp.open(tmp_path / "shards")


@pytest.mark.parametrize(
    "index, wrong",
    [
        (
            {"weight_map": {"a": "model-00001-of-00001.safetensors", "b": "model-00001-of-00001.safetensors"}},
            "lists b in",
        ),
        ({"weight_map": {"a": "../model-00001-of-00001.safetensors"}}, "not a file in the same folder"),
        ({}, "no weight_map"),
    ],
)
def test_an_index_that_contradicts_the_files(tmp_path: Path, index: object, wrong: str) -> None:
    write_weights(tmp_path, numbers({"a": (2,)}), None, "model-00001-of-00001.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises((InconsistentError, IntegrityError), match=wrong):
        ucp.open(tmp_path)


def test_tied_weights(tmp_path: Path) -> None:
    shapes = {name: shape for name, shape in llama_shapes().items() if name != "lm_head.weight"}
    tensors = numbers(shapes)
    config = {**LLAMA, "tie_word_embeddings": True}
    once = ucp.open(write_weights(tmp_path / "once", tensors, config))
    assert once["lm_head.weight"].name == "model.embed_tokens.weight"
    both = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    twice = write_weights(tmp_path / "twice", both, config)
    assert ucp.open(twice)["lm_head.weight"].name == "model.embed_tokens.weight"
    assert ucp.verify(twice).ok
    other = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}
    assert not ucp.verify(write_weights(tmp_path / "differ", other, config)).ok
    assert list(ucp.open(write_weights(tmp_path / "untied", both, LLAMA))) == list(both)
    assert ucp.open(write_weights(tmp_path / "gpt2", numbers(gpt2_shapes()), {"model_type": "gpt2"}))["lm_head.weight"]


def test_pickles_of_weights(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    weight = torch.arange(12.0).reshape(3, 4)
    state = {"model.embed_tokens.weight": weight, "lm_head.weight": weight, "turned.weight": weight.t()}
    torch.save(state, tmp_path / "pytorch_model.bin")
    (tmp_path / "training_args.bin").write_bytes(b"never opened, never carried")
    opened = ucp.open(tmp_path)
    assert list(opened) == ["model.embed_tokens.weight", "turned.weight"]  # two names of one storage
    assert opened["lm_head.weight"].name == "model.embed_tokens.weight"
    assert (np.asarray(opened["turned.weight"].read()) == weight.t().numpy()).all()
    assert "training_args.bin" not in opened.extras.files
    ucp.convert(tmp_path, tmp_path / "out", to="safetensors")
    assert ucp.diff(tmp_path, tmp_path / "out").same


def test_a_preset_provides_rules(tmp_path: Path) -> None:
    folder = write_weights(tmp_path / "hf", numbers(llama_shapes()), LLAMA)
    with pytest.raises(UsageError, match="no rule for splitting"):
        ucp.convert(folder, tmp_path / "two", to="deepspeed", tp=2)
    ucp.convert(folder, tmp_path / "two", to="deepspeed", tp=2, preset="llama")
    assert ucp.diff(folder, tmp_path / "two").same


def test_weights_alone_cannot_become_zero_3(tmp_path: Path) -> None:
    folder = write_weights(tmp_path / "hf", numbers(llama_shapes()), LLAMA)
    with pytest.raises(UsageError, match="the source has no optimizer"):
        ucp.convert(folder, tmp_path / "out", to="deepspeed", zero=3)
    conversion = ucp.api.plan(folder, tmp_path / "out", to="deepspeed", zero=1)
    assert "no-optimizer" in {note.id for note in conversion.writer.notes}


def test_the_configuration_survives_a_deepspeed_checkpoint(tmp_path: Path) -> None:
    """The files of the model are next to the step folder, although no trainer wrote it."""
    folder = write_weights(tmp_path / "model", numbers(llama_shapes()), LLAMA)
    (folder / "config.json").write_text('{"model_type": "mine"}')
    ucp.convert(folder, tmp_path / "zero", to="deepspeed", zero=1)
    ucp.convert(tmp_path / "zero", tmp_path / "again", to="safetensors")
    assert json.loads((tmp_path / "again/config.json").read_text())["model_type"] == "mine"


def test_an_optimizer_that_is_not_read_is_noted(tmp_path: Path) -> None:
    folder = write_weights(tmp_path / "model", numbers(llama_shapes()), LLAMA)
    assert ucp.open(folder).index.notes == []
    (folder / "optimizer.pt").write_bytes(b"")
    (note,) = ucp.open(folder).index.notes
    assert note.text == "only weights are read, not optimizer.pt"
