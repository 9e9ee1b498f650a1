"""Compare two checkpoints of any format and layout, atom by atom, in one pass."""

from __future__ import annotations

from ucp.compare.comparison import AtomDifference, CompareOptions, Comparison, compare
from ucp.compare.elements import Tolerance

__all__ = ["AtomDifference", "CompareOptions", "Comparison", "Tolerance", "compare"]
