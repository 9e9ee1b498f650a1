"""Layers: which parameters belong together, told by their names."""

from __future__ import annotations


def layer_of(name: str) -> str:
    """The layer of a parameter: its name up to the first number (`blocks.3`, `model.layers.0`), else its module.

    >>> layer_of("model.layers.3.mlp.experts.7.up.weight")
    'model.layers.3'
    >>> layer_of("lm_head.weight")
    'lm_head'
    """
    words = name.split(".")
    for position, word in enumerate(words):
        if word.isdigit():
            return ".".join(words[: position + 1])
    return ".".join(words[:-1]) or name
