"""A checkpoint as one self-contained HTML page: mesh, partition map, sizes, checks, statistics."""

from __future__ import annotations

from ucp.reports.write import Options, Written, write_report

__all__ = ["Options", "Written", "write_report"]
