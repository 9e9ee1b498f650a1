"""`--engine ray` on a real cluster: the same bytes if workers die; one failure ends all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import ucp
from tests.paths import FIXTURES, PROJECT
from tests.trees import contents
from ucp.api import _request
from ucp.cli.main import run
from ucp.engine.journal import journal_name
from ucp.engine.on_ray import choose_shards
from ucp.engine.staging import staging_folder
from ucp.engine.work_shard import WorkShard
from ucp.errors import UsageError
from ucp.storage.paths import COMPLETION_MARKER

SOURCE = FIXTURES / "z1_bf16_tp2_dp2"
LAYOUT = ["--to", "deepspeed", "--tp", "1", "--dp", "3"]


class Cluster:
    """A cluster in another process; see ray_cluster.py."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._own = tempfile.mkdtemp(prefix="ray-")  # sockets have short names
        environment = {**os.environ, "PYTHONPATH": str(PROJECT), "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
        # A machine that is slow, short of memory or nearly full is no reason for Ray to interfere.
        patient = {"RAY_health_check_failure_threshold": "60", "RAY_worker_register_timeout_seconds": "300"}
        patient |= {"RAY_memory_monitor_refresh_ms": "0", "RAY_local_fs_capacity_threshold": "1"}
        self.environment = {**environment, **patient, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONWARNINGS": "ignore"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cli.ray_cluster", self._own, str(folder)],
            cwd=PROJECT,
            env=self.environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.address: str = self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line[:1] in '"[':  # the rest is what Ray says
                return json.loads(line)
        raise AssertionError("the cluster ended")

    def run(self, *command: str) -> tuple[int, str]:
        """Exit code of a command, and what it said."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        code, said = self._answer()
        return code, said

    def convert(self, out: Path | str) -> tuple[int, str]:
        return self.run("convert", str(SOURCE), str(out), *LAYOUT, "--engine", "ray", "--shards", "2", "--jobs", "1")

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()
        shutil.rmtree(self._own, ignore_errors=True)


@pytest.fixture(scope="module")
def s3(s3_port: int) -> Iterator[None]:
    """An S3 server that this process and the cluster can reach."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3_port}")
        yield


