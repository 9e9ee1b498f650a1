#!/usr/bin/env python
"""Make the small real checkpoints in `fixtures/` again, with real DeepSpeed on CPU ranks.

    .venv/bin/python scripts/make_fixtures.py            # all of them
    .venv/bin/python scripts/make_fixtures.py NAME …     # some

Each is a save folder as DeepSpeed left it (without the recovery scripts that it copies beside), with `reference/`
next to the step: what the live engine held when it saved, read from its own tensors (see tests/interop/live_state.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))

from tests.interop.jobs import JobResult, Trainer  # noqa: E402
from tests.interop.spec import Spec  # noqa: E402

FIXTURES = PROJECT / "fixtures"
STEPS, STEPS_AFTER = 3, 2
LIMIT = 300_000  # bytes a file


def autotp(attention: str) -> dict[str, Any]:
    """DeepSpeed's settings that split these projections of a layer by rows, and the ones after them by columns."""
    fused = {"shape": [3, -1], "partition_dim": 0} if attention == "qkv" else {}
    layers = [
        {"patterns": [rf".*\.({attention})_proj\.weight$"], "partition_type": "column", **fused},
        {"patterns": [r".*\.(gate|up)_proj\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.(o|down)_proj\.weight$"], "partition_type": "row"},
    ]
    partition = {"use_default_specs": False, "layer_specs": layers}
    return {"tensor_parallel": {"autotp_size": 2, "partition_config": partition}}


# name → (ranks, what to train)
SPECS: dict[str, tuple[int, Spec]] = {
    "z0_bf16_dp2": (2, Spec(zero=0, layers=1)),
    "z0_fp32_dp2": (2, Spec(zero=0, dtype="fp32", layers=1, frozen=("pos",))),
    "z1_bf16_dp2": (2, Spec()),
    "z1_fp16_dp2": (2, Spec(dtype="fp16", groups=1, layers=1)),
    "z1_bf16_sgd_dp2": (2, Spec(optimizer="sgd", layers=1)),
    "z1_bf16_rmsprop_dp2": (2, Spec(optimizer="rmsprop", layers=1, scheduler=False)),
    "z1_bf16_elastic_dp2": (2, Spec(layers=1, config={"zero_optimization": {"elastic_checkpoint": True}})),
    "z1_bf16opt_dp3": (3, Spec(layers=1, groups=3, config={"data_types": {"grad_accum_dtype": "fp32"}})),
    "z1_bf16_moe4_ep2_dp4": (4, Spec(experts=4, ep=2, ffn=10)),
    "z1_bf16_autoep4_ep2_dp4": (4, Spec(autoep=True, experts=4, ep=2, hidden=8, ffn=6, tied=False)),
    "z3_bf16_autoep4_ep2_dp4": (4, Spec(zero=3, autoep=True, experts=4, ep=2, layers=1, hidden=8, ffn=6, tied=False)),
    "z1_bf16_tp2_dp2": (4, Spec(tp=2, ffn=10)),
    "z0_bf16_tp2_dp1": (2, Spec(zero=0, tp=2, layers=1, ffn=10)),
    "z3_bf16_tp2_dp2": (4, Spec(zero=3, tp=2, layers=1, ffn=10)),
    "z1_bf16_autotp2_dp2": (4, Spec(autotp=True, tp=2, layers=1, hidden=16, ffn=12, config=autotp("q|k|v"))),
    "z1_bf16_autotp2fused_dp2": (4, Spec(autotp=True, tp=2, layers=1, hidden=16, ffn=12, config=autotp("qkv"))),
    "z1_bf16_tp2_nouc_dp1": (2, Spec(tp=2, layers=1, ffn=10, uc_info=False)),
    "z1_bf16_tp2_swiglu_untied_dp1": (2, Spec(tp=2, layers=1, ffn=10, swiglu=True, tied=False)),
    "z2_bf16_roundrobin_dp3": (
        3,
        Spec(zero=2, groups=3, ffn=10, config={"zero_optimization": {"round_robin_gradients": True}}),
    ),
    "z1_bf16_frozen_dp2": (2, Spec(frozen=("pos", "blocks.1.attn"), ffn=10)),
    "z2_bf16_lowprec_dp2": (
        2,
        Spec(
            zero=2,
            layers=1,
            config={"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
        ),
    ),
    "z2_bf16_frozen_excl_dp2": (2, Spec(zero=2, layers=1, frozen=("attn",), exclude_frozen=True)),
    "z2_bf16_paramalign_dp2": (2, Spec(zero=2, layers=1, config={"zero_optimization": {"parameter_alignment": True}})),
    "z3_bf16_frozen_subgroups_dp2": (
        2,
        Spec(zero=3, frozen=("pos", "blocks.0.mlp"), config={"zero_optimization": {"sub_group_size": 900}}),
    ),
    "z3_fp32_dp3": (3, Spec(zero=3, dtype="fp32", layers=1, groups=3)),
    "pp2_z1_bf16_tied_dp2": (4, Spec(pp=2, gas=2, ffn=10)),
    "pp2_tp2_z1_bf16_untied_dp1": (4, Spec(pp=2, tp=2, gas=2, ffn=10, tied=False)),
}
# name → (ranks, what to train, which DeepSpeed's own converter then makes universal)
UNIVERSAL: dict[str, tuple[int, Spec]] = {
    "universal_z1_bf16_tp2": (2, Spec(tp=2, layers=1, ffn=10)),
    "universal_z3_bf16": (2, Spec(zero=3, layers=1, ffn=10)),
}


def main(names: list[str]) -> None:
    every = {**SPECS, **UNIVERSAL}
    if unknown := set(names) - set(every):
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(every)}")
    with Trainer() as trainer, tempfile.TemporaryDirectory() as scratch:
        for name in names or every:
            world, spec = every[name]
            work = Path(scratch) / name
            result = trainer.run_job(world, spec, STEPS, work / "out", save_dir=work / "saved", steps_after=STEPS_AFTER)
            if name in UNIVERSAL:
                to_universal(work / "saved")
            publish(name, work / "saved", result, world, spec)
            print(f"{name}: {size(FIXTURES / name):,} bytes")
    print(f"all: {size(FIXTURES):,} bytes")


