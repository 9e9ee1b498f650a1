"""Checkpoints in object stores are read like local ones, in a few range requests."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import ucp
from tests.paths import FIXTURES, fixture
from tests.remote.conftest import upload
from tests.remote.troubled_proxy import Proxy
from ucp import settings
from ucp.cli.main import run
from ucp.containers.torch_file import TorchFile
from ucp.errors import IntegrityError, StorageError, UnsafeError, UsageError
from ucp.settings import KIB, MIB
from ucp.storage.paths import parse_path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def described(checkpoint: Any) -> Any:
    """Where every byte of every state is, according to the index."""
    return {
        (name, kind): [(f.file, f.offset, f.dtype.name, f.region) for f in atom.fragments]
        for name, parameter in checkpoint.parameters.items()
        for kind, atom in parameter.atoms.items()
    }


def found(source: str) -> list[str]:
    """The findings of a deep verification, independent of where the checkpoint is."""
    return sorted(finding.message.replace(source, "SOURCE") for finding in ucp.verify(source, "deep").findings)


def make(to: str, folder: Path) -> Path:
    """A checkpoint of some format, on this machine."""
    source = FIXTURES / "z1_bf16_dp2"
    if to == "deepspeed":
        return source
    if to in ("megatron", "torch-dist"):
        return fixture("megatron/gpt_tp2_pp2_torch" + ("" if to == "megatron" else "dist"))
    ucp.convert(source, folder / to, to=to)
    return folder / to


@pytest.mark.parametrize(
    "to, store",
    [
        ("deepspeed", "bucket"),
        ("atoms", "bucket"),
        ("deepspeed-universal", "memory"),
        ("safetensors", "memory"),
        ("dcp", "memory"),
        ("megatron", "memory"),
        ("torch-dist", "memory"),
    ],
)
def test_every_format_is_read_as_it_is_from_disk(
    to: str, store: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    local = make(to, tmp_path)
    url = upload(local, request.getfixturevalue(store))
    here, there = ucp.open(local).index, ucp.open(url).index
    assert (here.format, here.step, here.sizes) == (there.format, there.step, there.sizes)
    assert described(here) == described(there)
    assert found(url) == found(str(local))
    assert ucp.diff(local, url).same


def test_a_conversion_from_s3_equals_one_from_disk(tmp_path: Path, bucket: str) -> None:
    source = FIXTURES / "z1_bf16_tp2_dp2"
    ucp.convert(source, tmp_path / "here", to="deepspeed", dp=1, tp=1)
    ucp.convert(upload(source, bucket), tmp_path / "there", to="deepspeed", dp=1, tp=1)
    assert contents(tmp_path / "there") == contents(tmp_path / "here")


def test_commands_take_urls(memory: str, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = FIXTURES / "z1_bf16_dp2"
    url = upload(source, memory)
    assert run(["inspect", url, "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert run(["inspect", str(source), "--json"]) == 0
    here = json.loads(capfd.readouterr().out)
    assert told["parameters"] == here["parameters"]
    for level in ([], ["--quick"], ["--deep"]):
        assert run(["verify", url, *level]) == 0
    assert run(["diff", url, str(source)]) == 0
    assert run(["report", url, "-o", str(tmp_path / "page.html")]) == 0
    assert run(["convert", url, str(tmp_path / "atoms")]) == 0
    assert ucp.diff(tmp_path / "atoms", url).same


def test_live_jobs_load_from_urls_and_save_to_folders(memory: str, tmp_path: Path) -> None:
    made, loaded = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)
    ucp.save(tmp_path / "saved", made)
    ucp.load_into(upload(tmp_path / "saved", memory), loaded)
    assert torch.equal(made.weight, loaded.weight)
    with pytest.raises(UsageError, match=r"jobs save to a file system"):
        ucp.save(f"{memory}/out", made)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"jobs record to a file system"):
        ucp.record(f"{memory}/run", made, optimizer)
    with pytest.raises(UsageError, match=r"snapshots go to a file system"):
        ucp.snapshot(f"{memory}/run", made, optimizer, every=1)


def test_an_index_takes_the_ends_of_a_shard_and_not_the_shard(tmp_path: Path, bucket: str, proxy: Proxy) -> None:
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / "some.pt"
    torch.save({f"t{n}": torch.zeros(4 * MIB // 4) for n in range(6)}, file)
    url = upload(tmp_path / "run", bucket)
    proxy.reset()
    there = TorchFile(parse_path(f"{url}/some.pt"))
    here = TorchFile(file)
    positions = [there.position(there.tree[f"t{n}"]) for n in range(6)]
    assert positions == [here.position(here.tree[f"t{n}"]) for n in range(6)]
    assert 0 < proxy.sent("some.pt") < 300 * KIB < file.stat().st_size / 50


@pytest.fixture
def weights(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray[Any, Any]]]:
    """A folder of weights: 24 MiB in three files."""
    random = np.random.default_rng(7)
    (tmp_path / "weights").mkdir()
    arrays = {f"w{n}": random.standard_normal((1024, 2048), np.float32) for n in range(3)}
    for number, (name, array) in enumerate(arrays.items(), 1):
        save_file({name: array}, tmp_path / "weights" / f"model-{number:05}-of-00003.safetensors")
    names = {name: f"model-{number:05}-of-00003.safetensors" for number, name in enumerate(arrays, 1)}
    (tmp_path / "weights" / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 3 * 8 * MIB}, "weight_map": names})
    )
    return tmp_path / "weights", arrays


def test_only_what_is_read_is_fetched(
    weights: tuple[Path, dict[str, np.ndarray[Any, Any]]], bucket: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, arrays = weights
    url = upload(folder, bucket)
    monkeypatch.setattr(settings, "REMOTE_BLOCK_BYTES", 1 * MIB)
    proxy.reset()
    opened = ucp.open(url)
    assert proxy.sent("safetensors") < 300 * KIB
    assert np.array_equal(opened["w1"].read("weight", rows=slice(0, 64)), arrays["w1"][:64])
    rows = 64 * 2048 * 4
    assert proxy.sent("safetensors") < 300 * KIB + rows + 4 * MIB  # blocks, and those ahead
    proxy.reset()
    assert np.array_equal(opened["w2"].read("weight"), arrays["w2"])
    assert 8 * MIB <= proxy.sent("safetensors") <= 10 * MIB
    ranges = [request for request in proxy.requests if request.method == "GET" and request.range]
    assert len(ranges) < 16  # and not one for every slab


def test_a_small_cache_costs_requests_but_not_bytes(
    weights: tuple[Path, dict[str, np.ndarray[Any, Any]]], bucket: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = weights
    url = upload(folder, bucket)
    monkeypatch.setattr(settings, "REMOTE_BLOCK_BYTES", 1 * MIB)
    monkeypatch.setattr(settings, "REMOTE_CACHE_BYTES", 2 * MIB)
    monkeypatch.setattr(settings, "SLAB_BYTES", 256 * KIB)
    proxy.reset()
    assert ucp.diff(url, folder, jobs=4).same
    assert proxy.sent("safetensors") < 2.5 * 24 * MIB


def test_a_folder_is_listed_again_whenever_it_is_opened(memory: str) -> None:
    import fsspec

    url = upload(FIXTURES / "z1_bf16_dp2", memory)
    assert ucp.open(url).parameters
    fs = fsspec.filesystem("memory")
    fs.rm(url, recursive=True)
    with pytest.raises(StorageError, match="no such file or folder"):
        ucp.open(url)
    upload(FIXTURES / "z1_bf16_dp2", memory)
    assert ucp.open(url).parameters


def test_a_truncated_object_is_reported(memory: str) -> None:
    import fsspec

    url = upload(FIXTURES / "z1_bf16_dp2", memory)
    fs = fsspec.filesystem("memory")
    victim = next(name for name in fs.find(url) if name.endswith("optim_states.pt"))
    fs.pipe_file(victim, fs.cat_file(victim)[:-5000])
    with pytest.raises(IntegrityError, match=r"memory://.*optim_states\.pt"):
        ucp.open(url)


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: ucp.open("nothing-such://bucket/run"), UsageError, "fsspec has no protocol nothing-such://"),
        (lambda: ucp.open("memory://nobody/nothing"), StorageError, "no such file or folder"),
        (lambda: parse_path("memory://one/run") / "/etc/passwd", None, ""),
    ],
    ids=["scheme", "missing", "elsewhere"],
)
def test_unreadable_sources_are_reported(call: Callable[[], Any], error: type[Exception] | None, words: str) -> None:
    pytest.importorskip("fsspec")
    if error is not None:
        with pytest.raises(error, match=words):
            call()
        return
    with pytest.raises(UnsafeError, match="not in the object store"):
        call().exists()


def test_a_manifest_cannot_lead_out_of_its_bucket(memory: str, tmp_path: Path) -> None:
    ucp.convert(FIXTURES / "z1_bf16_dp2", tmp_path / "view", link=True)
    with pytest.raises(UnsafeError, match="points at files elsewhere"):
        ucp.open(upload(tmp_path / "view", memory))
    inside = parse_path(f"{memory}/run")
    assert (inside / "../other").key == f"{memory}/other"
    with pytest.raises(UnsafeError, match="leads out of"):
        (inside / "../../../secret").exists()


def test_a_url_is_refused_where_a_file_is_needed(memory: str) -> None:
    with pytest.raises(TypeError, match="not a file on this machine"):
        os.stat(parse_path(f"{memory}/x"))


def test_file_urls_are_files() -> None:
    assert parse_path("file:///some/where") == Path("/some/where")
    assert parse_path("plain/path") == Path("plain/path")


def test_a_missing_client_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(UsageError, match="memory://not-asked-before") as failure:
        ucp.open("memory://not-asked-before/run")
    assert "universal-checkpoint[remote]" in str(failure.value)


def test_placeholder_objects_of_folders_are_ignored(bucket: str) -> None:
    """Web consoles of stores create empty objects whose names end with a slash."""
    import s3fs

    url = upload(FIXTURES / "z1_bf16_dp2", bucket)
    name = bucket.removeprefix("s3://")
    fs = s3fs.S3FileSystem()
    for key in ("z1_bf16_dp2/", "z1_bf16_dp2/global_step3/"):
        fs.call_s3("put_object", Bucket=name, Key=key, Body=b"")
    assert ucp.diff(url, FIXTURES / "z1_bf16_dp2").same
    assert ucp.open(url).index.sizes == ucp.open(FIXTURES / "z1_bf16_dp2").index.sizes


def test_a_page_goes_to_a_file(memory: str) -> None:
    with pytest.raises(UsageError, match="a page goes to a file system"):
        ucp.report(FIXTURES / "z1_bf16_dp2", f"{memory}/page.html")
