"""Compare the methods of computing one transposed convolution: check each result, then time them against each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import dispatch, execute
from .cases import Case
from .floor import Ceilings, ceilings
from .geometry import Geometry
from .methods import CHANNELS_LAST, Method, in_layout, our_method, peers
from .precision import tf32_allowed
from .problem import Problem
from .reference import Reference, reference
from .timing import Call, Work, data_sets, measure

# An error this many times the bound is no rounding: some product is missing, doubled or misplaced.
_WRONG = 16.0


@dataclass
class Row:
    """One method.

    Attributes:
        method: name of the algorithm or of the peer.
        ours: whether it is one of upfold's algorithms.
        layout: "contiguous" or "channels_last": of x.
        error: largest error by the rounding rule; None where it did not run.
        correct: whether that error is within the bound; one far above it makes the method wrong, and it is not timed.
        seconds: median time of a call; None where it did not run or is wrong.
        spread: distance of the quartiles divided by the median.
        how: the way of measuring (`timing.Timing.how`).
        note: the plan of an algorithm, or why the method did not run.
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
        layout: of x for upfold's algorithms.
        ceilings: the device's, for the floor.
        bound: the largest error that counts as correct.
        auto: the algorithm that upfold chooses by itself.
        rows: one for each method, upfold's first.
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

    @property
    def layer_text(self) -> str:
        """The layer as ``256 -> 128, k4 s2 p1``, what is default left out."""
        p, g, ndim = self.problem, self.geometry, self.geometry.ndim

        def axes(entries: Sequence[int]) -> str:
            return str(entries[0]) if len(set(entries)) == 1 else "x".join(map(str, entries))

        text = f"{p.in_channels} -> {p.out_channels}, k{axes(p.kernel_size[3 - ndim :])}"
        letters = (("s", g.stride, 1), ("p", g.padding, 0), ("op", g.output_padding, 0), ("d", g.dilation, 1))
        for letter, entries, default in letters:
            if set(entries) != {default}:
                text += f" {letter}{axes(entries)}"
        if g.groups > 1:
            text += " depthwise" if g.groups == p.in_channels == p.out_channels else f" g{g.groups}"
        return text + (" bias" if p.has_bias else "")

    @property
    def floor_seconds(self) -> float:
        """The least time that memory and arithmetic allow."""
        return self.ceilings.of(self.problem)

    def row(self, method: str) -> Row | None:
        """The row of that method, or None."""
        return next((row for row in self.rows if row.method == method), None)

    @property
    def auto_row(self) -> Row | None:
        """The row of what upfold chooses; None where that is torch's own operator, which is no figure of upfold's."""
        return next((row for row in self.rows if row.ours and row.method == self.auto), None)

    @property
    def torch_row(self) -> Row | None:
        """Torch's own operator in the same layout."""
        return self.row("torch" if self.layout == "contiguous" else f"torch {self.layout}")

    @property
    def best_peer(self) -> Row | None:
        """The fastest method that is not upfold's."""
        return min((r for r in self.rows if not r.ours and r.seconds), key=lambda r: r.seconds or math.inf, default=None)

    def ratio(self, row: Row | None, peer: Row | None) -> float | None:
        """How many times faster `row` is than `peer`; None where one of them has no time."""
        if row is None or peer is None or not row.seconds or not peer.seconds:
            return None
        return peer.seconds / row.seconds

    def figures(self, row: Row) -> dict[str, float | None]:
        """GFLOP/s, GB/s, times the floor, times torch in the same layout, and times the best peer."""
        if not row.seconds:
            return dict.fromkeys(("gflops", "gbytes_per_second", "x_floor", "x_torch", "x_best_peer"))
        return {
            "gflops": self.problem.flops / row.seconds / 1e9,
            "gbytes_per_second": self.problem.bytes / row.seconds / 1e9,
            "x_floor": row.seconds / self.floor_seconds,
            "x_torch": self.ratio(row, self.torch_row),
            "x_best_peer": self.ratio(row, self.best_peer),
        }

    def to_dict(self) -> dict[str, Any]:
        """Every figure, for JSON."""
        p, g, ndim = self.problem, self.geometry, self.geometry.ndim
        return {
            "name": self.name,
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
            "tf32": p.dtype == torch.float32 and tf32_allowed(self.device),
            "layout": self.layout,
            "device": str(self.device),
            "gflop": p.flops / 1e9,
            "megabytes": p.bytes / 1e6,
            "floor_seconds": self.floor_seconds,
            "ceilings": self.ceilings.to_dict(),
            "error_bound": self.bound,
            "auto": self.auto,
            "rows": [{**vars(row), **self.figures(row)} for row in self.rows],
        }


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).rpartition(".")[2]


def describe(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, geometry: Geometry) -> Problem:
    """The problem of these operands, without running it."""
    g = geometry
    return execute.describe(x, w, bias, (g.stride, g.padding, g.output_padding, g.groups, g.dilation))


