"""Which layers each pipeline stage of a job holds, from its arguments. Arithmetic only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from ucp.errors import NotUnderstoodError
from ucp.formats.megatron.arguments import Arguments
from ucp.formats.megatron.names import is_prediction, layer_of

_REPEATED: Final = re.compile(r"\(([^()]*)\)\*(\d+)|([^()])\*(\d+)")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A model chunk: chunk `vp` of stage `pp` holds layers `[first, stop)`, and perhaps an end of the model."""

    pp: int
    vp: int
    first: int
    stop: int
    embedding: bool
    output: bool
    prediction: bool = False  # holds the layers of multi-token prediction, and a copy of the embedding for them

    def holds(self, name: str) -> bool:
        """Whether a parameter of this name is in the chunk, some of its experts perhaps."""
        layer = layer_of(name)
        if layer is not None:
            return self.first <= layer < self.stop
        if is_prediction(name):
            return self.prediction
        return self.embedding or self.prediction if name.startswith("embedding.") else self.output


def chunks_of_job(arguments: Arguments) -> list[Chunk]:
    """All chunks in the order of the model: chunk 0 of every stage first, then chunk 1 of every stage, …"""
    layout = arguments.fields.get("pipeline_model_parallel_layout")
    if isinstance(layout, str):
        stages = _spelled(layout)
        counts = [stage.count("t") for stage in stages]
        starts = [i for i, stage in enumerate(stages) if "E" in stage]
        ends = [i for i, stage in enumerate(stages) if "L" in stage]
        predicting = [i for i, stage in enumerate(stages) if "m" in stage and arguments.prediction_layers]
    elif layout is not None:
        raise NotUnderstoodError("the job's pipeline layout is an object, which says nothing about its layers here")
    else:
        counts = _counts(arguments)
        starts, ends = [0], [len(counts) - 1]
        predicting = ends if arguments.prediction_layers else []
    if len(counts) % arguments.pp or (arguments.layers is not None and sum(counts) != arguments.layers):
        raise NotUnderstoodError(
            f"{arguments.layers} layers over {arguments.pp} stages of {arguments.vpp} chunks do not come out even:"
            f" {counts}"
        )
    chunks: list[Chunk] = []
    at = 0
    for number, count in enumerate(counts):
        vp, pp = divmod(number, arguments.pp)
        chunks.append(Chunk(pp, vp, at, at + count, number in starts, number in ends, number in predicting))
        at += count
    return chunks


def _counts(arguments: Arguments) -> list[int]:
    layers, pp, vpp = arguments.layers or 0, arguments.pp, arguments.vpp
    first = arguments.number("decoder_first_pipeline_num_layers", 0)
    last = arguments.number("decoder_last_pipeline_num_layers", 0)
    if first or last:
        middle = pp - bool(first) - bool(last)
        each = (layers - first - last) // middle if middle else 0
        stages = [*([first] if first else []), *([each] * middle), *([last] if last else [])]
        return [count // vpp for _ in range(vpp) for count in stages]
    before = int(arguments.flag("account_for_embedding_in_pipeline_split"))
    after = int(arguments.flag("account_for_loss_in_pipeline_split"))
    counts = [(layers + before + after) // (pp * vpp)] * (pp * vpp)
    counts[0] -= before
    counts[-1] -= after
    return counts


def _spelled(layout: str) -> list[str]:
    """`Et*3|(tt|)*2L` with every repetition written out, cut into stages."""
    text = layout.replace(",", "").replace(" ", "")
    while True:
        longer = _REPEATED.sub(lambda m: (m[1] if m[1] is not None else m[3]) * int(m[2] or m[4]), text)
        if longer == text:
            return text.split("|")
        text = longer
