"""Tables of comparisons for a terminal. Needs rich, imported here alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .charts import device_text, format_seconds
from .comparison import Comparison, Row
from .methods import AUTO, MATMUL_FOLD, TORCH
from .modes import STEP
from .summary import BEST, FLOOR, PEERS, summarize

# From here on every column is shown.
_PLAIN_WIDTH = 144
# Of a file: wide enough for a column for each config. A terminal's own width is used where there is one.
_FILE_WIDTH = 240
_MEDIUM_WIDTH = 100
_SHORT_HEADS = {"torch channels_last": "torch c_last", MATMUL_FOLD: "mm+fold", "torch native": "native", BEST: "best"}
LEGEND = (
    "torch c_last: torch with channels_last tensors; mm+fold: torch.matmul, then F.fold. auto: what upfold takes by itself.\n"
    "x floor, x torch, x best: the time of auto against what memory and arithmetic allow, against torch in the same layout,\n"
    "and against the fastest of torch's ways (red: slower). warm: x torch with one data set that stays in a GPU's cache, for\n"
    "layers that fit it. error: the largest of upfold's methods, max |y - y64| / conv_transpose(|x|, |w|), red above the bound;\n"
    "of a step, in which auto is a time, the largest of its result and gradients in times of their bounds."
)
_LOSS = "red"
_WIN = "green"


def make_console() -> Any:
    """A rich console that does not squeeze tables when its output goes to a file."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_FILE_WIDTH)


def ratio_text(ratio: float | None) -> str:
    """A ratio as ``2.31x``, losses in red; ``-`` where there is none."""
    if ratio is None:
        return "-"
    text = f"{ratio:.1f}x" if ratio >= 9.95 else f"{ratio:.2f}x"
    return f"[{_LOSS}]{text}[/]" if ratio < 1 else f"[{_WIN}]{text}[/]"


def error_text(row: Row | None) -> str:
    """The largest error of a row, in red where it is above the bound."""
    if row is None or row.error is None:
        return "-"
    return f"{row.error:.1e}" if row.correct else f"[{_LOSS}]{row.error:.1e}[/]"


def seconds_text(row: Row | None) -> str:
    """The time of a row, or ``-``."""
    return "-" if row is None or not row.seconds else format_seconds(row.seconds)


def new_table(title: str, *columns: str, left: Iterable[str] = ()) -> Any:
    """A table in the one style of this package; columns are set to the right but for the first and those in `left`."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for position, column in enumerate(columns):
        words = position == 0 or column in left
        # Figures are never cut; of the words only notes may take several lines.
        table.add_column(column, justify="left" if words else "right", no_wrap=column != "")
    return table


def floor_text(comparison: Comparison) -> str:
    """Say what the floor is made of."""
    c = comparison.ceilings
    moved, computed = comparison.moved_bytes / c.bytes_per_second, comparison.flops / c.flops_per_second
    limit = "memory" if moved > computed else "arithmetic"
    fixed = "" if c.source == "measured" else f" (fixed for the {c.source})"
    return (
        f"floor {format_seconds(comparison.floor_seconds)} by {limit}; ceilings{fixed}: "
        f"matmul {c.flops_per_second / 1e9:,.0f} GFLOP/s, elementwise {c.bytes_per_second / 1e9:,.0f} GB/s"
    )


def comparison_table(comparison: Comparison) -> Any:
    """A row for each method: time, GFLOP/s, GB/s, times the floor, times torch, error, and what is to be said."""
    title = f"{comparison.name}: {comparison.layer_text}, {comparison.size_text}, {comparison.layout}; {device_text(comparison)}"
    warm = ["warm"] if any(row.warm_seconds for row in comparison.rows) else []
    scratch = ["scratch"] if any(row.extra_bytes is not None and not row.ours for row in comparison.rows) else []
    heads = ["time", *warm, *scratch, "GFLOP/s", "GB/s", "x floor", "x torch", "largest error", ""]
    table = new_table(title, "method", *heads, left=("",))
    fastest = min((row.seconds for row in comparison.rows if row.seconds), default=None)
    for row in comparison.rows:
        figures = comparison.figures(row)
        gflops, gbytes, x_floor = figures["gflops"], figures["gbytes_per_second"], figures["x_floor"]
        name = f"upfold {row.method}" if row.ours else row.method
        marks = [text for text in ("<- auto" if row.ours and row.method == comparison.auto else "", row.note) if text]
        table.add_row(
            f"[bold]{name}[/]" if row.seconds is not None and row.seconds == fastest else name,
            seconds_text(row),
            *([] if not warm else ["-" if not row.warm_seconds else format_seconds(row.warm_seconds)]),
            *([] if not scratch else ["-" if row.extra_bytes is None else f"{row.extra_bytes / 2**20:.1f} MiB"]),
            "-" if gflops is None else f"{gflops:,.1f}",
            "-" if gbytes is None else f"{gbytes:,.1f}",
            "-" if x_floor is None else f"{x_floor:.2f}x",
            ratio_text(figures["x_torch"]) if row is not comparison.torch_row else "1.00x" if row.seconds else "-",
            error_text(row),
            "; ".join(marks).replace("[", "\\["),
        )
    return table


def print_comparison(console: Any, comparison: Comparison) -> None:
    """Print the table of one layer with its legend and its repro line."""
    console.print(comparison_table(comparison))
    console.print(floor_text(comparison), style="dim")
    error = f"max |y - y64| / conv_transpose(|x|, |w|), correct up to {comparison.bound:.1e}"
    if comparison.mode == STEP:
        error = "of the result and each gradient, in times of what is allowed there, correct up to 1"
    console.print(
        f"x torch: how many times faster than torch in the same layout (red: slower). Largest error: {error}.", style="dim"
    )
    console.print(f"repro: {comparison.repro}", style="dim", soft_wrap=True)


def progress_bar(console: Any) -> Any:
    """A progress display of one line, gone when its work is done."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    return Progress(*columns, console=console, transient=True)


