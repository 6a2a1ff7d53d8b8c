"""The bench: suites of layers, fold and unfold, and the host's time, each checked before it is timed, none asserted."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import cases, functional, info
from . import nn as layers
from .charts import format_seconds
from .compare import Comparison, compare_case, dtype_name
from .floor import ceilings
from .tables import LEGEND, new_table, progress_bar, ratio_text, suite_table, summary_lines
from .timing import data_sets, geometric_mean, host_medians, medians

CASE_SUITES = ("smoke", "edge", "seeds", "decoders", "irregular")
SUITES = (*CASE_SUITES, "fold", "host")
# Of a results file; raised when a key changes its meaning.
SCHEMA = 1
# What a CPU gets through in reasonable time; a GPU runs every case whole.
CPU_MAX_GFLOP = 0.5


@dataclass(frozen=True)
class FoldCase:
    """One call of fold or unfold: the image's batch, channels and size, and the window."""

    batch: int
    channels: int
    size: tuple[int, int]
    kernel_size: int
    stride: int
    padding: int

    @property
    def name(self) -> str:
        """As ``n4 c64 128x128 k3 s1 p1``."""
        size = "x".join(map(str, self.size))
        return f"n{self.batch} c{self.channels} {size} k{self.kernel_size} s{self.stride} p{self.padding}"

    @property
    def columns_shape(self) -> tuple[int, int, int]:
        """Shape of the column matrix, (batch, channels * kernel taps, positions)."""
        positions = 1
        for edge in self.size:
            positions *= (edge + 2 * self.padding - self.kernel_size) // self.stride + 1
        return self.batch, self.channels * self.kernel_size**2, positions


_FOLD_CPU = (
    FoldCase(4, 64, (128, 128), 3, 1, 1),
    FoldCase(1, 64, (256, 256), 4, 2, 1),
    FoldCase(16, 16, (64, 64), 3, 1, 1),
)
# Far larger than any cache.
_FOLD_GPU = (
    FoldCase(8, 64, (512, 512), 2, 2, 0),
    FoldCase(8, 64, (512, 512), 4, 2, 1),
    FoldCase(8, 64, (512, 512), 3, 1, 1),
)


@dataclass
class PairRow:
    """Upfold and torch on one piece of work.

    Attributes:
        name: what was timed.
        size: on what.
        upfold_seconds: median time of a call of upfold.
        torch_seconds: median time of a call of torch.
        error: largest error of upfold against float64 by the rounding rule; None where nothing is computed anew.
        floor_seconds: the least time that memory allows; None for host time.
        repro: a command that repeats this.
    """

    name: str
    size: str
    upfold_seconds: float
    torch_seconds: float
    error: float | None
    floor_seconds: float | None
    repro: str

    @property
    def ratio(self) -> float:
        """How many times faster upfold is."""
        return self.torch_seconds / self.upfold_seconds


