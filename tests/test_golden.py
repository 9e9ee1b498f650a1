"""What conversions write is byte for byte what it was: see `tests/golden.py`."""

from __future__ import annotations

import json

import pytest

from tests.golden import DIGESTS, TARGETS, convert_all, sources

GOLDEN: dict[str, dict[str, str]] = json.loads(DIGESTS.read_text())


def test_digests_exist_for_every_fixture_and_target() -> None:
    assert {name for name in sources() if not name.startswith("corpus/")} <= set(GOLDEN)
    assert all(set(digests) == set(TARGETS) for digests in GOLDEN.values())


@pytest.mark.parametrize(
    "source",
    [pytest.param(s, marks=[] if s.startswith("fixtures/") else pytest.mark.slow) for s in sources() if s in GOLDEN],
)
def test_output_is_byte_identical(source: str) -> None:
    assert convert_all(sources()[source]) == GOLDEN[source]
