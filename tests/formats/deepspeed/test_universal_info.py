"""The checkpoint's own rules: DeepSpeed's precedence, and affine maps against their definition."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.strategies import elements, numbered, split_rules
from tests.paths import FIXTURES
from ucp.containers.torch_file import TorchFile
from ucp.core.box import Shape, strides_of
from ucp.core.rules import REPLICATED, Rule, resolve, slice_pieces, whole_shape
from ucp.errors import InconsistentError, NotUnderstoodError
from ucp.formats.deepspeed.universal_info import DEFAULT_ORIGIN, affine_rule, rules_from_info

INFO = {
    "universal_checkpoint_version": 0.2,
    "original_vocab_size": 211,
    "vocabulary_parameter_patterns": [r".*embed\.weight", r".*tables\.\d"],
    "tp_replicated_parameter_patterns": [r".*ln\d\.(weight|bias)", r"tables\.0", r"unused"],
    "parameter_to_average_patterns": [r".*drift", r".*ln1\.weight"],
    "parameter_with_2_sub_params_cat_dim_0": [r".*gate_up"],
    "parameter_with_row_parallelism_patterns": [r".*proj\.weight", r".*tables\.1"],
    "parameter_with_sub_params": [
        {"patterns": [r".*qkv\.weight"], "shape": ((36, 12, 12), 36), "partition_dim": 0},
        {"patterns": [r".*old\.weight"], "shape": (3, -1), "partition_dim": 0},
        {"patterns": [r".*last\.weight"], "shape": (-1, (6, 6)), "partition_dim": -1},
        {"patterns": [r".*uneven"], "shape": ((5, 3), 4), "partition_dim": 0},
    ],
    "sub_param_shard_widths": {r".*qkv\.weight": [[18, 18], [6, 6], [6, 6]], r".*uneven": [[3, 2], [2, 1]]},
}


@pytest.mark.parametrize(
    "name, rule",
    [
        ("embed.weight", Rule("vocab", 0, true_size=211)),
        ("tied_modules.embed.weight", Rule("vocab", 0, true_size=211)),
        ("blocks.0.ln2.bias", REPLICATED),
        ("blocks.0.ln1.weight", REPLICATED),  # replicated wins over average
        ("blocks.0.drift", Rule("average")),
        ("blocks.0.gate_up", Rule("split", 0, ratio=(1, 1))),
        ("blocks.0.qkv.weight", Rule("split", 0, parts=(36, 12, 12))),
        ("blocks.0.old.weight", Rule("split", 0, ratio=(1, 1, 1))),
        ("blocks.0.last.weight", Rule("split", 1, parts=(6, 6))),
        ("blocks.0.uneven", Rule("split", 0, parts=(5, 3), widths=((3, 2), (2, 1)))),
        ("blocks.0.proj.weight", Rule("split", 1)),
        ("blocks.0.mlp.up.weight", Rule("split", 0)),
        ("tables.0", Rule("replicated", true_size=211)),
    ],
)
def test_precedence_is_deepspeeds(name: str, rule: Rule) -> None:
    book = rules_from_info(INFO, "model.pt")
    named = book.find(name)
    assert named is not None
    assert named.rule == rule
    assert named.origin.startswith("checkpoint: ")


def test_unmatched_names_are_concatenated_by_default() -> None:
    named = rules_from_info({}, "model.pt").find("anything")
    assert named is not None
    assert (named.rule, named.origin) == (Rule("split", 0), DEFAULT_ORIGIN)


def test_unused_patterns_are_listed() -> None:
    book = rules_from_info(INFO, "model.pt")
    for name in ("blocks.0.ln1.weight", "blocks.0.proj.weight"):
        book.find(name)
    unused = {named.pattern.pattern for named in book.unused()}
    assert r"unused" in unused
    assert r".*proj\.weight" not in unused
    assert r".*ln1\.weight" not in unused  # superseded, not unused


@pytest.mark.parametrize(
    "info, name, complaint",
    [
        ({"autotp_unsupported_parameter_patterns": {r"^a\.b$": "odd heads"}}, "a.b", "odd heads"),
        ({"vocabulary_parameter_patterns": ["e"]}, "e", "original_vocab_size is missing"),
        (INFO, "tables.1", "its padding is unknown"),
        ({"affine_map": {"version": 1, "params": {"a": {"logical_shape": [2]}}}}, "a", "affine map"),
    ],
)
def test_a_parameter_without_description_is_refused_on_lookup(info: dict[str, Any], name: str, complaint: str) -> None:
    book = rules_from_info(info, "model.pt")
    assert book.find("other") is not None
    with pytest.raises(NotUnderstoodError, match=rf"model\.pt.*{complaint}"):
        book.find(name)


def test_experts_of_auto_ep_are_ordinary_parameters() -> None:
    info = {"expert_parameter_patterns": [r".*experts\.w1"], "ds_autoep_layers": [{"ep_size": 2}]}
    named = rules_from_info(info, "model.pt").find("moe.experts.w1")
    assert named is not None


@pytest.mark.parametrize(
    "info",
    [
        [],
        {"tp_replicated_parameter_patterns": "a"},
        {"tp_replicated_parameter_patterns": [3]},
        {"tp_replicated_parameter_patterns": ["("]},
        {"parameter_with_sub_params": [{"patterns": ["a"]}]},
        {"parameter_with_sub_params": [{"patterns": ["a"], "shape": (3, -1), "partition_dim": 2}]},
        {"parameter_with_sub_params": [3]},
        {"affine_map": 3},
        {"affine_map": {"version": 2, "params": {}}},
    ],
)
def test_an_invalid_info_is_refused(info: Any) -> None:
    with pytest.raises(NotUnderstoodError, match=r"model\.pt"):
        rules_from_info(info, "model.pt")


def as_map(logical: Shape, ranks: list[tuple[Shape, list[dict[str, Any]]]]) -> dict[str, Any]:
    return {
        "logical_shape": list(logical),
        "ranks": {i: {"shard_shape": list(shape), "pieces": pieces} for i, (shape, pieces) in enumerate(ranks)},
    }


def strided(tensor: np.ndarray, offset: int, shape: list[int], strides: list[int]) -> np.ndarray:
    itemsize = tensor.itemsize
    return np.lib.stride_tricks.as_strided(tensor.reshape(-1)[offset:], shape, [s * itemsize for s in strides])


def slices_by_definition(entry: dict[str, Any]) -> list[np.ndarray]:
    """Each rank's slice as the map defines it: `slice[dest] = whole[source]` for every piece."""
    whole = numbered(tuple(entry["logical_shape"]))
    out = []
    for held in entry["ranks"].values():
        shard = np.full(prod(held["shard_shape"]), -1, dtype=np.int64)
        for piece in held["pieces"]:
            if 0 not in piece["shape"]:
                target = strided(shard, piece["dest"][0], piece["shape"], piece["dest"][1])
                target[...] = strided(whole, piece["source"][0], piece["shape"], piece["source"][1])
        out.append(shard)
    return out


