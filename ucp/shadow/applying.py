"""The thread that applies every step that is complete in all streams."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from ucp.errors import UcpError
from ucp.log.frames import BadBytesError
from ucp.shadow.course import Course
from ucp.shadow.intake import ArrivedDigests, ArrivedStep
from ucp.shadow.lanes import Following


def apply_all(course: Course, pool: ThreadPoolExecutor | None) -> None:
    """Apply what is complete, until the course stops and nothing complete is left."""
    while True:
        with course.changed:
            while not course.stopping and not _is_complete(course):
                course.changed.wait(1.0)
            following = course.following
            if following is None or not _is_complete(course):
                return  # stopping
            try:
                step = following.take()
            except BadBytesError as error:
                course.make_stale(str(error))
                following.is_broken = True
                step = None
            course.changed.notify_all()
        if step is not None:
            _apply(course, following, step, pool)


def _apply(
    course: Course,
    following: Following,
    step: dict[int, ArrivedStep] | ArrivedDigests,
    pool: ThreadPoolExecutor | None,
) -> None:
    try:
        if isinstance(step, ArrivedDigests):
            following.state.compare(step.stream, step.digests)
        else:
            following.state.apply(step, pool)
    except (UcpError, BadBytesError) as error:
        following.is_broken = True
        course.give_up(f"step {following.state.step + 1}: {error}")
    except BaseException as error:
        following.is_broken = True
        course.give_up(f"step {following.state.step + 1}: {error!r}")
        raise  # nobody expects this: whoever runs the shadow should see where it comes from
    following.applied_at = time.time()
    with course.changed:
        course.changed.notify_all()
    if following.state.refuted is not None:
        course.note(str(following.state.refuted))


def _is_complete(course: Course) -> bool:
    """Is there anything that can be applied now?"""
    following = course.following
    if following is None or following.is_broken:
        return False
    # A share that is stale still gives the steps that it has kept back.
    return (course.stale is None or following.state.step < following.goal) and following.is_complete()
