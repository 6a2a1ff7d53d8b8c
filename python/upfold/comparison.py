"""What a comparison of methods on one layer found, and the figures that follow from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .floor import Ceilings, moved_in_step
from .geometry import Geometry
from .methods import TORCH
from .modes import FORWARD, STEP
from .problem import Problem


@dataclass
class Row:
    """One method.

    Attributes:
        method: name of the algorithm or of the peer; ``gemm#1`` is gemm in its config 1.
        ours: whether it is one of upfold's algorithms.
        layout: "contiguous" or "channels_last": of x, the weight and gradients.
        error: largest error by the rounding rule; of a step, in the bound of the tensor that shows it; None where it did not run.
        correct: whether that error is within the bound; one far above it makes the method wrong, and it is not timed.
        seconds: median time of a call; None where it did not run or is wrong.
        spread: distance of the quartiles divided by the median.
        how: the way of measuring (`timing.Timing.how`).
        note: the plan of an algorithm, or why the method did not run.
        warm_seconds: the same with one data set, which stays in the cache; None on a CPU and for layers beyond the cache.
        out_seconds: the same into a result that was written before (``out=``): of what `auto` takes forward on a CPU, where the
            result has 1 MiB or more; else None.
        extra_bytes: the most memory that a call held beside operands and results: of ours, and of a step by whatever method;
            None on a CPU.
        failed: whether it is upfold's and broke or is wrong; the note says how. A command that met one ends with status 1.
    """

    method: str
    ours: bool
    layout: str
    error: float | None = None
    correct: bool = False
    seconds: float | None = None
    spread: float | None = None
    how: str | None = None
    note: str = ""
    warm_seconds: float | None = None
    out_seconds: float | None = None
    extra_bytes: int | None = None
    failed: bool = False


@dataclass
class Comparison:
    """All methods on one layer.

    Attributes:
        name: of the layer.
        size_text: batch and size that ran.
        repro: a command that repeats this comparison.
        problem: the layer as the algorithms see it.
        geometry: its arguments.
        device: where it ran.
        layout: of x, the weight and gradients for upfold's algorithms.
        ceilings: the device's, for the floor.
        bound: the largest error that counts as correct.
        auto: the algorithm that upfold chooses by itself; of a step `methods.AUTO`, one for each operator.
        rows: one for each method, upfold's first.
        mode: which operator (`modes.MODES`).
        precision: "tf32" or "ieee" for float32 on a GPU, else None.
        fresh_seconds: how much longer filling a fresh result takes than filling it again, forward on a CPU; else None.
    """

    name: str
    size_text: str
    repro: str
    problem: Problem
    geometry: Geometry
    device: torch.device
    layout: str
    ceilings: Ceilings
    bound: float
    auto: str
    rows: list[Row] = field(default_factory=list)
    mode: str = FORWARD
    precision: str | None = None
    fresh_seconds: float | None = None

    @property
    def layer_text(self) -> str:
        """The layer as ``256 -> 128, k4 s2 p1``, what is default left out."""
        p, g, ndim = self.problem, self.geometry, self.geometry.ndim
        text = f"{p.in_channels} -> {p.out_channels}, k{_axes(p.kernel_size[3 - ndim :], 'x')}"
        letters = (("s", g.stride, 1), ("p", g.padding, 0), ("op", g.output_padding, 0), ("d", g.dilation, 1))
        for letter, entries, default in letters:
            if set(entries) != {default}:
                text += f" {letter}{_axes(entries, 'x')}"
        if g.groups > 1:
            text += " depthwise" if g.groups == p.in_channels == p.out_channels else f" g{g.groups}"
        return text + (" bias" if p.has_bias else "") + ("" if self.mode == FORWARD else f", {self.mode}")

    @property
    def floor_seconds(self) -> float:
        """The least time that memory and arithmetic allow."""
        return self.ceilings.of_step(self.problem) if self.mode == STEP else self.ceilings.of(self.problem)

    @property
    def flops(self) -> int:
        """Operations of a call: a backward takes twice those of its forward."""
        return (3 if self.mode == STEP else 1) * self.problem.flops

    @property
    def moved_bytes(self) -> int:
        """Bytes that a call cannot avoid to move."""
        return moved_in_step(self.problem) if self.mode == STEP else self.problem.bytes

    def row(self, method: str) -> Row | None:
        """The row of that method, or None; ``auto`` is the one that upfold chooses."""
        if method == "auto":
            return self.auto_row
        return next((row for row in self.rows if row.method == method), None)

    @property
    def auto_row(self) -> Row | None:
        """The row of what upfold chooses; None where that is torch's own operator, which is no figure of upfold's."""
        return next((row for row in self.rows if row.ours and row.method == self.auto), None)

    @property
    def torch_row(self) -> Row | None:
        """Torch's own operator in the same layout."""
        return self.row(TORCH if self.layout == "contiguous" else f"{TORCH} {self.layout}")

    @property
    def best_peer(self) -> Row | None:
        """The fastest method that is not upfold's."""
        return min((r for r in self.rows if not r.ours and r.seconds), key=lambda r: r.seconds or math.inf, default=None)

    @property
    def failures(self) -> list[str]:
        """What broke or is wrong of upfold's, a line for each, with the command that repeats it."""
        return [f"{self.name}: {row.method}: {row.note}; repro: {self.repro}" for row in self.rows if row.failed]

    def ratio(self, row: Row | None, peer: Row | None) -> float | None:
        """How many times faster `row` is than `peer`; None where one of them has no time."""
        if row is None or peer is None or not row.seconds or not peer.seconds:
            return None
        return peer.seconds / row.seconds

    def warm_ratio(self, row: Row | None, peer: Row | None) -> float | None:
        """The same of the times with warm caches."""
        if row is None or peer is None or not row.warm_seconds or not peer.warm_seconds:
            return None
        return peer.warm_seconds / row.warm_seconds

    def figures(self, row: Row) -> dict[str, float | None]:
        """GFLOP/s, GB/s, times the floor, times torch in the same layout (cold and warm), and times the best peer."""
        if not row.seconds:
            return dict.fromkeys(("gflops", "gbytes_per_second", "x_floor", "x_torch", "x_torch_warm", "x_best_peer"))
        return {
            "gflops": self.flops / row.seconds / 1e9,
            "gbytes_per_second": self.moved_bytes / row.seconds / 1e9,
            "x_floor": row.seconds / self.floor_seconds,
            "x_torch": self.ratio(row, self.torch_row),
            "x_torch_warm": self.warm_ratio(row, self.torch_row),
            "x_best_peer": self.ratio(row, self.best_peer),
        }

    def to_dict(self) -> dict[str, Any]:
        """Every figure, for JSON."""
        p, g, ndim = self.problem, self.geometry, self.geometry.ndim
        return {
            "name": self.name,
            "mode": self.mode,
            "size": self.size_text,
            "repro": self.repro,
            "batch": p.batch,
            "in_channels": p.in_channels,
            "out_channels": p.out_channels,
            "in_size": list(p.in_size[3 - ndim :]),
            "out_size": list(p.out_size[3 - ndim :]),
            "kernel_size": list(p.kernel_size[3 - ndim :]),
            "stride": list(g.stride),
            "padding": list(g.padding),
            "output_padding": list(g.output_padding),
            "dilation": list(g.dilation),
            "groups": g.groups,
            "bias": p.has_bias,
            "dtype": dtype_name(p.dtype),
            "tf32": self.precision == "tf32",
            "precision": self.precision,
            "layout": self.layout,
            "device": str(self.device),
            "gflop": self.flops / 1e9,
            "megabytes": self.moved_bytes / 1e6,
            "workspace_cap": p.workspace_cap,
            "floor_seconds": self.floor_seconds,
            "ceilings": self.ceilings.to_dict(),
            "error_bound": self.bound,
            "auto": self.auto,
            "fresh_seconds": self.fresh_seconds,
            "rows": [{**vars(row), **self.figures(row)} for row in self.rows],
        }


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).rpartition(".")[2]


