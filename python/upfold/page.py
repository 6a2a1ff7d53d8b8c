"""The comparison page: the tables and charts of a run of the bench in one HTML file that needs nothing else. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from . import charts, page_charts
from .charts import format_seconds
from .geometry import InvalidArgument
from .markup import escaped, pictures, repeat, tiles
from .models.page import models_section
from .overview import Layer, Run, run_of, shown_methods
from .timing import geometric_mean

_STYLE = """
:root { color-scheme: light; --ink: #1d232a; --faint: #e3e6ea; --blue: #0072b2; --loss: #b00020; --soft: #f6f8fa; }
* { box-sizing: border-box; }
body { margin: 0; font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; color: var(--ink); background: #fff; }
header { background: linear-gradient(120deg, #0b3d61, #0072b2); color: #fff; padding: 28px 0 24px; }
main, header > div { max-width: 1120px; margin: 0 auto; padding: 0 24px; }
h1 { margin: 0; font-size: 26px; } header p { margin: 6px 0 0; opacity: .85; }
nav { margin-top: 14px; } nav a { color: #fff; margin-right: 18px; display: inline-block; }
h2 { margin: 44px 0 4px; font-size: 21px; border-bottom: 2px solid var(--faint); padding-bottom: 6px; }
h3 { margin: 30px 0 2px; font-size: 16px; } .note { color: #59636e; margin: 2px 0 10px; font-size: 13.5px; }
.tiles { display: flex; flex-wrap: wrap; gap: 14px; margin: 18px 0; }
.tile { flex: 1 1 190px; background: var(--soft); border: 1px solid var(--faint); border-radius: 10px; padding: 12px 16px; }
.tile b { display: block; font-size: 27px; line-height: 1.25; color: var(--blue); } .tile.bad b { color: var(--loss); }
.tile span { font-size: 13px; color: #59636e; }
figure { margin: 8px 0; overflow-x: auto; } figure svg { width: 100%; height: auto; min-width: 640px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 8px; text-align: right; border-bottom: 1px solid var(--faint); white-space: nowrap; }
th { background: var(--soft); position: sticky; top: 0; white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
td.words { text-align: left; color: #59636e; } table.models td.loss:last-child { white-space: normal; text-align: left; }
td.best { font-weight: 700; } td.auto { background: #e4f1fa; } td.loss { color: var(--loss); font-weight: 600; }
tr:hover td { background: #fafbfc; } .suite td { background: var(--soft); font-weight: 600; text-align: left; }
details { margin: 12px 0; } summary { cursor: pointer; }
pre { background: var(--soft); padding: 12px; overflow-x: auto; font-size: 12px; }
footer { color: #59636e; font-size: 13px; margin: 40px 0; }
"""


def write_page(facts: dict[str, Any], folder: str | Path, title: str = "Transposed convolution, method by method") -> Path:
    """Write the page of one run, or of several by name.

    Args:
        facts: what ``upfold bench --json`` writes, or a dictionary of such runs.
        folder: where ``index.html`` goes.
        title: the page's heading.

    Returns:
        The path written.

    Raises:
        InvalidArgument: no run has a suite of layers or whole models.
    """
    several = {name: run for name, run in facts.items() if isinstance(run, dict) and _has_figures(run)}
    runs = {"run": facts} if _has_figures(facts) else several
    if not runs:
        raise InvalidArgument("there are no suites of layers or models to show; they come from upfold bench --json")
    first = next(iter(runs.values()))
    sections = "".join(_section(name, run) for name, run in runs.items())
    links = "".join(f'<a href="#{escaped(name)}">{escaped(_kind(run))}</a>' for name, run in runs.items())
    text = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escaped(title)}</title><style>{_STYLE}</style></head>\n<body><header><div><h1>{escaped(title)}</h1>"
        f"<p>{escaped(first['device'])}, {escaped(_versions(first))}, {escaped(first.get('time', '')[:10])}</p>"
        f"<nav>{links}</nav></div></header>\n<main>{sections}{_footer()}</main></body></html>\n"
    )
    path = Path(folder) / "index.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _has_figures(run: dict[str, Any]) -> bool:
    return bool(run.get("suites") or run.get("models"))


def _kind(facts: dict[str, Any]) -> str:
    parts = [facts["dtype"], facts.get("precision"), "" if facts.get("layout") in (None, "contiguous") else facts["layout"]]
    modes = sorted({row["mode"] for rows in facts["suites"].values() for row in rows} - {"forward"})
    models = "" if facts["suites"] or not facts.get("models") else "whole models"
    return " ".join(filter(None, (*parts, ", ".join(modes), models)))


def _versions(facts: dict[str, Any]) -> str:
    machine = facts.get("machine", {})
    known = [(name, machine.get(name)) for name in ("upfold", "torch")]
    return ", ".join(f"{name} {value}" for name, value in known if isinstance(value, str)) or "versions not noted"


def _section(name: str, facts: dict[str, Any]) -> str:
    parts = [_layers(facts)] if facts["suites"] else []
    parts += [models_section(facts)] if facts.get("models") else []
    shown = "".join(parts)
    return f'<section id="{escaped(name)}"><h2>{escaped(_kind(facts))}</h2>{shown}{_failures(facts)}</section>'


def _layers(facts: dict[str, Any]) -> str:
    run = run_of(facts)
    methods = shown_methods([run])
    shown = [
        (
            "Gain on each layer",
            "Torch's time over upfold's, in the layout that the layer was given. Bars to the left of 1x are losses.",
            charts.as_svg(lambda pyplot: page_charts.gains(pyplot, run)),
        ),
        (
            "Roofline",
            "What upfold's own choice and torch reach under the ceilings of the device; a line joins the two of one layer, "
            "red where torch is ahead.",
            charts.as_svg(lambda pyplot: page_charts.roofline(pyplot, run)) if run.flops_per_second else "",
        ),
        (
            "GEMM against direct against fused against torch",
            "Which method leads, and how far each lies behind the fastest where it does not.",
            charts.as_svg(lambda pyplot: page_charts.leads(pyplot, run, methods)),
        ),
        (
            "Every method on every layer",
            "Time over the floor: the larger of the layer's bytes over the memory rate and its products over the rate of matrix "
            "products. A ring marks what upfold takes by itself.",
            charts.as_svg(lambda pyplot: charts.panels(pyplot, [run], methods, "")),
        ),
    ]
    return (
        f"{_tiles(run)}{pictures(shown)}<h3>Times</h3>"
        f'<p class="note">Microseconds of one call; bold is the fastest shown, blue what upfold takes by itself.</p>'
        f"{_table(run, methods)}{repeat('layer', (layer.repro for layer in run.layers))}"
    )


def _tiles(run: Run) -> str:
    against_torch = [layer.ratio for layer in run.layers if layer.ratio is not None]
    timed = [layer for layer in run.layers if layer.best_peer and layer.ratio is not None]
    against_best = [layer.times[layer.best_peer or ""] / layer.times[layer.auto] for layer in timed]
    over_floor = [layer.times[layer.auto] / layer.floor for layer in timed]
    slower = sum(ratio < 1 for ratio in against_torch)
    entries = [
        (
            f"{geometric_mean(against_torch):.2f}x",
            f"torch in the same layout, geometric mean of {len(against_torch)} layers",
            False,
        ),
        (f"{geometric_mean(against_best):.2f}x", "the fastest peer of each layer, whichever it is", False),
        (f"{geometric_mean(over_floor):.2f}", "times the floor of the hardware", False),
        (str(slower), f"of {len(against_torch)} layers slower than torch in the same layout", slower > 0),
    ]
    return tiles(entries)


def _table(run: Run, methods: Sequence[str]) -> str:
    heads = "".join(f"<th>{escaped(name)}</th>" for name in ("layer", "size", "floor", *methods, "x torch", "x best peer"))
    rows = []
    suite = None
    for layer in run.layers:
        if layer.suite != suite:
            suite = layer.suite
            rows.append(f'<tr class="suite"><td colspan="{len(methods) + 5}">{escaped(suite)}</td></tr>')
        rows.append(f"<tr>{''.join(_cells(layer, methods))}</tr>")
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _cells(layer: Layer, methods: Sequence[str]) -> Iterable[str]:
    yield f"<td>{escaped(layer.name)}</td><td>{escaped(layer.size)}</td><td>{layer.floor * 1e6:.1f}</td>"
    fastest = min((layer.times[name] for name in methods if name in layer.times), default=None)
    for name in methods:
        seconds = layer.times.get(name)
        if seconds is None:
            yield "<td>-</td>"
            continue
        look = " ".join(filter(None, ("best" if seconds == fastest else "", "auto" if name == layer.auto else "")))
        yield f'<td class="{look}" title="{escaped(format_seconds(seconds))}">{seconds * 1e6:.1f}</td>'
    best = layer.best_peer
    for ratio in (layer.ratio, layer.times[best] / layer.times[layer.auto] if best and layer.ratio is not None else None):
        yield "<td>-</td>" if ratio is None else f'<td class="{"loss" if ratio < 1 else ""}">{ratio:.2f}</td>'


def _failures(facts: dict[str, Any]) -> str:
    items = "".join(f"<li>{escaped(line)}</li>" for line in facts.get("failures", ()))
    return f'<h3>What broke or was wrong</h3><ul class="loss">{items}</ul>' if items else ""


def _footer() -> str:
    return (
        "<footer>Every result was checked against a float64 reference before it was timed. Medians after a warm-up; on a GPU by "
        "CUDA-graph replay with operands outside the cache. * means that the layer was cut down to run sooner.</footer>"
    )
