"""The region of a parameter that a tensor-parallel rank holds, from rules or from the live shape."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ucp.core.box import Box
from ucp.core.checkpoint import Parameter
from ucp.core.region import Region
from ucp.core.rules import Rule, RuleBook, SlicePiece
from ucp.errors import UsageError
from ucp.training.collect import atom_region
from ucp.training.load_plan import TensorParallelSlicer


def parameter(shape: tuple[int, ...], rule: Rule | None = None, name: str = "mlp.up.weight") -> Parameter:
    if rule is None:
        return Parameter(name, shape)
    return Parameter(name, shape, rule=rule, rule_origin="checkpoint")


def test_the_rule_of_the_checkpoint_is_used() -> None:
    fused = parameter((6, 2), Rule("split", 0, parts=(4, 2)))
    assert TensorParallelSlicer(2, 1).region(fused, (3, 2)) == Region.of([Box((2, 0), (2, 2)), Box((5, 0), (1, 2))])


def test_widths_are_used_only_for_their_own_degree() -> None:
    uneven = parameter((6, 2), Rule("split", 0, widths=((4, 2),)))
    assert TensorParallelSlicer(3, 2).region(uneven, (2, 2)) == Region.of([Box((4, 0), (2, 2))])


def test_the_rule_of_the_user_has_precedence() -> None:
    book = RuleBook()
    book.add(r"mlp\.up", Rule("split", 1), "rules.toml")
    assert TensorParallelSlicer(2, 1, book).region(parameter((6, 4), Rule("split", 0)), (6, 2)) == Region.of(
        [Box((0, 2), (6, 2))]
    )


def test_a_vocabulary_is_padded_for_the_new_degree() -> None:
    vocabulary = parameter((53, 2), Rule("vocab", 0, true_size=53))
    assert TensorParallelSlicer(2, 1).region(vocabulary, (28, 2)) == Region.of([Box((28, 0), (28, 2))])
    assert TensorParallelSlicer(1, 0).region(vocabulary, (64, 2)) == Region.all_of((64, 2))
    with pytest.raises(UsageError, match=r"shape is \[53, 2\] in the checkpoint, but \[52, 2\] in the job"):
        TensorParallelSlicer(2, 0).region(vocabulary, (26, 2))


def test_without_a_rule_shapes_decide_if_they_are_unambiguous() -> None:
    assert TensorParallelSlicer(2, 1).region(parameter((6, 4)), (6, 4)) == Region.all_of((6, 4))
    assert TensorParallelSlicer(2, 1).region(parameter((6, 4)), (6, 2)) == Region.of([Box((0, 2), (6, 2))])
    with pytest.raises(UsageError, match="no rule for splitting it over tp=2"):
        TensorParallelSlicer(2, 1).region(parameter((6, 4), name="attn.qkv.weight"), (3, 4))
    with pytest.raises(UsageError, match="no rule for splitting it over tp=2"):
        TensorParallelSlicer(2, 1).region(parameter((7, 4)), (4, 4))


def test_attributes_of_megatron_on_a_parameter_are_used() -> None:
    noted = SimpleNamespace(tensor_model_parallel=True, partition_dim=0, partition_stride=1)
    assert TensorParallelSlicer(2, 1).region(parameter((6, 4)), (3, 4), noted) == Region.of([Box((3, 0), (3, 4))])


def test_explicit_slices_are_used_only_for_their_own_degree() -> None:
    slices = ((SlicePiece(Box((0,), (4,)), 0),), (SlicePiece(Box((4,), (2,)), 0),))
    spelled = parameter((6,), Rule("pieces", logical_shape=(6,), slices=slices))
    assert TensorParallelSlicer(2, 1).region(spelled, (2,)) == Region.of([Box((4,), (2,))])
    assert TensorParallelSlicer(1, 0).region(spelled, (6,)) == Region.all_of((6,))
    with pytest.raises(UsageError, match="lists the slices of another degree than tp=3"):
        TensorParallelSlicer(3, 0).region(spelled, (2,))


def test_another_shape_is_refused() -> None:
    with pytest.raises(UsageError, match=r"\[6, 4\] in the checkpoint, but \[6, 5\] in the job"):
        TensorParallelSlicer(1, 0).region(parameter((6, 4)), (6, 5))


def test_regions_of_parts_of_slices() -> None:
    half = Region.of([Box((0, 2), (6, 2))])
    assert atom_region(half, Region((Box((0, 0), (6, 2)),), 3, 7), (6, 2), "p") == half.cut(3, 7)
    box = Region.of([Box((1, 0), (2, 2))])
    assert atom_region(Region.all_of((6, 2)), box, (6, 2), "p") == box
    with pytest.raises(UsageError, match="are not supported"):
        atom_region(half, box, (6, 2), "p")
