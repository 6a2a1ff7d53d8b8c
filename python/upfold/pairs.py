"""The suites that set upfold beside torch alone: fold and unfold, and what one small call costs the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import functional
from . import nn as layers
from .charts import format_seconds
from .floor import ceilings
from .tables import new_table, ratio_text
from .timing import data_sets, geometric_mean, host_medians, medians


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


# Of an error by the rounding rule: no type rounds this far.
_WRONG = 0.05
# Far larger than any cache, of which the rates of the column kernels must not be made.
_FOLD_CPU = (
    FoldCase(8, 64, (256, 256), 2, 2, 0),
    FoldCase(4, 64, (256, 256), 4, 2, 1),
    FoldCase(4, 64, (128, 128), 3, 1, 1),
    FoldCase(1, 64, (256, 256), 4, 2, 1),
    FoldCase(16, 16, (64, 64), 3, 1, 1),
)
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
        repro: a command that repeats this.
        error: largest error of upfold against float64 by the rounding rule; None where nothing is computed anew.
        floor_seconds: the least time that memory allows; None for host time.
        moved_bytes: image and columns, each once; None for host time.
        elementwise_bytes_per_second: what a kernel that reads and writes reached in the same process; None for host time.
        flops: floating-point operations of a call; None where it only moves.
    """

    name: str
    size: str
    upfold_seconds: float
    torch_seconds: float
    repro: str
    error: float | None = None
    floor_seconds: float | None = None
    moved_bytes: int | None = None
    elementwise_bytes_per_second: float | None = None
    flops: int | None = None

    @property
    def failures(self) -> list[str]:
        """A line where the result is wrong."""
        if self.error is None or self.error < _WRONG:
            return []
        return [f"{self.name} {self.size}: WRONG: error {self.error:.1e}; repro: {self.repro}"]

    @property
    def ratio(self) -> float:
        """How many times faster upfold is."""
        return self.torch_seconds / self.upfold_seconds

    @property
    def gbytes_per_second(self) -> float | None:
        """Rate of upfold in GB/s, counting each byte once."""
        return None if self.moved_bytes is None else self.moved_bytes / self.upfold_seconds / 1e9

    @property
    def share_of_elementwise(self) -> float | None:
        """That rate as a share of the elementwise kernel's."""
        rate = self.gbytes_per_second
        if rate is None or self.elementwise_bytes_per_second is None:
            return None
        return rate * 1e9 / self.elementwise_bytes_per_second

    def to_dict(self) -> dict[str, Any]:
        """Every figure, for JSON."""
        rates = {"gbytes_per_second": self.gbytes_per_second, "share_of_elementwise": self.share_of_elementwise}
        if self.flops is not None:
            rates["gflops"], rates["torch_gflops"] = (self.flops / t / 1e9 for t in (self.upfold_seconds, self.torch_seconds))
        return {**asdict(self), "x_torch": self.ratio, **rates}


def run_fold(device: torch.device, dtype: torch.dtype, seconds: float, repro: str) -> list[PairRow]:
    """Check and time fold and unfold on images that no cache holds."""
    rows: list[PairRow] = []
    for case in _FOLD_GPU if device.type == "cuda" else _FOLD_CPU:
        rows += _fold_and_unfold(case, device, dtype, seconds, repro)
    return rows


