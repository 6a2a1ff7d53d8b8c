"""One run of a model, watched: what reaches its layers and how long they take, with the model left as it was."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .fused_model import named_running
from .geometry import InvalidArgument

# What a model is called with: one tensor, positional arguments, or keyword arguments.
Inputs = Tensor | Sequence[Any] | Mapping[str, Any]
# What a layer is called with.
Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Traffic:
    """What one layer saw during the runs.

    Attributes:
        calls: number of calls in one run of the model.
        input_shapes, output_shapes: distinct pairs of shapes, in the order of arrival.
        seconds: time inside the layer for each timed run.
    """

    calls: int = 0
    input_shapes: list[tuple[int, ...]] = field(default_factory=list)
    output_shapes: list[tuple[int, ...]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


class _Clock:
    """Reads times where `device` keeps them: on a GPU by events, so that the host need not wait at every layer."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def read(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        """Seconds from `start` to `end`; waits for the GPU."""
        if not self._on_gpu:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def as_call(inputs: Inputs) -> Call:
    """Read a model's inputs as positional and keyword arguments."""
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, Sequence) and not isinstance(inputs, str):
        return tuple(inputs), {}
    raise InvalidArgument(
        f"inputs = {type(inputs).__name__}; must be a tensor, a sequence of positional arguments or a mapping of "
        f"keyword arguments; they are what the model is called with"
    )


def input_of(call: Call) -> Any:
    """The tensor that a transposed convolution, fold or unfold layer was called with, or None."""
    args, kwargs = call
    return args[0] if args else kwargs.get("input")


@contextlib.contextmanager
def undisturbed(model: nn.Module, call: Call) -> Iterator[None]:
    """Run in evaluation mode without gradients; modes and random numbers are afterwards as they were."""
    training = [module for module in model.modules() if getattr(module, "training", False)]  # frozen ones have none
    devices = {t.device.index or 0 for t in _tensors(model, call) if t.device.type == "cuda"}
    with torch.no_grad(), torch.random.fork_rng(devices=sorted(devices)):
        try:
            for module in training:
                module.training = False
            yield
        finally:
            for module in training:
                module.training = True


def _tensors(model: nn.Module, call: Call) -> Iterable[Tensor]:
    yield from model.parameters()
    yield from (value for value in (*call[0], *call[1].values()) if isinstance(value, Tensor))


def device_of(model: nn.Module, call: Call) -> torch.device:
    """Where the model works: the device of its first parameter, else of its first input, else the CPU."""
    return next((t.device for t in _tensors(model, call)), torch.device("cpu"))


def visit(model: nn.Module, call: Call, layers: Iterable[nn.Module], see: Callable[[nn.Module, Call], None]) -> None:
    """Run `model` once and call `see(layer, its call)` just before each call of one of `layers`."""

    def before(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        see(layer, (args, kwargs))

    with contextlib.ExitStack() as cleanup:
        cleanup.enter_context(undisturbed(model, call))
        for layer in layers:
            cleanup.callback(layer.register_forward_pre_hook(before, with_kwargs=True).remove)
        model(*call[0], **call[1])


def time_layers(
    model: nn.Module, call: Call, layers: Sequence[nn.Module], runs: int = 3
) -> tuple[dict[nn.Module, Traffic], list[float]]:
    """Run `model` once to warm up, then `runs` times with a clock in front of and behind each of `layers`.

    Returns:
        What each layer saw, and the seconds of each run.
    """
    clock = _Clock(device_of(model, call))
    traffic = {layer: Traffic() for layer in layers}
    spans: list[tuple[nn.Module, Any, Any]] = []
    started: dict[nn.Module, Any] = {}

    def before(layer: nn.Module, args: Any) -> None:
        started[layer] = clock.read()

    def after(layer: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        spans.append((layer, started.pop(layer), clock.read()))
        shapes = (
            tuple(input_of((args, kwargs)).shape),
            tuple(getattr(output, "shape", ())),
        )
        seen = traffic[layer]
        if shapes not in zip(seen.input_shapes, seen.output_shapes, strict=True):
            seen.input_shapes.append(shapes[0])
            seen.output_shapes.append(shapes[1])

    totals = []
    with contextlib.ExitStack() as cleanup:
        cleanup.enter_context(undisturbed(model, call))
        for layer in layers:
            cleanup.callback(layer.register_forward_pre_hook(before).remove)
            cleanup.callback(layer.register_forward_hook(after, with_kwargs=True).remove)
        for run in range(1 + runs):
            spans.clear()
            start = clock.read()
            model(*call[0], **call[1])
            total = clock.between(start, clock.read())
            if run == 0:
                for layer, _, _ in spans:
                    traffic[layer].calls += 1
                continue
            totals.append(total)
            for seen in traffic.values():
                seen.seconds.append(0.0)
            for layer, begin, end in spans:
                traffic[layer].seconds[-1] += clock.between(begin, end)
    return traffic, totals


def time_models(models: Mapping[str, nn.Module], call: Call, seconds: float, least_runs: int) -> dict[str, float]:
    """Seconds of one run of each model on the same inputs: medians of runs in turns, each waited for, after a warm-up.

    Unlike `timing.medians`, which replays a GPU's work, this holds what the host takes between the layers.
    """
    clock = _Clock(device_of(next(iter(models.values())), call))
    times: dict[str, list[float]] = {name: [] for name in models}
    while any(len(taken) <= least_runs or sum(taken) < seconds for taken in times.values()):
        for name, model in models.items():
            start = clock.read()
            model(*call[0], **call[1])
            times[name].append(clock.between(start, clock.read()))
    return {name: statistics.median(taken[1:]) for name, taken in times.items()}


# What sees an operator: the path of the module that called it, its name, its operands and arguments by torch's names, the result.
SeeOperator = Callable[[str, str, Mapping[str, Any], Tensor], None]
_PARAMETERS = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_DEFAULTS: dict[str, Any] = {"bias": None, "stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}


class _Operators(TorchFunctionMode):
    """Sees every transposed convolution that Python calls, torch's and upfold's alike, by its name."""

    def __init__(self, path: Sequence[str], see: SeeOperator) -> None:
        super().__init__()
        self._path, self._see = path, see

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        if name in ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"):
            bound = {**_DEFAULTS, **dict(zip(_PARAMETERS, args)), **(kwargs or {})}
            self._see(self._path[-1] if self._path else "", name, bound, result)
        return result


def visit_operators(model: nn.Module, call: Call, see: SeeOperator) -> None:
    """Run `model` once and call `see` after each transposed convolution in it, whoever computes it and however it is called."""
    path: list[str] = []

    def enter(name: str) -> Callable[..., None]:
        return lambda module, args: path.append(name)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        path.pop()

    set_stance = getattr(getattr(torch, "compiler", None), "set_stance", None)  # younger than torch 2.0
    with contextlib.ExitStack() as cleanup:
        cleanup.enter_context(undisturbed(model, call))
        if set_stance is not None:  # compiled parts run as they were written, or no operator of theirs would be seen
            cleanup.enter_context(set_stance("force_eager"))
        for name, module in named_running(model):
            if not isinstance(module, torch.jit.ScriptModule):
                cleanup.callback(module.register_forward_pre_hook(enter(name)).remove)
                cleanup.callback(module.register_forward_hook(leave).remove)
        with _Operators(path, see):
            model(*call[0], **call[1])
