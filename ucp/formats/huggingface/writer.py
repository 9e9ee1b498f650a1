"""Writes weights as a folder that `from_pretrained` loads: shards with an index, config and tokenizer beside them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from math import prod
from typing import Any, Final

from ucp.errors import IntegrityError, StorageError, UsageError
from ucp.formats.huggingface.names import name_all
from ucp.formats.outputs import carried_file, no_weight, safetensors_file
from ucp.formats.registry import WriteOptions
from ucp.model.checkpoint import MASTER, WEIGHT, Atom, Checkpoint, Note, Parameter
from ucp.model.target import Digests, Literal, OutputFile, Target
from ucp.tunables import GIB

DEFAULT_SHARD_SIZE: Final = 5 * GIB

# What a model folder keeps of a trainer's: no optimizer, no trainer state, nothing that is a pickle.
_CARRIED: Final = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "preprocessor_config.json",
    "processor_config.json",
)


class Writer:
    """Lays out one copy of every weight, in master precision or the dtype asked for."""

    def __init__(self, source: Checkpoint, options: WriteOptions) -> None:
        self.source = source
        self.options = options
        self.notes: list[Note] = []
        self.mesh = None
        self._naming = name_all(source.parameters, adapter=source.details.get("adapter") is True)
        if self._naming.stripped:
            self._note("prefix-stripped", f"'{self._naming.stripped}' was taken off the front of every name")
        self._config = self._read_config()

    def target(self) -> Target:
        """Every file of the folder."""
        return Target(tuple(self._files()))

    def last(self, target: Target, digests: Digests) -> OutputFile | None:
        """Nothing: the format has no manifest."""
        del target, digests
        return None

    def _files(self) -> Iterator[OutputFile]:
        weights, removed = self._weights()
        if weights:
            yield from self._shards(weights, {"format": "pt", **removed})
        adapter = [(name, self._atom(self.source.parameters[own])) for own, name in self._naming.adapter.items()]
        if adapter:
            folder = "adapter/" if weights else ""
            yield safetensors_file(f"{folder}adapter_model.safetensors", adapter, {"format": "pt"})
            if "adapter_config.json" in self.source.extras.files:
                yield carried_file(self.source, "adapter_config.json", f"{folder}adapter_config.json")
        if self._config is not None:
            data = json.dumps(self._with_dtype(self._config, weights), indent=2).encode() + b"\n"
            yield OutputFile("config.json", len(data), (Literal(0, data),))
        elif weights and not any(note.id == "no-config" for note in self.source.notes):
            self._note("no-config", "the source has no config.json: `from_pretrained` will want one")
        for name in self.source.extras.files:
            if any(fnmatch(name, pattern) for pattern in _CARRIED):
                yield carried_file(self.source, name, name)

    def _weights(self) -> tuple[list[tuple[str, Atom]], dict[str, str]]:
        """Names and atoms in the model's order, and the aliases that were left out (alias → kept name)."""
        tied = self._config is None or self._config.get("tie_word_embeddings") is True
        found: list[tuple[str, Atom]] = []
        removed: dict[str, str] = {}
        for own, name in self._naming.model.items():
            parameter = self.source.parameters[own]
            if not parameter.atoms:
                continue
            atom = self._atom(parameter)
            found.append((name, atom))
            for alias in parameter.aliases:
                other = alias.removeprefix(self._naming.stripped)
                if tied:
                    removed[other] = name
                else:
                    found.append((other, atom))
        names = [name for name, _ in found]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise UsageError(f"two parameters would both be called {twice[0]}")
        return found, removed

    def _atom(self, parameter: Parameter) -> Atom:
        """The most precise form of a weight, in the dtype asked for."""
        best = parameter.atoms.get(MASTER) or parameter.atoms.get(WEIGHT)
        if best is None:
            raise no_weight(parameter)
        castable = best.dtype.family == "float" and parameter.role != "buffer"
        return replace(best, kind=WEIGHT, dtype=self.options.dtype) if self.options.dtype and castable else best

    def _shards(self, weights: Sequence[tuple[str, Atom]], metadata: Mapping[str, str]) -> Iterator[OutputFile]:
        shards = _packed(weights, self.options.max_shard_size or DEFAULT_SHARD_SIZE)
        if len(shards) == 1:
            yield safetensors_file("model.safetensors", shards[0], metadata)
            return
        place: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            path = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            place.update((name, path) for name, _ in shard)
            yield safetensors_file(path, shard, metadata)
        index = {
            "metadata": {
                "total_parameters": sum(prod(atom.shape) for _, atom in weights),
                "total_size": sum(atom.nbytes for _, atom in weights),
            },
            "weight_map": dict(sorted(place.items())),
        }
        data = json.dumps(index, indent=2).encode() + b"\n"
        yield OutputFile("model.safetensors.index.json", len(data), (Literal(0, data),))

    def _read_config(self) -> dict[str, Any] | None:
        made = self.source.extras.trees.get("config.json")  # for names that were mapped
        if isinstance(made, dict):
            return made
        path = self.source.extras.files.get("config.json")
        if path is None:
            return None
        try:
            config = json.loads((self.source.root / path).read_bytes())
        except OSError as error:
            raise StorageError(f"{self.source.root / path}: cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise IntegrityError(f"{self.source.root / path}: is no JSON: {error}") from None
        return config if isinstance(config, dict) else None

    def _with_dtype(self, config: dict[str, Any], weights: Sequence[tuple[str, Atom]]) -> dict[str, Any]:
        """The config naming the dtype that is written: loaders round to the one it names, silently."""
        names = {atom.dtype.name for _, atom in weights if atom.dtype.family == "float"}
        if len(names) != 1:
            return config
        key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
        return {**config, key: names.pop()}

    def _note(self, kind: str, text: str) -> None:
        self.notes.append(Note(kind, text))


def _packed(weights: Sequence[tuple[str, Atom]], limit: int) -> list[list[tuple[str, Atom]]]:
    """Weights in order, in shards of at most `limit` bytes; a larger one has a shard of its own."""
    shards: list[list[tuple[str, Atom]]] = [[]]
    held = 0
    for name, atom in weights:
        if shards[-1] and held + atom.nbytes > limit:
            shards.append([])
            held = 0
        shards[-1].append((name, atom))
        held += atom.nbytes
    return shards
