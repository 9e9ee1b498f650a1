"""How the keys of a state dict are built: under which names model and optimizer stand, and whether flattened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from ucp.formats.distcp_index import KeyPath

DETAIL: Final = "dcp"  # key of Checkpoint.details under which a style is kept


@dataclass(frozen=True, slots=True)
class Place:
    """A dictionary of the state dict: the folder that holds it (empty, or with a slash at the end) and its path."""

    folder: str
    prefix: KeyPath

    def to_json(self) -> dict[str, Any]:
        return {"folder": self.folder, "prefix": list(self.prefix)}


@dataclass(frozen=True, slots=True)
class Style:
    """`flattened` is torch's `flatten_optimizer_state_dict`: one key a parameter and field, no numbered groups."""

    model: Place = Place("", ("model",))
    optimizer: Place = Place("", ("optim",))
    flattened: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model.to_json(),
            "optimizer": {**self.optimizer.to_json(), "flattened": self.flattened},
        }


def style_of(details: Any) -> Style | None:
    """The style that a checkpoint's details tell, or None. A model saved alone leaves the optimizer's place open."""
    told = details.get(DETAIL) if isinstance(details, dict) else None
    if not isinstance(told, dict):
        return None
    model, optimizer = _place(told.get("model")), _place(told.get("optimizer"))
    if model is None and optimizer is None:
        return None
    flattened = optimizer is not None and told["optimizer"].get("flattened") is True
    if model is None:
        model = Place("", ("model",))
    if optimizer is None:
        optimizer = Place(model.folder, ("optim",))
    return Style(model, optimizer, flattened)


def _place(told: Any) -> Place | None:
    if not isinstance(told, dict) or not isinstance(told.get("prefix"), (list, tuple)):
        return None
    folder = told.get("folder")
    if not isinstance(folder, str) or folder.count("/") > 1 or folder.startswith((".", "/")):
        return None  # details may come from a manifest: only what a reader of ours would say is taken
    return Place(folder, tuple(part if isinstance(part, int) else str(part) for part in told["prefix"]))
