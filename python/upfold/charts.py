"""Charts of the methods: bars for one layer, dots for several or for whole suites. Needs matplotlib, imported here alone."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .comparison import Comparison, Row, dtype_name
from .geometry import InvalidArgument
from .overview import Run, shown_methods

# Colour (told apart by colour-blind readers too) and marker of each method; upfold's are saturated, the peers grey or sand.
_STYLES = {
    "gemm": ("#0072B2", "o"),
    "gemm_atomic": ("#56B4E9", "v"),
    "direct": ("#D55E00", "s"),
    "depthwise": ("#CC79A7", "P"),
    "fused": ("#009E73", "D"),
    "torch": ("#333333", "X"),
    "torch channels_last": ("#8A8A8A", "x"),
    "torch native": ("#B5B5B5", "*"),
    "matmul + F.fold": ("#C8A24A", "^"),
}
_OTHER = ("#7A5195", "h")
INK = "#222222"
FAINT = "#DDDDDD"
LOSS = "#B00020"


def write_chart(comparisons: Sequence[Comparison], path: str | Path, title: str | None = None) -> Path:
    """Draw the time of each method: bars for one layer, a row of dots for each of several.

    Args:
        comparisons: the layers.
        path: where the picture goes; its suffix names the format.
        title: stands above; None writes one.

    Returns:
        The path written.
    """
    if len(comparisons) == 1:
        return saved(path, lambda pyplot: _bars(pyplot, comparisons[0], title))
    return saved(path, lambda pyplot: _dots(pyplot, comparisons, title))


def write_overview(runs: Sequence[Run], path: str | Path, methods: Sequence[str] = (), title: str | None = None) -> Path:
    """Draw whole suites: a row for each layer, a panel for each run, a mark for each method at its time in floors.

    Args:
        runs: over the same layers (`overview.read_runs`).
        path: where the picture goes; its suffix names the format.
        methods: which; none takes the usual ones.
        title: stands above; None writes one.

    Returns:
        The path written.

    Raises:
        InvalidArgument: the runs are not over the same layers.
    """
    first, *others = ([layer.name for layer in run.layers] for run in runs)
    if any(names != first for names in others):
        raise InvalidArgument("runs side by side must be over the same layers; name the suites or draw each by itself")
    shown = shown_methods(runs, methods)
    return saved(path, lambda pyplot: panels(pyplot, runs, shown, title), dpi=100)


def saved(path: str | Path, draw: Callable[[Any], Any], dpi: int = 144) -> Path:
    """Write the figure that `draw(pyplot)` makes, in the look of all charts, and return the path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _figure(draw) as figure:
        figure.savefig(path, dpi=dpi, bbox_inches="tight", pad_inches=0.2)
    return path


