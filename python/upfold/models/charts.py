"""The chart of whole models: what replacing and fusing gains end to end, eager and compiled. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..charts import INK, LOSS, bare, format_ratio, format_seconds, saved
from .overview import VARIANTS, by_variant, kind, measured, ratio
from .result import TORCH

_COLOURS = dict(zip(VARIANTS, ("#333333", "#0072B2", "#009E73", "#A6A6A6", "#7FB8DA", "#80CDB8")))
# Of a bar, in inches, and between two models.
_BAR, _GAP = 0.17, 0.16


def write_models_chart(runs: Sequence[dict[str, Any]], path: str | Path) -> Path:
    """Draw runs of whole models side by side (`overview.model_runs`), and return the path written."""
    return saved(path, lambda pyplot: speeds(pyplot, runs), dpi=100)


def speeds(pyplot: Any, runs: Sequence[dict[str, Any]]) -> Any:
    """A panel for each run: bars of how many times as fast as torch's eager model each variant is, by latency."""
    heading = f"Whole models, times as fast as with torch's layers, eager (longer is better): {runs[0]['device']}"
    return _panels(pyplot, runs, "seconds", heading)


def memory(pyplot: Any, run: dict[str, Any]) -> Any:
    """Bars of the most memory that a call of each variant takes beside the weights."""
    return _panels(pyplot, [run], "peak_bytes", "")


def _panels(pyplot: Any, runs: Sequence[dict[str, Any]], quantity: str, heading: str) -> Any:
    names = list(dict.fromkeys(model["name"] for run in runs for model in measured(run)))
    sizes = {model["name"]: model["size"] for run in runs for model in run["models"]}
    shown = [one for one in VARIANTS if any(one in by_variant(model) for run in runs for model in run["models"])]
    row = len(shown) * _BAR + _GAP
    height = len(names) * row / 0.77  # axes take that part of a figure
    figure, grid = pyplot.subplots(1, len(runs), figsize=(max(10.0, 4.6 * len(runs) + 1.6), height), sharey=True, squeeze=False)
    figure.subplots_adjust(wspace=0.08)
    for axes, run in zip(grid[0], runs):
        _draw(axes, run, names, shown, quantity)
        axes.set_title(kind(run), loc="left", fontsize=10.5)
    grid[0][0].set_yticks(range(len(names)), [f"{name}\n{sizes[name]}" for name in names], fontsize=9)
    grid[0][0].set_ylim(len(names) - 0.45, -0.55)
    bars = [pyplot.Rectangle((0, 0), 1, 1, color=_COLOURS[name]) for name in shown]
    inch = 1.0 / height
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, grid[0][0].get_position().y0 - 0.45 * inch)}
    labels = [f"{name} eager" if " " not in name else name for name in shown]
    figure.legend(bars, labels, ncol=len(shown), frameon=False, fontsize=9, **place)
    if heading:
        figure.suptitle(heading, x=0.02, y=grid[0][0].get_position().y1 + 0.55 * inch, ha="left", fontsize=12)
    return figure


def _draw(axes: Any, run: dict[str, Any], names: Sequence[str], shown: Sequence[str], quantity: str) -> None:
    models = {model["name"]: model for model in measured(run)}
    reasons = {model["name"]: model["reason"] for model in run["models"]}
    faster = quantity == "seconds"
    thick = _BAR / (len(shown) * _BAR + _GAP)
    longest = 1.0
    for position, name in enumerate(names):
        for row, variant in enumerate(shown):
            y = position + (row - (len(shown) - 1) / 2) * thick
            one = by_variant(models[name]).get(variant) if name in models else None
            value = None if one is None else ratio(models[name], variant, quantity)
            if one is None or value is None:
                continue
            value = value if faster else 1 / value
            longest = max(longest, value)
            axes.barh(y, value, height=0.86 * thick, color=_COLOURS[variant])
            loss = round(value, 2) < 1 if faster else round(value, 2) > 1
            text = _label(models[name], one, value, quantity)
            ink = LOSS if loss and variant != TORCH else INK
            behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.4}  # the line at 1 may run through the label
            place: Any = {"xytext": (3, 0), "textcoords": "offset points", "va": "center", "bbox": behind}
            axes.annotate(text, (value, y), fontsize=7, color=ink, **place)
        if name not in models:
            text = reasons.get(name) or "not in this run"
            axes.text(0.02, position, text, va="center", fontsize=7.5, color=INK, wrap=True)
    axes.axvline(1, color=INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
    axes.set_xlim(0, longest * 1.42)
    axes.set_xlabel("times as fast" if faster else "memory of a call over that of torch eager (shorter is better)", fontsize=9)
    bare(axes)


def _label(model: dict[str, Any], one: dict[str, Any], value: float, quantity: str) -> str:
    amount = format_seconds(one["seconds"]) if quantity == "seconds" else f"{one['peak_bytes'] / 2**20:,.0f} MiB"
    if one["variant"] != TORCH:
        return f"{format_ratio(value)}  {amount}"
    share = model["share"]
    said = "" if quantity != "seconds" or share is None else f", {share:.0%} in transposed convolutions"
    return amount + said
