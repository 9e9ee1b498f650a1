"""The wheel with its core dependencies alone: no torch, and every command that moves or checks bytes works."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

import ucp
from scripts.core_env import make_core_environment
from tests.paths import FIXTURES, fixture, unpacked
from ucp.formats.registry import TARGETS
from ucp.version import VERSION

pytestmark = pytest.mark.slow
SOURCE = FIXTURES / "z1_bf16_tp2_dp2"

# Runs command lines in one process and prints their exit codes; torch must not even be there to import.
RUN_ALL = """
import json, sys
from importlib.util import find_spec
from ucp.cli.main import run

commands = json.load(sys.stdin)
codes = [run(command) for command in commands]
found = [name for name in ("torch", "deepspeed", "transformers", "pandas", "scipy") if find_spec(name)]
print(json.dumps({"codes": codes, "found": found}), file=sys.__stdout__)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `bin` of the environment."""
    return make_core_environment(tmp_path_factory.mktemp("core")).parent


def clean() -> dict[str, str]:
    """The variables of this process, without those by which Python would find this checkout."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def run_all(environment: Path, folder: Path, commands: list[list[str]]) -> None:
    """Every command succeeds."""
    done = subprocess.run(
        [environment / "python", "-I", "-c", RUN_ALL],
        cwd=folder,
        env=clean(),
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["found"] == []
    failed = [" ".join(command) for command, code in zip(commands, result["codes"], strict=True) if code]
    assert not failed, done.stderr


def test_torch_is_not_there(environment: Path, tmp_path: Path) -> None:
    code = "import ucp; print(ucp.__file__, ucp.__version__); import torch"
    done = subprocess.run(
        [environment / "python", "-c", code], cwd=tmp_path, env=clean(), capture_output=True, text=True, check=False
    )
    assert "ModuleNotFoundError: No module named 'torch'" in done.stderr
    file, version = done.stdout.split()
    assert Path(file).is_relative_to(environment.parent)
    assert version == VERSION


def test_the_console_script(environment: Path, tmp_path: Path) -> None:
    for command in (["inspect", SOURCE], ["convert", SOURCE, "out", "--to", "deepspeed", "--tp", "1", "--dp", "3"]):
        done = subprocess.run(
            [environment / "ucp", *map(str, command)], cwd=tmp_path, env=clean(), capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr.decode()


def test_every_command_that_needs_no_tensors(environment: Path, tmp_path: Path) -> None:
    source = str(SOURCE)
    megatron = str(fixture("megatron/llama_tp2_pp2_torch"))
    to_every_target = [["convert", megatron, target, "--to", target] for target in TARGETS]
    back = [["convert", target, f"{target}-weights", "--to", "safetensors"] for target in TARGETS]
    same = [["diff", target, f"{target}-weights", "--only", "weights"] for target in TARGETS]
    run_all(
        environment,
        tmp_path,
        [
            *to_every_target,
            *back,
            *same,
            *(["verify", target, "--deep"] for target in TARGETS),
            ["convert", source, "linked", "--link"],
            ["inspect", source, "--param", "embed.weight"],
            ["inspect", source, "--json"],
            ["verify", source, "--deep"],
            ["diff", megatron, "atoms"],
            ["report", source, "-o", "report.html"],
        ],
    )
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_from_every_fixture_to_safetensors(environment: Path, tmp_path: Path) -> None:
    sources = [path for path in FIXTURES.iterdir() if path.is_dir() and path.name != "packed"]
    sources += [
        next((path / name for name in ("step-3", "ckpt") if (path / name).is_dir()), path)
        for path in unpacked().glob("*/*")
    ]
    assert len(sources) > 80
    damaged = {"gpt_pp2_dp2_do_full_torchdist"}  # by a bug of Megatron
    commands = []
    for number, path in enumerate(sorted(sources)):
        repair = ["--repair"] if path.name in damaged else []
        commands.append(["convert", str(path), str(number), "--to", "safetensors", *repair])
        commands.append(["verify", str(number)])
    run_all(environment, tmp_path, commands)


def test_help_and_numpy_work(environment: Path, tmp_path: Path) -> None:
    code = f"""
import pydoc, ucp
pydoc.render_doc(ucp)
ckpt = ucp.open({str(SOURCE)!r})
assert ckpt.read("embed.weight", "master").shape == (53, 14)
assert len(list(ckpt.state_dict(dtype="bf16", as_torch=False).values())) == 33
assert "embed.weight" in ckpt._repr_html_()
try:
    ckpt.state_dict()
except ucp.UsageError as error:
    assert "universal-checkpoint[torch]" in str(error)
"""
    subprocess.run([environment / "python", "-W", "error", "-c", code], cwd=tmp_path, env=clean(), check=True)


@pytest.mark.parametrize(
    "command",
    ["inspect run --log run", "convert run out --log run", "verify run --log run", "merge run out", "shadow --log run"],
)
def test_a_command_that_needs_torch_names_the_extra(environment: Path, tmp_path: Path, command: str) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    with ucp.record(tmp_path / "run", model, optimizer):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    words = [*command.split(), *(["--listen", "127.0.0.1:0"] if "shadow" in command else [])]
    done = subprocess.run(
        [environment / "ucp", *words], cwd=tmp_path, env=clean(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "needs torch, which is not installed\n  → pip install 'universal-checkpoint[torch]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_metadata(environment: Path, tmp_path: Path) -> None:
    code = (
        "import json; from importlib.metadata import metadata; print(json.dumps(metadata('universal-checkpoint').json))"
    )
    done = subprocess.run([environment / "python", "-I", "-c", code], cwd=tmp_path, capture_output=True, check=True)
    found = json.loads(done.stdout)
    versions = {text.rpartition(" ")[2] for text in found["classifier"] if "Python :: 3." in text}
    assert versions == {"3.10", "3.11", "3.12", "3.13"}
    assert found["requires_python"] == ">=3.10"
    assert all(url.partition(", ")[2].startswith("https://") for url in found["project_url"])
    core = {re.split(r"[^\w-]", text)[0] for text in found["requires_dist"] if "extra ==" not in text}
    assert core == {"click", "numpy", "safetensors", "tomli", "tqdm", "xxhash"}
    extras = {"torch", "deepspeed", "megatron", "remote", "ray", "log", "report", "fast", "all", "dev"}
    assert set(found["provides_extra"]) >= extras
