"""Shard-consistency checks: what must be true of a checkpoint, found out without trusting what its files say."""

from __future__ import annotations

from ucp.checks.findings import Finding, Level, Report
from ucp.checks.registry import CHECKS, Check
from ucp.checks.run import verify

__all__ = ["CHECKS", "Check", "Finding", "Level", "Report", "verify"]
