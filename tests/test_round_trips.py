"""Round trips between every pair of formats leave every tensor byte-identical: one small job, written as all of them.

Some formats keep a single copy of a parameter. It is the precise one, and others make their weights of it again.
"""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ucp
import ucp.api
from tests.formats.megatron import legacy_model

FORMS: dict[str, dict[str, Any]] = {
    "atoms": {"to": "atoms"},
    "virtual atoms": {"to": "atoms", "link": True},
    "deepspeed": {"to": "deepspeed", "tp": 1, "pp": 1, "dp": 2, "zero": 1},
    "deepspeed, zero 3": {"to": "deepspeed", "tp": 1, "pp": 1, "dp": 3, "zero": 3},
    "universal": {"to": "deepspeed-universal"},
    "dcp": {"to": "dcp", "dp": 2},
    "megatron": {"to": "megatron", "tp": 2, "pp": 2, "optimizer": "plain"},
    "megatron, distributed": {"to": "megatron", "tp": 1, "pp": 2, "dp": 2, "optimizer": "distributed"},
    "torch-dist": {"to": "torch-dist", "tp": 2, "pp": 1, "optimizer": "plain"},
    "torch-dist, distributed": {
        "to": "torch-dist",
        "tp": 1,
        "pp": 2,
        "dp": 3,
        "optimizer": "distributed",
        "optimizer_sharding": "dp_reshardable",
    },
}
PRECISE = 1 + 2**-12  # what masters have more than weights: too little to round to another one
States = dict[str, dict[str, "np.ndarray[Any, Any]"]]


def states(path: Path) -> States:
    """Every state of every parameter. bfloat16 comes as float32, which holds it exactly."""
    opened = ucp.open(path)
    return {name: {kind: np.asarray(p.read(kind)) for kind in p.kinds} for name, p in opened.parameters.items()}


def check(found: States, expected: States) -> None:
    """All of it, bit for bit; `expected` has weights and masters."""
    assert sorted(found) == sorted(expected)
    for name, kinds in found.items():
        truth = dict(expected[name])
        if "weight" not in kinds or "master" not in kinds:
            truth["master"], kinds = (
                truth.pop("master"),
                {"master" if k == "weight" else k: v for k, v in kinds.items()},
            )
            del truth["weight"]
        assert sorted(kinds) == sorted(truth), name
        for kind, array in kinds.items():
            assert (array.dtype, array.shape) == (truth[kind].dtype, truth[kind].shape), (name, kind)
            assert array.tobytes() == truth[kind].tobytes(), (name, kind)


class Job:
    """The checkpoint that all others are made of."""

    def __init__(self, root: Path) -> None:
        trees = legacy_model.all_ranks(2, 1)
        for tree in trees.values():
            masters = tree["optimizer"]["fp32_from_fp16_params"]
            tree["optimizer"]["fp32_from_fp16_params"] = [[m * PRECISE for m in group] for group in masters]
        self.path = legacy_model.save(root / "start", trees)
        self.states = states(self.path)
        self._config = root / "config.json"
        self._config.write_text(json.dumps({"num_attention_heads": 2}))

    def convert(self, source: Path, target: Path, **options: Any) -> Path:
        """Convert, with what only some of the formats carry.

        Megatron wants to know the number of heads, and pads vocabularies. What has a single precise copy of a parameter
        does not say in which dtype the module had it.
        """
        if options["to"] in ("megatron", "torch-dist"):
            options.update(model_config=self._config, vocab_size=legacy_model.VOCABULARY)
        if options["to"] in ("deepspeed", "deepspeed-universal", "megatron", "torch-dist"):
            options["dtype"] = "bf16"
        ucp.api.convert(source, target, jobs=1, **options)
        return target


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def written(job: Job, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The job in every format."""
    root = tmp_path_factory.mktemp("written")
    return {form: job.convert(job.path, root / str(i), **options) for i, (form, options) in enumerate(FORMS.items())}


def test_masters_are_more_than_weights(job: Job) -> None:
    assert len(job.states) == 13
    for kinds in job.states.values():
        assert sorted(kinds) == ["exp_avg", "exp_avg_sq", "master", "step", "weight"]
        assert kinds["weight"].tobytes() != kinds["master"].tobytes()


@pytest.mark.parametrize("form", FORMS)
def test_every_format_holds_all_of_it(job: Job, written: dict[str, Path], form: str) -> None:
    check(states(written[form]), job.states)


@pytest.mark.parametrize("first, second", list(combinations(FORMS, 2)), ids=lambda form: form)
def test_there_and_back(job: Job, written: dict[str, Path], tmp_path: Path, first: str, second: str) -> None:
    there = job.convert(written[first], tmp_path / "there", **FORMS[second])
    check(states(there), job.states)
    check(states(job.convert(there, tmp_path / "back", **FORMS[first])), job.states)


@pytest.mark.parametrize("form", FORMS)
def test_weights_alone_go_through_safetensors(job: Job, written: dict[str, Path], tmp_path: Path, form: str) -> None:
    for dtype, kind in (("bf16", "weight"), ("fp32", "master")):
        folder = job.convert(written[form], tmp_path / dtype, to="safetensors", dtype=dtype)
        again = job.convert(folder, tmp_path / f"{dtype} atoms", to="atoms")
        for path in (folder, again):
            found = states(path)
            assert sorted(found) == sorted(job.states)
            for name, kinds in found.items():
                assert list(kinds) == ["weight"]
                assert kinds["weight"].tobytes() == job.states[name][kind].tobytes(), (name, dtype)