def to_universal(saved: Path) -> None:
    """Replace the native step folder by what DeepSpeed's converter makes of it."""
    step = saved / f"global_step{STEPS}"
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(step)]
    command += ["--output_folder", f"{step}_universal", "--num_extract_workers", "1", "--num_merge_workers", "1"]
    subprocess.run(
        command,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    shutil.rmtree(step)
    (saved / "latest").unlink()


def publish(name: str, saved: Path, result: JobResult, world: int, spec: Spec) -> None:
    """Put a save folder and its reference where the tests find them."""
    target = FIXTURES / name
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(saved, target, ignore=shutil.ignore_patterns("zero_to_*.py"))
    reference = target / "reference"
    reference.mkdir()
    seen: set[str] = set()
    for rank in range(world):  # identical files of further ranks are left out
        state = (result.out / "reference" / f"rank{rank:02d}.safetensors").read_bytes()
        if (digest := hashlib.sha256(state).hexdigest()) not in seen:
            seen.add(digest)
            (reference / f"rank{rank:02d}.safetensors").write_bytes(state)
    place = ("dp_rank", "tp_rank", "pp_rank", "ep_rank", "dp", "tp", "pp", "ep")
    run = {
        "spec": asdict(spec),
        "world": world,
        "optimizer_class": result.ranks[0]["optimizer_class"],
        "losses_hex": result.losses,
        "final": result.ranks[0]["final"],
        "ranks": [{key: report[key] for key in place} for report in result.ranks],
    }
    (reference / "run.json").write_text(json.dumps(run, indent=1) + "\n")
    if big := [path for path in target.rglob("*") if path.is_file() and path.stat().st_size > LIMIT]:
        raise SystemExit(f"{name}: over {LIMIT:,} bytes: {', '.join(map(str, big))}")


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    main(sys.argv[1:])
