"""`ucp` as a library: what it exports, and reading from an open checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from inspect import signature
from pathlib import Path

import numpy as np
import pytest
import torch

import ucp
from tests.interop.model import Gpt, Tp, global_batch
from tests.interop.spec import Spec
from tests.paths import FIXTURES
from ucp.formats.registry import find_format
from ucp.read import atom_reader

CHECKPOINT = FIXTURES / "z1_bf16_tp2_dp2"
MASTERS_ONLY = FIXTURES / "z3_bf16_frozen_subgroups_dp2"


@pytest.fixture
def ckpt() -> ucp.OpenCheckpoint:
    return ucp.open(CHECKPOINT)


# --- what `import ucp` offers ---


def test_dir_tab_and_help_show_the_public_names_only() -> None:
    code = """
import sys, ucp
assert dir(ucp) == sorted(ucp.__all__), dir(ucp)
import rlcompleter
shown = {name.removeprefix("ucp.").rstrip("()") for name in rlcompleter.Completer({"ucp": ucp}).attr_matches("ucp.")}
assert shown == set(ucp.__all__) - {"__version__"}, shown
import pydoc
text = pydoc.plain(pydoc.render_doc(ucp))
for name in ("convert(src:", "open = open_checkpoint(path:", "save(path:", "class Plan(", "class OpenCheckpoint("):
    assert name in text, name
for name in ("TYPE_CHECKING", "annotations =", "_EXPORTS"):
    assert name not in text, name
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_misspelled_name_is_corrected() -> None:
    with pytest.raises(AttributeError, match=r"module 'ucp' has no attribute 'opne'; did you mean 'open'\?"):
        ucp.opne  # noqa: B018
    assert not hasattr(ucp, "shards")


def test_help_describes_every_option() -> None:
    text = ucp.convert.__doc__ or ""
    assert "\ndp: Data-parallel degree of the target.\n" in text
    shown = str(signature(ucp.convert))
    assert "dp: int | None = None" in shown
    assert "Option(" not in shown


def test_arguments_come_in_one_order() -> None:
    for function in (ucp.save, ucp.load_into, ucp.record, ucp.snapshot):
        assert list(signature(function).parameters)[:3] == ["path", "model", "optimizer"], function
    for function in (ucp.open, ucp.load_store):
        assert next(iter(signature(function).parameters)) == "path"
    for function in (ucp.convert, ucp.plan):
        assert list(signature(function).parameters)[:2] == ["src", "dst"]
    assert list(signature(ucp.report).parameters)[:2] == ["src", "page"]


def test_a_format_may_be_given_as_its_entry(tmp_path: Path) -> None:
    ucp.convert(CHECKPOINT, tmp_path / "out", to=find_format("safetensors"))
    assert ucp.open(tmp_path / "out").index.format == "safetensors"


# --- reading ---


def test_read_by_name(ckpt: ucp.OpenCheckpoint) -> None:
    whole = ckpt.read("blocks.0.attn.proj.weight", "master")
    assert isinstance(whole, np.ndarray)
    tensor = ckpt.read("blocks.0.attn.proj.weight", "master", slice(2, 4), as_torch=True)
    assert torch.equal(tensor, torch.from_numpy(whole)[2:4])
    assert ckpt.read("head.weight", as_torch=True).dtype == torch.bfloat16


def test_a_state_dict_fills_a_model(ckpt: ucp.OpenCheckpoint) -> None:
    """Shards of two tensor-parallel ranks fill an unsharded model, which then computes the loss that the job had."""
    run = json.loads((CHECKPOINT / "reference" / "run.json").read_text())
    spec = Spec(**{**run["spec"], "tp": 1, "frozen": ()})
    model = Gpt(spec, Tp())
    model.load_state_dict(ckpt.state_dict(dtype="fp32"))
    assert model.head.weight is model.embed.weight
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, torch.from_numpy(ckpt.read(name, "master"))), name
    loss = model(*global_batch(spec, 3)).item()
    assert loss == pytest.approx(float.fromhex(run["losses_hex"]["3"]), rel=0.01)


def test_a_state_dict_reads_on_access(ckpt: ucp.OpenCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    real = atom_reader.read_tensor

    def read(root: Path, atom: ucp.Atom, *rest: object) -> torch.Tensor:
        reads.append(atom.name)
        return real(root, atom, *rest)

    monkeypatch.setattr(atom_reader, "read_tensor", read)
    weights = ckpt.state_dict()
    assert len(weights) == 33
    assert "head.weight" in weights
    assert repr(weights).startswith("<weight of 33 parameters in ")
    assert reads == []
    tied = weights["head.weight"]
    assert tied is weights["embed.weight"]
    assert reads == ["embed.weight"]
    with pytest.raises(KeyError):
        weights["embed"]


def test_state_dicts_of_other_states(ckpt: ucp.OpenCheckpoint) -> None:
    moments = ckpt.state_dict("exp_avg", dtype=torch.float16, as_torch=False)
    assert "seen" not in moments  # a buffer
    assert moments["pos.weight"].dtype == np.float16
    assert np.array_equal(moments["pos.weight"], ckpt.read("pos.weight", "exp_avg").astype(np.float16))
    with pytest.raises(ucp.UsageError, match=r"no parameter has 'momentum'\n.*it has: weight, master, exp_avg"):
        ckpt.state_dict("momentum")
    with pytest.raises(ucp.UsageError, match="'int8' is not a floating-point dtype"):
        ckpt.state_dict(dtype="int8")


def test_weights_come_from_masters_if_the_checkpoint_has_no_others() -> None:
    ckpt = ucp.open(MASTERS_ONLY)
    name = next(name for name, view in ckpt.items() if view.kinds[0] == "master")
    weight = ckpt.state_dict()[name]
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight, ckpt.read(name, "master", as_torch=True).bfloat16())


def test_without_torch_there_are_numpy_arrays(ckpt: ucp.OpenCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert ckpt.state_dict(as_torch=False)["pos.weight"].dtype == np.float32
    for wants_torch in (ckpt.state_dict, lambda: ckpt.read("pos.weight", as_torch=True)):
        with pytest.raises(
            ucp.UsageError, match=r"needs torch, which is not installed\n.*universal-checkpoint\[torch\]"
        ):
            wants_torch()


# --- notebooks ---


def test_notebooks_show_tables(ckpt: ucp.OpenCheckpoint, tmp_path: Path) -> None:
    plan = ucp.plan(CHECKPOINT, tmp_path / "<b>")
    ucp.convert(CHECKPOINT, tmp_path / "part", only="weights")
    different = ucp.diff(CHECKPOINT, tmp_path / "part")
    for shown, words in (
        (ckpt, ("DeepSpeed", "tp 2", "step 3", "embed.weight", "53 × 14", "vocab(dim=0, true_size=53)")),
        (ckpt["embed.weight"], ("master", "float32", "exp_avg_sq", "scalar")),
        (plan, ("&lt;b&gt;", "33 files", "extras/extras.json")),
        (ucp.verify(CHECKPOINT), (": ok; ", "32 parameters")),
        (ucp.verify(tmp_path), ("failed", "is not a checkpoint in a known format")),
        (different, ("different", "blocks.0.attn.proj.weight", "only in A", "more</div>")),
    ):
        html = shown._repr_html_()
        assert all(word in html for word in words), html
        assert html.count("<tr>") == html.count("</tr>") <= 41