def as_svg(draw: Callable[[Any], Any]) -> str:
    """The figure that `draw(pyplot)` makes as an SVG element, to stand in a page; its text stays text."""
    buffer = io.StringIO()
    with _figure(draw) as figure:
        figure.savefig(buffer, format="svg", bbox_inches="tight", pad_inches=0.1, metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


@contextlib.contextmanager
def _figure(draw: Callable[[Any], Any]) -> Iterator[Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    look: Any = {
        "font.size": 10,
        "axes.edgecolor": INK,
        "text.color": INK,
        "figure.facecolor": "white",
        "svg.hashsalt": "upfold",
        "svg.fonttype": "none",
    }
    with pyplot.rc_context(look):
        figure = draw(pyplot)
        yield figure
        pyplot.close(figure)


def device_text(comparison: Comparison) -> str:
    """Name the device and the dtype, for titles."""
    import torch

    if comparison.device.type == "cuda":
        where = torch.cuda.get_device_name(comparison.device)
    else:
        threads = torch.get_num_threads()
        where = f"{comparison.device.type.upper()}, {threads} thread{'s' if threads > 1 else ''}"
    return f"{where}, {dtype_name(comparison.problem.dtype)}"


def format_seconds(seconds: float) -> str:
    """Three significant digits with the unit that fits: ``812 ns``, ``3.42 µs``, ``15.0 ms``, ``1.20 s``."""
    for limit, scale, unit in ((1e-6, 1e9, "ns"), (1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if seconds < limit:
            return f"{_three_digits(seconds * scale)} {unit}"
    return f"{_three_digits(seconds)} s"


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def style(method: str) -> tuple[str, str]:
    """Colour and marker of a method."""
    return _STYLES.get(method, _OTHER)


def _timed(comparison: Comparison) -> list[Row]:
    return [row for row in comparison.rows if row.seconds]


def _bars(pyplot: Any, comparison: Comparison, title: str | None) -> Any:
    rows = sorted(_timed(comparison), key=lambda row: row.seconds or 0.0)
    figure, axes = pyplot.subplots(figsize=(8, 1.5 + 0.5 * len(rows)))
    longest = max((row.seconds or 0.0 for row in rows), default=1.0)
    floor = comparison.floor_seconds
    axes.axvline(floor * 1e3, color=INK, linestyle=(0, (4, 3)), linewidth=1, zorder=3)
    for position, row in enumerate(rows):
        seconds = row.seconds or 0.0
        axes.barh(position, seconds * 1e3, height=0.62, color=style(row.method)[0], zorder=2)
        ratio = comparison.figures(row)["x_torch"]
        label = format_seconds(seconds)
        if ratio is not None and row is not comparison.torch_row:
            label += f"  ({format_ratio(ratio)} torch)"
        if row.ours and row.method == comparison.auto:
            label += "  \u2190 auto"
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}  # the floor's line may run through the label
        axes.text((seconds + 0.015 * longest) * 1e3, position, label, va="center", fontsize=9.5, bbox=behind, zorder=4)
    axes.text(floor * 1e3, -0.75, f" floor {format_seconds(floor)}", fontsize=8.5, va="center")
    axes.set_yticks(range(len(rows)), [f"upfold {row.method}" if row.ours else row.method for row in rows])
    axes.set_ylim(len(rows) - 0.45, -1.05)
    axes.set_xlim(0, max(longest, floor) * 1e3 * 1.42)
    axes.set_xlabel("time of one call, ms (shorter is better)")
    heading = f"{comparison.layer_text}, {comparison.size_text}\n{device_text(comparison)}"
    axes.set_title(title or heading, loc="left", fontsize=11)
    bare(axes)
    return figure


def _dots(pyplot: Any, comparisons: Sequence[Comparison], title: str | None) -> Any:
    from matplotlib.ticker import LogLocator, NullLocator

    figure, axes = pyplot.subplots(figsize=(10, 2.0 + 0.52 * len(comparisons)))
    marks: dict[str, Any] = {}
    for position, comparison in enumerate(comparisons):
        _draw_row(axes, position, comparison, marks)
    times = [row.seconds or 0.0 for comparison in comparisons for row in _timed(comparison)]
    times += [comparison.floor_seconds for comparison in comparisons]
    axes.set_xscale("log")
    axes.set_xlim(min(times) * 1e3 / 1.6, max(times) * 1e3 * 1.6)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_yticks(range(len(comparisons)), [f"{c.name}\n{c.size_text}" for c in comparisons], fontsize=8.5)
    axes.set_ylim(len(comparisons) - 0.4, -0.6)
    axes.set_xlabel("time of one call, ms, logarithmic (left is better)")
    heading = f"Transposed convolution, method by method: {device_text(comparisons[0])}"
    axes.set_title(title or heading, loc="left", fontsize=12)
    order = [method for method in dict.fromkeys((*_STYLES, *marks)) if method in marks]
    below = (0.5, -0.55 / (0.52 * len(comparisons) + 0.6))
    place = {"loc": "upper center", "bbox_to_anchor": below, "frameon": False, "fontsize": 9}
    axes.legend([marks[method] for method in order], order, ncol=len(order), **place)
    bare(axes)
    return figure


def _draw_row(axes: Any, position: int, comparison: Comparison, marks: dict[str, Any]) -> None:
    """Draw one layer: a dot for each method, a line from torch to what `auto` takes, and the ratio of the two at the right."""
    axes.axhline(position, color=FAINT, linewidth=0.8, zorder=0)
    auto, torch_row = comparison.auto_row, comparison.torch_row
    ratio = comparison.ratio(auto, torch_row)
    if ratio is not None and auto is not None and torch_row is not None:
        ends = [(row.seconds or 0.0) * 1e3 for row in (auto, torch_row)]
        axes.plot(ends, [position] * 2, color=style(auto.method)[0], linewidth=2.5, alpha=0.35, zorder=1)
        ink = LOSS if ratio < 1 else INK
        text = f"{comparison.auto} {format_ratio(ratio)} torch"
        axes.text(1.01, position, text, transform=axes.get_yaxis_transform(), va="center", fontsize=9, color=ink)
    for row in _timed(comparison):
        color, marker = style(row.method)
        look = {"s": 62, "color": color, "marker": marker, "linewidths": 1.6, "zorder": 3}
        marks.setdefault(row.method, axes.scatter((row.seconds or 0.0) * 1e3, position, **look))
    marks.setdefault("floor", axes.scatter(comparison.floor_seconds * 1e3, position, s=130, color=INK, marker="|", zorder=2))


def panels(pyplot: Any, runs: Sequence[Run], methods: Sequence[str], title: str | None) -> Any:
    """A panel for each run, side by side, on one logarithmic axis of times over the floor."""
    layers = runs[0].layers
    height = 0.25 * len(layers) + 0.8
    width = max(9.0, 5.4 * len(runs) + 0.6)
    figure, grid = pyplot.subplots(1, len(runs), figsize=(width, height), sharey=True, squeeze=False)
    figure.subplots_adjust(wspace=0.2)
    times = [layer.times[name] / layer.floor for run in runs for layer in run.layers for name in methods if name in layer.times]
    marks: dict[str, Any] = {}
    for axes, run in zip(grid[0], runs):
        _draw_panel(axes, run, methods, marks)
        axes.set_xlim(min([1.0, *times]) / 1.15, max([2.0, *times]) * 1.15)
        axes.set_title(f"{run.kind}", loc="left", fontsize=10.5)
    labels = [f"{layer.name}   {layer.size}" for layer in layers]
    grid[0][0].set_yticks(range(len(layers)), labels, fontsize=8)
    grid[0][0].set_ylim(len(layers) - 0.4, -0.6)
    inch = 1.0 / height
    order = [name for name in methods if name in marks] + ["taken by auto"]
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, grid[0][0].get_position().y0 - 0.5 * inch)}
    figure.legend([marks[name] for name in order], order, ncol=len(order), frameon=False, fontsize=9, **place)
    heading = f"Time over the floor of each layer, logarithmic (left is better): {runs[0].device}" if title is None else title
    if heading:
        figure.suptitle(heading, x=0.02, y=grid[0][0].get_position().y1 + 0.5 * inch, ha="left", fontsize=12)
    return figure


def _draw_panel(axes: Any, run: Run, methods: Sequence[str], marks: dict[str, Any]) -> None:
    """Draw one run: marks by method, a ring round what `auto` takes, and the ratio to torch at the right."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.axvline(1.0, color=INK, linestyle=(0, (4, 3)), linewidth=1, zorder=1)
    for position, layer in enumerate(run.layers):
        axes.axhline(position, color=FAINT, linewidth=0.7, zorder=0)
        if position and layer.suite != run.layers[position - 1].suite:
            axes.axhline(position - 0.5, color=INK, linewidth=0.8, zorder=0)
        for name in methods:
            if name in layer.times:
                color, marker = style(name)
                look = {"s": 30, "color": color, "marker": marker, "linewidths": 1.3, "zorder": 3}
                marks.setdefault(name, axes.scatter(layer.times[name] / layer.floor, position, **look))
        if layer.auto in layer.times:
            ring = {"s": 100, "facecolors": "none", "edgecolors": INK, "linewidths": 0.9, "zorder": 4}
            marks.setdefault("taken by auto", axes.scatter(layer.times[layer.auto] / layer.floor, position, **ring))
        if layer.ratio is not None:
            ink = LOSS if layer.ratio < 1 else INK
            place = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 8, "color": ink}
            axes.text(1.01, position, f"{format_ratio(layer.ratio)}", **place)
    axes.text(1.01, -1.0, "x torch", transform=axes.get_yaxis_transform(), va="center", fontsize=8)
    axes.set_xlabel("times the floor")
    bare(axes)


def format_ratio(value: float) -> str:
    """``1.52x``, and ``12.3x`` above ten."""
    return f"{value:.1f}x" if value >= 9.95 else f"{value:.2f}x"


def bare(axes: Any) -> None:
    """Take the frame away and draw a faint grid."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=FAINT, linewidth=0.6, zorder=-1)
    axes.set_axisbelow(True)
