"""The thread that reads the log: what no feed brings, and epochs that no feed has told of."""

from __future__ import annotations

import threading
import time

from ucp import tunables
from ucp.errors import UcpError
from ucp.log.frames import BadBytesError
from ucp.log.manifest import read_manifest
from ucp.log.reader import epoch_folder
from ucp.shadow.course import Course
from ucp.shadow.epochs import epochs_of, root_of
from ucp.shadow.intake import GapError


def read_log(course: Course, ending: threading.Event) -> None:
    """Read what there is until the end is told of."""
    pause, looked = 0.0, 0.0
    while not ending.wait(pause):
        moved = False
        try:
            if time.monotonic() - looked > tunables.SHADOW_EPOCH_SECONDS:
                moved, looked = _look_for_epoch(course), time.monotonic()
            moved |= _poll(course)
        except GapError as gap:
            with course.changed:
                course.begin_again(f"the log begins with frame {gap.got}, and frame {gap.expected} is wanted")
        except BadBytesError as error:
            course.give_up(f"the log is out of order: {error}")
        except UcpError as error:
            course.give_up(str(error))
        shortest = tunables.SHADOW_POLL_SECONDS  # at first, and then less and less often
        pause = 0.0 if moved else min(max(1.2 * pause, shortest), 10 * shortest)


def _poll(course: Course) -> bool:
    """Read what the log has of streams that nothing else brings."""
    with course.changed:
        following = None if course.stale is not None else course.following
    return following is not None and following.read_log(course.changed)


def _look_for_epoch(course: Course) -> bool:
    """Go on with an epoch of the log that is newer than the one that is followed."""
    with course.changed:
        if course.following is not None:
            course.following.find_log()
        log = course.log if course.following is None else course.following.log
    epochs = [] if log is None else epochs_of(log)
    if log is None or not epochs:
        return False
    newest = max(epochs)
    with course.changed:
        following = course.following
        if following is not None and newest <= following.state.manifest.epoch:
            if following.lacks_kinds and newest == following.state.manifest.epoch:
                following.learn_kinds(read_manifest(epoch_folder(root_of(log), newest)))
            return False
        if following is not None and any(lane.feeds for lane in following.lanes.values()):
            return False  # the feeds tell when they go over to it
        course.follow(read_manifest(epoch_folder(root_of(log), newest)), root_of(log).parent)
    return True
