"""Universal folders: from real DeepSpeed, and synthetic ones for rare contents."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import types
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

import ucp
from tests.formats.deepspeed.synthetic import flat_optim, model_state, save_flat, tree_differences
from tests.formats.deepspeed.synthetic import save as save_step
from tests.paths import FIXTURES
from ucp.core.checkpoint import Checkpoint, Parameter
from ucp.core.rules import REPLICATED, Rule, RuleBook, slice_pieces
from ucp.errors import InconsistentError, NotUnderstoodError, UsageError
from ucp.formats.deepspeed.folder import recognises_universal
from ucp.formats.deepspeed.read import reader, universal_reader
from ucp.formats.deepspeed.write.universal_writer import UniversalWriter
from ucp.formats.registry import ReadOptions, WriteOptions, open_checkpoint

KINDS = {"fp32": "master"}


def values(opened: Any, name: str, kind: str) -> bytes:
    return raw(opened[name].read(kind, as_torch=True))


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def local_bytes(parameter: Parameter, data: bytes, itemsize: int, tp: int, rank: int) -> bytes:
    """This rank's slice of a whole state, without its padding rows."""
    whole = np.frombuffer(data, f"V{itemsize}").reshape(parameter.shape)
    pieces = slice_pieces(parameter.rule, parameter.padded_shape or parameter.shape, tp, rank, parameter.name)
    boxes = [tuple(slice(a, a + n) for a, n in zip(p.box.start, p.box.shape, strict=True)) for p in pieces]
    return b"".join(whole[box].tobytes() for box in boxes)


@pytest.mark.parametrize("fixture", ["universal_z1_bf16_tp2", "universal_z3_bf16"])
def test_states_equal_those_of_the_live_engine(project: Path, fixture: str) -> None:
    folder = project / "fixtures" / fixture
    opened, index = ucp.open(folder), open_checkpoint(folder, ReadOptions())
    assert index.format == "deepspeed-universal"
    compared = set()
    for path in sorted((folder / "reference").glob("rank*.safetensors")):
        rank = int(path.stem.removeprefix("rank"))
        with safe_open(path, "pt") as reference:
            for key in reference.keys():  # noqa: SIM118
                name, kind = key.rsplit("|", 1)
                name = index.aliases().get(name, name)
                parameter, kind = index.parameters[name], KINDS.get(kind, kind)
                if kind not in parameter.atoms:
                    assert kind == "weight"
                    assert parameter.role == "trained"  # ZeRO-3 keeps no module weights
                    continue
                expected = reference.get_tensor(key)
                data = values(opened, name, kind)
                if kind != "step":
                    tp = index.mesh.tp
                    data = local_bytes(parameter, data, parameter.atoms[kind].dtype.itemsize, tp, rank % tp)
                assert data == raw(expected)[: len(data) if parameter.padded_shape else None], key
                compared.add((name, kind))
    assert compared >= {(n, k) for n, p in index.parameters.items() for k in p.atoms if p.role == "trained"}
    assert {p.role for p in index.parameters.values()} >= {"trained", "buffer"}
    assert index.step == 3
    assert sorted(name for group in index.groups for name in group.names) == sorted(
        name for name, p in index.parameters.items() if p.role == "trained"
    )


def test_folders_of_buffers_and_aliases_are_not_parameters(project: Path) -> None:
    """The converter wrote an fp32.pt for each buffer and the tied head; the module's own tensors are used."""
    folder = project / "fixtures" / "universal_z1_bf16_tp2"
    index = open_checkpoint(folder, ReadOptions())
    assert (folder / "global_step3_universal" / "zero" / "head.weight" / "fp32.pt").is_file()
    assert index.aliases() == {"head.weight": "embed.weight"}
    for parameter in index.parameters.values():
        if parameter.role == "buffer":
            assert list(parameter.atoms) == ["weight"]
            assert all(f.file.startswith("mp_rank_") for f in parameter.atoms["weight"].fragments)
    assert any(note.id == "universal-copies" for note in index.notes)


