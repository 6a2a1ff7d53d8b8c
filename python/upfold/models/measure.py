"""Running whole models in all ways: torch's layers, replaced and fused, eager and compiled; each checked before it is timed."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..comparison import dtype_name
from ..fuse import fuse
from ..memory import peak_beside, spoil
from ..patch import unpatched
from ..precision import tf32_allowed
from ..replace import find, measure, replace, restore
from ..timing import latencies, settle
from ..timing import measure as device_times
from . import ModelCase
from .result import COMPILED, EAGER, LAYERS, TORCH, LayerTime, ModelResult, Variant
from .rule import allowed_error, error_norm, in_double, in_tf32

Run = Callable[[], Tensor]
_CHANGES: dict[str, Callable[[nn.Module], Any]] = dict(zip(LAYERS, (restore, replace, fuse)))


@dataclass(frozen=True)
class Conditions:
    """How the models run.

    Attributes:
        dtype: of weights and inputs.
        device: where.
        layout: "contiguous" or "channels_last", of weights and inputs.
        small: whether the small sizes run in place of the published ones.
        seconds: time spent on each variant, for each way of timing.
        compiled: whether the variants are compiled as well.
        backend: of ``torch.compile``.
        flags: of the command that repeats a model.
    """

    dtype: torch.dtype
    device: torch.device
    layout: str = "contiguous"
    small: bool = True
    seconds: float = 0.5
    compiled: bool = True
    backend: str = "inductor"
    flags: str = ""


@unpatched()
def run_model(case: ModelCase, conditions: Conditions) -> ModelResult:
    """Check and time one model in all ways; what keeps it, or a way, from running is told in the result."""
    tf32 = conditions.dtype == torch.float32 and tf32_allowed(conditions.device)
    precision = ("tf32" if tf32 else "ieee") if conditions.dtype == torch.float32 and conditions.device.type == "cuda" else None
    size = case.small if conditions.small else case.published
    repro = f"upfold bench --suite models --model {case.name} {conditions.flags}".rstrip()
    facts = (case.name, case.source, size.text, dtype_name(conditions.dtype), precision, conditions.layout, repro)
    result = ModelResult(*facts)
    if conditions.layout != "contiguous" and case.axes == 1:
        result.reason = "its tensors have one spatial axis, and so no channels_last"
        return result
    try:
        model, inputs = case.build(size, conditions.dtype, conditions.device, conditions.layout)
    except ImportError as error:
        missing = (error.name or "").partition(".")[0] == case.package
        hint = f"{case.package} is not installed; pip install 'upfold[models]' brings it"
        result.reason = hint if missing else f"{case.package} cannot be imported: {_first_line(error)}"
        return result
    except Exception as error:  # another version of a package, which takes other arguments
        result.reason = f"it cannot be built: {type(error).__name__}: {_first_line(error)}"
        return result
    result.parameters = sum(parameter.numel() for parameter in model.parameters())
    with torch.no_grad():
        _run_in_all_ways(result, model, inputs, conditions)
    return result


def _run_in_all_ways(result: ModelResult, model: nn.Module, inputs: list[Tensor], conditions: Conditions) -> None:
    try:
        exact = in_double(model, *inputs)
        with _fastest_of_cudnn():  # of whose kernels some round more: the bound is that of the one that is timed
            bound = allowed_error(model(*inputs), exact)
        if result.precision == "tf32":
            bound = max(bound, allowed_error(in_tf32(model, *inputs), exact))
    except Exception as error:
        result.reason = f"torch does not run it: {type(error).__name__}: {_first_line(error)}"
        return
    result.bound = bound
    with _fastest_of_cudnn(), _fresh_compiler():
        runs: list[tuple[Variant, Run]] = []
        for variant, run in _variants(model, inputs, conditions):
            result.variants.append(variant)
            if run is not None and _check(variant, run, exact, result, conditions.device):
                runs.append((variant, run))
        del exact
        _time(runs, conditions)
        _measure_layers(result, model, inputs)


def _variants(model: nn.Module, inputs: Sequence[Tensor], conditions: Conditions) -> Iterator[tuple[Variant, Run | None]]:
    """Each way with what runs it, eager before compiled; the copies share the model's tensors."""
    device = conditions.device
    for layers, change in _CHANGES.items():
        shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        try:
            changed = copy.deepcopy(model, shared)
            report = change(changed)
            if device.type == "cuda":
                changed(*inputs)  # from now on it holds what it keeps between calls
        except Exception as error:
            broken = _broken(Variant(layers, EAGER, failed=layers != TORCH), error)
            yield broken, None
            continue
        held = torch.cuda.memory_allocated(device) - before if device.type == "cuda" else None
        note = report.summary().partition(": ")[2] if layers != TORCH else ""
        yield Variant(layers, EAGER, held_bytes=held, note=note), _eager(changed, inputs)
        if conditions.compiled:
            yield Variant(layers, COMPILED, held_bytes=held, note=note), _compiled(changed, inputs, conditions.backend)