@dataclass
class Results:
    """What one run of the bench measured."""

    machine: dict[str, Any]
    device: str
    dtype: str
    layout: str
    max_gflop: float | None
    suites: dict[str, list[Comparison]] = field(default_factory=dict)
    pairs: dict[str, list[PairRow]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Every figure, for JSON."""
        pairs = {name: [{**asdict(row), "x_torch": row.ratio} for row in rows] for name, rows in self.pairs.items()}
        return {
            "schema": SCHEMA,
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": self.machine,
            "device": self.device,
            "dtype": self.dtype,
            "layout": self.layout,
            "max_gflop": self.max_gflop,
            "suites": {name: [comparison.to_dict() for comparison in rows] for name, rows in self.suites.items()},
            **pairs,
        }

    def write(self, path: str | Path) -> Path:
        """Write the figures as JSON and return the path."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        return path


@dataclass(frozen=True)
class Options:
    """How the bench runs: device, dtype and layout of x, the largest case in GFLOP (None: whole), seconds for each method."""

    device: torch.device
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    max_gflop: float | None = None
    seconds: float = 0.2


def run(names: Sequence[str], options: Options, console: Any) -> Results:
    """Run suites and print a table for each as soon as it is done.

    Args:
        names: of the suites (`SUITES`).
        options: how to run.
        console: a rich console.

    Returns:
        Every figure.
    """
    results = Results(
        info.gather(),
        torch.cuda.get_device_name(options.device) if options.device.type == "cuda" else info.processor(),
        dtype_name(options.dtype),
        options.layout,
        options.max_gflop,
    )
    where = f"{results.device}, {torch.get_num_threads()} CPU threads, {results.dtype}, x {options.layout}"
    for name in names:
        title = f"{name}: {where}"
        if name in CASE_SUITES:
            results.suites[name] = _run_cases(name, options, console)
            _print_suite(console, title, results.suites[name])
        else:
            with console.status(f"timing {name}"):
                rows = _run_fold(options) if name == "fold" else _run_host(options)
            results.pairs[name] = rows
            _print_pairs(console, title, rows)
    return results


def _run_cases(suite: str, options: Options, console: Any) -> list[Comparison]:
    chosen = cases.by_tier(suite)
    done: list[Comparison] = []
    with progress_bar(console) as progress:
        task = progress.add_task("", total=len(chosen))
        for case in chosen:
            progress.update(task, description=f"{suite}: {case.name}")
            scaled = case if options.max_gflop is None else case.scaled(options.max_gflop)
            done.append(
                compare_case(scaled, dtype=options.dtype, device=options.device, layout=options.layout, seconds=options.seconds)
            )
            progress.advance(task)
    return done


def _print_suite(console: Any, title: str, rows: Sequence[Comparison]) -> None:
    console.print(suite_table(title, rows, console.width))
    for row in rows:
        for method in row.rows:
            if method.ours and method.note.startswith("WRONG"):
                console.print(f"{row.name}: {method.method}: {method.note}", style="red")
    console.print("\n".join(summary_lines(rows)))
    console.print("\n" + LEGEND, style="dim")
    console.print("* cut down to run sooner (--max-gflop sets how far). To repeat one line:", style="dim")
    for row in rows:
        cut = row.size_text.partition(" (")[2].rstrip(")")
        console.print(f"  {row.repro}" + (f"   # {row.name}, {cut}" if cut else ""), style="dim", soft_wrap=True)


def _run_fold(options: Options) -> list[PairRow]:
    on_gpu = options.device.type == "cuda"
    rows: list[PairRow] = []
    for case in _FOLD_GPU if on_gpu else _FOLD_CPU:
        generator = torch.Generator().manual_seed(0)
        image = torch.randn(case.batch, case.channels, *case.size, generator=generator).to(options.device, options.dtype)
        columns = torch.randn(case.columns_shape, generator=generator).to(options.device, options.dtype)
        moved = (image.numel() + columns.numel()) * image.element_size()
        floor = ceilings(options.device, options.dtype).floor_seconds(moved, 0)
        window: dict[str, Any] = {"kernel_size": case.kernel_size, "padding": case.padding, "stride": case.stride}

        def our_fold(t: Tensor, case: FoldCase = case, window: dict[str, Any] = window) -> Tensor:
            return functional.fold(t, case.size, **window)

        def torch_fold(t: Tensor, case: FoldCase = case, window: dict[str, Any] = window) -> Tensor:
            return F.fold(t, case.size, **window)

        def our_unfold(t: Tensor, window: dict[str, Any] = window) -> Tensor:
            return functional.unfold(t, **window)

        def torch_unfold(t: Tensor, window: dict[str, Any] = window) -> Tensor:
            return F.unfold(t, **window)

        wide = torch_fold(columns.double())
        error = float(((our_fold(columns).double() - wide).abs() / torch_fold(columns.abs().double())).nan_to_num(0.0).max())
        same = torch.equal(our_unfold(image), torch_unfold(image))
        for name, ours, theirs, operand, off in (
            ("fold", our_fold, torch_fold, columns, error),
            ("unfold", our_unfold, torch_unfold, image, 0.0 if same else float("inf")),
        ):
            sets = [operand] + [operand.clone() for _ in range(data_sets(moved, options.device) - 1)]
            works = [[_bound(function, t) for t in sets] for function in (ours, theirs)]
            upfold_seconds, torch_seconds = medians(works, options.device, seconds=3 * options.seconds)
            rows.append(PairRow(name, case.name, upfold_seconds, torch_seconds, off, floor, _repro("fold", options)))
    return rows


def _bound(function: Callable[[Tensor], Tensor], operand: Tensor) -> Callable[[], object]:
    return lambda: function(operand)


def _run_host(options: Options) -> list[PairRow]:
    device, dtype = options.device, options.dtype
    torch.manual_seed(0)
    x = torch.randn(1, 64, 8, 8, device=device, dtype=dtype)
    theirs = nn.ConvTranspose2d(64, 32, 2, 2, device=device, dtype=dtype)
    ours = layers.ConvTranspose2d(64, 32, 2, 2, device=device, dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    needs_gradient = x.clone().requires_grad_()

    def quiet(call: Callable[[], Tensor]) -> Callable[[], object]:
        def without_gradients() -> Tensor:
            with torch.no_grad():
                return call()

        return without_gradients

    def function(convolve: Callable[..., Tensor]) -> Callable[[], Tensor]:
        weight, bias = theirs.weight.detach(), None if theirs.bias is None else theirs.bias.detach()
        return lambda: convolve(x, weight, bias, 2)

    def through(layer: nn.Module, t: Tensor) -> Callable[[], Tensor]:
        return lambda: layer(t)

    def forward_backward(layer: nn.Module) -> Callable[[], object]:
        wanted = [needs_gradient, *layer.parameters()]
        return lambda: torch.autograd.grad(layer(needs_gradient).sum(), wanted)

    pairs: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
        ("function, no gradients", quiet(function(functional.conv_transpose2d)), quiet(function(F.conv_transpose2d))),
        ("layer, no gradients", quiet(through(ours, x)), quiet(through(theirs, x))),
        ("layer, forward with gradients", through(ours, needs_gradient), through(theirs, needs_gradient)),
        ("layer, forward and backward", forward_backward(ours), forward_backward(theirs)),
    ]
    rows = []
    for name, mine, its in pairs:
        upfold_seconds, torch_seconds = host_medians([mine, its], device, seconds=3 * options.seconds)
        size = "n1 64 -> 32, k2 s2, 8x8"
        rows.append(PairRow(name, size, upfold_seconds, torch_seconds, None, None, _repro("host", options)))
    return rows


def _repro(suite: str, options: Options) -> str:
    device = "" if options.device.type == "cpu" else f" --device {options.device}"
    return f"upfold bench --suite {suite} --dtype {dtype_name(options.dtype)}{device}"


def _print_pairs(console: Any, title: str, rows: Sequence[PairRow]) -> None:
    table = new_table(title, "work", "size", "torch", "upfold", "x floor", "x torch", "largest error", left=("size",))
    for row in rows:
        error = "-" if row.error is None else f"{row.error:.1e}"
        floor = "-" if row.floor_seconds is None else f"{row.upfold_seconds / row.floor_seconds:.2f}x"
        times = format_seconds(row.torch_seconds), format_seconds(row.upfold_seconds)
        table.add_row(row.name, row.size, *times, floor, ratio_text(row.ratio), error)
    console.print(table)
    for name in dict.fromkeys(row.name for row in rows):
        ratios = [row.ratio for row in rows if row.name == name]
        if len(ratios) > 1:
            console.print(f"{name}: {geometric_mean(ratios):.2f}x torch (geometric mean), worst {min(ratios):.2f}x")
    if all(row.floor_seconds is None for row in rows):
        console.print("What a call costs the caller, wall time (on a GPU without the GPU's own work).", style="dim")
    console.print(f"repro: {rows[0].repro}", style="dim")