@pytest.mark.slow
@pytest.mark.interop
@pytest.mark.parametrize(
    "variant",
    [
        "z1_bf16_tp2_dp2",
        "z1_bf16_autotp2fused_dp2",
        "z1_bf16_frozen_dp2",
        "z2_bf16_lowprec_dp2",
        "z3_bf16_frozen_subgroups_dp2",
        "z3_bf16_tp2_dp2",
        "pp2_tp2_z1_bf16_untied_dp1",
    ],
)
def test_real_conversions_equal_their_native_source(tmp_path: Path, variant: str) -> None:
    source = FIXTURES / variant
    target = tmp_path / "made_universal"
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--num_extract_workers=1"]
    command += ["--no_strict"]  # patterns of the pipeline's module that match nothing
    command += ["--num_merge_workers=1", f"--input_folder={source / 'global_step3'}", f"--output_folder={target}"]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "DS_ACCELERATOR": "cpu"})
    assert recognises_universal(tmp_path)
    made, native = universal_reader.read(tmp_path, ReadOptions()), reader.read(source, ReadOptions())
    made_values, native_values = ucp.open(tmp_path), ucp.open(source)
    pipeline = native.mesh.pp > 1  # its layer files are not part of the folder: neither buffers nor module weights
    assert made.mesh == native.mesh
    assert made.step == native.step
    assert [(g.hyper, g.names) for g in made.groups] == [(g.hyper, g.names) for g in native.groups]
    for name, parameter in native.parameters.items():
        if pipeline and parameter.role == "buffer":
            assert name not in made.parameters
            continue
        found = made.parameters[name]
        for fact in ("role", "shape", "rule", "aliases", "group", "stages", "padded_shape"):
            assert getattr(found, fact) == getattr(parameter, fact), (name, fact)
        assert list(found.atoms) == [kind for kind in parameter.atoms if not (pipeline and kind == "weight")]
        for kind, atom in found.atoms.items():
            assert atom.dtype == parameter.atoms[kind].dtype
            assert values(made_values, name, kind) == values(native_values, name, kind), (name, kind)
    assert set(made.parameters) <= set(native.parameters)


# Made-up folders.


def save(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)


def model_tree(shapes: dict[str, tuple[int, ...]], **more: Any) -> dict[str, Any]:
    return {
        "module": {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()},
        "buffer_names": [],
        "param_shapes": [{name: torch.Size(shape) for name, shape in shapes.items()}],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "global_steps": 7,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": "0.19.8",
        **more,
    }


class Made:
    """A universal folder of one model-parallel rank, or of several with the same names."""

    def __init__(self, root: Path, tp: int = 1, **more: Any) -> None:
        self.root = root
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.more = more
        self.tp = tp

    def state(self, name: str, kind: str, value: Any) -> None:
        save(self.root / "zero" / name / f"{kind}.pt", value)

    def parameter(self, name: str, local: tuple[int, ...], whole: tuple[int, ...] | None = None, **keys: Any) -> None:
        self.shapes[name] = local
        for i, kind in enumerate(("fp32", "exp_avg", "exp_avg_sq")):
            values = torch.arange(float(np.prod(whole or local))).reshape(whole or local) + i
            self.state(name, kind, {"param": values, **keys})
        self.state(name, "step", 7)

    def finish(self, groups: list[dict[str, Any]] | None = None) -> Path:
        for rank in range(self.tp):
            tree = model_tree(self.shapes, **{"mp_world_size": self.tp, **self.more})
            save(self.root / f"mp_rank_{rank:02d}_model_states.pt", tree)
        save(self.root / "zero" / "optimizer_state.pt", {"param_groups": groups or [{"lr": 0.5, "params": [0]}]})
        return self.root

    def read(self, rules: RuleBook | None = None) -> Checkpoint:
        return universal_reader.read(self.root, ReadOptions(rules=rules))


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path / "u")


