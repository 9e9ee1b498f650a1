"""Names, orders, pipeline splits and flat buffers: arithmetic that needs no files."""

from __future__ import annotations

import pytest

from ucp.errors import NotUnderstoodError
from ucp.formats.megatron.job_arguments import JobArguments
from ucp.formats.megatron.mcore_modules import (
    canonical_name,
    order_key,
    parse_stacked_key,
    shift_expert,
    shift_layer,
    split_rule,
    to_core_name,
)
from ucp.formats.megatron.rank_layout import BucketRange, BufferParam, bucket_size, lay_out_buffer, model_chunks


@pytest.mark.parametrize(
    "key, index, name",
    [
        ("decoder.layers.mlp.linear_fc2.weight", (3,), "decoder.layers.3.mlp.linear_fc2.weight"),
        (
            "decoder.layers.mlp.experts.experts.linear_fc1.weight",
            (1, 5),
            "decoder.layers.1.mlp.experts.local_experts.5.linear_fc1.weight",
        ),
        (
            "decoder.layers.2.mlp.experts.experts.linear_fc1.weight",
            (5,),
            "decoder.layers.2.mlp.experts.local_experts.5.linear_fc1.weight",
        ),
        (
            "decoder.layers.2.mlp.experts.experts.7.linear_fc1.weight",
            (),
            "decoder.layers.2.mlp.experts.local_experts.7.linear_fc1.weight",
        ),
        ("decoder.layers.self_attention.linear_qkv.layer_norm_bias", (0,), "decoder.layers.0.input_layernorm.bias"),
        ("decoder.final_layernorm.weight", (), "decoder.final_layernorm.weight"),
    ],
)
def test_stacked_keys(key: str, index: tuple[int, ...], name: str) -> None:
    stack = parse_stacked_key(key)
    assert len(stack.axes) == len(index)
    assert stack.name(index) == name


def test_spellings_of_other_releases() -> None:
    assert (
        to_core_name("language_model.encoder.layers.3.input_norm.weight") == "decoder.layers.3.input_layernorm.weight"
    )
    assert (
        to_core_name("language_model.transformer.layers.0.attention.query_key_value.bias")
        == "decoder.layers.0.self_attention.linear_qkv.bias"
    )
    assert to_core_name("word_embeddings_for_head.weight") == "output_layer.weight"
    assert (
        canonical_name("decoder.layers.0.mlp.experts.linear_fc2.weight3")
        == "decoder.layers.0.mlp.experts.local_experts.3.linear_fc2.weight"
    )


def test_layers_and_experts_are_numbered_over_the_whole_model() -> None:
    name = "decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight"
    moved = shift_expert(shift_layer(name, 4), 6)
    assert moved == "decoder.layers.5.mlp.experts.local_experts.6.linear_fc1.weight"
    assert shift_layer("mtp.layers.0.enorm.weight", 4) == "mtp.layers.0.enorm.weight"


