"""The fault injection itself: a few faults of every kind are found, and a blind spot would be reported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_faults_of_every_kind_are_found(project: Path, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, project / "scripts/inject_faults.py", "--faults", "60", "--seed", "3", "--json", result],
        check=False,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(result.read_text())
    assert told["checkpoints"] >= 20
    assert told["faults"] >= 60
    assert (told["missed"], told["false_alarms"]) == (0, [])
    assert all(kind["injected"] for kind in told["kinds"])


@pytest.mark.slow
def test_a_blind_spot_is_reported(project: Path, tmp_path: Path) -> None:
    """A stray byte in a file that no check looks at, injected as if it were a fault, is missed and fails the run."""
    script = f"""
import sys
sys.path.insert(0, {str(project / "scripts")!r})
import inject_faults
def harmless(victim, dice):
    if victim.index.format != "deepspeed":
        raise inject_faults.NotApplicableError
    victim.write(victim.root / "latest", (victim.root / "latest").read_bytes() + b"\\n")
    return "a line break in latest"
inject_faults.kinds = lambda: [inject_faults.Fault("harmless", harmless, 1.0)]
sys.argv = ["inject_faults", "--faults", "1", "--fixtures", {str(tmp_path)!r}]
inject_faults.main()
"""
    (tmp_path / "z1").symlink_to(project / "fixtures/z1_bf16_dp2")
    done = subprocess.run([sys.executable, "-c", script], check=False, text=True, capture_output=True)
    assert done.returncode == 1, done.stderr
    assert "MISSED harmless: " in done.stdout
