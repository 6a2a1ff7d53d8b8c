"""Compare the methods of computing one transposed convolution: check each result, then time them against each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import backward, dispatch
from .algorithms import REGISTRY, Packing
from .cases import Case
from .comparison import Comparison, Row, repro_line
from .floor import ceilings
from .fresh import time_fresh
from .geometry import Geometry, InvalidArgument
from .memory import held_beside_result, spoil
from .methods import AUTO, Method, Result, frozen_method, our_method, peers
from .modes import CHANNELS_LAST, FORWARD, OPERATORS, STEP, Operands, describe, positional, with_gradient
from .patch import unpatched
from .precision import tf32_allowed
from .problem import Problem
from .reference import Reference, StepReference, reference, step_reference
from .timing import Call, cache_bytes, data_sets, measure

# An error this many times the bound is no rounding: some product is missing, doubled or misplaced.
_WRONG = 16.0


@dataclass(frozen=True)
class Conditions:
    """How a comparison is made.

    Attributes:
        layout: "contiguous" or "channels_last", of x, the weight and gradients for upfold's algorithms.
        seconds: time spent on each method.
        mode: which operator, or a step of forward and backward (`modes.MODES`).
        configs: whether every config of an algorithm gets a row (``gemm#1``), or its best guess alone, as in steps.
        frozen: whether the forwards of these that pack the weight get a second one, with the weight packed before.
    """

    layout: str = "contiguous"
    seconds: float = 0.3
    mode: str = FORWARD
    configs: bool = False
    frozen: bool = False


_USUAL = Conditions()


def compare_case(
    case: Case,
    conditions: Conditions = _USUAL,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    bias: bool | None = None,
) -> Comparison:
    """Compare all methods on one case.

    Args:
        case: the layer and its size.
        conditions: how.
        dtype: of the operands.
        device: where to run.
        bias: whether a bias is added; None takes the case's published flag.

    Returns:
        A row for each method, with the reason where one does not run.
    """
    operands = Operands(*case.tensors(dtype=dtype, device=device, bias=bias))
    return compare(operands, case.geometry, conditions, name=case.name, size_text=case.size_text)


@unpatched()
def compare(
    operands: Operands,
    geometry: Geometry,
    conditions: Conditions = _USUAL,
    *,
    name: str = "layer",
    size_text: str = "",
) -> Comparison:
    """Compare all methods on given operands.

    Args:
        operands: x, w and the bias or None; the gradient modes make theirs from them.
        geometry: checked arguments.
        conditions: how.
        name: heads the table.
        size_text: batch and size; empty writes them from x.

    Returns:
        A row for each method.
    """
    mode, device = conditions.mode, operands.x.device
    layout = conditions.layout if geometry.ndim in CHANNELS_LAST else "contiguous"
    x, w, bias = operands.x.detach().contiguous(), operands.w.detach().contiguous(), operands.bias
    operands = with_gradient(mode, Operands(x, w, None if bias is None else bias.detach()), geometry)
    problem = describe(mode, operands.laid_out(layout), geometry)
    tf32 = x.dtype == torch.float32 and tf32_allowed(device)
    precision = ("tf32" if tf32 else "ieee") if x.dtype == torch.float32 and device.type == "cuda" else None
    result = Comparison(
        name=name,
        size_text=size_text or f"n{x.shape[0]} " + "x".join(map(str, x.shape[2:])),
        repro="",
        problem=problem,
        geometry=geometry,
        device=device,
        layout=layout,
        ceilings=ceilings(device, x.dtype),
        bound=0.0,
        auto=AUTO if mode == STEP else _choice(problem, device),
        mode=mode,
        precision=precision,
    )
    result.repro = repro_line(result)
    methods = _our_steps(result, operands) if mode == STEP else _our_methods(result, conditions)
    for peer in peers(mode, geometry, device):
        methods.append((Row(peer.name, False, peer.layout, note=peer.note), peer.run))
    with torch.no_grad():
        truth: Reference | StepReference
        truth = (
            step_reference(operands, geometry, tf32=tf32) if mode == STEP else reference(operands, geometry, mode=mode, tf32=tf32)
        )
        result.bound = truth.bound
        _check_and_time(methods, operands, truth, result.moved_bytes, conditions)
    result.rows = [row for row, _ in methods]
    with torch.no_grad():
        time_fresh(result, operands, conditions.seconds)
    return result


def _choice(problem: Problem, device: torch.device) -> str:
    """What upfold takes here, untuned: its figures count no plan of this machine's, and torch's operator least of all."""
    with dispatch.use(tuned=False):
        return dispatch.plan(problem, device, dispatch.current().algorithm).algorithm


def _our_methods(result: Comparison, conditions: Conditions) -> list[tuple[Row, Method | None]]:
    methods: list[tuple[Row, Method | None]] = []
    problem, device = result.problem, result.device
    for name, algorithm in REGISTRY.items():
        if name == "torch":  # stands below, as a peer
            continue
        refusal = algorithm.reject(problem, device)
        if refusal is not None:
            methods.append((Row(name, True, result.layout, note=f"refuses: {refusal}"), None))
            continue
        configs = algorithm.configs(problem, device)
        for config in configs if conditions.configs else configs[:1]:
            best_guess = config == configs[0]
            row = Row(name if best_guess else f"{name}#{config}", True, result.layout)
            needed = algorithm.workspace_bytes(problem, config, device)
            if needed > problem.workspace_cap:
                row.note = f"needs {needed / 2**20:.3g} MiB, more than the cap"
                methods.append((row, None))
                continue
            words = [f"config {config}"] if len(configs) > 1 else []
            words += [f"{needed / 2**20:.3g} MiB workspace"] if needed else []
            row.note = ", ".join(words)
            methods.append((row, our_method(result.mode, name, result.geometry, None if best_guess else config)))
            packing = algorithm.packing(problem, config, device) if conditions.frozen and result.mode == FORWARD else ""
            if isinstance(packing, Packing):
                kept = Row(f"{row.method} frozen", True, result.layout, note=f"keeps {packing.copy_bytes / 2**20:.3g} MiB")
                methods.append((kept, frozen_method(name, result.geometry, config)))
    return methods


def _our_steps(result: Comparison, operands: Operands) -> list[tuple[Row, Method | None]]:
    """A step by what `auto` takes for each operator, and by each algorithm that takes all of them or leaves some to `auto`."""
    methods: list[tuple[Row, Method | None]] = []
    data = operands.laid_out(result.layout)
    problems = [describe(mode, data, result.geometry) for mode in OPERATORS]
    for name in (*REGISTRY, AUTO):
        if name == "torch":
            continue
        row = Row(name, True, result.layout)
        try:
            with dispatch.use(tuned=False):
                taken = [dispatch.plan(problem, result.device, name).algorithm for problem in problems]
                together = backward.together(data.grad, data.x, data.w, positional(result.geometry), name, data.bias is not None)
        except InvalidArgument as error:
            row.note = f"refuses: {next(filter(None, (REGISTRY[name].reject(p, result.device) for p in problems)), error)}"
            methods.append((row, None))
            continue
        if set(taken) != {name}:
            row.note = ", ".join(f"{mode} {algorithm}" for mode, algorithm in zip(OPERATORS, taken))
            row.note += "" if together is None else f", both gradients from {together.said}"
        methods.append((row, our_method(STEP, name, result.geometry)))
    return methods


def _check_and_time(
    methods: Sequence[tuple[Row, Method | None]],
    operands: Operands,
    truth: Reference | StepReference,
    moved_bytes: int,
    conditions: Conditions,
) -> None:
    device = operands.x.device
    timed: list[tuple[Row, list[Call]]] = []
    sets: dict[str, list[Operands]] = {}
    for row, method in methods:
        if method is None:
            continue
        if row.layout not in sets:
            first = operands.laid_out(row.layout)
            others = data_sets(moved_bytes, device) - 1
            sets[row.layout] = [first] + [first.another(conditions.mode) for _ in range(others)]
        if _check(row, method, sets[row.layout][0], truth):
            timed.append((row, [_call(method, data) for data in sets[row.layout]]))
    works = [calls for _, calls in timed]
    for (row, _), timing in zip(timed, measure(works, device, seconds=conditions.seconds)):
        row.seconds, row.spread, row.how = timing.seconds, timing.spread, timing.how
    if moved_bytes <= cache_bytes(device):
        for (row, _), timing in zip(timed, measure([calls[:1] for calls in works], device, seconds=conditions.seconds)):
            row.warm_seconds = timing.seconds


def _check(row: Row, method: Method, operands: Operands, truth: Reference | StepReference) -> bool:
    """Fill in what a first call shows; return whether the method is to be timed."""
    device = operands.x.device
    try:
        y: Any
        is_step = isinstance(truth, StepReference)
        if device.type == "cuda" and (row.ours or is_step):
            if is_step:
                method(operands)  # a library that tries its ways in its first call holds more in that one
            y, row.extra_bytes = held_beside_result(_call(method, operands), device)
        else:
            y = method(operands)
        row.error = truth.error(y)
        spoil(y)
    except Exception as error:
        row.note = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if row.ours and not _is_out_of_memory(error):  # reject() let the problem through, so this is no refusal
            row.failed, row.note = True, f"FAILED: {row.note}"
        elif not isinstance(error, RuntimeError):  # a peer may lack the dtype, in torch's words for it; the reader is told
            raise
        _check_device(device, row)
        return False
    row.correct = row.error <= truth.bound
    if row.ours and not row.error <= _WRONG * truth.bound:  # NaN too
        row.failed, row.note = True, f"WRONG: error {row.error:.1e} is far above {truth.bound:.1e}; not timed"
        return False
    if not row.correct:
        row.note = "; ".join(filter(None, (row.note, "error above the bound")))
    return True


def _is_out_of_memory(error: Exception) -> bool:
    """Whether torch's allocator of a GPU or of a CPU gave up: that says nothing of the method's kernels."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _check_device(device: torch.device, row: Row) -> None:
    """Raise where a kernel has broken the device for the rest of the process: whatever followed would be noted as refused."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise RuntimeError(f"{device} cannot be used any more; the last method was {row.method}: {row.note}") from error


def _call(method: Method, operands: Operands) -> Callable[[], Result]:
    return lambda: method(operands)