def test_parameters_are_in_the_order_of_the_module() -> None:
    local = [
        "embedding.word_embeddings.weight",
        "embedding.position_embeddings.weight",
        "decoder.layers.2.input_layernorm.weight",
        "decoder.layers.2.self_attention.linear_proj.weight",
        "decoder.layers.2.self_attention.linear_qkv.weight",
        "decoder.layers.2.self_attention.linear_qkv.bias",
        "decoder.layers.2.pre_mlp_layernorm.weight",
        "decoder.layers.2.mlp.router.weight",
        "decoder.layers.2.mlp.experts.local_experts.2.linear_fc1.weight",
        "decoder.layers.2.mlp.experts.local_experts.2.linear_fc2.weight",
        "decoder.layers.2.mlp.experts.local_experts.10.linear_fc1.weight",
        "decoder.layers.2.mlp.shared_experts.gate_weight",
        "decoder.layers.2.mlp.shared_experts.linear_fc1.weight",
        "decoder.layers.10.input_layernorm.weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    ]
    backwards = local[::-1]
    assert sorted(backwards, key=order_key) == local
    fused = sorted(local, key=lambda name: order_key(name, fused=True))
    assert fused.index("decoder.layers.2.input_layernorm.weight") == 3
    assert fused[2] == "decoder.layers.2.self_attention.linear_proj.weight"


@pytest.mark.parametrize(
    "fields, counts",
    [
        ({"num_layers": 4, "pipeline_model_parallel_size": 2}, [2, 2]),
        (
            {"num_layers": 8, "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            [2, 2, 2, 2],
        ),
        (
            {"num_layers": 7, "pipeline_model_parallel_size": 3, "decoder_first_pipeline_num_layers": 1},
            [1, 3, 3],
        ),
        (
            {
                "num_layers": 6,
                "pipeline_model_parallel_size": 4,
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
            },
            [1, 2, 2, 1],
        ),
        (
            {"num_layers": 4, "pipeline_model_parallel_size": 4, "pipeline_model_parallel_layout": "E|tt|t*2|L"},
            [0, 2, 2, 0],
        ),
        (
            {"num_layers": 6, "pipeline_model_parallel_size": 4, "pipeline_model_parallel_layout": "Et,(|tt)*2|tL"},
            [1, 2, 2, 1],
        ),
        (
            {"num_layers": 2, "pipeline_model_parallel_size": 4, "pipeline_model_parallel_layout": "Et|*3tL"},
            [1, 0, 0, 1],
        ),
    ],
)
def test_layers_of_stages(fields: dict[str, object], counts: list[int]) -> None:
    chunks = model_chunks(JobArguments(fields))
    assert [chunk.stop - chunk.first for chunk in chunks] == counts
    assert [chunk.embedding for chunk in chunks] == [True] + [False] * (len(counts) - 1)
    assert [chunk.output for chunk in chunks] == [False] * (len(counts) - 1) + [True]
    stages = fields["pipeline_model_parallel_size"]
    assert [(chunk.vp, chunk.pp) for chunk in chunks] == [divmod(i, stages) for i in range(len(chunks))]


def test_layers_that_do_not_divide_evenly() -> None:
    with pytest.raises(NotUnderstoodError, match="5 layers over 2 stages"):
        model_chunks(JobArguments({"num_layers": 5, "pipeline_model_parallel_size": 2}))


def test_a_bucket_is_filled_in_reverse_at_multiples_of_64() -> None:
    layout = lay_out_buffer([BufferParam(10), BufferParam(64), BufferParam(65)], None, 2)
    assert layout.bucket_ranges == (BucketRange(0, 192, 10), BucketRange(0, 128, 64), BucketRange(0, 0, 65))
    assert (layout.lengths, layout.padded) == ((202,), (256,))


def test_a_full_bucket_is_closed() -> None:
    layout = lay_out_buffer([BufferParam(10), BufferParam(64), BufferParam(65)], 65, 3)
    assert layout.bucket_ranges == (BucketRange(1, 64, 10), BucketRange(1, 0, 64), BucketRange(0, 0, 65))
    assert (layout.lengths, layout.padded) == ((65, 74), (384, 384))
    assert layout.starts == (0, 65)
    assert layout.numel == 139


def test_a_tied_embedding_has_a_bucket_of_its_own() -> None:
    layout = lay_out_buffer([BufferParam(100, own_bucket=True), BufferParam(10)], None, 2)
    assert layout.bucket_ranges == (BucketRange(1, 0, 100), BucketRange(0, 0, 10))
    assert layout.lengths == (64, 100)  # the open bucket is closed at the embedding's aligned start
    assert lay_out_buffer([BufferParam(10), BufferParam(100, own_bucket=True)], None, 2).lengths == (100, 10)


def test_wide_padding() -> None:
    assert lay_out_buffer([BufferParam(10)], None, 2, wide=True).padded == (65536,)


@pytest.mark.parametrize(
    "fields, size",
    [
        ({}, None),
        ({"overlap_grad_reduce": True}, 40_000_000),
        ({"overlap_grad_reduce": True, "world_size": 64}, 64_000_000),
        ({"overlap_grad_reduce": True, "ddp_bucket_size": 5}, 5),
        ({"overlap_grad_reduce": True, "ddp_num_buckets": 4}, 250),
    ],
)
def test_bucket_size(fields: dict[str, object], size: int | None) -> None:
    assert bucket_size(JobArguments(fields), 1000) == size


def test_rules_by_name_and_shape() -> None:
    shapes = {"a.mlp.linear_fc2.weight": (4, 6)}
    arguments = JobArguments({"q_lora_rank": 8, "padded_vocab_size": 12})
    gated = split_rule("a.mlp.linear_fc1.weight", [(12, 4)], arguments, shapes.get)
    straight = split_rule("a.mlp.linear_fc1.weight", [(6, 4)], arguments, shapes.get)
    assert gated is not None
    assert straight is not None
    assert (gated.cut, gated.ratio, straight.ratio) == ("split", (1, 1), None)
    for shape, cut in (((8, 4), "replicated"), ((4, 4), "split")):
        down = split_rule("a.self_attention.linear_q_down_proj.weight", [shape, shape], arguments, shapes.get)
        assert down is not None
        assert down.cut == cut
    assert split_rule("a.mixer.conv1d.weight", [(4, 4)], arguments, shapes.get) is None