def test_states_of_any_name_and_number(made: Made) -> None:
    made.parameter("a.weight", (2, 3))
    made.state("a.weight", "momentum_buffer", {"param": torch.full((2, 3), 9.0)})
    made.state("a.weight", "weight", torch.arange(6.0))  # a state of the optimizer whose name has a meaning in ucp
    index = open_checkpoint(made.finish(), ReadOptions())
    atoms = index.parameters["a.weight"].atoms
    assert list(atoms)[:2] == ["weight", "master"]
    assert {"exp_avg", "exp_avg_sq", "momentum_buffer", "state_weight", "step"} < set(atoms)
    opened = ucp.open(made.root)
    assert np.asarray(opened["a.weight"].read("momentum_buffer")).tolist() == [[9.0] * 3] * 2
    assert np.asarray(opened["a.weight"].read("state_weight")).tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert np.asarray(opened["a.weight"].read("step")).item() == 7
    assert index.groups[0].hyper == {"lr": 0.5}
    assert index.groups[0].names == ["a.weight"]


def test_flat_states_take_their_shape_from_the_model_file(made: Made) -> None:
    made.parameter("a.weight", (2, 3), (6,))
    made.finish()
    assert made.read().parameters["a.weight"].atoms["exp_avg"].shape == (2, 3)


def test_everything_wrong_is_reported_at_once(made: Made) -> None:
    made.parameter("a.weight", (2, 3), (7,))
    made.parameter("b.weight", (2, 3))
    made.shapes["c.weight"] = (4,)
    made.finish()
    with pytest.raises(InconsistentError) as caught:
        made.read()
    text = str(caught.value)
    assert "zero/a.weight/exp_avg.pt: shape [7], but parameter a.weight has [2, 3]" in text
    assert "zero/c.weight/fp32.pt is missing" in text
    assert "b.weight" not in text


def test_an_unlisted_name_is_kept_and_noted(made: Made) -> None:
    made.parameter("a.weight", (2, 3))
    made.parameter("extra.weight", (4,))
    del made.shapes["extra.weight"]
    made.state("left.over", "fp32", {"param": torch.ones(3)})
    made.finish()
    index = made.read()
    assert (index.parameters["extra.weight"].role, index.parameters["extra.weight"].shape) == ("trained", (4,))
    assert list(index.parameters["left.over"].atoms) == ["weight"]
    assert index.parameters["left.over"].role == "frozen"
    assert sum(note.id == "universal-unlisted" for note in index.notes) == 2


def test_a_missing_model_file_is_named(tmp_path: Path) -> None:
    made = Made(tmp_path / "u", tp=3)
    made.parameter("a.weight", (2, 3))
    (made.finish() / "mp_rank_01_model_states.pt").unlink()
    with pytest.raises(InconsistentError, match=r"mp_rank_01_model_states\.pt is missing"):
        made.read()
    for path in made.root.glob("mp_rank_*"):
        path.unlink()
    with pytest.raises(NotUnderstoodError, match="without model files"):
        made.read()


def test_a_state_that_is_neither_tensor_nor_number_is_named(made: Made) -> None:
    made.parameter("a.weight", (2, 3))
    made.state("a.weight", "exp_avg", {"param": "text"})
    made.finish()
    with pytest.raises(NotUnderstoodError, match=r"zero/a\.weight/exp_avg\.pt: expected a tensor"):
        made.read()


