"""Rules against numpy: slices cut by a rule reassemble the whole, and rules that do not fit are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.strategies import Numbers, elements, numbered, shapes, split_rules
from ucp.core.box import Box, Shape, coverage
from ucp.core.rules import (
    REPLICATED,
    Rule,
    RuleBook,
    SlicePiece,
    even_widths,
    logical_shape,
    resolve,
    rule_from_json,
    rule_to_json,
    slice_pieces,
    whole_shape,
)
from ucp.errors import InconsistentError, IntegrityError, UsageError


def cut_by_definition(rule: Rule, tensor: Numbers, tp: int, rank: int) -> Numbers:
    """This rank's slice: its slices of all parts, concatenated."""
    parts = rule.parts or (tensor.shape[rule.dim],)
    shares = []
    at = 0
    for i, size in enumerate(parts):
        widths = rule.widths[i] if rule.widths else [size // tp] * tp
        start = at + sum(widths[:rank])
        shares.append(np.take(tensor, range(start, start + widths[rank]), axis=rule.dim))
        at += size
    return np.concatenate(shares, axis=rule.dim)


@given(split_rules())
def test_slices_are_cut_as_defined_and_tile_the_whole(case: tuple[Rule, Shape, int]) -> None:
    rule, shape, tp = case
    tensor = numbered(shape)
    local, boxes = [], []
    for rank in range(tp):
        expected = cut_by_definition(rule, tensor, tp, rank)
        pieces = slice_pieces(rule, shape, tp, rank, "p")
        laid = [elements(tensor, piece.box) for piece in pieces]
        assert np.array_equal(np.concatenate([np.empty(0, np.int64), *laid]), expected.reshape(-1))
        offsets = np.cumsum([0, *(piece.box.numel for piece in pieces)])
        assert [piece.offset for piece in pieces] == offsets[:-1].tolist()
        local.append(expected.shape)
        boxes += [piece.box for piece in pieces]
    assert whole_shape(rule, local, "p") == shape
    assert list(coverage(shape, boxes)) == []


@given(split_rules())
def test_resolving_fills_in_sizes_and_changes_no_slice(case: tuple[Rule, Shape, int]) -> None:
    rule, shape, tp = case
    tensor = numbered(shape)
    local = [cut_by_definition(rule, tensor, tp, rank).shape for rank in range(tp)]
    from_the_end = Rule("split", rule.dim - len(shape), parts=rule.parts, widths=rule.widths)
    resolved = resolve(from_the_end, local, "p")
    assert resolved.dim == rule.dim
    for rank in range(tp):
        assert slice_pieces(resolved, shape, tp, rank, "p") == slice_pieces(rule, shape, tp, rank, "p")


@given(st.integers(1, 4), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.lists(st.integers(1, 3), min_size=1))
def test_a_ratio_becomes_parts_even_over_uneven_slices(columns: int, ratio: list[int], units: list[int]) -> None:
    """Rank r holds `units[r]` times the ratio: the parts are the ratio times the sum."""
    local = [(unit * sum(ratio), columns) for unit in units]
    resolved = resolve(Rule("split", 0, ratio=tuple(ratio)), local, "p")
    assert resolved.parts == tuple(share * sum(units) for share in ratio)
    assert resolved.ratio is None
    assert whole_shape(resolved, local, "p") == (sum(units) * sum(ratio), columns)
    for rank, unit in enumerate(units):
        pieces = slice_pieces(resolved, (sum(units) * sum(ratio), columns), len(units), rank, "p")
        assert [piece.box.shape[0] for piece in pieces] == [share * unit for share in ratio]


@given(shapes(max_dims=3, min_side=1), st.integers(1, 4))
def test_replicated_and_averaged_ranks_hold_the_whole(shape: Shape, tp: int) -> None:
    for rule in (REPLICATED, Rule("average")):
        assert whole_shape(rule, [shape] * tp, "p") == shape
        for rank in range(tp):
            (piece,) = slice_pieces(rule, shape, tp, rank, "p")
            assert np.array_equal(elements(numbered(shape), piece.box), numbered(shape).reshape(-1))


def test_vocabulary_padding_is_removed_at_every_tp_degree() -> None:
    rule = Rule("vocab", 0, true_size=211)
    for tp in (1, 2, 4):
        padded = whole_shape(rule, [(224 // tp, 36)] * tp, "embed")
        assert padded == (224, 36)
        assert logical_shape(rule, padded) == (211, 36)
        boxes = [piece.box for rank in range(tp) for piece in slice_pieces(rule, padded, tp, rank, "embed")]
        assert list(coverage((211, 36), boxes)) == []
    assert logical_shape(rule, (200, 36)) == (200, 36)
    assert logical_shape(Rule("replicated", true_size=211), (224, 36)) == (211, 36)


@pytest.mark.parametrize(
    "rule, local, error",
    [
        (REPLICATED, [(2, 3), (2, 4)], InconsistentError),
        (Rule("split", 1), [(2, 3), (3, 3)], InconsistentError),
        (Rule("split", 2), [(2, 3), (2, 3)], UsageError),
        (Rule("split", -3), [(2, 3), (2, 3)], UsageError),
        (Rule("split", 0), [(2, 3), (2,)], InconsistentError),
        (Rule("split", 0, parts=(3, 2)), [(2, 3), (2, 3)], InconsistentError),
        (Rule("split", 0, ratio=(1, 2)), [(2, 3), (2, 3)], UsageError),
        (Rule("split", 0, parts=(3, 2)), [(4, 3), (1, 3)], UsageError),
        (Rule("split", 0, parts=(3, 2), widths=((2, 1), (1, 1))), [(2, 3), (3, 3)], InconsistentError),
        (Rule("split", 0, parts=(3, 2), widths=((2, 1),)), [(2, 3), (3, 3)], InconsistentError),
        (Rule("pieces", logical_shape=(2,), slices=((), ())), [(2,), (0,)], InconsistentError),
        (Rule("pieces", logical_shape=(2,), slices=((),)), [(0,), (0,)], InconsistentError),
    ],
)
def test_rules_that_do_not_fit_are_refused_with_the_parameter_name(
    rule: Rule, local: list[Shape], error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"parameter blocks\.0\.weight"):
        resolve(rule, local, "blocks.0.weight")


def test_a_split_that_does_not_divide_is_refused_with_the_numbers() -> None:
    with pytest.raises(UsageError, match=r"dimension 0 has 7 entries.*tp=2"):
        even_widths(7, 2, "p", "dimension 0")
    with pytest.raises(UsageError, match=r"part 2 of 3 of dimension 0 has 2 entries.*tp=4"):
        slice_pieces(Rule("split", 0, parts=(8, 2, 2)), (12, 3), 4, 0, "qkv")


def test_the_first_matching_rule_applies_and_its_use_is_recorded() -> None:
    book = RuleBook()
    book.add(r"a\.", Rule("split", 1), "one")
    book.add(r".*weight$", REPLICATED, "two")
    book.add(r"never", REPLICATED, "three")
    named = book.find("a.weight")
    assert named is not None
    assert named.origin == "one"
    assert book.find("b.a.bias") is None  # anchored at the start
    assert [named.origin for named in book.unused()] == ["two", "three"]
    book.find("b.weight")
    assert [named.origin for named in book.unused()] == ["three"]
    with pytest.raises(UsageError, match="not a regular expression"):
        book.add("(", REPLICATED, "four")


PIECES = Rule(
    "pieces",
    logical_shape=(4, 2),
    slices=((SlicePiece(Box((0, 0), (2, 2)), 0),), (SlicePiece(Box((2, 0), (2, 2)), 0, 0.5),)),
)


@given(split_rules())
def test_a_rule_survives_a_round_trip_through_json(case: tuple[Rule, Shape, int]) -> None:
    for rule in (
        case[0],
        PIECES,
        REPLICATED,
        Rule("average"),
        Rule("vocab", -2, true_size=7),
        Rule("split", ratio=(2, 1)),
    ):
        assert rule_from_json(rule_to_json(rule)) == rule


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"cut": "shredded"},
        {"cut": ["split"]},
        {"cut": "split", "size": 3},
        {"cut": "split", "dim": "0"},
        {"cut": "split", "dim": True},
        {"cut": "split", "parts": 3},
        {"cut": "split", "parts": [1.5]},
        {"cut": "split", "widths": [1]},
        {"cut": "pieces", "slices": [[{"start": [0], "shape": [1, 1], "offset": 0}]]},
        {"cut": "pieces", "slices": [[{"start": [0], "shape": [1]}]]},
        {"cut": "pieces", "slices": [3]},
        [],
    ],
)
def test_damaged_json_is_refused(data: object) -> None:
    with pytest.raises(IntegrityError, match="not a rule"):
        rule_from_json(data)
