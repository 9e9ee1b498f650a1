"""`ucp shadow` as a process next to a job: the job is killed, the shadow has its last complete step."""

from __future__ import annotations

import json
import random
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ucp
from tests.replay.logged_job import assert_same, state_of
from tests.training.shadow import trainer
from tests.training.shadow.follower import until
from tests.training.shadow.shadow_processes import Processes, expected
from ucp.cli.main import run as run_command


@pytest.fixture
def processes() -> Iterator[Processes]:
    made = Processes()
    yield made
    made.end()


def status(capsys: pytest.CaptureFixture[str], url: str) -> dict[str, Any]:
    capsys.readouterr()
    run_command(["shadow", "status", url, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def until_status(capsys: pytest.CaptureFixture[str], url: str, condition: Callable[[dict[str, Any]], object]) -> None:
    """Wait until the status of a shadow fulfils a condition."""
    until(lambda: condition(status(capsys, url)))


SHADOWS: dict[str, list[tuple[str, list[str]]]] = {  # addresses and options
    "tcp": [("127.0.0.1:0", [])],
    "shared memory": [("shm://{name}", [])],
    "two shares": [("shm://{name}", ["--shard", "1/2"]), ("127.0.0.1:0", ["--shard", "2/2"])],
}


@pytest.mark.parametrize("way", SHADOWS)
def test_the_job_is_killed(tmp_path: Path, processes: Processes, capsys: pytest.CaptureFixture[str], way: str) -> None:
    """SIGKILL at a random time: the shadow has a step that the job had reported, and the job continues from it."""
    torch.set_num_threads(1)
    seed, name = list(SHADOWS).index(way), f"test-{secrets.token_hex(8)}"
    urls = [processes.shadow(*options, listen=listen.format(name=name))[1] for listen, options in SHADOWS[way]]
    url = ",".join(urls)
    job = processes.start("-m", "tests.training.shadow.trainer", tmp_path / "run", 100_000, url)
    assert job.stdout is not None
    for _ in range(random.Random(seed).randrange(1, 60)):
        reported = int(job.stdout.readline())
    for each in urls:
        until_status(capsys, each, lambda found: found["step"])  # the job may be ahead of its own threads
    time.sleep(random.Random(seed).random() * 0.02)
    job.kill()
    job.wait()
    whole_lines = job.stdout.read().rpartition("\n")[0]
    reported = max([reported, *map(int, whole_lines.split())])
    log = tmp_path / "run" / "log"
    log.rename(tmp_path / "out-of-reach")  # the shadow alone has to do
    for each in urls:
        until_status(capsys, each, lambda found: not found["feeds"])
        until_status(capsys, each, lambda found: len(urls) > 1 or not found["pending_bytes"])
        assert status(capsys, each)["condition"] == "live"
    assert run_command(["convert", url, str(tmp_path / "resumed")]) == 0
    resumed = ucp.open(tmp_path / "resumed").index
    step = resumed.step
    assert step is not None
    assert 0 < step <= reported + 1
    net, optimizer, state = expected(step)
    assert_same(state_of(resumed), state)
    again, its = trainer.build()
    assert ucp.load_into(tmp_path / "resumed", again, its).step == step
    for number in range(step + 1, step + 6):
        assert trainer.step(again, its, number) == trainer.step(net, optimizer, number)


def test_the_shadow_is_killed(tmp_path: Path, processes: Processes, capsys: pytest.CaptureFixture[str]) -> None:
    """Training continues; another shadow at the same address gets everything from the log."""
    torch.set_num_threads(1)
    name = f"shm://test-{secrets.token_hex(8)}"
    shadow, url = processes.shadow(listen=name)
    job = processes.start("-m", "tests.training.shadow.trainer", tmp_path / "run", 120, url)
    assert job.stdout is not None
    for _ in range(10):
        job.stdout.readline()
    shadow.kill()
    shadow.wait()
    job.stdout.read()
    assert job.wait(600) == 0
    _, url = processes.shadow("--log", tmp_path / "run", listen=name)
    assert url == name
    assert status(capsys, url)["step"] == 120
    assert run_command(["convert", url, str(tmp_path / "end")]) == 0
    assert_same(state_of(ucp.open(tmp_path / "end").index), expected(120)[2])


def test_a_shadow_ends_on_sigterm(tmp_path: Path, processes: Processes, capsys: pytest.CaptureFixture[str]) -> None:
    net, optimizer = trainer.build()
    with ucp.record(tmp_path / "run", net, optimizer) as recorder:
        trainer.step(net, optimizer, 1)
        recorder.flush()
        shadow, url = processes.shadow("--log", tmp_path / "run")
        assert run_command(["shadow", "status", url]) == 0
        assert "live: step 1, 0 behind" in capsys.readouterr().out
        shadow.send_signal(signal.SIGUSR1)  # without --save: it continues
        assert run_command(["shadow", "status", url]) == 0
        shadow.send_signal(signal.SIGTERM)
        assert shadow.wait(300) == 0
    assert run_command(["shadow", "status", url]) == 5
    assert "cannot be reached" in capsys.readouterr().err


def test_sigusr1_saves_a_checkpoint(tmp_path: Path, processes: Processes, capsys: pytest.CaptureFixture[str]) -> None:
    """While the job continues: twice, and once more for the same step."""
    torch.set_num_threads(1)
    net, optimizer = trainer.build()
    shadow, url = processes.shadow("--save", tmp_path / "kept")
    with ucp.record(tmp_path / "run", net, optimizer, to=url) as recorder:
        for step in (1, 2, 3):
            trainer.step(net, optimizer, step)
            recorder.flush()
            until_status(capsys, url, lambda found, step=step: found["step"] == step)
            if step != 2:
                shadow.send_signal(signal.SIGUSR1)
                until((tmp_path / f"kept/step-{step}").exists)
    shadow.send_signal(signal.SIGUSR1)
    shadow.send_signal(signal.SIGTERM)
    assert shadow.wait(300) == 0
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["step-1", "step-3"]
    for step in (1, 3):
        assert ucp.verify(tmp_path / f"kept/step-{step}", "deep").ok
        assert_same(state_of(ucp.open(tmp_path / f"kept/step-{step}").index), expected(step)[2])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "needs a job to follow"),
        (["--listen", "0.0.0.0:0"], "needs a token"),
        (["--base", "nowhere", "--listen", "127.0.0.1:0"], "nowhere"),
        (["--log", "nowhere"], "this shadow could not be read"),
        (["--listen", "nowhere"], "not an address"),
        (["--listen", "shm://a/b"], "not an address"),
        (["--log", "nowhere", "--listen", "127.0.0.1:0", "--shard", "3/2"], "shard 3 of 2 does not exist"),
        (["--log", "nowhere", "--shard", "1/2", "--save", "kept"], "one shard is not a checkpoint"),
    ],
)
def test_invalid_options_are_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert run_command(["shadow", *arguments]) in (2, 3, 5)
    assert message in capsys.readouterr().err
