"""Our own formats pass the conformance tests that other packages run on theirs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import ucp
from tests.formats.megatron import legacy_model
from ucp.formats.store.reader import generation_notes, schema_of
from ucp.read.atom_reader import read_tensor
from ucp.testing import FormatConformance
from ucp.training.store import Store


class TestAtoms(FormatConformance):
    format = "atoms"


class TestDcp(FormatConformance):
    format = "dcp"
    options: ClassVar[Mapping[str, Any]] = {"dp": 2}


class TestSafetensors(FormatConformance):
    format = "safetensors"


class TestDeepSpeed(FormatConformance):
    format = "deepspeed"
    options: ClassVar[Mapping[str, Any]] = {"dp": 2, "zero": 1, "dtype": "bf16"}


class TestDeepSpeedZero3(FormatConformance):
    format = "deepspeed"
    options: ClassVar[Mapping[str, Any]] = {"dp": 2, "zero": 3, "dtype": "bf16"}


class TestDeepSpeedUniversal(FormatConformance):
    format = "deepspeed-universal"
    options: ClassVar[Mapping[str, Any]] = {"dtype": "bf16"}


class OfMegatron(FormatConformance):
    """Megatron's formats need parameters with Megatron's names, and its arguments."""

    def make_source(self, folder: Path) -> Path:
        folder.mkdir()
        return legacy_model.save(folder, legacy_model.all_ranks(2, 1))

    def write(self, source: Path, target: Path) -> Path:
        config = target.with_name("config.json")
        config.write_text(json.dumps({"num_attention_heads": 2}))
        options = {"model_config": config, "vocab_size": legacy_model.VOCABULARY, "dtype": "bf16", **self.options}
        ucp.convert(source, target, to=self.format, jobs=1, **options)
        return target


class TestMegatron(OfMegatron):
    format = "megatron"
    options: ClassVar[Mapping[str, Any]] = {"tp": 2, "optimizer": "plain"}


class TestTorchDist(OfMegatron):
    format = "torch-dist"
    options: ClassVar[Mapping[str, Any]] = {"tp": 1, "optimizer": "distributed"}


class TestStore(FormatConformance):
    """A job writes stores; `ucp convert` does not."""

    format = "store"

    def write(self, source: Path, target: Path) -> Path:
        checkpoint = ucp.open(source).index
        notes, _ = generation_notes(checkpoint)
        target.mkdir()
        with Store.create(target / "s.ucpstore", schema_of(checkpoint)) as store:
            store.begin(7)
            for atom in checkpoint.atoms():
                store.write(atom.name, atom.kind, read_tensor(checkpoint.root, atom))
            store.commit(notes)
        return target / "s.ucpstore"
