"""Whole models from results files: runs by name, and a Markdown table of what replacing and fusing gained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..charts import format_ratio, format_seconds
from ..geometry import InvalidArgument
from .result import COMPILED, EAGER, FUSED, REPLACED, TORCH

# In the order of the charts; torch eager is what the others are measured against.
VARIANTS = tuple(f"{layers}{way}" for way in ("", f" {COMPILED}") for layers in (TORCH, REPLACED, FUSED))


def model_runs(facts: dict[str, Any], names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The runs of a results file that hold whole models.

    Args:
        facts: what ``upfold bench --json`` writes, or a dictionary of such runs.
        names: which, in a file that holds several; none takes all.

    Raises:
        InvalidArgument: there is no such run.
    """
    several = {name: run for name, run in facts.items() if isinstance(run, dict) and run.get("models")}
    found = {"": facts} if facts.get("models") else several
    if missing := [name for name in names if name not in found]:
        raise InvalidArgument(f"run = {missing[0]!r}; of whole models the file has {', '.join(found) or 'none'}")
    if not found:
        raise InvalidArgument("the file holds no whole models; they come from upfold bench --suite models --json")
    return [found[name] for name in names or found]


def kind(run: dict[str, Any]) -> str:
    """As ``float32 tf32, channels_last``."""
    return " ".join(filter(None, (run["dtype"], run.get("precision")))) + f", {run['layout']}"


def by_variant(model: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The timed variants of a model, by name."""
    return {one["variant"]: one for one in model["variants"] if one["seconds"]}


def measured(run: dict[str, Any]) -> list[dict[str, Any]]:
    """The models of a run of which torch's eager time is known."""
    return [model for model in run["models"] if TORCH in by_variant(model)]


def ratio(model: dict[str, Any], variant: str, quantity: str, base: str = TORCH) -> float | None:
    """How many times less of a quantity the variant takes than `base`, or None where either is unknown."""
    found = by_variant(model)
    above, below = (found.get(name, {}).get(quantity) for name in (base, variant))
    return above / below if above and below else None


def markdown(runs: Sequence[dict[str, Any]]) -> str:
    """A table for each run: latency with torch's layers, and how many times faster the others are in the same way."""
    parts = []
    for run in runs:
        ways = [EAGER] + [COMPILED] * any(f"{TORCH} {COMPILED}" in by_variant(model) for model in run["models"])
        heads = ["model", "share"]
        for way in ways:
            heads += [f"torch {way}", "replaced", "fused"]
        on_gpu = any(one["peak_bytes"] for model in run["models"] for one in model["variants"])
        heads += ["memory: torch", "replaced", "fused"] if on_gpu else []
        lines = [f"{run['device']}, {kind(run)}", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        lines += [f"| {' | '.join(_cells(model, ways, on_gpu))} |" for model in measured(run)]
        lines += [f"\n{model['name']}: not measured, {model['reason']}" for model in run["models"] if model["reason"]]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _cells(model: dict[str, Any], ways: Sequence[str], on_gpu: bool) -> list[str]:
    found = by_variant(model)
    cells = [f"{model['name']} {model['size']}", "-" if model["share"] is None else f"{model['share']:.0%}"]
    for way in ways:
        torchs, *ours = (layers if way == EAGER else f"{layers} {way}" for layers in (TORCH, REPLACED, FUSED))
        cells.append(format_seconds(found[torchs]["seconds"]) if torchs in found else "-")
        ratios = [ratio(model, name, "seconds", torchs) for name in ours]
        cells += ["-" if value is None else format_ratio(value) for value in ratios]
    if on_gpu:
        sizes = [found.get(name, {}).get("peak_bytes") for name in (TORCH, REPLACED, FUSED)]
        cells += ["-" if size is None else f"{size / 2**20:.0f} MiB" for size in sizes]
    return cells
