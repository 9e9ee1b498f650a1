"""Hyper-parameters: which group of a checkpoint goes to which group of a live optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ucp.model.checkpoint import Checkpoint
from ucp.train.live import LiveJob
from ucp.train.matching import LoadPlan, Matcher


def match_groups(job: LiveJob, matcher: Matcher, source: Checkpoint, plan: LoadPlan) -> None:
    """Hyper-parameters for every live group: those of the checkpoint's group that its parameters are in, by name."""
    for number, names in enumerate(job.names_by_group()):
        found: dict[int, str] = {}
        for name in names:
            parameter = matcher.find(name)
            if parameter is not None and parameter.group is not None:
                found.setdefault(parameter.group, name)
        hypers = [source.groups[group].hyper for group in found]
        if not hypers:
            plan.hyper.append(None)
            if names:
                plan.left.append(f"hyper-parameters of group {number}: the checkpoint has none for its parameters")
            continue
        plan.hyper.append(dict(hypers[0]))
        for (group, name), hyper in zip(found.items(), hypers, strict=True):
            differing = [key for key in _differing(hypers[0], hyper) if key in job.groups[number]]
            if differing:
                first = next(iter(found))
                plan.problems.append(
                    f"group {number} of the job holds {found[first]} and {name}, which are in the checkpoint's groups"
                    f" {first} and {group}: {', '.join(differing)} differ"
                )


def _differing(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[str]:
    return [key for key in sorted({*one, *two}) if key not in ("name", "params") and one.get(key) != two.get(key)]
