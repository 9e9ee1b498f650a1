"""Real DeepSpeed for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.interop.jobs import Trainer
from tests.training.worlds import Worlds


@pytest.fixture(scope="session")
def trainer() -> Iterator[Trainer]:
    """One worker process for the whole session: importing DeepSpeed is most of a job's cost."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    with Trainer() as worker:
        yield worker


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """One worker process for what runs inside live jobs."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    with Worlds() as worker:
        yield worker
