"""The schedule of a snapshot: nothing is lost or copied twice, and nothing is late that need not be."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from math import inf, isclose

from hypothesis import given
from hypothesis import strategies as st

from ucp.training.snapshots.copy_schedule import (
    CopyRates,
    TensorDeadline,
    assign_parts,
    is_feasible,
    iterations_needed,
    make_schedule,
    open_time,
    smoothed,
)

seconds = st.integers(0, 40).map(float)


@st.composite
def tensors(draw: st.DrawFn, *, one_window: bool = False) -> list[TensorDeadline]:
    made = []
    window = (0.0, float(draw(st.integers(1, 30))))
    for number in range(draw(st.integers(0, 8))):
        release = 0.0 if one_window else draw(seconds)
        length = draw(st.integers(1, 30))
        deadline = window[1] if one_window else draw(st.sampled_from([release + length, release + length, inf]))
        made.append(TensorDeadline(f"t{number}", draw(st.integers(0, 50)), release, deadline))
    return made


costs = st.builds(
    CopyRates, st.sampled_from([1.0, 2.0, 4.0]), st.sampled_from([8.0, 64.0]), st.sampled_from([0.5, 1.0])
)
blocked = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 5)), max_size=3).map(
    lambda gaps: [
        (float(sum(a + b for a, b in gaps[:i]) + gaps[i][0]), float(sum(a + b for a, b in gaps[: i + 1])))
        for i in range(len(gaps))
    ]
)


@given(tensors(), costs, blocked)
def test_every_byte_is_copied_once(
    wanted: list[TensorDeadline], rates: CopyRates, busy: list[tuple[float, float]]
) -> None:
    made = make_schedule(wanted, rates, busy)
    copied: Counter[str] = Counter()
    for copy in made.copies:
        copied[copy.name] += copy.nbytes
        assert isclose(copy.nbytes, (copy.stop - copy.start) * rates.rate, abs_tol=1e-6)
    for late in made.late:
        copied[late.name] += late.nbytes
    for tensor in wanted:
        assert isclose(copied[tensor.name], tensor.nbytes, abs_tol=1e-6)
    assert all(a.stop <= b.start + 1e-6 for a, b in pairwise(made.copies))
    by_name = {tensor.name: tensor for tensor in wanted}
    assert all(copy.start >= by_name[copy.name].release - 1e-6 for copy in made.copies)
    assert isclose(made.stall, made.late_bytes / rates.local, abs_tol=1e-6)
    if made.stall == 0:
        for copy in made.copies:
            assert copy.stop <= by_name[copy.name].deadline + 1e-6
            assert all(min(copy.stop, b) - max(copy.start, a) <= 1e-6 for a, b in busy)


@given(tensors(), costs, blocked)
def test_nothing_is_late_if_the_schedule_is_feasible(
    wanted: list[TensorDeadline], rates: CopyRates, busy: list[tuple[float, float]]
) -> None:
    made = make_schedule(wanted, rates, busy)
    assert is_feasible(wanted, rates.rate, busy) == (made.late_bytes < 1e-6)


def least_memory(tensors: list[TensorDeadline], costs: CopyRates, blocked: list[tuple[float, float]]) -> float:
    """Bytes that must be copied locally if all tensors have one window: those that the link cannot copy in it."""
    total = sum(tensor.nbytes for tensor in tensors)
    start = min((tensor.release for tensor in tensors), default=0.0)
    stop = min((tensor.deadline for tensor in tensors), default=inf)
    return 0.0 if stop == inf else max(0.0, total - costs.rate * open_time(start, stop, blocked))


@given(tensors(one_window=True), costs, blocked)
def test_with_one_window_only_the_excess_is_late(
    wanted: list[TensorDeadline], rates: CopyRates, busy: list[tuple[float, float]]
) -> None:
    made = make_schedule(wanted, rates, busy)
    assert isclose(made.late_bytes, least_memory(wanted, rates, busy), abs_tol=1e-6)
    assert isclose(made.stall, least_memory(wanted, rates, busy) / rates.local, abs_tol=1e-6)


@given(st.integers(0, 10**12), costs, st.floats(0.01, 100))
def test_the_number_of_iterations_is_minimal(total: int, rates: CopyRates, window: float) -> None:
    count = iterations_needed(total, rates, window)
    assert count * rates.rate * window >= total * (1 - 1e-6)
    assert count == 1 or (count - 1) * rates.rate * window < total


def test_a_schedule_computed_by_hand() -> None:
    """Two layers, the last of which is updated first in the next step."""
    made = make_schedule([TensorDeadline("first", 40, 0, 10), TensorDeadline("last", 40, 0, 6)], CopyRates(10, 100))
    assert [(copy.name, copy.start, copy.stop) for copy in made.copies] == [("last", 0, 4), ("first", 4, 8)]
    assert made.stall == 0
    made = make_schedule(
        [TensorDeadline("first", 40, 0, 6), TensorDeadline("last", 40, 0, 6)], CopyRates(10, 100), [(1.0, 2.0)]
    )
    assert [(late.name, late.at, late.nbytes) for late in made.late] == [("last", 6, 30)]
    assert isclose(made.stall, 0.3)
    assert made.end == 6.3


def test_open_time_and_smoothing() -> None:
    assert open_time(0, 10, [(2, 4), (9, 20)]) == 7
    assert open_time(5, 3) == 0
    assert smoothed(None, 4) == 4
    assert smoothed(4, 8, 0.5) == 6


loads = st.lists(st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 100), max_size=8), min_size=1, max_size=4)


@given(loads, st.integers(1, 5))
def test_every_parameter_is_in_one_part_and_parts_are_balanced(wanted: list[dict[str, int]], count: int) -> None:
    parts = assign_parts(wanted, count)
    assert set(parts) == {name for load in wanted for name in load}
    assert all(0 <= part < count for part in parts.values())
    if len(wanted) == 1:  # greedy on one rank: at most a share and the largest
        [load] = wanted
        full = Counter(dict.fromkeys(range(count), 0))
        for name, part in parts.items():
            full[part] += load[name]
        assert max(full.values()) <= sum(load.values()) / count + max(load.values(), default=0)


def test_parts_are_balanced_for_every_rank() -> None:
    """Two ranks with half of the parameters each: every part has bytes of both."""
    halves = [{f"a{n}": 10 for n in range(4)}, {f"b{n}": 10 for n in range(4)}]
    parts = assign_parts(halves, 4)
    for part in range(4):
        assert [sum(load[name] for name in load if parts[name] == part) for load in halves] == [10, 10]
