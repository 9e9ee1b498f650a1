"""Write weights as a folder that `from_pretrained` loads: shards with an index, config and tokenizer.

Prefixes of wrappers are removed from parameter names, and the weights of PEFT adapters go to a file of their own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from math import prod
from typing import Final

from ucp.core.checkpoint import MASTER, WEIGHT, Atom, Checkpoint, Note, Parameter
from ucp.core.target import OutputFile, Target
from ucp.errors import ImpossibleError
from ucp.formats.output_files import copied_file, literal_file, missing_weight_error, safetensors_file
from ucp.formats.registry import FormatWriter, WriteOptions
from ucp.formats.translate.model_config import hf_config_in
from ucp.settings import GIB

DEFAULT_SHARD_SIZE: Final = 5 * GIB

# Files of a trainer that a model folder keeps: no optimizer, no trainer state, no pickles.
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

_WRAPPERS: Final = ("_forward_module.", "module.")
# A LightningModule has the model in an attribute; the model's own first name follows.
_ATTRIBUTE: Final = "model."
_MODEL_ROOTS: Final = ("model.", "lm_head.", "transformer.", "base_model.", "gpt_neox.", "backbone.")

_PEFT: Final = "base_model.model."
# Prefixes of the parameters of PEFT's layers: LoRA and DoRA, IA3, LoHa, LoKr, OFT, BOFT, VeRA.
_LAYER: Final = r"(?:lora|ia3|hada|lokr|oft|boft|vera)_[^.]+"
_IN_MODEL: Final = re.compile(rf"(.*\.{_LAYER})\.([^.]+)((?:\.weight|\.bias)?)")
_IN_FILE: Final = re.compile(rf"base_model\.(?:.*\.)?{_LAYER}(?:\.weight|\.bias)?")
_SAVED_WHOLE: Final = re.compile(r"(.*)\.modules_to_save\.[^.]+(\..*)")  # a module trained together with the adapter
_ORIGINAL: Final = ".original_module."  # its untrained original
_MAGNITUDE: Final = re.compile(r"(.*\.lora_magnitude_vector)\.weight")  # a module in the model, a tensor in the file


class HuggingFaceWriter(FormatWriter):
    """Lays out one copy of every weight, in the precision of the master or in `options.dtype`."""

    def __init__(self, source: Checkpoint, options: WriteOptions) -> None:
        self.source = source
        self.options = options
        self.notes: list[Note] = []
        self.mesh = None
        self._naming = hugging_face_names(source.parameters, adapter=source.details.get("adapter") is True)
        if self._naming.stripped:
            self._note("prefix-stripped", f"the prefix '{self._naming.stripped}' was removed from every name")
        self._config = hf_config_in(source)  # a tree if a table of names made it

    def target(self) -> Target:
        """Every file of the folder."""
        return Target(tuple(self._files()))

    def _files(self) -> Iterator[OutputFile]:
        weights, removed = self._weights()
        if weights:
            yield from self._shards(weights, {"format": "pt", **removed})
        adapter = [(name, self._atom(self.source.parameters[own])) for own, name in self._naming.adapter.items()]
        if adapter:
            folder = "adapter/" if weights else ""
            yield safetensors_file(f"{folder}adapter_model.safetensors", adapter, {"format": "pt"})
            if "adapter_config.json" in self.source.extras.files:
                yield copied_file(self.source, "adapter_config.json", f"{folder}adapter_config.json")
        if self._config is not None:
            config = dict(self._config)
            names = {atom.dtype.name for _, atom in weights if atom.dtype.family == "float"}
            if len(names) == 1:  # loaders silently round to the dtype that the config names
                key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
                config[key] = names.pop()
            yield literal_file("config.json", json.dumps(config, indent=2).encode() + b"\n")
        elif weights and not any(note.id == "no-config" for note in self.source.notes):
            self._note("no-config", "the source has no config.json, which `from_pretrained` needs")
        for name in self.source.extras.files:
            if any(fnmatch(name, pattern) for pattern in _CARRIED):
                yield copied_file(self.source, name, name)

    def _weights(self) -> tuple[list[tuple[str, Atom]], dict[str, str]]:
        """Names and atoms in the model's order, and the aliases left out (alias → name that is written)."""
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
            raise ImpossibleError(f"two parameters would have the name {twice[0]}")
        return found, removed

    def _atom(self, parameter: Parameter) -> Atom:
        """The most precise copy of a weight, cast to `options.dtype`."""
        best = parameter.atoms.get(MASTER) or parameter.atoms.get(WEIGHT)
        if best is None:
            raise missing_weight_error(parameter)
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
        yield literal_file("model.safetensors.index.json", json.dumps(index, indent=2).encode() + b"\n")

    def _note(self, kind: str, text: str) -> None:
        self.notes.append(Note(kind, text))


def _packed(weights: Sequence[tuple[str, Atom]], limit: int) -> list[list[tuple[str, Atom]]]:
    """Weights in order, in shards of at most `limit` bytes; a larger weight has a shard of its own."""
    shards: list[list[tuple[str, Atom]]] = [[]]
    size = 0
    for name, atom in weights:
        if shards[-1] and size + atom.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append((name, atom))
        size += atom.nbytes
    return shards


@dataclass(slots=True)
class HuggingFaceNames:
    """Source name → name in the folder, for parameters of the model and of an adapter."""

    model: dict[str, str] = field(default_factory=dict)
    adapter: dict[str, str] = field(default_factory=dict)
    stripped: str = ""  # the prefix removed from every name


def hugging_face_names(names: Iterable[str], *, adapter: bool = False) -> HuggingFaceNames:
    """The name of every parameter in the folder. `adapter`: the source is the file of an adapter, not a model."""
    listed = list(names)
    if adapter or any(_IN_FILE.fullmatch(name) for name in listed):
        return HuggingFaceNames(adapter={name: name for name in listed})
    naming = HuggingFaceNames(stripped=_common_wrapper(listed))
    peft = any(_IN_MODEL.fullmatch(name) for name in listed)
    for name in listed:
        own = name[len(naming.stripped) :]
        adapter_name = _adapter_name(own) if peft else None
        if adapter_name is not None:
            naming.adapter[name] = adapter_name
        elif peft:
            plain = own.removeprefix(_PEFT).replace(".base_layer.", ".")
            naming.model[name] = plain.replace(_ORIGINAL, ".")
        else:
            naming.model[name] = own
    return naming


def _adapter_name(name: str) -> str | None:
    """The name in an adapter's file, which leaves out the name of the adapter; None for parameters of the model."""
    found = _IN_MODEL.fullmatch(name)
    if found:
        bare = f"{found[1]}{found[3]}"
        magnitude = _MAGNITUDE.fullmatch(bare)
        return magnitude[1] if magnitude else bare
    saved = _SAVED_WHOLE.fullmatch(name)
    return f"{saved[1]}{saved[2]}" if saved else None


def _common_wrapper(names: Sequence[str]) -> str:
    stripped = ""
    for wrapper in _WRAPPERS:
        if names and all(name.startswith(stripped + wrapper) for name in names):
            stripped += wrapper
    inner = stripped + _ATTRIBUTE
    if names and all(name.startswith(inner) for name in names):
        rest = [name[len(inner) :] for name in names]
        if all(name.startswith(_MODEL_ROOTS) for name in rest):
            stripped = inner
    return stripped
