"""Parameter names as Hugging Face knows them: without what wrappers put in front, adapters told apart."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from ucp.records import dataclass, field

_WRAPPERS: Final = ("_forward_module.", "module.")
# A LightningModule keeps the model under an attribute of its own; what then follows is the model's own first name.
_ATTRIBUTE: Final = "model."
_MODEL_ROOTS: Final = ("model.", "lm_head.", "transformer.", "base_model.", "gpt_neox.", "backbone.")

_PEFT: Final = "base_model.model."
_ADAPTER: Final = re.compile(r"(.*\.lora_(?:A|B|embedding_A|embedding_B|magnitude_vector))\.([^.]+)((?:\.weight)?)")


@dataclass(slots=True)
class Naming:
    """Source name → name in the folder: of the model itself, and of an adapter on it."""

    model: dict[str, str] = field(default_factory=dict)
    adapter: dict[str, str] = field(default_factory=dict)
    stripped: str = ""  # what was taken off the front of every name


def name_all(names: Iterable[str]) -> Naming:
    """Every parameter's name in the folder."""
    listed = list(names)
    naming = Naming(stripped=_common_wrapper(listed))
    peft = any(_ADAPTER.fullmatch(name) for name in listed)
    for name in listed:
        own = name[len(naming.stripped) :]
        if peft and (found := _ADAPTER.fullmatch(own)):
            naming.adapter[name] = f"{found[1]}{found[3]}"  # files of adapters leave the adapter's own name out
        elif peft:
            naming.model[name] = own.removeprefix(_PEFT).replace(".base_layer.", ".")
        else:
            naming.model[name] = own
    return naming


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