def test_rules_come_from_the_state_files_if_the_model_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass
    class SubparamShape:
        patterns: list[str]
        shape: tuple[Any, ...]
        partition_dim: int

    home = "deepspeed.checkpoint.universal_checkpoint"
    module = types.ModuleType(home)
    SubparamShape.__module__, SubparamShape.__qualname__ = home, "SubparamShape"
    module.SubparamShape = SubparamShape  # type: ignore[attr-defined]
    for name in ("deepspeed", "deepspeed.checkpoint"):  # what pickle imports on its way; the real one takes seconds
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, home, module)
    made = Made(tmp_path / "u", tp=2)
    made.parameter("norm", (4,), (4,))
    made.parameter("column", (3, 4), (6, 4), cat_dim=0)
    made.parameter("row", (4, 3), (4, 6), cat_dim=1)
    made.parameter("embed", (4, 4), (7, 4), cat_dim=0, vocab_tensor=True)
    made.parameter("gated", (4, 2), (8, 2), cat_dim=0, param_n_sub_params=2)
    shape = SubparamShape(["qkv"], ((4, 2, 2), 4), 0)
    made.parameter("qkv", (4, 4), (8, 4), sub_param_shape=shape)
    made.parameter("silent", (4, 3), (8, 3))
    made.finish()
    monkeypatch.undo()
    user = RuleBook()
    user.add("silent", Rule("split", 0, ratio=(1, 1)), "file: mine.toml")
    found = {name: p.rule for name, p in made.read().parameters.items()}
    assert found == {
        "norm": REPLICATED,
        "column": Rule("split", 0),
        "row": Rule("split", 1),
        "embed": Rule("vocab", 0, true_size=7),
        "gated": Rule("split", 0, parts=(4, 4)),
        "qkv": Rule("split", 0, parts=(4, 2, 2)),
        "silent": Rule("split", 0),
    }
    embed = made.read(user).parameters["embed"]
    assert (embed.shape, embed.padded_shape) == ((7, 4), (8, 4))
    assert made.read(user).parameters["silent"].rule == Rule("split", 0, parts=(4, 4))


def test_the_users_rules_win_over_the_checkpoints(tmp_path: Path) -> None:
    info = {"tp_replicated_parameter_patterns": ["a"], "parameter_with_row_parallelism_patterns": ["b"]}
    made = Made(tmp_path / "u", tp=2, universal_checkpoint_info=info)
    made.parameter("a", (4, 2))
    made.parameter("b", (4, 2), (8, 2))
    made.finish()
    user = RuleBook()
    user.add("b", Rule("split", 0), "file: mine.toml")
    parameters = made.read(user).parameters
    assert (parameters["a"].rule, parameters["b"].rule) == (REPLICATED, Rule("split", 0))
    assert parameters["b"].rule_origin == "file: mine.toml"


def test_recognition(made: Made, tmp_path: Path) -> None:
    made.parameter("a.weight", (2, 3))
    made.finish()
    assert recognises_universal(made.root)
    assert not recognises_universal(tmp_path)  # nothing names the folder
    (tmp_path / "latest_universal").write_text("u")
    assert recognises_universal(tmp_path)
    assert universal_reader.read(tmp_path, ReadOptions()).root == made.root
    (tmp_path / "latest").write_text("global_step7")
    assert not recognises_universal(tmp_path)  # the native checkpoint of the save folder is preferred
    (tmp_path / "latest").unlink()
    (tmp_path / "latest_universal").write_text("../elsewhere")
    assert not recognises_universal(tmp_path)
    assert universal_reader.read(tmp_path, ReadOptions(tag="u")).root == made.root
    with pytest.raises(UsageError, match="no universal folder v"):
        universal_reader.read(tmp_path, ReadOptions(tag="v"))
    with pytest.raises(UsageError, match="not one named 'v'"):
        universal_reader.read(made.root, ReadOptions(tag="v"))


def test_a_folder_without_optimizer_state_is_noted(made: Made) -> None:
    made.parameter("a.weight", (2, 3))
    (made.finish() / "zero" / "optimizer_state.pt").unlink()
    index = open_checkpoint(made.root, ReadOptions())
    assert index.groups == []
    assert any(note.id == "universal-no-optimizer" for note in index.notes)


def test_extras_have_everything_but_states(project: Path) -> None:
    index = open_checkpoint(project / "fixtures" / "universal_z3_bf16", ReadOptions())
    trees = index.extras.trees
    assert trees["zero/optimizer_state.pt"]["loss_scaler"] is not None
    assert "fp32_flat_groups" not in trees["zero/optimizer_state.pt"]  # repeats rank 0's shards
    model = next(tree for name, tree in trees.items() if name.endswith("model_states.pt"))
    assert model["global_steps"] == 3
    assert not model.get("module")


