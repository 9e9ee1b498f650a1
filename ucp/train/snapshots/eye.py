"""Looking at the job for a snapshot: its tensors, and the state besides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ucp.formats.rulefiles import rule_book
from ucp.train.describe import describe
from ucp.train.pieces import SliceRules
from ucp.train.saved_state import collect_state
from ucp.train.snapshots.layout import Sight, look
from ucp.train.talk import agree

ClientState = dict[str, Any] | Callable[[], dict[str, Any]] | None


class Eye:
    """Sees one job, as this rank has it."""

    def __init__(
        self, model: Any, optimizer: Any, client_state: ClientState, rules: str | Path | None, preset: str | None
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._client_state, self._rules, self._preset = client_state, rules, preset

    def look(self, before: Sight) -> Sight:
        """This rank's tensors. What was found before is believed as long as they lie where they lay."""
        return look(describe(self._model, self._optimizer), before.slices, before)

    def look_anew(self) -> Sight:
        """This rank's tensors, and how slices combine. Collective."""
        error: BaseException | None = None
        slices: SliceRules | None = None
        sight: Sight | None = None
        try:
            job = describe(self._model, self._optimizer)
            slices = SliceRules(job, rule_book(self._rules, self._preset), self._given())
        except Exception as caught:  # noqa: BLE001 - told to the other ranks, then raised
            error = caught
        agree(error)
        assert slices is not None
        slices.agree_on_defaults()
        try:
            sight = look(slices.job, slices)
        except Exception as caught:  # noqa: BLE001
            error = caught
        agree(error)
        assert sight is not None
        return sight

    def state(self, sight: Sight) -> dict[str, Any]:
        """What there is besides tensors of parameters: generators, counters, scheduler, the user's client state."""
        return collect_state(sight.job, self._given())

    def _given(self) -> dict[str, Any]:
        given = self._client_state() if callable(self._client_state) else self._client_state
        return dict(given or {})
