"""Two checkpoints of any formats and layouts compared atom by atom, in one pass of slabs."""

from __future__ import annotations

from ucp.compare.result import AtomDifference, Comparison
from ucp.compare.run import Options, compare
from ucp.compare.tally import Tolerance

__all__ = ["AtomDifference", "Comparison", "Options", "Tolerance", "compare"]