def test_numbers_that_deepspeed_cannot_load_are_noted(project: Path, tmp_path: Path) -> None:
    """NAdam keeps a 0-d `mu_product` next to its moments; DeepSpeed slices everything but `step`."""
    files: dict[str, Any] = {"mp_rank_00_model_states.pt": model_state(dp_world_size=1)}
    optim = flat_optim(1, 0)
    for state in optim["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        state["mu_product"] = torch.tensor(0.5)
    files["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"] = optim
    source = open_checkpoint(save_step(tmp_path / "c", files), ReadOptions())
    (note,) = [note for note in UniversalWriter(source, WriteOptions()).notes if note.id == "universal-numbers"]
    assert "mu_product" in note.text
    plain = open_checkpoint(project / "fixtures" / "z1_bf16_dp2", ReadOptions())
    assert all(note.id != "universal-numbers" for note in UniversalWriter(plain, WriteOptions()).notes)


def test_the_defect_of_round_robin_is_noted(project: Path) -> None:
    noted = {}
    for fixture in ("z2_bf16_roundrobin_dp3", "z1_bf16_dp2"):
        source = open_checkpoint(project / "fixtures" / fixture, ReadOptions())
        noted[fixture] = "universal-round-robin" in {note.id for note in UniversalWriter(source, WriteOptions()).notes}
    assert noted == {"z2_bf16_roundrobin_dp3": True, "z1_bf16_dp2": False}


def test_the_defect_of_expert_parallelism_is_noted(project: Path) -> None:
    """DeepSpeed looks up the local numbers of experts, which are wrong on all ranks but one."""
    noted = {}
    for fixture in ("z1_bf16_moe4_ep2_dp4", "z1_bf16_dp2"):
        source = open_checkpoint(project / "fixtures" / fixture, ReadOptions())
        noted[fixture] = "universal-experts" in {note.id for note in UniversalWriter(source, WriteOptions()).notes}
    assert noted == {"z1_bf16_moe4_ep2_dp4": True, "z1_bf16_dp2": False}


@pytest.mark.parametrize("fixture", ["z1_bf16_dp2", "z1_fp16_dp2", "pp2_z1_bf16_tied_dp2"])
def test_output_from_a_universal_folder_equals_output_from_its_source(
    project: Path, tmp_path: Path, fixture: str
) -> None:
    """The dtype of the module, its buffers, and the layer files of a pipeline."""
    source = project / "fixtures" / fixture
    ucp.convert(source, tmp_path / "universal", to="deepspeed-universal")
    assert ucp.diff(source, tmp_path / "universal").same
    for start, name in ((source, "direct"), (tmp_path / "universal", "through")):
        ucp.convert(start, tmp_path / name, to="deepspeed", dp=3, pp=1, zero=1)
    names = {path.relative_to(tmp_path / "direct") for path in (tmp_path / "direct").rglob("*") if path.is_file()}
    assert names == {p.relative_to(tmp_path / "through") for p in (tmp_path / "through").rglob("*") if p.is_file()}
    for name in names - {Path("latest")}:
        direct, through = (torch.load(tmp_path / way / name, weights_only=False) for way in ("direct", "through"))
        direct.get("ds_config", {}).pop("checkpoint", None)
        assert tree_differences(direct, through) == [], name


def test_a_tag_that_is_a_path_becomes_one_folder(tmp_path: Path) -> None:
    saved = save_flat(tmp_path / "c")
    (saved / "epoch3").mkdir()
    (saved / "global_step7").rename(saved / "epoch3" / "step7")
    (saved / "latest").write_text("epoch3/step7")
    ucp.convert(saved, tmp_path / "u", to="deepspeed-universal")
    assert (tmp_path / "u" / "latest_universal").read_text() == "epoch3_step7_universal"
    assert ucp.diff(saved, tmp_path / "u").same


def test_a_number_of_one_element_stays_a_number(tmp_path: Path) -> None:
    """A parameter of one element and NAdam's 0-d `mu_product` have equally many elements but different shapes."""
    numbers = {"step": torch.tensor(1.0), "mu_product": torch.tensor(0.5)}
    moments = {"exp_avg": torch.ones(1), "exp_avg_sq": torch.ones(1)}
    optimizer = {"state": {"scale": {**moments, **numbers}}, "param_groups": [{"lr": 0.5, "params": ["scale"]}]}
    torch.save({"model": {"scale": torch.ones(1)}, "optim": optimizer}, tmp_path / "a.pt")
    ucp.convert(tmp_path / "a.pt", tmp_path / "universal", to="deepspeed-universal")
    atoms = ucp.open(tmp_path / "universal").index.parameters["scale"].atoms
    assert (atoms["mu_product"].shape, atoms["exp_avg"].shape) == ((), (1,))


def saved_with_names(path: Path, *names: str) -> Path:
    net = torch.nn.Module()
    for number, name in enumerate(names):
        *above, last = name.split(".")
        holder = net
        for part in above:
            holder.add_module(part, torch.nn.Module())
            holder = holder.get_submodule(part)
        holder.add_module(last, torch.nn.Linear(2, number + 1))
    optimizer = torch.optim.Adam(net.parameters())
    torch.stack([p.square().sum() for p in net.parameters()]).sum().backward()
    optimizer.step()
    ucp.save(path, net, optimizer)
    return path


def test_names_with_slashes_are_nested_folders(tmp_path: Path) -> None:
    saved = saved_with_names(tmp_path / "saved", "a", "a/b", "a/b/c", "d/e")
    ucp.convert(saved, tmp_path / "u", to="deepspeed-universal")
    (made,) = (tmp_path / "u").glob("*/zero/a/b/c.weight/fp32.pt")
    assert ucp.diff(saved, tmp_path / "u").same
    made.unlink()
    with pytest.raises(InconsistentError, match=r"a/b/c\.weight"):
        ucp.open(tmp_path / "u")


@pytest.mark.parametrize("name", ["a//b", "/a", "x.pt/a"])
def test_names_that_are_not_paths_are_refused(tmp_path: Path, name: str) -> None:
    saved = saved_with_names(tmp_path / "saved", name)
    with pytest.raises(UsageError, match="cannot be used as a folder name"):
        ucp.convert(saved, tmp_path / "u", to="deepspeed-universal")


def test_weights_alone_are_refused(tmp_path: Path) -> None:
    """An engine loads by groups: without any it reports success and keeps its initial weights."""
    torch.save({"linear.weight": torch.ones(3, 2)}, tmp_path / "weights.pt")
    with pytest.raises(
        UsageError,
        match=r"the source has no optimizer, .*: it would silently load neither linear\.weight nor any other",
    ):
        ucp.convert(tmp_path / "weights.pt", tmp_path / "u", to="deepspeed-universal")


def test_an_unnamed_optimizer_is_refused(tmp_path: Path) -> None:
    """ZeRO off and fp32, before the first step: two groups of numbers that cannot be matched to parameters."""
    step = tmp_path / "saved" / "global_step0"
    step.mkdir(parents=True)
    (tmp_path / "saved" / "latest").write_text("global_step0")
    groups = [{"lr": 0.1, "params": [0]}, {"lr": 0.1, "params": [1]}]
    tree = {
        "module": OrderedDict({"a.weight": torch.ones(2, 2), "b.weight": torch.ones(2, 2), "c.weight": torch.ones(2)}),
        "buffer_names": [],
        "optimizer": {"state": {}, "param_groups": groups},
        "global_steps": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": "0.19.8",
        "ds_config": {},
    }
    torch.save(tree, step / "mp_rank_00_model_states.pt")
    with pytest.raises(UsageError, match="states of the source's optimizer have no names"):
        ucp.convert(tmp_path / "saved", tmp_path / "u", to="deepspeed-universal")
