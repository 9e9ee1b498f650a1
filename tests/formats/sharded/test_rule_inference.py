"""Inference of missing rules: every kind of evidence, and real checkpoints without their own rules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.paths import FIXTURES, fixture
from ucp import settings
from ucp.containers.inert import TensorRef
from ucp.containers.torch_file import TorchFile
from ucp.core.box import Shape
from ucp.core.checkpoint import Fragment
from ucp.core.dtypes import FLOAT32
from ucp.core.region import Region
from ucp.core.rules import REPLICATED, Rule, resolve, slice_pieces, whole_shape
from ucp.errors import InconsistentError, UsageError
from ucp.formats.deepspeed.universal_info import rules_from_info
from ucp.formats.sharded.rule_files import load_rules
from ucp.formats.sharded.rule_inference import LocalSlice, RuleInference, SliceEquality, compare_slices
from ucp.storage.local import SourceFiles


class Slices:
    """Slices of made-up parameters in one file."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.held: dict[str, list[LocalSlice]] = {}
        self.data = bytearray()
        self.random = np.random.default_rng(7)

    def add(self, name: str, *slices: np.ndarray) -> None:
        self.held[name] = [LocalSlice(s.shape, [self.fragment(s)]) for s in slices]

    def fragment(self, values: np.ndarray) -> Fragment:
        offset = len(self.data)
        self.data += values.astype(np.float32).tobytes()
        return Fragment(Region.all_of(values.shape), "data.bin", offset, FLOAT32)

    def cut(self, name: str, shape: Shape, rule: Rule, tp: int = 2) -> None:
        """Random values split over `tp` ranks by `rule`."""
        tensor = self.random.normal(size=shape)
        slices = []
        for rank in range(tp):
            flat = []
            for piece in slice_pieces(rule, shape, tp, rank, name):
                box = piece.box
                place = tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))
                flat.append(tensor[place].reshape(-1))
            local = shape
            if rule.cut != "replicated":
                local = (*shape[: rule.dim], shape[rule.dim] // tp, *shape[rule.dim + 1 :])
            slices.append(np.concatenate(flat).reshape(local))
        self.add(name, *slices)

    def infer(self, presets: Sequence[str] | None = None) -> dict[str, tuple[Rule, str]]:
        (self.root / "data.bin").write_bytes(self.data)
        with SourceFiles(self.root) as files:
            return RuleInference(files, presets).rules_for(self.held)

    def rules(self, presets: Sequence[str] | None = None) -> dict[str, Rule]:
        return {name: rule for name, (rule, _) in self.infer(presets).items()}


@pytest.fixture
def slices(tmp_path: Path) -> Slices:
    return Slices(tmp_path)


def test_bytes_then_shapes_then_names_decide(slices: Slices) -> None:
    slices.cut("norm.weight", (8,), REPLICATED)
    slices.cut("a.weight", (6, 8), Rule("split", 0))
    slices.cut("b.weight", (8, 6), Rule("split", 1))
    slices.cut("b.bias", (8,), REPLICATED)
    slices.cut("a.bias", (6,), Rule("split", 0))
    slices.cut("mlp.up.weight", (16, 8), Rule("split", 0))  # both sides are 8 on a rank: only the name decides
    slices.cut("mlp.down.weight", (8, 16), Rule("split", 1))
    slices.cut("temperature", (), REPLICATED)
    slices.add("uneven.weight", slices.random.normal(size=(5, 3)), slices.random.normal(size=(5, 2)))
    assert slices.rules() == {
        "norm.weight": REPLICATED,
        "a.weight": Rule("split", 0),
        "b.weight": Rule("split", 1),
        "b.bias": REPLICATED,
        "a.bias": Rule("split", 0),
        "mlp.up.weight": Rule("split", 0),
        "mlp.down.weight": Rule("split", 1),
        "temperature": REPLICATED,
        "uneven.weight": Rule("split", 1),
    }


def test_every_rule_reports_its_evidence(slices: Slices) -> None:
    slices.cut("norm.weight", (8,), REPLICATED)
    slices.cut("a.weight", (6, 8), Rule("split", 0))
    slices.cut("layers.0.o_proj.weight", (8, 16), Rule("split", 1))
    origins = {name: origin for name, (_, origin) in slices.infer().items()}
    assert origins["norm.weight"] == "inferred: bit-equal on 2 ranks"
    assert "hidden size 8" in origins["a.weight"]
    assert "by name" in origins["layers.0.o_proj.weight"]
    assert "llama" in origins["layers.0.o_proj.weight"]


def test_fused_parts_come_from_a_preset(slices: Slices) -> None:
    qkv, gated = Rule("split", 0, parts=(8, 8, 8)), Rule("split", 0, parts=(12, 12))
    slices.cut("norm.weight", (8,), REPLICATED)
    slices.cut("blocks.0.attn.qkv.weight", (24, 8), qkv)
    slices.cut("blocks.0.attn.qkv.bias", (24,), qkv)
    slices.cut("blocks.0.mlp.gate_up_proj.weight", (24, 8), gated)
    slices.cut("layers.0.query_key_value.weight", (24, 8), Rule("split", 0))
    found = slices.rules()
    for name, expected in (("blocks.0.attn.qkv.weight", qkv), ("blocks.0.attn.qkv.bias", qkv)):
        assert resolve(found[name], [s.shape for s in slices.held[name]], name) == expected
    assert found["blocks.0.mlp.gate_up_proj.weight"] == Rule("split", 0, ratio=(1, 1))
    assert found["layers.0.query_key_value.weight"] == Rule("split", 0)  # interleaved head by head


@pytest.mark.parametrize("gated", [True, False])
def test_a_gate_shows_in_the_two_sides_of_the_mlp(slices: Slices, gated: bool) -> None:
    slices.cut("2.norm.weight", (8,), REPLICATED)
    slices.cut("2.mlp.dense_h_to_4h.weight", (48 if gated else 24, 8), Rule("split", 0))
    slices.cut("2.mlp.dense_4h_to_h.weight", (8, 24), Rule("split", 1))
    expected = Rule("split", 0, ratio=(1, 1)) if gated else Rule("split", 0)
    assert slices.rules()["2.mlp.dense_h_to_4h.weight"] == expected


def test_constants_follow_the_weight_of_their_module_or_their_name(slices: Slices) -> None:
    """Zeros are bit-equal whether split or copied."""
    slices.cut("ln.weight", (8,), REPLICATED)
    slices.cut("a.weight", (6, 8), Rule("split", 0))
    slices.add("a.bias", np.zeros(3), np.zeros(3))
    slices.cut("b.weight", (8, 6), Rule("split", 1))
    slices.add("b.bias", np.zeros(8), np.zeros(8))
    slices.add("other_norm.weight", np.ones(8), np.ones(8))
    slices.add("layers.0.q_proj.bias", np.zeros(4), np.zeros(4))
    assert slices.rules() == {
        "ln.weight": REPLICATED,
        "a.weight": Rule("split", 0),
        "a.bias": Rule("split", 0),
        "b.weight": Rule("split", 1),
        "b.bias": REPLICATED,
        "other_norm.weight": REPLICATED,
        "layers.0.q_proj.bias": Rule("split", 0),
    }


def test_untouched_norms_still_show_the_hidden_size(slices: Slices) -> None:
    slices.add("norm.weight", np.ones(8), np.ones(8))
    slices.cut("a.weight", (6, 8), Rule("split", 0))
    assert slices.rules()["a.weight"] == Rule("split", 0)


def test_one_error_lists_ambiguous_names_with_rules_to_paste(slices: Slices, tmp_path: Path) -> None:
    slices.cut("norm.weight", (8,), REPLICATED)
    slices.cut("mystery.weight", (16, 8), Rule("split", 0))
    slices.cut("enigma.weight", (8, 16), Rule("split", 1))
    slices.cut("attn.qkv_proj.weight", (16, 8), Rule("split", 0))  # 8 query, 4 key, 4 value rows, or not
    with pytest.raises(UsageError, match="rules of 3 parameters cannot be inferred") as caught:
        slices.infer()
    text = str(caught.value)
    assert "rank 0: [8, 8], rank 1: [8, 8]" in text
    assert "--rules" in text
    # Each candidate, pasted into a file, is a rule for its parameter.
    entries = re.findall(r"\[\[rule\]\](?:\n +\w+ = .+)+", text)
    offered: dict[str, list[Rule]] = {}
    for entry in entries:
        path = tmp_path / "pasted.toml"
        path.write_text(entry)
        for name in ("mystery.weight", "enigma.weight", "attn.qkv_proj.weight"):
            named = load_rules(path).find(name)
            if named is not None:
                offered.setdefault(name, []).append(named.rule)
    assert offered["mystery.weight"] == [Rule("split", 0), Rule("split", 1)]
    assert Rule("split", 0, parts=(8, 4, 4)) in offered["attn.qkv_proj.weight"]
    assert set(offered) == {"mystery.weight", "enigma.weight", "attn.qkv_proj.weight"}


def test_a_fused_name_that_no_preset_knows_is_not_split_blindly(slices: Slices) -> None:
    slices.cut("norm.weight", (8,), REPLICATED)
    slices.cut("x.kv_proj.weight", (12, 8), Rule("split", 0))
    with pytest.raises(UsageError, match="suggests fused parts"):
        slices.infer()


def test_many_ambiguous_names_are_all_named(slices: Slices) -> None:
    for i in range(30):
        slices.cut(f"mystery{i}.w", (4, 4), Rule("split", 0))
    with pytest.raises(UsageError, match="rules of 30 parameters") as caught:
        slices.infer()
    assert all(f"mystery{i}.w" in str(caught.value) for i in range(30))


def test_slices_that_no_rule_can_join_are_inconsistent(slices: Slices) -> None:
    slices.add("a.weight", np.ones((2, 3)), np.ones((3, 2)))
    with pytest.raises(InconsistentError, match=r"a\.weight.*2 dimensions"):
        slices.infer()
    slices.add("a.weight", np.ones((2, 3)), np.ones(3))
    with pytest.raises(InconsistentError, match=r"a\.weight"):
        slices.infer()


def test_a_scalar_that_differs_is_ambiguous(slices: Slices) -> None:
    slices.add("temperature", np.array(1.0), np.array(2.0))
    with pytest.raises(UsageError, match="scalar that differs"):
        slices.infer()


def test_nothing_to_infer(slices: Slices) -> None:
    assert slices.infer() == {}


@pytest.mark.parametrize("block", [4, 12, 1 << 20])
def test_comparison_sees_every_byte_however_the_slices_are_cut(
    slices: Slices, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(settings, "SLAB_BYTES", block)
    values = slices.random.normal(size=(5, 7)).astype(np.float32)
    whole = [slices.fragment(values)]
    cut = [slices.fragment(part) for part in np.split(values.reshape(-1), [3, 4, 20])]
    columns = values.T.copy()
    transposed = slices.fragment(columns)
    strides = (1, 5)
    strided = [Fragment(Region.all_of((5, 7)), "data.bin", transposed.offset, FLOAT32, strides=strides)]
    wide = np.zeros((5, 9), dtype=np.float32)
    wide[:, 1:8] = values
    padded = slices.fragment(wide)
    window = [Fragment(Region.all_of((5, 7)), "data.bin", padded.offset + 4, FLOAT32, strides=(9, 1))]
    inline = [Fragment(Region.all_of((5, 7)), "", 0, FLOAT32, inline=values.tobytes())]
    forms = [whole, cut, strided, window, inline]
    with SourceFiles(slices.root) as files:
        (slices.root / "data.bin").write_bytes(slices.data)
        assert compare_slices(files, [((5, 7), form) for form in forms]) is SliceEquality.EQUAL
        for at in (0, 17, 34):
            other = values.copy()
            other.reshape(-1)[at] += 1
            changed = [Fragment(Region.all_of((5, 7)), "", 0, FLOAT32, inline=other.tobytes())]
            assert compare_slices(files, [((5, 7), whole), ((5, 7), changed)]) is SliceEquality.DIFFERENT
        shorter = [Fragment(Region.all_of((5, 6)), "", 0, FLOAT32, inline=values.tobytes()[:120])]
        assert compare_slices(files, [((5, 7), whole), ((5, 7), shorter)]) is SliceEquality.DIFFERENT
        assert compare_slices(files, [((5, 7), shorter), ((5, 7), whole)]) is SliceEquality.DIFFERENT


@pytest.mark.parametrize("limit, looked_at", [(64, 128), (settings.SLAB_BYTES, 2 * 4096)])
def test_comparison_stops_at_the_first_difference(
    slices: Slices, monkeypatch: pytest.MonkeyPatch, limit: int, looked_at: int
) -> None:
    monkeypatch.setattr(settings, "SLAB_BYTES", limit)
    a = slices.random.normal(size=10_000)
    first, second = slices.fragment(a), slices.fragment(a + 1)
    (slices.root / "data.bin").write_bytes(slices.data)
    read = 0

    class Counting(SourceFiles):
        def read(self, file: str, offset: int, size: int) -> bytes:
            nonlocal read
            read += size
            return super().read(file, offset, size)

    with Counting(slices.root) as files:
        assert compare_slices(files, [((10_000,), [first]), ((10_000,), [second])]) is SliceEquality.DIFFERENT
    assert read == looked_at


# Real checkpoints: infer without universal_checkpoint_info, then compare with its rules.


def refs(tree: Any) -> Iterator[tuple[str, TensorRef]]:
    for name, value in tree.items():
        if isinstance(value, TensorRef):
            yield name, value


def from_module(step: Path, files: Sequence[str], buffers: Sequence[str] = ()) -> dict[str, list[LocalSlice]]:
    """Slices of the tensors in one file per tensor-parallel rank."""
    held: dict[str, list[LocalSlice]] = {}
    for file in files:
        torch_file = TorchFile(step / file)
        tree = torch_file.tree.get("module", torch_file.tree)
        for name, ref in refs(tree):
            if name in buffers or not ref.shape or not ref.numel:
                continue
            strides = None if ref.is_contiguous else ref.strides
            fragment = Fragment(Region.all_of(ref.shape), file, torch_file.position(ref), ref.dtype, strides=strides)
            held.setdefault(name, []).append(LocalSlice(ref.shape, [fragment]))
    return held


def from_stage3(step: Path, tp: int, dp: int) -> dict[str, list[LocalSlice]]:
    """Slices of the masters of a ZeRO-3 checkpoint: every parameter is partitioned over dp on its own."""
    held: dict[str, list[LocalSlice]] = {}
    for t in range(tp):
        shapes = TorchFile(step / f"zero_pp_rank_0_mp_rank_{t:02d}_model_states.pt").tree["param_shapes"]
        names = [f"bf16_zero_pp_rank_{d}_mp_rank_{t:02d}_optim_states.pt" for d in range(dp)]
        files = [TorchFile(step / name) for name in names]
        for g, group in enumerate(shapes):
            at = 0
            for name, shape in group.items():
                per = -(-prod(shape) // dp)
                fragments = []
                for d, file in enumerate(files):
                    ref = file.tree["optimizer_state_dict"]["fp32_flat_groups"][g]
                    region = Region.all_of(tuple(shape)).cut(d * per, (d + 1) * per)
                    fragments.append(Fragment(region, names[d], file.position(ref) + 4 * at, ref.dtype))
                held.setdefault(name, []).append(LocalSlice(tuple(shape), fragments))
                at += per
    return held


def compare_with_info(
    step: Path, model_file: str, held: Mapping[str, Sequence[LocalSlice]], wrong_in_info: Sequence[str] = ()
) -> None:
    info = TorchFile(step / model_file).tree["universal_checkpoint_info"]
    book = rules_from_info(info, model_file)
    assert held
    with SourceFiles(step) as files:
        inferred = RuleInference(files).rules_for(held)
    assert list(inferred) == list(held)
    for name, (rule, origin) in inferred.items():
        local = [s.shape for s in held[name]]
        named = book.find(name)
        assert named is not None
        if name in wrong_in_info:
            assert rule == REPLICATED
            continue
        padded = whole_shape(resolve(named.rule, local, name), local, name)
        for rank in range(len(local)):
            expected = slice_pieces(resolve(named.rule, local, name), padded, len(local), rank, name)
            found = slice_pieces(resolve(rule, local, name), padded, len(local), rank, name)
            assert found == expected, (name, rule, origin, named.rule)


@pytest.mark.parametrize(
    "variant", ["z0_bf16_tp2_dp1", "z1_bf16_tp2_dp2", "z1_bf16_autotp2_dp2", "z1_bf16_autotp2fused_dp2"]
)
def test_real_checkpoints_without_their_rules(variant: str) -> None:
    step = FIXTURES / variant / "global_step3"
    files = [f"mp_rank_{t:02d}_model_states.pt" for t in range(2)]
    buffers = TorchFile(step / files[0]).tree["buffer_names"]
    compare_with_info(step, files[0], from_module(step, files, buffers))


def test_a_real_stage_3_checkpoint_without_its_rules() -> None:
    step = FIXTURES / "z3_bf16_tp2_dp2" / "global_step3"
    compare_with_info(step, "zero_pp_rank_0_mp_rank_00_model_states.pt", from_stage3(step, tp=2, dp=2))


@pytest.mark.parametrize("name", ["pp2_tp2_z1_bf16_untied_dp1", "megatron_deepspeed/mds_swiglu_tp2_pp2_z1_bf16"])
def test_real_pipelines_without_their_rules(name: str) -> None:
    (step,) = fixture(name).glob("global_step*")
    held: dict[str, list[LocalSlice]] = {}
    for path in sorted(step.glob("layer_*-model_00-model_states.pt")):
        layer = int(path.name.split("-")[0].removeprefix("layer_"))
        files = [path.name, path.name.replace("model_00", "model_01")]
        held |= {f"{layer}.{name}": slices for name, slices in from_module(step, files).items()}
    # The lists omit buffers, and Megatron-DeepSpeed's omits its position table, which would be concatenated.
    wrong = [name for name in held if name.endswith((".mask", "1.position_embeddings.weight"))]
    assert wrong
    compare_with_info(step, "mp_rank_00_model_states.pt", held, wrong)
