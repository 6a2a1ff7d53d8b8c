"""Tables of whole models for a terminal. Needs rich."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..charts import format_seconds
from ..tables import new_table, ratio_text
from .result import ModelResult, Variant, summarize

# Of the quartiles of a latency, as a part of it: the machine was busy with something else.
_UNSTEADY = 0.2
LEGEND = (
    "latency: wall time of a call that is waited for (~: unsteady). x torch: against torch's layers run in the same way, eager\n"
    "or compiled; x eager: against torch's layers, eager. device: a GPU's time by CUDA-graph replay (*: of eager calls).\n"
    "memory: the most a call takes beside the weights; held: what stays beside them, as folded weights. error: |y - y64| / |y64|."
)


def print_model(console: Any, result: ModelResult) -> None:
    """Print a table of one model, or why it was not measured."""
    if result.reason is not None:
        console.print(f"\n{result.name}: not measured, {result.reason}", markup=False)
        return
    console.print(_table(result))
    console.print("  " + shares_text(result), style="dim")
    for one in result.variants:
        if one.seconds is None:
            console.print(f"  {one.name}: {one.note}", style="red" if one.failed else "yellow", markup=False)
    console.print(f"  {result.repro}", style="dim", soft_wrap=True)


def print_models_summary(console: Any, results: Sequence[ModelResult]) -> None:
    """Print means over the models, and what the columns say."""
    summary = summarize(results)
    if summary:
        console.print(_summary_table(summary))
    console.print(LEGEND, style="dim")


def shares_text(result: ModelResult) -> str:
    """What part of the model the transposed convolutions are, and what upfold takes for them."""
    if not result.layers:
        return "transposed convolutions: not measured"
    share = "" if result.share is None else f", {result.share:.0%} of the model's time with torch"
    torch_seconds, upfold_seconds = (sum(getattr(one, f"{who}_seconds") for one in result.layers) for who in ("torch", "upfold"))
    times = f"torch {format_seconds(torch_seconds)}, upfold {format_seconds(upfold_seconds)}"
    taken = ", ".join(dict.fromkeys(one.algorithm for one in result.layers if one.algorithm))
    return f"{len(result.layers)} transposed convolutions{share}: {times} ({taken})"


def _table(result: ModelResult) -> Any:
    on_gpu = any(one.peak_bytes is not None for one in result.variants)
    device = ("device", "x torch", "x eager", "memory", "held") if on_gpu else ()
    title = f"\n{result.name}: {result.source}; {result.size}, {(result.parameters or 0) / 1e6:.3g} M parameters"
    table = new_table(title, "layers", "latency", "x torch", "x eager", *device, "error", "first call", "", left=("",))
    for one in result.variants:
        figures = result.figures(one)
        cells = [
            one.name,
            ("~" if (one.spread or 0) > _UNSTEADY else "") + _time(one.seconds),
            ratio_text(figures["x_torch"]),
            ratio_text(figures["x_torch_eager"]),
        ]
        if on_gpu:
            cells += [_time(one.device_seconds) + ("" if one.how in (None, "graph") else "*")]
            cells += [ratio_text(figures["x_torch_device"]), ratio_text(figures["x_torch_eager_device"])]
            cells += [_mebibytes(one.peak_bytes), _mebibytes(one.held_bytes)]
        cells += ["-" if one.error is None else f"{one.error:.1e}", _time(one.first_seconds)]
        table.add_row(*cells, _short_note(one))
    return table


def _short_note(one: Variant) -> str:
    return one.note.partition(":")[0] if one.seconds is None else one.note


def _summary_table(summary: dict[str, dict[str, dict[str, Any]]]) -> Any:
    heads = {
        "x_torch": "x torch",
        "x_torch_eager": "x eager",
        "x_torch_device": "x torch, device",
        "x_torch_eager_device": "x eager, device",
    }
    shown = [figure for figure in heads if any(figure in figures for figures in summary.values())]
    table = new_table(
        "\nsummary: geometric mean, worst, and on how many models slower", "layers", *(heads[figure] for figure in shown)
    )
    for name, figures in summary.items():
        table.add_row(name, *(_summary_text(figures.get(figure)) for figure in shown))
    return table


def _summary_text(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return "-"
    return f"{ratio_text(entry['geometric_mean'])} {ratio_text(entry['worst'])} {entry['slower']:>2} of {entry['models']}"


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)


def _mebibytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:,.1f} MiB"