def check(rule: Rule, entry: dict[str, Any]) -> None:
    logical = tuple(entry["logical_shape"])
    local = [tuple(held["shard_shape"]) for held in entry["ranks"].values()]
    resolved = resolve(rule, local, "p")
    assert whole_shape(resolved, local, "p") == logical
    for rank, expected in enumerate(slices_by_definition(entry)):
        found = np.full(expected.size, -1, dtype=np.int64)
        for piece in slice_pieces(resolved, logical, len(local), rank, "p"):
            found[piece.offset : piece.offset + piece.box.numel] = elements(numbered(logical), piece.box)
        assert np.array_equal(found, expected)


def split_map(logical: Shape, dim: int, widths: list[list[int]]) -> dict[str, Any]:
    """The affine map of fused parts, each split over the ranks with `widths[part][rank]`."""
    ranks = []
    for rank in range(len(widths[0])):
        shard = (*logical[:dim], sum(row[rank] for row in widths), *logical[dim + 1 :])
        pieces, begin, at = [], 0, 0
        for row in widths:
            source = (begin + sum(row[:rank])) * strides_of(logical)[dim]
            pieces.append(
                {
                    "shape": [*logical[:dim], row[rank], *logical[dim + 1 :]],
                    "source": [source, list(strides_of(logical))],
                    "dest": [at * strides_of(shard)[dim], list(strides_of(shard))],
                    "locations": [rank],
                }
            )
            begin += sum(row)
            at += row[rank]
        ranks.append((shard, pieces))
    return as_map(logical, ranks)