def _axes(entries: Sequence[int], joint: str) -> str:
    """One number where all are equal, else all of them."""
    return str(entries[0]) if len(set(entries)) == 1 else joint.join(map(str, entries))


def repro_line(comparison: Comparison) -> str:
    """Write the ``upfold compare`` command that repeats a comparison, defaults left out."""
    problem, geometry, ndim = comparison.problem, comparison.geometry, comparison.geometry.ndim
    words = [f"upfold compare --in {problem.in_channels} --out {problem.out_channels}"]
    words.append(f"--kernel {_axes(problem.kernel_size[3 - ndim :], ' ')}")
    for flag, entries, default in (
        ("stride", geometry.stride, 1),
        ("padding", geometry.padding, 0),
        ("output-padding", geometry.output_padding, 0),
        ("dilation", geometry.dilation, 1),
    ):
        if set(entries) != {default}:
            words.append(f"--{flag} {_axes(entries, ' ')}")
    if geometry.groups != 1:
        words.append(f"--groups {geometry.groups}")
    words.append("--size " + " ".join(map(str, problem.in_size[3 - ndim :])))
    words.append(f"--batch {problem.batch} --dtype {dtype_name(problem.dtype)}")
    if problem.has_bias:
        words.append("--bias")
    if comparison.layout != "contiguous":
        words.append(f"--layout {comparison.layout}")
    if comparison.mode != FORWARD:
        words.append(f"--mode {comparison.mode}")
    if comparison.device.type != "cpu":
        words.append(f"--device {comparison.device}")
    if comparison.precision is not None:
        words.append(f"--precision {comparison.precision}")
    return " ".join(words)
