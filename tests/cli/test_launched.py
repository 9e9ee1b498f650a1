"""Several processes of one launch: they share the work, one publishes, and a failure of one ends all."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import ucp
from tests.paths import FIXTURES, PROJECT
from tests.trees import contents
from ucp import api
from ucp.cli.convert import shard_of_launcher
from ucp.engine.pool import Progress
from ucp.engine.work_shard import WorkShard

SOURCE = FIXTURES / "z1_bf16_tp2_dp2"
LAYOUT = ["--to", "deepspeed", "--tp", "1", "--dp", "3"]
# Looks at the others all the time, gives up soon, and where told so may not write more than some bytes to a file.
DRIVER = """
import resource, sys
from ucp import settings
settings.LIVENESS_SECONDS, settings.MISSING_PROCESS_SECONDS = 0.05, float(sys.argv[1])
if int(sys.argv[2]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
from ucp.cli.main import run
sys.exit(run(sys.argv[3:]))
"""


def start(
    rank: int, world: int, out: Path, *options: str, patience: float = 60, limit: int = 0
) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", DRIVER, str(patience), str(limit), "convert", str(SOURCE), str(out), *LAYOUT]
    environment = {**os.environ, "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(world)}
    return subprocess.Popen([*command, *options], env=environment, text=True, stderr=subprocess.PIPE)


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, said = process.communicate(timeout=60)
    return process.returncode, said


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "out"
    ucp.convert(SOURCE, path, to="deepspeed", tp=1, dp=3)
    return path


@pytest.mark.parametrize(
    "environment, shard",
    [
        ({}, None),
        ({"RANK": "1", "WORLD_SIZE": "4"}, None),  # a container's, for every shell in it
        ({"RANK": "1", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"}, WorkShard(1, 4)),
        ({"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),  # the batch script itself
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "4"}, WorkShard(3, 4)),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3"}, WorkShard(2, 3)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, WorkShard(0, 2)),
        ({"PMI_RANK": "two", "PMI_SIZE": "2"}, None),
    ],
)
def test_the_shard_of_a_launched_process(environment: dict[str, str], shard: WorkShard | None) -> None:
    assert shard_of_launcher(environment) == shard


def test_all_write_and_the_first_publishes(tmp_path: Path, whole: Path) -> None:
    processes = [start(rank, 3, tmp_path / "out") for rank in range(3)]
    said = [end(process) for process in processes]
    assert [code for code, _ in said] == [0, 0, 0], said
    assert contents(tmp_path / "out") == contents(whole)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert "parameters" in said[0][1]
    assert said[1][1] == said[2][1] == "", "one summary is enough"


def test_a_failure_ends_the_other_processes_with_its_message(tmp_path: Path, whole: Path) -> None:
    out = tmp_path / "out"
    first = start(0, 2, out, patience=5)  # it may look only after the other has failed
    code, said = end(start(1, 2, out, limit=10_000))
    assert code == 5
    assert "File too large" in said
    code, said = end(first)
    assert code == 5
    assert "shard 2/2 failed" in said
    assert "File too large" in said
    assert not out.exists()
    again = [start(rank, 2, out) for rank in range(2)]  # the note of the failure is not believed any more
    assert [end(process)[0] for process in again] == [0, 0]
    assert contents(out) == contents(whole)


def test_a_process_that_never_starts_is_reported(tmp_path: Path, whole: Path) -> None:
    out = tmp_path / "out"
    code, said = end(start(0, 2, out, patience=0.5))
    assert code == 5
    assert "shard 2/2 is not done, and no process works on it" in said
    assert "--shard 2/2" in said
    ucp.convert(SOURCE, out, to="deepspeed", tp=1, dp=3, shard=(2, 2))
    ucp.convert(SOURCE, out, to="deepspeed", tp=1, dp=3, finish=True)
    assert contents(out) == contents(whole)


@pytest.mark.slow
def test_torchrun(tmp_path: Path, whole: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "ucp", "convert"]
    run = subprocess.run(
        [*command, str(SOURCE), str(tmp_path / "out"), *LAYOUT],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert contents(tmp_path / "out") == contents(whole)


@pytest.mark.slow
def test_torchrun_on_two_nodes(tmp_path: Path, whole: Path) -> None:
    """Two launchers that meet over the network, as on two machines that see the same folders."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        meeting = f"127.0.0.1:{free.getsockname()[1]}"
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", meeting]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "ucp", "convert"]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
    nodes = [
        subprocess.Popen(
            [*command, str(SOURCE), str(tmp_path / "out"), *LAYOUT], env=environment, text=True, stderr=subprocess.PIPE
        )
        for _ in range(2)
    ]
    said = [end(node) for node in nodes]
    assert [code for code, _ in said] == [0, 0], said
    assert contents(tmp_path / "out") == contents(whole)


class Heard(Progress):
    """Adds up the reported bytes."""

    def __init__(self) -> None:
        self.total = self.done = 0

    def start(self, total: int) -> None:
        self.total += total

    def advance(self, nbytes: int) -> None:
        self.done += nbytes


def test_the_first_process_reports_the_bytes_of_all(tmp_path: Path) -> None:
    out, heard = tmp_path / "out", Heard()
    ucp.convert(SOURCE, out, to="deepspeed", tp=1, dp=3, shard=(2, 2))
    conversion = api.plan(SOURCE, out, to="deepspeed", tp=1, dp=3)
    conversion.run(shard=WorkShard(0, 2), in_launch=True, progress=heard)
    assert heard.total == heard.done == conversion.target.nbytes
