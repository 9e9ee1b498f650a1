"""The grid beyond DeepSpeed's ranks: files that nothing refers to, and missing files of a trainer."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ucp.api import convert
from ucp.checks.runner import verify
from ucp.core.checkpoint import Atom, Checkpoint, Extras, Fragment, Mesh, Parameter, Rank
from ucp.core.dtypes import FLOAT32
from ucp.core.region import Region
from ucp.formats.deepspeed.checks import missing_sidecars
from ucp.formats.megatron.checks import missing_objects
from ucp.formats.registry import ReadOptions, open_checkpoint
from ucp.storage.paths import list_files


def strays(source: Path | Checkpoint) -> list[str | None]:
    report = verify(source, "quick")
    found = [finding for finding in report.findings if finding.check == "grid"]
    assert {finding.severity for finding in found} <= {"warning"}
    return [finding.file for finding in found]


def test_data_files_that_no_metadata_name(project: Path, tmp_path: Path) -> None:
    convert(project / "fixtures/z1_bf16_dp2", tmp_path / "dcp", to="dcp")
    (tmp_path / "dcp/__8_0.distcp").touch()  # of a rank that had nothing to write
    assert strays(tmp_path / "dcp") == []
    (first, *_) = sorted((tmp_path / "dcp").glob("*.distcp"))
    shutil.copy(first, tmp_path / "dcp/__9_0.distcp")
    assert strays(tmp_path / "dcp") == ["__9_0.distcp"]
    # Megatron's index of such a folder has all its files.
    index = open_checkpoint(tmp_path / "dcp", ReadOptions())
    index = replace(index, format="torch-dist", sizes=dict(list_files(tmp_path / "dcp")))
    assert strays(index) == ["__9_0.distcp"]


def test_shards_that_no_index_names(project: Path, tmp_path: Path) -> None:
    convert(project / "fixtures/z1_bf16_dp2", tmp_path / "hf", to="safetensors", max_shard_size=4096)
    save_file({"other": torch.ones(2)}, tmp_path / "hf/consolidated.safetensors")  # of another name: not checked here
    assert strays(tmp_path / "hf") == []
    save_file({"other": torch.ones(2)}, tmp_path / "hf/model-00009-of-00009.safetensors")
    assert strays(tmp_path / "hf") == ["model-00009-of-00009.safetensors"]
    (tmp_path / "hf/model.safetensors.index.json").unlink()
    (tmp_path / "hf/model-00009-of-00009.safetensors").unlink()
    assert strays(tmp_path / "hf") == ["model.safetensors.index.json"]


def test_rank_folders_beyond_the_ranks_of_a_megatron_job(tmp_path: Path) -> None:
    region = Region.all_of((2,))
    files = [f"mp_rank_{tp:02d}_000/model_optim_rng.pt" for tp in range(3)]
    covers = [(Fragment(region, file, 0, FLOAT32, Rank(tp=tp)),) for tp, file in enumerate(files)]
    for file in files:
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_bytes(bytes(8))
    parameter = Parameter("p", (2,), atoms={"weight": Atom("p", "weight", (2,), FLOAT32, covers[0], tuple(covers[1:]))})
    checkpoint = Checkpoint("megatron", tmp_path, Mesh(tp=3), {"p": parameter}, sizes=dict.fromkeys(files, 8))
    assert strays(checkpoint) == []
    assert strays(replace(checkpoint, mesh=Mesh(tp=2))) == [files[2]]


@pytest.mark.parametrize(
    "world, scheduler, files, lost",
    [
        (2, None, "scheduler.pt rng_state_0.pth rng_state_1.pth", ""),
        (2, None, "rng_state_0.pth", "scheduler.pt rng_state_1.pth"),
        (2, {"last_epoch": 3}, "rng_state_1.pth", "rng_state_0.pth"),
        (4, None, "scheduler.pt rng_state_0.pth rng_state_1.pth", ""),  # more ranks than the save had
        (1, None, "scheduler.pt rng_state.pth", ""),
        (1, None, "scheduler.pt rng_state_0.pth rng_state_1.pth", ""),
        (1, None, "", "scheduler.pt"),
    ],
)
def test_files_that_the_trainer_writes_next_to_the_step(world: int, scheduler: object, files: str, lost: str) -> None:
    sizes = dict.fromkeys(["trainer_state.json", *files.split()], 1)
    extras = Extras({"mp_rank_00_model_states.pt": {"lr_scheduler": scheduler}})
    checkpoint = Checkpoint("deepspeed", Path("out"), Mesh(dp=world), {}, extras=extras, sizes=sizes)
    assert [finding.file for finding in missing_sidecars(checkpoint)] == lost.split()


def test_random_states_of_accelerate() -> None:
    sizes = dict.fromkeys(["random_states_0.pkl", "random_states_2.pkl"], 1)
    (finding,) = missing_sidecars(Checkpoint("deepspeed", Path("out"), Mesh(dp=3), {}, sizes=sizes))
    assert (finding.file, finding.severity) == ("random_states_1.pkl", "warning")
    assert "the random states of rank 1" in finding.message


def test_objects_of_old_megatron_folders() -> None:
    sizes = dict.fromkeys([f"a._extra_state/shard_{i}.{j}_2.3.pt" for i in range(2) for j in range(3)], 1)
    checkpoint = Checkpoint("torch-dist", Path("iter"), Mesh(), {}, sizes=sizes)
    assert list(missing_objects(checkpoint)) == []
    del sizes["a._extra_state/shard_1.0_2.3.pt"]
    (finding,) = missing_objects(checkpoint)
    assert finding.file == "a._extra_state/shard_1.0_2.3.pt"
    sizes["b/shard_0_99999999999.pt"] = 1
    assert len(list(missing_objects(checkpoint))) == 1  # no job had that many


def test_optimizer_files_without_states_are_not_missing(project: Path, tmp_path: Path) -> None:
    """With weights only, DeepSpeed writes optimizer files without content."""
    convert(project / "fixtures/z1_bf16_dp2", tmp_path / "hf", to="safetensors", dtype="bf16")
    convert(tmp_path / "hf", tmp_path / "engine", to="deepspeed", zero=1, dp=2)
    assert strays(tmp_path / "engine") == []