def repro_line(problem: Problem, geometry: Geometry, layout: str, device: torch.device) -> str:
    """Write the ``upfold compare`` command for a layer, defaults left out."""
    ndim = geometry.ndim

    def axes(entries: Sequence[int]) -> str:
        return str(entries[0]) if len(set(entries)) == 1 else " ".join(map(str, entries))

    words = [f"upfold compare --in {problem.in_channels} --out {problem.out_channels}"]
    words.append(f"--kernel {axes(problem.kernel_size[3 - ndim :])}")
    for flag, entries, default in (
        ("stride", geometry.stride, 1),
        ("padding", geometry.padding, 0),
        ("output-padding", geometry.output_padding, 0),
        ("dilation", geometry.dilation, 1),
    ):
        if set(entries) != {default}:
            words.append(f"--{flag} {axes(entries)}")
    if geometry.groups != 1:
        words.append(f"--groups {geometry.groups}")
    words.append("--size " + " ".join(map(str, problem.in_size[3 - ndim :])))
    words.append(f"--batch {problem.batch} --dtype {dtype_name(problem.dtype)}")
    if problem.has_bias:
        words.append("--bias")
    if layout != "contiguous":
        words.append(f"--layout {layout}")
    if device.type != "cpu":
        words.append(f"--device {device}")
    return " ".join(words)


def compare_case(
    case: Case,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    layout: str = "contiguous",
    bias: bool | None = None,
    seconds: float = 0.3,
) -> Comparison:
    """Compare all methods on one case.

    Args:
        case: the layer and its size.
        dtype: of the operands.
        device: where to run.
        layout: "contiguous" or "channels_last", of x for upfold's algorithms.
        bias: whether a bias is added; None takes the case's published flag.
        seconds: time spent on each method.

    Returns:
        A row for each method, with the reason where one does not run.
    """
    x, w, b = case.tensors(dtype=dtype, device=device, bias=bias)
    return compare(x, w, b, case.geometry, name=case.name, size_text=case.size_text, layout=layout, seconds=seconds)


def compare(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    geometry: Geometry,
    *,
    name: str = "layer",
    size_text: str = "",
    layout: str = "contiguous",
    seconds: float = 0.3,
) -> Comparison:
    """Compare all methods on given operands; the arguments are those of `compare_case`, with the tensors themselves.

    Args:
        x: (batch, in_channels, spatial...).
        w: (in_channels, out_channels / groups, kernel...).
        bias: (out_channels,) or None.
        geometry: checked arguments.
        name: heads the table.
        size_text: batch and size; None writes them from x.
        layout: of x for upfold's algorithms.
        seconds: time spent on each method.

    Returns:
        A row for each method.
    """
    device = x.device
    layout = layout if geometry.ndim in CHANNELS_LAST else "contiguous"
    x, w, bias = x.detach().contiguous(), w.detach().contiguous(), None if bias is None else bias.detach()
    ours = in_layout(x, layout)
    problem = describe(ours, w, bias, geometry)
    explanation = dispatch.explain(problem, device=device)
    result = Comparison(
        name=name,
        size_text=size_text or f"n{x.shape[0]} " + "x".join(map(str, x.shape[2:])),
        repro=repro_line(problem, geometry, layout, device),
        problem=problem,
        geometry=geometry,
        device=device,
        layout=layout,
        ceilings=ceilings(device, x.dtype),
        bound=0.0,
        auto=explanation.plan.algorithm,
    )
    methods = _our_methods(explanation, layout, geometry)
    for peer in peers(geometry, device):
        methods.append((Row(peer.name, False, peer.layout, note=peer.note), peer.run))
    with torch.no_grad():
        truth = reference(x, w, bias, geometry, tf32=x.dtype == torch.float32 and tf32_allowed(device))
        result.bound = truth.bound
        _check_and_time(methods, x, w, bias, truth, seconds)
    result.rows = [row for row, _ in methods]
    return result


def _our_methods(explanation: dispatch.Explanation, layout: str, geometry: Geometry) -> list[tuple[Row, Method | None]]:
    methods: list[tuple[Row, Method | None]] = []
    for candidate in explanation.candidates:
        if candidate.algorithm == "torch":  # stands below, as a peer
            continue
        row = Row(candidate.algorithm, True, layout)
        if candidate.plan is None:
            row.note = f"refuses: {candidate.refusal}"
        elif candidate.plan.workspace_bytes:
            row.note = f"{candidate.plan.workspace_bytes / 2**20:.3g} MiB workspace"
        methods.append((row, None if candidate.plan is None else our_method(candidate.algorithm, geometry)))
    return methods


def _check_and_time(
    methods: Sequence[tuple[Row, Method | None]],
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    truth: Reference,
    seconds: float,
) -> None:
    timed: list[tuple[Row, Work]] = []
    sets: dict[str, list[torch.Tensor]] = {}
    moved = (x.numel() + w.numel() + truth.values.numel()) * x.element_size()
    for row, method in methods:
        if method is None:
            continue
        if row.layout not in sets:
            first = in_layout(x, row.layout)
            sets[row.layout] = [first] + [first.clone() for _ in range(data_sets(moved, x.device) - 1)]
        weight = w if row.ours else in_layout(w, row.layout)
        try:
            row.error = truth.error(method(sets[row.layout][0], weight, bias))
        except RuntimeError as error:  # a peer may lack the dtype; the reader is told
            row.note = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            continue
        row.correct = row.error <= truth.bound
        if row.ours and row.error > _WRONG * truth.bound:
            row.note = f"WRONG: error {row.error:.1e} is far above {truth.bound:.1e}; not timed"
            continue
        if not row.correct:
            row.note = "; ".join(filter(None, (row.note, "error above the bound")))
        timed.append((row, [_call(method, data, weight, bias) for data in sets[row.layout]]))
    for (row, _), timing in zip(timed, measure([work for _, work in timed], x.device, seconds=seconds)):
        row.seconds, row.spread, row.how = timing.seconds, timing.spread, timing.how


def _call(method: Method, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> Call:
    return lambda: method(x, w, bias)
