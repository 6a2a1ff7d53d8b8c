"""The charts of the comparison page: the roofline, the gain on each layer, and how often each method leads. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .charts import FAINT, INK, LOSS, bare, format_ratio, style
from .overview import Layer, Run
from .timing import geometric_mean

_GAIN = "#0072B2"


def roofline(pyplot: Any, run: Run) -> Any:
    """FLOP/s that `auto` and torch reach over the FLOPs for each byte, under what memory and matrix products allow."""
    figure, axes = pyplot.subplots(figsize=(10, 5.2))
    layers = [layer for layer in run.layers if layer.flops and layer.bytes]
    densities = [layer.flops / layer.bytes for layer in layers]
    low, high = min(densities, default=1.0) / 2, max(densities, default=100.0) * 2
    ridge = run.flops_per_second / run.bytes_per_second if run.bytes_per_second else high
    roof = sorted({low, min(max(ridge, low), high), high})
    axes.plot(roof, [min(run.flops_per_second, run.bytes_per_second * x) / 1e12 for x in roof], color=INK, linewidth=1.4)
    for layer, density in zip(layers, densities):
        ours, theirs = (layer.times.get(name) for name in (layer.auto, layer.peer))
        reached = [layer.flops / seconds / 1e12 for seconds in (ours, theirs) if seconds]
        if len(reached) == 2:
            axes.plot([density] * 2, reached, color=FAINT if reached[0] > reached[1] else LOSS, linewidth=1.2, zorder=1)
        for name, seconds in ((layer.peer, theirs), (layer.auto, ours)):
            if seconds:
                color, marker = style(name)
                look = {"s": 42, "color": color, "marker": marker, "linewidths": 1.4, "zorder": 3}
                axes.scatter(density, layer.flops / seconds / 1e12, **look)
    names = list(dict.fromkeys(name for layer in layers for name in (layer.auto, layer.peer) if name in layer.times))
    marks = [axes.scatter([], [], color=style(name)[0], marker=style(name)[1]) for name in names]
    labels = [name if name.startswith("torch") else f"upfold {name}" for name in names]
    axes.legend(marks, labels, frameon=False, fontsize=9, loc="lower right")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_xlabel("FLOPs for each byte of x, w and y", fontsize=9)
    axes.set_ylabel("TFLOP/s", fontsize=9)
    axes.text(
        high,
        run.flops_per_second / 1e12 * 1.12,
        f"matrix products {run.flops_per_second / 1e12:.3g} TFLOP/s",
        ha="right",
        fontsize=8.5,
    )
    axes.text(
        low * 1.1,
        run.bytes_per_second * low * 1.6 / 1e12,
        f"memory {run.bytes_per_second / 1e12:.3g} TB/s",
        fontsize=8.5,
        rotation=28,
    )
    bare(axes)
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    return figure


def gains(pyplot: Any, run: Run) -> Any:
    """A bar for each layer, largest first: torch's time over that of `auto`; a tick where the fastest peer stands."""
    from matplotlib.ticker import NullLocator

    layers = sorted((layer for layer in run.layers if layer.ratio is not None), key=lambda layer: layer.ratio or 0.0)
    figure, axes = pyplot.subplots(figsize=(10, 0.9 + 0.2 * len(layers)))
    for position, layer in enumerate(layers):
        ratio = layer.ratio or 1.0
        color = _GAIN if ratio >= 1 else LOSS
        axes.barh(position, ratio - 1, left=1, height=0.68, color=color)
        axes.text(ratio * 1.03 if ratio >= 1 else 1.03, position, f"{format_ratio(ratio)}  {layer.auto}", va="center", fontsize=8)
        best = layer.best_peer
        if best is not None and best != layer.peer:
            axes.plot(
                [layer.times[best] / layer.times[layer.auto]] * 2, [position - 0.42, position + 0.42], color=INK, linewidth=1.8
            )
    ratios = [layer.ratio or 1.0 for layer in layers] or [1.0]
    best_ratios = [layer.times[layer.best_peer] / layer.times[layer.auto] for layer in layers if layer.best_peer]
    axes.axvline(1, color=INK, linewidth=1)
    axes.set_xscale("log")
    axes.set_xlim(min(0.7, *ratios, *best_ratios) / 1.1, max(2.0, *ratios) * 1.7)
    ticks = [
        tick for tick in (0.25, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 20, 50) if axes.get_xlim()[0] <= tick <= axes.get_xlim()[1]
    ]
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks], fontsize=8.5)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks(range(len(layers)), [f"{layer.name}   {layer.size}" for layer in layers], fontsize=7.5)
    axes.set_ylim(-0.7, len(layers) - 0.3)
    axes.set_xlabel("times as fast as torch in the same layout, logarithmic; black tick: against the fastest peer", fontsize=9)
    bare(axes)
    return figure


def leads(pyplot: Any, run: Run, methods: Sequence[str]) -> Any:
    """For each method: on how many layers it is the fastest shown, and its time over the fastest's in geometric mean."""
    from matplotlib.ticker import MaxNLocator

    figure, (count, lag) = pyplot.subplots(1, 2, figsize=(10, 0.9 + 0.34 * len(methods)), sharey=True)
    for position, method in enumerate(methods):
        took = [layer for layer in run.layers if method in layer.times]
        first = sum(_fastest(layer, methods) == method for layer in took)
        behind = geometric_mean([layer.times[method] / layer.times[_fastest(layer, methods)] for layer in took])
        color = style(method)[0]
        count.barh(position, first, height=0.66, color=color)
        count.text(first + 0.2, position, f"{first} of {len(took)}", va="center", fontsize=8.5)
        lag.barh(position, behind - 1 if took else 0.0, left=1, height=0.66, color=color)
        lag.text(max(behind, 1.0) * 1.02 if took else 1.0, position, f"{behind:.2f}" if took else "-", va="center", fontsize=8.5)
    names = [method if method.startswith("torch") else f"upfold {method}" for method in methods]
    count.set_yticks(range(len(methods)), names, fontsize=9)
    count.set_ylim(len(methods) - 0.4, -0.6)
    count.xaxis.set_major_locator(MaxNLocator(integer=True))
    count.set_xlabel("layers on which it is the fastest, of those that it takes", fontsize=9)
    lag.set_xlabel("its time over the fastest's, geometric mean of those", fontsize=9)
    lag.set_xlim(1, lag.get_xlim()[1] * 1.1)
    for axes in (count, lag):
        bare(axes)
    return figure


def _fastest(layer: Layer, methods: Sequence[str]) -> str:
    return min((name for name in methods if name in layer.times), key=layer.times.__getitem__)