@given(split_rules())
def test_a_map_of_split_parts_becomes_a_rule_that_cuts_the_same(case: tuple[Rule, Shape, int]) -> None:
    rule, logical, tp = case
    parts = rule.parts or (logical[rule.dim],)
    widths = [list(row) for row in rule.widths] if rule.widths else [[size // tp] * tp for size in parts]
    entry = split_map(logical, rule.dim, widths)
    found = affine_rule(entry, "p")
    check(found, entry)
    if tp > 1 and all(width for row in widths for width in row):
        assert found.cut == "split"  # never left as pieces: it must be possible to cut it again


def test_a_replicated_map_becomes_replicated() -> None:
    piece = {"shape": [4, 3], "source": [0, [3, 1]], "dest": [0, [3, 1]], "locations": [0, 1]}
    entry = as_map((4, 3), [((4, 3), [piece])] * 2)
    assert affine_rule(entry, "p") == REPLICATED


def test_parts_of_which_some_are_replicated_stay_pieces() -> None:
    """Queries split over two ranks, keys and values whole on both."""
    ranks = []
    for rank in range(2):
        query = {"shape": [2, 3], "source": [6 * rank, [3, 1]], "dest": [0, [3, 1]], "locations": [rank]}
        rest = {"shape": [2, 3], "source": [12, [3, 1]], "dest": [6, [3, 1]], "locations": [0, 1]}
        ranks.append(((4, 3), [query, rest]))
    entry = as_map((6, 3), ranks)
    rule = affine_rule(entry, "p")
    assert rule.cut == "pieces"
    check(rule, entry)


def test_blocks_gathered_from_two_places_stay_pieces() -> None:
    ranks = []
    for first, second in ((0, 2), (1, 3)):
        pieces = [
            {"shape": [3, 2], "source": [2 * block, [8, 1]], "dest": [2 * i, [4, 1]], "locations": [0]}
            for i, block in enumerate((second, first))
        ]
        ranks.append(((3, 4), pieces))
    entry = as_map((3, 8), ranks)
    check(affine_rule(entry, "p"), entry)


def test_a_scaled_copy_keeps_its_scale() -> None:
    piece = {"shape": [4], "source": [0, [1]], "dest": [0, [1]], "locations": [0, 1], "scale": 0.5}
    rule = affine_rule(as_map((4,), [((4,), [piece])] * 2), "p")
    assert rule.slices is not None
    assert [piece.scale for pieces in rule.slices for piece in pieces] == [0.5, 0.5]


@given(st.data())
def test_any_strided_blocks_are_supported(data: st.DataObject) -> None:
    """A slice that is any permutation of the whole's dimensions, divided in two anywhere."""
    logical = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    order = data.draw(st.permutations(range(len(logical))))
    shape = [logical[d] for d in order]
    source = [strides_of(logical)[d] for d in order]
    dest = list(strides_of(tuple(shape)))
    mark = data.draw(st.integers(0, shape[0]))
    pieces = [
        {"shape": [mark, *shape[1:]], "source": [0, source], "dest": [0, dest], "locations": [0]},
        {
            "shape": [shape[0] - mark, *shape[1:]],
            "source": [mark * source[0], source],
            "dest": [mark * dest[0], dest],
            "locations": [0],
        },
    ]
    entry = as_map(logical, [(tuple(shape), pieces)])
    rule = affine_rule(entry, "p")
    for piece in slice_pieces(rule, logical, 1, 0, "p"):
        held = slices_by_definition(entry)[0][piece.offset : piece.offset + piece.box.numel]
        assert np.array_equal(elements(numbered(logical), piece.box), held)


@pytest.mark.parametrize(
    "change",
    [
        {"source": [3, [1]]},
        {"dest": [1, [1]]},
        {"shape": [3]},
        {"shape": [-4]},
        {"source": [0, [1, 1]]},
        {"source": 0},
        {"scale": 0.0},
        {"dest": [0, [0]]},
    ],
)
def test_an_invalid_map_is_refused(change: dict[str, Any]) -> None:
    piece = {"shape": [4], "source": [0, [1]], "dest": [0, [1]], "locations": [0], **change}
    with pytest.raises(NotUnderstoodError, match=r"model\.pt.*affine map"):
        affine_rule(as_map((4,), [((4,), [piece])]), "model.pt")


def test_two_maps_for_one_name_are_inconsistent() -> None:
    piece = {"shape": [4], "source": [0, [1]], "dest": [0, [1]], "locations": [0]}
    entry = as_map((4,), [((4,), [piece])])
    book = rules_from_info({"affine_map": {"version": 1, "params": {"a.*": entry, "^ab$": entry}}}, "model.pt")
    with pytest.raises(InconsistentError, match="2 affine maps claim parameter ab"):
        book.find("ab")


@pytest.mark.parametrize("variant", ["z1_bf16_autotp2_dp2", "z1_bf16_autotp2fused_dp2"])
def test_real_affine_maps_agree_with_the_pattern_lists(variant: str) -> None:
    """AutoTP writes both forms, which must agree."""
    model = TorchFile(FIXTURES / variant / "global_step3" / "mp_rank_00_model_states.pt").tree
    info = dict(model["universal_checkpoint_info"])
    with_map = rules_from_info(info, "model.pt")
    without = rules_from_info({key: value for key, value in info.items() if key != "affine_map"}, "model.pt")
    names = [name for group in model["param_shapes"] for name in group]
    assert names
    for name in names:
        mapped, listed = with_map.find(name), without.find(name)
        assert mapped is not None
        assert listed is not None
        assert mapped.origin == "checkpoint: affine_map"
        assert mapped.rule == listed.rule, name