@pytest.fixture(scope="module")
def cluster(s3: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    del s3
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed (pip install ray)")
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "out"
    ucp.convert(SOURCE, path, to="deepspeed", tp=1, dp=3)
    return path


@pytest.mark.slow
def test_a_command_outside_the_cluster(tmp_path: Path, cluster: Cluster, whole: Path) -> None:
    """A command with relative paths, which workers cannot resolve in their folders."""
    (tmp_path / "here").symlink_to(SOURCE)
    command = [sys.executable, "-m", "ucp", "convert", "here", "out", *LAYOUT, "--engine", "ray", "--ray-address"]
    done = subprocess.run(
        [*command, cluster.address, "--json"],
        cwd=tmp_path,
        env=cluster.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["target"] == "out", "stdout is data"
    assert contents(tmp_path / "out") == contents(whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "out"]


@pytest.mark.slow
def test_a_killed_worker_is_restarted_and_keeps_its_work(tmp_path: Path, cluster: Cluster, whole: Path) -> None:
    (cluster.folder / "die").touch()
    (cluster.folder / "written").unlink(missing_ok=True)
    code, said = cluster.convert(tmp_path / "out")
    assert code == 0, said
    assert not (cluster.folder / "die").exists(), "it was killed"
    assert contents(tmp_path / "out") == contents(whole)
    lines = [line.split() for line in (cluster.folder / "written").read_text().splitlines()]
    second = [line for line in lines if line[0] == journal_name(WorkShard(1, 2))]
    workers = [worker for _, worker, *_ in second]
    assert len(set(workers)) > 1, "another process continued with shard 2"
    assert 0 < workers.count(workers[0]) < len(workers)
    assert len({(file, offset) for *_, file, offset in lines}) == len(lines), "nothing was written twice"


@pytest.mark.slow
def test_a_failed_shard_ends_the_run_with_its_message(tmp_path: Path, cluster: Cluster, whole: Path) -> None:
    out = tmp_path / "out"
    target = ucp.plan(SOURCE, out, to="deepspeed", tp=1, dp=3).target
    second = target.files[min(WorkShard(1, 2).files(target))].path
    obstacle = staging_folder(out) / second
    obstacle.mkdir(parents=True)
    (cluster.folder / "wait").touch()  # shard 1 would never end
    code, said = cluster.convert(out)
    assert code == 5, said
    assert "shard 2/2: " in said
    assert Path(second).name in said or str(staging_folder(out)) in said
    assert "Is a directory" in said
    assert not out.exists()
    (cluster.folder / "wait").unlink()
    obstacle.rmdir()
    code, said = cluster.convert(out)
    assert code == 0, said
    assert contents(out) == contents(whole)
    code, said = cluster.convert(out)
    assert code == 2
    assert "already exists" in said


@pytest.mark.slow
def test_into_an_object_store(cluster: Cluster, whole: Path) -> None:
    import s3fs

    fs = s3fs.S3FileSystem(skip_instance_cache=True)
    fs.mkdir("ray")
    # A shard that was started by a run that did not finish.
    code, said = cluster.run("convert", str(SOURCE), "s3://ray/out", *LAYOUT, "--shard", "1/2")
    assert code == 0, said
    code, said = cluster.convert("s3://ray/out")
    assert code == 0, said
    fs.invalidate_cache()
    names = [name.removeprefix("ray/out/") for name in fs.find("ray/out")]
    assert {name: fs.cat_file(f"ray/out/{name}") for name in names if name != COMPLETION_MARKER} == contents(whole)
    code, said = cluster.convert("s3://ray/out")
    assert code == 2
    assert "already exists" in said


@pytest.mark.parametrize(
    "cpus, shards, jobs, expected",
    [
        ([2], None, None, (2, 2)),  # a single shard would publish itself
        ([64, 64, 0], None, None, (16, 8)),
        ([64, 4], None, None, (17, 4)),
        ([64] * 100, None, 1, (1000, 1)),  # no more than files
        ([2], 4, None, (4, 1)),
        ([8, 8], 4, None, (4, 4)),
        ([], 7, 3, (7, 3)),  # a cluster that grows when tasks wait
    ],
)
def test_shards_for_the_cpus_of_a_cluster(
    cpus: list[int], shards: int | None, jobs: int | None, expected: tuple[int, int]
) -> None:
    assert choose_shards(cpus, shards, jobs, most=1000) == expected


def test_clusters_with_too_few_cpus() -> None:
    with pytest.raises(UsageError, match="no node of the Ray cluster has a free CPU"):
        choose_shards([0, 0], None, None, most=10)
    with pytest.raises(UsageError, match=r"no node of the Ray cluster has 9 CPUs \(the largest has 8"):
        choose_shards([4, 8], None, 9, most=10)


def test_paths_mean_the_same_on_every_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.toml").touch()
    request = _request("run", "out", {"like": Path("a"), "names": "table.toml", "dp": 2, "log": None})
    options = {"like": str(tmp_path / "a"), "names": str(tmp_path / "table.toml"), "dp": 2}
    assert request == {"src": str(tmp_path / "run"), "dst": str(tmp_path / "out"), "options": options}
    assert _request("shadow://host:1", "out", {"names": "hf"}) == {
        "src": "shadow://host:1",
        "dst": str(tmp_path / "out"),
        "options": {"names": "hf"},
    }


@pytest.mark.parametrize(
    "options, said",
    [
        (["--engine", "ray", "--shard", "1/2"], "leave --shard and --finish out"),
        (["--engine", "ray", "--finish"], "leave --shard and --finish out"),
        (["--shards", "2"], "add --engine ray"),
        (["--engine", "ray", "--shards", "1"], "x>=2"),
    ],
)
def test_options_that_do_not_go_together(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["convert", str(SOURCE), str(tmp_path / "out"), *options]) == 2
    assert said in capsys.readouterr().err


def test_a_launcher_and_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    assert run(["convert", str(SOURCE), str(tmp_path / "out"), "--engine", "ray"]) == 2
    assert "run it once, without the launcher" in capsys.readouterr().err


def test_ray_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run(["convert", str(SOURCE), str(tmp_path / "out"), "--engine", "ray"]) == 2
    assert "universal-checkpoint[ray]" in capsys.readouterr().err
