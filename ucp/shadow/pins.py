"""What keeps a share from going on for a moment, so that all shares can be brought to one step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from ucp import tunables
from ucp.errors import UsageError
from ucp.shadow.assembling import tell
from ucp.shadow.lanes import Following
from ucp.shadow.snapshot import Snapshot


class Pin:
    """No step is applied beyond those that were asked for; more may become complete. Close it soon.

    It holds for a while after it was asked: who forgets it does not stop the share for ever.
    """

    def __init__(
        self,
        changed: threading.Condition,
        following: Following,
        is_over: Callable[[], bool],
        stale: Callable[[], str | None],
    ) -> None:
        """`changed` is the shadow's lock, which is held now; `stale` tells why nothing comes any more."""
        self._changed = changed
        self._following = following
        self._is_over = is_over
        self._stale = stale
        self._open = True
        following.pins += 1
        self._hold()

    def _hold(self) -> None:
        self._following.pinned_until = time.monotonic() + 2 * tunables.SHADOW_ALIGN_SECONDS

    def told(self) -> dict[str, Any]:
        """Which steps can be had, as JSON values."""
        with self._changed:
            self._hold()
            state = self._following.state
            return {
                "run": state.manifest.run,
                "epoch": state.manifest.epoch,
                "share": [state.share.number, state.share.count],
                "applied": state.step,
                "complete": self._following.complete_step,
                "reason": self._stale(),
            }

    def snapshot(self, step: int) -> Snapshot:
        """The state after just this step; `UsageError` where that cannot be had."""
        following = self._following
        with self._changed:
            following.advance(self._changed, step, self._is_over)
        made = following.state.snapshot(lambda: tell(following.state, following.base, following.log))
        if made.step == step:
            return made
        made.close()
        raise UsageError(f"the shadow has step {made.step}, and not step {step}", hint="try again")

    def close(self) -> None:
        """Let the share go on."""
        with self._changed:
            if self._open:
                self._open = False
                self._following.pins -= 1
                self._changed.notify_all()
