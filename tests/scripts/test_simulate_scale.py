"""The figures of the simulation: fits, plots, and what a process took."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest


@pytest.fixture(scope="module")
def simulation(project: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("simulate_scale", project / "scripts" / "simulate_scale.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["simulate_scale"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_exponents_are_found(simulation: ModuleType, power: float) -> None:
    sizes = [512, 1024, 2048, 4096]
    assert simulation.exponent(sizes, [3 * size**power for size in sizes]) == pytest.approx(power)


def test_memory_and_time_are_those_of_the_command(simulation: ModuleType) -> None:
    cost = simulation.measure("x", [sys.executable, "-c", "x = b'x' * 200_000_000; print(len(x))"])
    assert cost.said == "200000000\n"
    assert cost.memory > 200e6  # a child's peak begins with what its parent had, and that may be much here
    assert cost.cpu > 0
    with pytest.raises(SystemExit, match="ended with 3"):
        simulation.measure("x", [sys.executable, "-c", "raise SystemExit(3)"])


def test_the_plot_is_whole(simulation: ModuleType) -> None:
    text = simulation.svg([1, 2, 4], {"plan": [1.0, 2.0, 4.0], "parts": [0.1, 0.2, 0.4]})
    tree = ElementTree.fromstring(text)
    assert len(tree.findall("{http://www.w3.org/2000/svg}polyline")) == 2
    assert "plan ∝ n^1.00" in text