def suite_table(title: str, comparisons: Sequence[Comparison], width: int = _PLAIN_WIDTH) -> Any:
    """A row for each layer with the time of each method and what `auto` took; a narrow console gets fewer columns.

    A size with ``*`` was cut down.
    """
    ours = list(dict.fromkeys(row.method for c in comparisons for row in c.rows if row.ours and row.method != AUTO))
    peers = list(dict.fromkeys(row.method for c in comparisons for row in c.rows if not row.ours))
    if width < _PLAIN_WIDTH:
        peers = [method for method in peers if method == "torch"]
    heads = [_SHORT_HEADS.get(method, method) for method in peers]
    ends = ("x floor", "x torch", "x best", "error") if width >= _PLAIN_WIDTH else ("x torch", "x best")
    if width >= _PLAIN_WIDTH and any(row.warm_seconds for c in comparisons for row in c.rows):
        ends = (*ends[:3], "warm", "error")
    middle = () if width < _MEDIUM_WIDTH else ("size",)
    table = new_table(title, "layer", *middle, *heads, *ours, "auto", *ends, left=("size", "auto"))
    for comparison in comparisons:
        auto = comparison.auto_row
        figures = comparison.figures(auto) if auto is not None else {}
        x_floor = figures.get("x_floor")
        worst = max((r for r in comparison.rows if r.ours and r.error is not None), key=lambda r: r.error or 0.0, default=None)
        cells = {
            "size": short_size(comparison),
            "x floor": "-" if x_floor is None else f"{x_floor:.1f}x",
            "x torch": ratio_text(figures.get("x_torch")),
            "x best": ratio_text(figures.get("x_best_peer")),
            "warm": ratio_text(figures.get("x_torch_warm")),
            "error": error_text(worst),
        }
        table.add_row(
            comparison.name,
            *(cells[column] for column in middle),
            *(seconds_text(comparison.row(method)) for method in peers),
            *(_highlight(comparison, method) for method in ours),
            _highlight(comparison, AUTO) if comparison.auto == AUTO else comparison.auto,
            *(cells[column] for column in ends),
        )
    return table


def short_size(comparison: Comparison) -> str:
    """Batch and size that ran, with a ``*`` where they were cut down."""
    size, cut, _ = comparison.size_text.partition(" (cut from ")
    return size + ("*" if cut else "")


def _highlight(comparison: Comparison, method: str) -> str:
    row = comparison.row(method)
    if row is not None and row.failed:
        return f"[{_LOSS}]{row.note.partition(':')[0]}[/]"
    text = seconds_text(row)
    return f"[bold]{text}[/]" if method == comparison.auto else text


def summary_table(name: str, comparisons: Sequence[Comparison], width: int = _PLAIN_WIDTH) -> Any:
    """A row for each of upfold's methods and for `auto`: mean, worst case and losses against each peer, and in floors."""
    found = summarize(comparisons)
    heads = [head for head in (*PEERS, FLOOR) if any(head in entries for entries in found.values())]
    if width < _PLAIN_WIDTH:
        heads = [head for head in heads if head in (TORCH, BEST, FLOOR)]
    title = f"summary of {name}, {len(comparisons)} layers: geometric mean, worst, and on how many slower"
    table = new_table(title, "method", *("x " + _SHORT_HEADS.get(head, head) for head in heads))
    for method, entries in found.items():
        table.add_row(method, *(_summary_text(entries.get(head)) for head in heads))
    return table


def _summary_text(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return "-"
    mean, worst = entry["geometric_mean"], entry["worst"]
    if "slower" not in entry:  # times the floor
        return f"{mean:.2f}x {worst:.2f}x"
    return f"{ratio_text(mean)} {ratio_text(worst)} {entry['slower']:>2}"
