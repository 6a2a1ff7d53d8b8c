"""The chart of a scan: where the model's time goes, each layer by torch and by upfold, and the whole model. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .charts import FAINT, INK, LOSS, bare, format_ratio, format_seconds, saved, style
from .report import LayerRow, Report

_OURS = "#0072B2"
_FUSED = "#009E73"
_REST = "#E4E4E4"


def write_scan_chart(report: Report, path: str | Path, title: str = "") -> Path:
    """Draw what `scan` measured.

    Args:
        report: of `scan` with inputs.
        path: where the picture goes; its suffix names the format.
        title: the model's name.

    Returns:
        The path written.
    """
    return saved(path, lambda pyplot: _draw(pyplot, report, title))


def _draw(pyplot: Any, report: Report, title: str) -> Any:
    layers = [row for row in report.rows if row.seconds is not None]
    heights = [0.9, max(0.4, 0.62 * len(layers)), 1.5]  # inches, as what lies between and above is
    between, above = 1.15, 1.2
    height = sum(heights) + 2 * between + above + 0.6
    figure, (share, bars, whole) = pyplot.subplots(3, 1, figsize=(10, height), gridspec_kw={"height_ratios": heights})
    figure.subplots_adjust(top=1 - above / height, bottom=0.6 / height, hspace=between / (sum(heights) / 3))
    _draw_share(share, report, layers)
    _draw_layers(bars, layers)
    _draw_whole(whole, report)
    figure.suptitle(f"{title}\n{report.summary()}".strip(), x=0.02, y=1 - 0.1 / height, ha="left", va="top", fontsize=11.5)
    return figure


def _draw_share(axes: Any, report: Report, layers: list[LayerRow]) -> None:
    """One bar for a run of the model, cut into its layers and the rest."""
    left = 0.0
    for position, row in enumerate(layers):
        part = row.share or 0.0
        shade = 1 - 0.45 * position / max(1, len(layers) - 1)
        axes.barh(0, part, left=left, color=_OURS, alpha=shade, edgecolor="white", linewidth=1)
        last = row.name.rpartition(".")[2]
        name = row.name if last.isdigit() else last
        if part > 0.04:
            text = f"{name}\n{part:.0%}" if part > 0.011 * len(name) else f"{part:.0%}"  # as wide as the part, about
            axes.text(left + part / 2, 0, text, ha="center", va="center", fontsize=8, color="white")
        left += part
    axes.barh(0, max(0.0, 1 - left), left=left, color=_REST)
    if left < 0.94:
        axes.text((1 + left) / 2, 0, f"everything else {1 - left:.0%}", ha="center", va="center", fontsize=8.5)
    axes.set_xlim(0, max(1.0, left))
    axes.set_yticks([])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_title(f"Where one run of the model goes: {format_seconds(report.seconds or 0.0)}", loc="left", fontsize=10)
    bare(axes)


def _draw_layers(axes: Any, layers: list[LayerRow]) -> None:
    """A pair of bars for each layer: torch's operator and upfold's, with the ratio and the algorithm."""
    axes.set_title("Each layer" if layers else "Each layer: none ran", loc="left", fontsize=10)
    if not layers:
        axes.set_axis_off()
        return
    known = [row for row in layers if row.torch_seconds and row.upfold_seconds]
    longest = max((max(row.torch_seconds or 0.0, row.upfold_seconds or 0.0) for row in known), default=1.0)
    for position, row in enumerate(layers):
        if row.ratio is None:
            axes.text(0, position, f"  not measured: {row.why or row.reason or ''}", va="center", fontsize=8.5)
            continue
        theirs, ours = row.torch_seconds or 0.0, row.upfold_seconds or 0.0
        axes.barh(position - 0.19, theirs * 1e3, height=0.34, color=style("torch")[0])
        axes.barh(position + 0.19, ours * 1e3, height=0.34, color=style(row.algorithm or "")[0] if row.algorithm else _OURS)
        axes.text((theirs + 0.01 * longest) * 1e3, position - 0.19, format_seconds(theirs), va="center", fontsize=8.5)
        text = f"{format_seconds(ours)}  {row.algorithm or 'upfold'}, {format_ratio(row.ratio)} torch"
        axes.text(
            (ours + 0.01 * longest) * 1e3, position + 0.19, text, va="center", fontsize=8.5, color=LOSS if row.ratio < 1 else INK
        )
    labels = [
        f"{row.name or '(the model)'}\n{'x'.join(map(str, row.input_shapes[0])) if row.input_shapes else ''}" for row in layers
    ]
    axes.set_yticks(range(len(layers)), labels, fontsize=8)
    axes.set_ylim(len(layers) - 0.4, -0.6)
    axes.set_xlim(0, longest * 1e3 * 1.35)
    axes.set_xlabel("time of the layer's calls in one run, ms: torch above, upfold below", fontsize=9)
    bare(axes)


def _draw_whole(axes: Any, report: Report) -> None:
    """Bars for the whole model: torch's layers, upfold's, fused."""
    whole = report.whole
    axes.set_title("The whole model, end to end", loc="left", fontsize=10)
    if whole is None or whole.torch_seconds is None:
        axes.text(0, 0.5, f"not measured: {whole.reason if whole else ''}", fontsize=9, transform=axes.transAxes)
        axes.set_axis_off()
        return
    ways = [("torch's layers", whole.torch_seconds, style("torch")[0]), ("replaced", whole.upfold_seconds, _OURS)]
    if whole.fused_seconds is not None:
        ways.append((f"fused ({whole.operations} operations)", whole.fused_seconds, _FUSED))
    longest = max(seconds or 0.0 for _, seconds, _ in ways)
    for position, (_, seconds, color) in enumerate(ways):
        seconds = seconds or 0.0
        ratio = whole.torch_seconds / seconds
        axes.barh(position, seconds * 1e3, height=0.62, color=color)
        text = format_seconds(seconds) + ("" if position == 0 else f"  ({format_ratio(ratio)} torch)")
        axes.text((seconds + 0.01 * longest) * 1e3, position, text, va="center", fontsize=9, color=LOSS if ratio < 1 else INK)
    axes.set_yticks(range(len(ways)), [name for name, _, _ in ways], fontsize=9)
    axes.set_ylim(len(ways) - 0.4, -0.6)
    axes.set_xlim(0, longest * 1e3 * 1.25)
    axes.set_xlabel("time of one run, ms (shorter is better)", fontsize=9)
    axes.tick_params(colors=INK)
    axes.spines["bottom"].set_color(FAINT)
    bare(axes)
