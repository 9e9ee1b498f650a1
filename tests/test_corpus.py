"""Every real checkpoint that we have converts to atoms, and every atom is what the live engine held, bit for bit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ucp
from tests.paths import CORPUS, FIXTURES, variants
from tests.references import RankState, bits, differences, read_reference


def name_of(path: Path) -> str:
    return f"corpus-{path.name}" if CORPUS and CORPUS in path.parents else path.name


def save_folder(variant: Path) -> Path:
    """The folder with `latest`, as a user would give it: the variant itself, or where the wrapper put it."""
    found = [path.parent for pattern in ("latest", "latest_universal") for path in sorted(variant.rglob(pattern))]
    assert found, f"no checkpoint in {variant}"
    return found[0]


DEEPSPEED = [
    *sorted(path.parent for path in FIXTURES.glob("*/reference")),
    *variants("deepspeed"),
    *(path for path in variants("huggingface") if "fsdp2" not in path.name),
]
MEGATRON_DEEPSPEED = variants("megatron_deepspeed")


@pytest.mark.parametrize("variant", DEEPSPEED, ids=name_of)
def test_atoms_are_what_the_live_engine_held(variant: Path, tmp_path: Path) -> None:
    source = save_folder(variant)
    reference = read_reference(variant / "reference")
    if was_saved_without_frozen(variant):
        reference = [without_frozen(rank) for rank in reference]
    assert differences(ucp.open(source), reference) == []
    ucp.convert(source, tmp_path / "atoms")
    assert differences(ucp.open(tmp_path / "atoms"), reference) == []
    ucp.convert(source, tmp_path / "virtual", link=True)
    assert differences(ucp.open(tmp_path / "virtual"), reference) == []


def was_saved_without_frozen(variant: Path) -> bool:
    """`exclude_frozen_parameters=True`, which the Hugging Face Trainer chooses by itself for LoRA."""
    return bool(re.search("frozen_excl|trainer_llama_lora", variant.name))


def without_frozen(rank: RankState) -> RankState:
    """What is left of a rank's state in such a checkpoint: trained parameters, and buffers in the model file."""
    trained = {key.rsplit("|", 1)[0] for key in rank.values if key.endswith("|fp32")}
    buffers = ("mask", "seen")
    return RankState(
        rank.place,
        {
            key: value
            for key, value in rank.values.items()
            if (name := key.rsplit("|", 1)[0]) in trained or name.endswith(buffers)
        },
    )


def test_checkpoints_were_found() -> None:
    assert len(DEEPSPEED) > 35
    assert len(MEGATRON_DEEPSPEED) == 5


@pytest.mark.parametrize("variant", [*DEEPSPEED, *MEGATRON_DEEPSPEED], ids=name_of)
def test_masters_round_to_the_weights(variant: Path) -> None:
    """Needs no reference: a wrong layout, a wrong name or swapped ranks cannot pass it."""
    checkpoint = ucp.open(save_folder(variant))
    both = [view for view in checkpoint.parameters.values() if {"weight", "master"} <= set(view.kinds)]
    wrong = []
    for view in both:
        weight: Any = view.read("weight", as_torch=True)
        master: Any = view.read("master", as_torch=True)
        if not bool((bits(master.to(weight.dtype)) == bits(weight)).all()):
            wrong.append(view.name)
    assert wrong == []
    assert both or has_no_weights(variant)


def has_no_weights(variant: Path) -> bool:
    """ZeRO-3 keeps masters only; ZeRO off in fp32 keeps weights only."""
    return bool(re.search(r"z3_|z0_fp32", variant.name))


@pytest.mark.slow
@pytest.mark.interop
@pytest.mark.parametrize("variant", MEGATRON_DEEPSPEED, ids=name_of)
def test_atoms_are_what_deepspeeds_own_converter_makes(variant: Path, tmp_path: Path) -> None:
    """These have no reference; DeepSpeed's converter is independent of us, and right about them but for one parameter.

    Megatron-DeepSpeed's patterns for pipelines forget the position embedding, so the converter stacks its equal copies.
    """
    torch = pytest.importorskip("torch")
    universal = ds_to_universal(save_folder(variant), tmp_path)
    ucp.convert(save_folder(variant), tmp_path / "atoms")
    checkpoint = ucp.open(tmp_path / "atoms")
    trained = [name for name, view in checkpoint.parameters.items() if "exp_avg" in view.kinds]
    assert trained
    wrong = []
    for name in trained:
        for stored, kind in (("fp32", "master"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
            expected = torch.load(universal / "zero" / name / f"{stored}.pt", weights_only=False)["param"]
            found: Any = checkpoint[name].read(kind, as_torch=True)
            if name == "1.position_embeddings.weight" and expected.shape[0] == 2 * found.shape[0]:
                one, two = expected.chunk(2)
                assert torch.equal(one, two)
                expected = one
            if found.shape != expected.shape or not torch.equal(bits(found), bits(expected)):
                wrong.append(f"{name}|{kind}: {list(found.shape)}, expected {list(expected.shape)}")
    assert wrong == []
    made = {path.parent.name for path in (universal / "zero").glob("*/exp_avg.pt")}
    assert made == set(trained)


def ds_to_universal(save: Path, scratch: Path) -> Path:
    """What DeepSpeed's converter makes of the latest step."""
    step = save / (save / "latest").read_text()
    target = scratch / "universal"
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(step)]
    command += ["--output_folder", str(target), "--num_extract_workers", "1", "--num_merge_workers", "1", "--no_strict"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(megatron_stand_in(scratch / "stand-in"))}
    # Its exit code says nothing: it trips over Megatron's nested `module` after the last parameter was written.
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (target / "zero").is_dir(), done.stderr[-2000:]
    return target


def megatron_stand_in(folder: Path) -> Path:
    """Megatron is not installed, and DeepSpeed's converter unpickles an enum of it from the saved arguments."""
    package = folder / "megatron" / "core"
    package.mkdir(parents=True)
    (package / "enums.py").write_text("import enum\nclass ModelType(enum.Enum):\n    one, two, three = 1, 2, 3\n")
    return folder