def _eager(module: nn.Module, inputs: Sequence[Tensor]) -> Run:
    return lambda: module(*inputs)


def _compiled(module: nn.Module, inputs: Sequence[Tensor], backend: str) -> Run:
    """Compiles at its first call, which is where a torch that cannot compile here says so."""

    @functools.cache
    def compiled() -> Any:
        return torch.compile(module, backend=backend)

    return lambda: compiled()(*inputs)


def _check(variant: Variant, run: Run, exact: Tensor, result: ModelResult, device: torch.device) -> bool:
    """Run once; note the error, the memory, and why the variant is not to be timed."""
    torchs = result.find(TORCH, variant.way)
    comparable = variant.layers != TORCH and torchs is not None and torchs.error is not None
    try:
        start = time.perf_counter()
        y = run()
        settle(device)
        variant.first_seconds = time.perf_counter() - start
        variant.error = error_norm(y, exact)
        right = y.shape == exact.shape and variant.error <= (result.bound or 0.0)
        spoil(y)
        del y
        if device.type == "cuda":
            variant.peak_bytes = peak_beside(lambda: spoil(run()), device)
    except Exception as error:
        _broken(variant, error)
        variant.failed = comparable and not isinstance(error, torch.cuda.OutOfMemoryError)
        settle(device)  # a device that cannot be used any more ends the run here
        return False
    if not right:
        variant.note = f"WRONG: error {variant.error:.1e} above {result.bound:.1e}"
        variant.failed = variant.layers != TORCH
    return right


def _broken(variant: Variant, error: Exception) -> Variant:
    variant.note = f"FAILED: {type(error).__name__}: {_first_line(error)}"
    return variant


def _first_line(error: Exception) -> str:
    """The first line, and the next where it only announces that, as torch's compiler does."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])[:300]


def _time(runs: Sequence[tuple[Variant, Run]], conditions: Conditions) -> None:
    for (variant, _), timing in zip(runs, latencies([run for _, run in runs], conditions.device, seconds=conditions.seconds)):
        variant.seconds, variant.spread = timing.seconds, timing.spread
    if conditions.device.type != "cuda":
        return
    for variant, run in runs:  # one by one: a captured graph holds all memory of its call
        (timing,) = device_times([run], conditions.device, seconds=conditions.seconds)
        variant.device_seconds, variant.how = timing.seconds, timing.how


def _measure_layers(result: ModelResult, model: nn.Module, inputs: Sequence[Tensor]) -> None:
    """The transposed convolutions by themselves, torch's and upfold's, and what part of the model they are."""
    found = {entry.layer: entry.name for entry in find(model) if entry.refusal is None}
    contests = measure(model, (tuple(inputs), {}), list(found), None)
    for layer, contest in contests.items():
        if contest.refusal is None:
            times = contest.torch_seconds, contest.upfold_seconds
            result.layers.append(LayerTime(found[layer], contest.algorithm, *times))
    whole = result.find(TORCH)
    seconds = None if whole is None else whole.device_seconds or whole.seconds
    if seconds:
        result.share = sum(layer.torch_seconds for layer in result.layers) / seconds


@contextlib.contextmanager
def _fresh_compiler() -> Iterator[None]:
    """Drop what was compiled for other models, of which torch keeps only so many, and keep its warnings off the tables."""
    import torch._dynamo

    torch._dynamo.reset()
    loggers = [logging.getLogger(f"torch.{name}") for name in ("_dynamo", "_inductor")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


@contextlib.contextmanager
def _fastest_of_cudnn() -> Iterator[None]:
    """Let cuDNN try its kernels and keep the fastest, for every variant alike."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
