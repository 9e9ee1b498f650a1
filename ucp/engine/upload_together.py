"""Processes of one launch that write shares of one target into an object store, and see each other through notes there.

Each puts a sign of life beside its notes now and then; one that fails leaves its last words, which stop the others. The
first one waits for all and makes the folder whole. Clocks are not compared: a sign counts when it is another one.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress

from ucp import tunables
from ucp.engine.convert import Progress
from ucp.engine.shares import Share
from ucp.engine.together import OtherFailedError
from ucp.engine.upload_notes import BEGINNING, folder_of, read_notes
from ucp.errors import StorageError, UcpError, UsageError
from ucp.files.paths import COMPLETE, RemotePath
from ucp.files.remote import Store

ALIVE = "alive.json"
FAILED = "failed.json"


class UploadTogether(Progress):
    """One process of a launch. As a progress it passes on what is done here, and stops when another has failed."""

    def __init__(self, path: RemotePath, share: Share, shown: Progress) -> None:
        self.share = share
        self._path = path
        self._shown = shown
        self._others = [Share(number, share.count) for number in range(share.count) if number != share.number]
        if self._store.get((path / COMPLETE).key) is not None:
            raise UsageError(f"{path}: exists already", hint="choose another target, or remove it first")
        self._own(FAILED, None)
        self._old = {other: self._stamp(other, FAILED) for other in self._others}  # of an earlier launch
        self._signs: dict[Share, tuple[int | None, float]] = {}  # the last sign of life, and when it was new to us
        self._stop = threading.Event()
        self._failure: OtherFailedError | None = None
        self._thread = threading.Thread(target=self._live, name="ucp-alive", daemon=True)
        self._thread.start()

    @property
    def leads(self) -> bool:
        """Whether this process waits for the others and publishes."""
        return self.share.number == 0

    def start(self, total: int) -> None:
        if self.leads:
            self._shown.start(total)

    def advance(self, nbytes: int) -> None:
        if self.leads:
            self._shown.advance(nbytes)
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Give no more signs of life."""
        self._stop.set()
        self._thread.join()
        with suppress(StorageError):
            self._own(ALIVE, None)
        self._shown.finish()

    def fail(self, error: BaseException) -> None:
        """Tell the others, unless they told us."""
        if not isinstance(error, OtherFailedError):
            text = str(error) if isinstance(error, UcpError) else f"{type(error).__name__}: {error}"
            with suppress(StorageError):
                self._own(FAILED, {"error": text})

    def wait(self, fingerprint: str) -> None:
        """Return when every other process has done its share; raise when one will not."""
        left = self._others
        while left := [share for share in left if not self._is_done(share, fingerprint)]:
            if self._failure is not None:
                raise self._failure
            self._stop.wait(tunables.REMOTE_LOOK_SECONDS)

    def _live(self) -> None:
        """Give signs of life, and look for the last words of others, until told to stop."""
        count = 0
        while True:
            with suppress(UcpError, ValueError):  # the next one may arrive
                self._own(ALIVE, {"count": count})
                for other in self._others:
                    if self._stamp(other, FAILED) != self._old[other] and (said := self._said(other)):
                        self._failure = OtherFailedError(
                            f"{other} failed: {said}", hint="put that right and launch again"
                        )
            count += 1
            if self._stop.wait(tunables.REMOTE_LOOK_SECONDS):
                return

    def _is_done(self, share: Share, fingerprint: str) -> bool:
        folder = folder_of(share)
        found = {f"{folder}/{name}": one for name, one in self._store.everything((self._path / folder).key).items()}
        begun = any(name.endswith(f"/{BEGINNING}") for name in found)
        if begun and read_notes(self._path, found, share, fingerprint).done:
            return True
        sign = found[f"{folder}/{ALIVE}"].stamp if f"{folder}/{ALIVE}" in found else None
        last, since = self._signs.setdefault(share, (sign, time.monotonic()))
        if sign != last:
            self._signs[share] = sign, time.monotonic()
        elif time.monotonic() - since > tunables.MISSING_PROCESS_SECONDS:
            raise OtherFailedError(
                f"{share} is not done, and no process works on it",
                hint=f"run it with --part {share.number + 1}/{share.count}, then --finish; or launch all again,"
                " which keeps what was done",
            )
        return False

    @property
    def _store(self) -> Store:
        return self._path.store

    def _own(self, name: str, told: object) -> None:
        """Write a note of this process's own, or remove it."""
        key = (self._path / folder_of(self.share) / name).key
        if told is None:
            self._store.remove([key])
        else:
            self._store.put(key, json.dumps(told).encode())

    def _stamp(self, share: Share, name: str) -> int | None:
        found = self._store.everything((self._path / folder_of(share)).key).get(name)
        return None if found is None else found.stamp

    def _said(self, share: Share) -> str | None:
        data = self._store.get((self._path / folder_of(share) / FAILED).key)
        return None if data is None else str(json.loads(data).get("error"))
