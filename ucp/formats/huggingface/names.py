"""Parameter names as Hugging Face knows them: without what wrappers put in front, adapters told apart."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

_WRAPPERS: Final = ("_forward_module.", "module.")
# A LightningModule keeps the model under an attribute of its own; what then follows is the model's own first name.
_ATTRIBUTE: Final = "model."
_MODEL_ROOTS: Final = ("model.", "lm_head.", "transformer.", "base_model.", "gpt_neox.", "backbone.")

_PEFT: Final = "base_model.model."
# PEFT's layers, by what begins the names of their own parameters: LoRA and DoRA, IA3, LoHa, LoKr, OFT, BOFT, VeRA.
_LAYER: Final = r"(?:lora|ia3|hada|lokr|oft|boft|vera)_[^.]+"
_IN_MODEL: Final = re.compile(rf"(.*\.{_LAYER})\.([^.]+)((?:\.weight|\.bias)?)")
_IN_FILE: Final = re.compile(rf"base_model\.(?:.*\.)?{_LAYER}(?:\.weight|\.bias)?")
_SAVED_WHOLE: Final = re.compile(r"(.*)\.modules_to_save\.[^.]+(\..*)")  # a module that is trained beside the adapter
_ORIGINAL: Final = ".original_module."  # what it was before
_MAGNITUDE: Final = re.compile(r"(.*\.lora_magnitude_vector)\.weight")  # a module in the model, a tensor in the file


@dataclass(slots=True)
class Naming:
    """Source name → name in the folder: of the model itself, and of an adapter on it."""

    model: dict[str, str] = field(default_factory=dict)
    adapter: dict[str, str] = field(default_factory=dict)
    stripped: str = ""  # what was taken off the front of every name


def name_all(names: Iterable[str], *, adapter: bool = False) -> Naming:
    """Every parameter's name in the folder. `adapter` says that the source is an adapter's file, no model's."""
    listed = list(names)
    if adapter or any(_IN_FILE.fullmatch(name) for name in listed):
        return Naming(adapter={name: name for name in listed})
    naming = Naming(stripped=_common_wrapper(listed))
    peft = any(_IN_MODEL.fullmatch(name) for name in listed)
    for name in listed:
        own = name[len(naming.stripped) :]
        filed = _filed(own) if peft else None
        if filed is not None:
            naming.adapter[name] = filed
        elif peft:
            plain = own.removeprefix(_PEFT).replace(".base_layer.", ".")
            naming.model[name] = plain.replace(_ORIGINAL, ".")
        else:
            naming.model[name] = own
    return naming


def _filed(name: str) -> str | None:
    """The name in an adapter's file, which leaves the adapter's own name out; None for the model's parameters."""
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
