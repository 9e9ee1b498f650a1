"""A checkpoint as one self-contained HTML page: mesh, partition map, sizes, checks, statistics."""

from __future__ import annotations

from ucp.reports.html_page import ReportOptions, WrittenReport, write_report

__all__ = ["ReportOptions", "WrittenReport", "write_report"]
