"""What CI systems run: the action's script, GitLab's template and the hook, executed as they execute them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from tests.checks.sharded_checkpoint import flip


@pytest.fixture
def checkpoint(project: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(project / "fixtures/z1_bf16_dp2", tmp_path / "check point"))


def damage(checkpoint: Path) -> None:
    flip(checkpoint / "global_step3/mp_rank_00_model_states.pt", 12000)


def environment(**given: str) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, **given}


def act(project: Path, folder: Path, **inputs: str) -> tuple[int, str, dict[str, str]]:
    """Run the action's script as its last step does; returns exit code, log and outputs."""
    (folder / "temp").mkdir(exist_ok=True)
    for name in ("output", "summary"):
        (folder / name).write_text("")
    done = subprocess.run(
        ["bash", project / "ci-templates/github-verify.sh"],
        env=environment(
            RUNNER_TEMP=str(folder / "temp"),
            GITHUB_OUTPUT=str(folder / "output"),
            GITHUB_STEP_SUMMARY=str(folder / "summary"),
            **inputs,
        ),
        check=False,
        text=True,
        capture_output=True,
    )
    outputs = dict(line.split("=", 1) for line in (folder / "output").read_text().splitlines())
    return done.returncode, done.stdout + done.stderr, outputs


def test_the_action_passes_a_sound_checkpoint(project: Path, tmp_path: Path, checkpoint: Path) -> None:
    code, log, outputs = act(project, tmp_path, UCP_CHECKPOINT=str(checkpoint), UCP_LEVEL="deep")
    assert code == 0, log
    assert (outputs["ok"], outputs["exit-code"]) == ("true", "0")
    assert json.loads(Path(outputs["report"]).read_text())["level"] == "deep"
    assert "ok; " in (tmp_path / "summary").read_text()


def test_the_action_fails_and_annotates_a_damaged_one(project: Path, tmp_path: Path, checkpoint: Path) -> None:
    damage(checkpoint)
    code, log, outputs = act(project, tmp_path, UCP_CHECKPOINT=str(checkpoint), UCP_LEVEL="deep")
    assert code == 4
    assert f"::error file={checkpoint}/global_step3/mp_rank_00_model_states.pt,title=ucp verify%3A zip-crc::" in log
    assert (outputs["ok"], outputs["exit-code"]) == ("false", "4")
    assert json.loads(Path(outputs["sarif"]).read_text())["runs"][0]["results"]


def test_the_action_takes_a_policy(project: Path, tmp_path: Path, checkpoint: Path) -> None:
    damage(checkpoint)
    inputs = {"UCP_CHECKPOINT": str(checkpoint), "UCP_LEVEL": "deep"}
    _, _, outputs = act(project, tmp_path, **inputs)
    failed = {finding["check"] for finding in json.loads(Path(outputs["report"]).read_text())["findings"]}
    baseline = shutil.copy(outputs["report"], tmp_path / "baseline.json")
    assert act(project, tmp_path, **inputs, UCP_ALLOW=" \n".join(failed))[0] == 0
    assert act(project, tmp_path, **inputs, UCP_BASELINE=str(baseline))[0] == 0
    assert act(project, tmp_path, **inputs, UCP_FAIL_ON="never", UCP_TAG="global_step3", UCP_JOBS="1")[0] == 0


def test_inputs_of_the_action_are_never_run(project: Path, tmp_path: Path) -> None:
    hostile = f'"; touch {tmp_path}/sprung; $(touch {tmp_path}/sprung) #'
    for name in ("UCP_CHECKPOINT", "UCP_LEVEL", "UCP_ALLOW", "UCP_BASELINE", "UCP_TAG", "UCP_JOBS", "UCP_FAIL_ON"):
        code, _, _ = act(project, tmp_path, **{"UCP_CHECKPOINT": str(tmp_path / "none"), name: hostile})
        assert code != 0
    assert not (tmp_path / "sprung").exists()


def test_the_action_passes_every_input_to_its_script(project: Path) -> None:
    action = yaml.safe_load((project / "action.yml").read_text())
    script = (project / "ci-templates/github-verify.sh").read_text()
    install, verify = action["runs"]["steps"]
    given = {**install["env"], **verify["env"]}
    used = set(re.findall(r"inputs\.([\w-]+)", " ".join(given.values()) + install["if"]))
    assert used == set(action["inputs"])
    assert set(verify["env"]) <= set(re.findall(r"UCP_\w+", script))
    for step in action["runs"]["steps"]:
        assert "${{" not in step["run"]  # if an input were run as text
    written = set(re.findall(r'echo "([\w-]+)=', script))
    assert written == set(action["outputs"])


def test_gitlabs_template_runs(project: Path, tmp_path: Path, checkpoint: Path) -> None:
    (job,) = yaml.safe_load((project / "ci-templates/gitlab-ci.yml").read_text()).values()
    for damaged, level, expected in ((False, "default", 0), (False, "deep", 0), (True, "deep", 4)):
        if damaged:
            damage(checkpoint)
        variables = {**job["variables"], "UCP_CHECKPOINT": str(checkpoint), "UCP_LEVEL": level, "UCP_ALLOW": "padding"}
        done = subprocess.run(
            ["sh", "-c", "\n".join(["set -e", *job["before_script"], *job["script"]])],
            env=environment(**variables),
            cwd=tmp_path,
            check=False,
            text=True,
            capture_output=True,
        )
        assert done.returncode == expected, done.stderr
        suite = ElementTree.parse(tmp_path / job["artifacts"]["reports"]["junit"]).getroot()
        assert (suite.get("failures") != "0") is damaged
        assert all((tmp_path / path).is_file() for path in job["artifacts"]["paths"])


def test_the_hook_runs(project: Path, checkpoint: Path) -> None:
    (hook,) = yaml.safe_load((project / ".pre-commit-hooks.yaml").read_text())
    command = [*hook["entry"].split(), str(checkpoint), "--deep"]
    assert subprocess.run(command, env=environment(), check=False, capture_output=True).returncode == 0
    damage(checkpoint)
    assert subprocess.run(command, env=environment(), check=False, capture_output=True).returncode == 4
    assert hook["pass_filenames"] is False
