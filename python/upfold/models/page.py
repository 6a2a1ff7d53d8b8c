"""The part of the comparison page that shows whole models. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .. import charts
from ..charts import format_seconds
from ..markup import escaped, pictures, repeat, tiles
from ..timing import geometric_mean
from . import charts as model_charts
from .overview import by_variant, measured, ratio
from .result import COMPILED, FUSED, REPLACED, TORCH

_HEADS = ("layers", "latency", "x torch", "x torch eager", "device", "x torch", "memory", "held", "error", "")


def models_section(run: dict[str, Any]) -> str:
    """Tiles, charts and the table of every figure of a run's whole models, as HTML."""
    on_gpu = any(one["peak_bytes"] for model in measured(run) for one in model["variants"])
    shown = [
        (
            "What is gained end to end",
            "Latency of a call that is waited for, against the model with torch's layers, eager.",
            charts.as_svg(lambda pyplot: model_charts.speeds(pyplot, [run])) if measured(run) else "",
        ),
        (
            "Memory of a call",
            "The most that a call takes of torch's allocator at a time beside the weights, its result included.",
            charts.as_svg(lambda pyplot: model_charts.memory(pyplot, run)) if on_gpu else "",
        ),
    ]
    repros = repeat("model", (model["repro"] for model in run["models"]))
    return f"{tiles(_gains(run))}{pictures(shown)}<h3>Whole models, every figure</h3>{_table(run)}{repros}"


def _gains(run: dict[str, Any]) -> Iterator[tuple[str, str, bool]]:
    for way, base, said in (("", TORCH, f"{TORCH} eager"), (f" {COMPILED}", f"{TORCH} {COMPILED}", f"{TORCH} {COMPILED}")):
        for layers in (REPLACED, FUSED):
            ratios = [ratio(model, f"{layers}{way}", "seconds", base) for model in measured(run)]
            known = [value for value in ratios if value is not None]
            if known:
                mean, slower = geometric_mean(known), sum(value < 1 for value in known)
                text = f"{layers}{way} against {said}: geometric mean of {len(known)} models, {slower} slower"
                yield f"{mean:.2f}x", text, mean < 1


def _table(run: dict[str, Any]) -> str:
    rows = []
    for model in run["models"]:
        text = f"{model['name']}: {model['source']}; {model['size']}"
        if model["reason"]:
            text += f": not measured, {model['reason']}"
        elif model["share"] is not None:
            text += f", {model['share']:.0%} of it in transposed convolutions"
        rows.append(f'<tr class="suite"><td colspan="{len(_HEADS)}">{escaped(text)}</td></tr>')
        rows += [f"<tr>{_cells(one, model)}</tr>" for one in model["variants"]]
    heads = "".join(f"<th>{head}</th>" for head in _HEADS)
    body = f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'<div class="scroll"><table class="models">{body}</table></div>'


def _cells(one: dict[str, Any], model: dict[str, Any]) -> str:
    fastest = min((other["seconds"] for other in by_variant(model).values()), default=None)
    best = ' class="best"' if one["seconds"] is not None and one["seconds"] == fastest else ""
    cells = [f"<td>{escaped(one['variant'])}</td><td{best}>{_time(one['seconds'])}</td>"]
    cells += [_ratio(one["x_torch"]), _ratio(one["x_torch_eager"])]
    cells += [f"<td>{_time(one['device_seconds'])}</td>", _ratio(one["x_torch_device"])]
    cells += [f"<td>{_mebibytes(one[name])}</td>" for name in ("peak_bytes", "held_bytes")]
    error = "-" if one["error"] is None else f"{one['error']:.1e}"
    look = "loss" if one["failed"] else "words"
    return "".join(cells) + f'<td>{error}</td><td class="{look}">{escaped(one["note"])}</td>'


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)


def _ratio(value: float | None) -> str:
    return "<td>-</td>" if value is None else f'<td class="{"loss" if value < 1 else ""}">{value:.2f}</td>'


def _mebibytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:,.1f} MiB"
