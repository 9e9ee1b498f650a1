"""Two checkpoints of any formats and layouts compared atom by atom, in one pass of slabs."""

from __future__ import annotations

from ucp.compare.comparison import AtomDifference, CompareOptions, Comparison, compare
from ucp.compare.elements import Tolerance

__all__ = ["AtomDifference", "CompareOptions", "Comparison", "Tolerance", "compare"]
