"""Failing stores: refusals, connections that break or hang, and processes that are killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ucp
from tests.paths import FIXTURES
from tests.remote.conftest import upload
from tests.remote.troubled_proxy import Fault, Proxy, Request, Trouble
from tests.remote.uploads import here, seen
from ucp import settings
from ucp.cli.main import run
from ucp.errors import InconsistentError, StorageError
from ucp.settings import KIB, MIB
from ucp.storage.object_store import with_retries

SOURCE = FIXTURES / "z1_bf16_dp2"


def is_object(request: Request) -> bool:
    return request.range is not None


@pytest.mark.parametrize("trouble", ["refuse", "cut", "cut early"])
def test_failed_reads_are_repeated(trouble: Trouble, bucket: str, proxy: Proxy) -> None:
    url = upload(SOURCE, bucket)
    proxy.reset()
    proxy.faults += [Fault(trouble, 3, "GET"), Fault(trouble, 2, "GET", is_object), Fault(trouble, 1, "HEAD")]
    assert ucp.diff(url, SOURCE).same
    assert [fault.met for fault in proxy.faults] == [3, 2, 1]


def test_a_request_that_hangs_is_repeated(bucket: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    url = upload(SOURCE, bucket)
    monkeypatch.setattr(settings, "REMOTE_TIMEOUT_SECONDS", 3.0)
    monkeypatch.setattr(settings, "REMOTE_ATTEMPTS", 100)  # a busy machine may look like a silent store
    proxy.reset()
    proxy.faults.append(Fault("stall", 2, "GET", is_object))
    assert ucp.diff(url, SOURCE).same
    assert proxy.faults[0].met == 2


@pytest.mark.parametrize("trouble", ["refuse", "cut early", "cut"])
def test_failed_writes_are_repeated(
    trouble: Trouble, tmp_path: Path, bucket: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "REMOTE_SPOOL_BYTES", 128 * KIB)
    proxy.faults += [
        Fault(trouble, 2, "PUT", lambda request: "journal" in request.path),
        Fault(trouble, 2, "PUT", lambda request: request.path.endswith(".pt")),
        Fault(trouble, 1, "PUT", lambda request: "complete" in request.path),
    ]
    ucp.convert(SOURCE, f"{bucket}/out", to="deepspeed")
    assert [fault.met for fault in proxy.faults] == [2, 2, 1]
    ucp.convert(SOURCE, tmp_path / "out", to="deepspeed")
    assert seen(f"{bucket}/out") == here(tmp_path / "out")


def test_failed_parts_of_a_large_file_are_sent_again(
    tmp_path: Path, bucket: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    (tmp_path / "weights").mkdir()
    save_file({"w": np.arange(3 * MIB, dtype=np.float32)}, tmp_path / "weights" / "model.safetensors")
    monkeypatch.setattr(settings, "REMOTE_PART_BYTES", 5 * MIB)
    proxy.faults.append(Fault("cut early", 1, "PUT", lambda request: "partNumber=2" in request.path))
    proxy.faults.append(Fault("refuse", 1, "POST", lambda request: "uploadId" in request.path))
    ucp.convert(tmp_path / "weights", f"{bucket}/out", to="safetensors")
    assert [fault.met for fault in proxy.faults] == [1, 1]
    assert ucp.diff(f"{bucket}/out", tmp_path / "weights").same


def test_a_store_that_keeps_failing_is_reported(
    bucket: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    url = upload(SOURCE, bucket)
    monkeypatch.setattr(settings, "REMOTE_ATTEMPTS", 2)
    proxy.faults.append(Fault("refuse", 10_000, "GET", is_object))
    assert run(["verify", url]) == StorageError.exit_code
    assert run(["convert", url, f"{bucket}/out"]) == StorageError.exit_code
    told = capfd.readouterr().err
    assert "2 attempts" in told
    assert url in told
    assert "Traceback" not in told


def test_a_missing_bucket_is_reported(proxy: Proxy) -> None:
    with pytest.raises(StorageError, match="no such file or folder"):
        ucp.open("s3://nobody-has-made-this/run")
    with pytest.raises(StorageError, match="nobody-has-made-this"):
        ucp.convert(SOURCE, "s3://nobody-has-made-this/run")
    assert proxy.requests


def test_a_killed_upload_is_hidden_and_resumes(tmp_path: Path, bucket: str, proxy: Proxy) -> None:
    held = Fault("hold", 100, "PUT", lambda request: request.path.endswith("_optim_states.pt"))
    proxy.faults.append(held)
    script = (
        "import sys; from ucp import settings; settings.REMOTE_SPOOL_BYTES = 128 * 1024;"
        "from ucp.cli.main import run; sys.exit(run(sys.argv[1:]))"
    )
    command = ["convert", str(SOURCE), f"{bucket}/out", "--to", "deepspeed"]
    (tmp_path / "spool").mkdir()  # which a killed process leaves behind
    process = subprocess.Popen(
        [sys.executable, "-c", script, *command],
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(tmp_path / "spool")},
    )
    try:
        deadline = time.monotonic() + 300
        while held.met == 0:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait(60)
    proxy.reset()
    with pytest.raises(InconsistentError, match="half-done"):
        ucp.open(f"{bucket}/out")
    ucp.convert(SOURCE, f"{bucket}/out", to="deepspeed", resume=True)
    ucp.convert(SOURCE, tmp_path / "out", to="deepspeed")
    assert seen(f"{bucket}/out") == here(tmp_path / "out")


def test_final_errors_are_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "REMOTE_RETRY_SECONDS", 0.0)
    asked: list[int] = []

    def refuse(error: Exception) -> None:
        asked.append(1)
        raise error

    with pytest.raises(StorageError, match="s3://b/k: PermissionError: no") as failure:
        with_retries(lambda: refuse(PermissionError("no")), "s3://b/k")
    assert "credentials" in str(failure.value)
    with pytest.raises(FileNotFoundError):
        with_retries(lambda: refuse(FileNotFoundError()), "s3://b/k")
    assert len(asked) == 2
    with pytest.raises(StorageError, match=r"ConnectionError: reset \(6 attempts\)"):
        with_retries(lambda: refuse(ConnectionError("reset")), "s3://b/k")
    assert len(asked) == 2 + settings.REMOTE_ATTEMPTS