def _fold_and_unfold(case: FoldCase, device: torch.device, dtype: torch.dtype, seconds: float, repro: str) -> list[PairRow]:
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(case.batch, case.channels, *case.size, generator=generator).to(device, dtype)
    columns = torch.randn(case.columns_shape, generator=generator).to(device, dtype)
    moved = (image.numel() + columns.numel()) * image.element_size()
    rates = ceilings(device, dtype)
    window: dict[str, Any] = {"kernel_size": case.kernel_size, "padding": case.padding, "stride": case.stride}

    def our_fold(t: Tensor) -> Tensor:
        return functional.fold(t, case.size, **window)

    def torch_fold(t: Tensor) -> Tensor:
        return F.fold(t, case.size, **window)

    def our_unfold(t: Tensor) -> Tensor:
        return functional.unfold(t, **window)

    def torch_unfold(t: Tensor) -> Tensor:
        return F.unfold(t, **window)

    wide = torch_fold(columns.double())
    # A pixel that no block covers is 0 in both, and 0 / tiny stays 0; a NaN of ours stays one.
    covered = torch_fold(columns.abs().double()).clamp_min(torch.finfo(torch.float64).tiny)
    error = float(((our_fold(columns).double() - wide).abs() / covered).max())
    same = torch.equal(our_unfold(image), torch_unfold(image))
    del wide, covered
    rows = []
    for name, ours, theirs, operand, off in (
        ("fold", our_fold, torch_fold, columns, error),
        ("unfold", our_unfold, torch_unfold, image, 0.0 if same else float("inf")),
    ):
        sets = [operand] + [operand.clone() for _ in range(data_sets(moved, device) - 1)]
        works = [[_bound(function, t) for t in sets] for function in (ours, theirs)]
        times = medians(works, device, seconds=3 * seconds)
        floor, elementwise = rates.floor_seconds(moved, 0), rates.measured_bytes_per_second
        rows.append(PairRow(name, case.name, times[0], times[1], repro, off, floor, moved, elementwise))
    return rows


def _bound(function: Callable[[Tensor], Tensor], operand: Tensor) -> Callable[[], object]:
    return lambda: function(operand)


def run_host(device: torch.device, dtype: torch.dtype, seconds: float, repro: str) -> list[PairRow]:
    """Time what one call of a small layer costs the caller, with and without gradients."""
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
        upfold_seconds, torch_seconds = host_medians([mine, its], device, seconds=3 * seconds)
        rows.append(PairRow(name, "n1 64 -> 32, k2 s2, 8x8", upfold_seconds, torch_seconds, repro))
    return rows


def print_pairs(console: Any, title: str, rows: Sequence[PairRow]) -> None:
    """Print a table of pairs, their means, and the line that repeats them."""
    moves, computes = (any(getattr(row, what) is not None for row in rows) for what in ("moved_bytes", "flops"))
    rates = ("x floor", "GB/s", "of elementwise") if moves else ("torch GFLOP/s", "GFLOP/s") if computes else ()
    checked = any(row.error is not None for row in rows)
    ends = ("x torch", *(("largest error",) if checked else ()))
    table = new_table(title, "work", "size", "torch", "upfold", *rates, *ends, left=("size",))
    for row in rows:
        cells = [row.name, row.size, format_seconds(row.torch_seconds), format_seconds(row.upfold_seconds)]
        if moves:
            floor = "-" if row.floor_seconds is None else f"{row.upfold_seconds / row.floor_seconds:.2f}x"
            rate, share = row.gbytes_per_second, row.share_of_elementwise
            cells += [floor, "-" if rate is None else f"{rate:,.0f}", "-" if share is None else f"{share:.0%}"]
        elif computes:
            flops = row.flops or 0
            cells += [f"{flops / seconds / 1e9:,.0f}" for seconds in (row.torch_seconds, row.upfold_seconds)]
        cells.append(ratio_text(row.ratio))
        if checked:
            cells.append("-" if row.error is None else f"{row.error:.1e}")
        table.add_row(*cells)
    console.print(table)
    # A layer has a row for each layout; their mean stands for all, and says how near the products come to torch's.
    for name in ("all",) if computes else dict.fromkeys(row.name for row in rows):
        ratios = [row.ratio for row in rows if name in ("all", row.name)]
        if len(ratios) > 1:
            console.print(f"{name}: {geometric_mean(ratios):.2f}x torch (geometric mean), worst {min(ratios):.2f}x")
    if moves:
        rate = next(row.elementwise_bytes_per_second for row in rows if row.elementwise_bytes_per_second)
        console.print(f"elementwise: a kernel that reads and writes, {rate / 1e9:,.0f} GB/s in this process", style="dim")
    elif computes:
        console.print("torch: a 1x1 convolution in channels_last with the same products, not shuffled into place.", style="dim")
    elif checked:
        console.print("torch: the layer, then relu, eager and by torch.compile; upfold: activation='relu'.", style="dim")
    else:
        console.print("What a call costs the caller (on a GPU without the GPU's own work).", style="dim")
    console.print(f"repro: {rows[0].repro}", style="dim")
