"""Choosing an algorithm: an override, else what was measured, else the least predicted time. The only place that prefers."""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from . import plans
from .algorithms import REGISTRY, Algorithm
from .cost import added_sums_seconds, channel_sums_seconds, predicted_seconds, shared_columns_seconds
from .geometry import InvalidArgument
from .problem import DTYPE_BYTES, Operator, Problem

_DEFAULT_WORKSPACE_MB = {"cpu": 64.0}
_DEFAULT_WORKSPACE_MB_GPU = 256.0
# By name only: gemm_atomic gives other bits on every run, torch is the peer, which a measurement alone can put first.
_NEVER_CHOSEN = ("gemm_atomic", "torch")
# What `tune` times: by a measurement even torch may be chosen.
MAY_BE_TUNED = tuple(name for name in REGISTRY if name != "gemm_atomic")
# Asked for by name, they leave the gradients that they refuse to `auto`.
_FORWARD_ONLY = ("fused",)
# The algorithm that stands in where none of ours runs.
FALLBACK = "torch"


class Settings(NamedTuple):
    """What `use` sets: an algorithm's name or None for auto, the workspace cap in MiB, may torch stand in, are plans followed.

    `config` is what `use_config` sets, for an algorithm asked for by name.
    """

    algorithm: str | None = None
    workspace_mb: float | None = None
    fallback: bool | None = None
    config: int | None = None
    tuned: bool | None = None


_DEFAULTS = Settings()
_settings: ContextVar[Settings] = ContextVar("upfold_settings", default=_DEFAULTS)
current = _settings.get


@contextlib.contextmanager
def use(
    algorithm: str | None = None,
    workspace_mb: float | None = None,
    fallback: bool | None = None,
    tuned: bool | None = None,
) -> Iterator[None]:
    """Set how upfold's operators run inside a ``with`` block or a decorated function.

    The settings are read when an operator runs, so a compiled function follows them without being compiled again. They belong to
    the running thread or task; blocks nest, and an argument left at None keeps the outer value. A backward keeps the settings of
    its forward. Environment variables are read when a shape is first planned, so set them before the process starts. Put the
    block round a compiled function, not into it: there it breaks the graph.

    Args:
        algorithm: the name of an algorithm (`algorithms()`), or 'auto'.
        workspace_mb: the most scratch that one call may take, in MiB (default: UPFOLD_WORKSPACE_MB, else 64 on a
            CPU, 256 on a GPU).
        fallback: whether torch's own operator may stand in where no kernel of upfold runs (default: UPFOLD_FALLBACK, else yes).
        tuned: whether plans that `tune` left are followed (default: UPFOLD_TUNED, else yes).

    Raises:
        InvalidArgument: the algorithm is unknown, or the cap is not positive and finite.
    """
    outer = current()
    if algorithm is not None:
        check_name(algorithm)
    if workspace_mb is not None and not 0 < workspace_mb < math.inf:
        raise InvalidArgument(f"workspace_mb = {workspace_mb}; must be positive and finite; the unit is MiB")
    inner = Settings(
        outer.algorithm if algorithm is None else None if algorithm == "auto" else algorithm,
        outer.workspace_mb if workspace_mb is None else float(workspace_mb),
        outer.fallback if fallback is None else bool(fallback),
        outer.config,
        outer.tuned if tuned is None else bool(tuned),
    )
    with _settings_are(inner):
        yield


@contextlib.contextmanager
def use_config(config: int) -> Iterator[None]:
    """Set the tile choice of the algorithms that are asked for by name inside a block, to measure it against the best guess.

    Args:
        config: one of the algorithm's `configs` for each problem that runs in the block.
    """
    with _settings_are(current()._replace(config=config)):
        yield


@contextlib.contextmanager
def _settings_are(inner: Settings) -> Iterator[None]:
    token = _settings.set(inner)
    try:
        yield
    finally:
        _settings.reset(token)


@contextlib.contextmanager
def restored(settings: Settings) -> Iterator[None]:
    """Settings that were `current` before, in force again where they said something: a backward may run in another thread."""
    merged: list[Any] = [now if then is None else then for then, now in zip(settings, current())]
    with _settings_are(Settings(*merged)):
        yield


def algorithms() -> tuple[str, ...]:
    """The names that ``algorithm=`` takes beside 'auto'."""
    return tuple(REGISTRY)


def check_name(algorithm: str) -> None:
    """Refuse an unknown algorithm."""
    if algorithm != "auto" and algorithm not in REGISTRY:
        known = ", ".join(repr(name) for name in ("auto", *REGISTRY))
        raise InvalidArgument(
            f"algorithm = {algorithm!r}; must be one of {known}; upfold.explain tells which of them take a layer"
        )


def encode_algorithm(algorithm: str | None) -> int:
    """The code of a name in operator schemas: 0 for None, which leaves it to `use`, and -1 for 'auto', which does not."""
    if algorithm is None or algorithm == "auto":
        return 0 if algorithm is None else -1
    check_name(algorithm)
    return 1 + list(REGISTRY).index(algorithm)


def decode_algorithm(code: int) -> str | None:
    """Undo `encode_algorithm`."""
    return None if code == 0 else "auto" if code == -1 else list(REGISTRY)[code - 1]


def workspace_cap(device: torch.device) -> int:
    """The most scratch that a call on this device may take now, in bytes."""
    megabytes = current().workspace_mb
    if megabytes is None:
        megabytes = _environment_workspace_mb() or _DEFAULT_WORKSPACE_MB.get(device.type, _DEFAULT_WORKSPACE_MB_GPU)
    return int(megabytes * 2**20)


def _environment_workspace_mb() -> float | None:
    text = os.environ.get("UPFOLD_WORKSPACE_MB")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise InvalidArgument(f"UPFOLD_WORKSPACE_MB = {text!r}; must be a positive, finite number; the unit is MiB")
    return value


def fallback_allowed() -> bool:
    """Whether torch's operator may stand in where no kernel of ours runs."""
    return _allowed(current().fallback, "UPFOLD_FALLBACK")


def tuned_allowed() -> bool:
    """Whether the plans that `tune` left are followed."""
    return _allowed(current().tuned, "UPFOLD_TUNED")


def _allowed(chosen: bool | None, variable: str) -> bool:
    return os.environ.get(variable, "1").lower() not in ("0", "false", "no") if chosen is None else chosen


@dataclass(frozen=True)
class Plan:
    """What will run: the algorithm, its tile choice, the scratch it takes, and why it was chosen."""

    algorithm: str
    config: int
    workspace_bytes: int
    reason: str


def plan(problem: Problem, device: torch.device, algorithm: str | None = None) -> Plan:
    """Choose how to run a problem.

    Args:
        problem: what to compute.
        device: where.
        algorithm: a name that overrides the choice; None or 'auto' leaves it to upfold.

    Raises:
        InvalidArgument: the algorithm is unknown, or it refuses, or every one refuses (the text lists each refusal).
    """
    if algorithm is not None and algorithm != "auto":
        check_name(algorithm)
        refusal = REGISTRY[algorithm].reject(problem, device)
        if refusal is not None:
            if algorithm in _FORWARD_ONLY and problem.operator is not Operator.CONV_TRANSPOSE:
                return _automatic(problem, device, fallback_allowed(), tuned_allowed())
            raise InvalidArgument(
                f"algorithm = {algorithm!r}; it refuses this problem: {refusal}; " + _others(problem, device, algorithm)
            )
        return planned(REGISTRY[algorithm], problem, device, "asked for by name", current().config)
    return _automatic(problem, device, fallback_allowed(), tuned_allowed())


def _others(problem: Problem, device: torch.device, refused: str) -> str:
    verdicts = [(name, entry.reject(problem, device)) for name, entry in REGISTRY.items() if name != refused]
    return "; ".join(f"{name} accepts it" if refusal is None else f"{name} refuses: {refusal}" for name, refusal in verdicts)


def planned(algorithm: Algorithm, problem: Problem, device: torch.device, reason: str, config: int | None = None) -> Plan:
    """The plan of an algorithm that accepts the problem, with its best guess where no config is given."""
    if config is None:
        config = algorithm.configs(problem, device)[0]
    return Plan(algorithm.name, config, algorithm.workspace_bytes(problem, config, device), reason)


@lru_cache(maxsize=4096)
def _automatic(problem: Problem, device: torch.device, may_fall_back: bool, tuned: bool) -> Plan:
    found = _tuned(problem, device, may_fall_back) if tuned else None
    return found or _predicted(problem, device, may_fall_back)


def forget() -> None:
    """Choose anew for every problem: the tuned plans have changed."""
    _automatic.cache_clear()


def _tuned(problem: Problem, device: torch.device, may_fall_back: bool) -> Plan | None:
    """The fastest of the measured ways that this problem allows: they may have been measured on a near size."""
    ranking = plans.lookup(problem, device)
    if ranking is None:
        return None
    for rank, (name, config, seconds) in enumerate(ranking.measured):
        if name == FALLBACK and (rank > 0 or not may_fall_back):  # it runs where nothing was faster, and where it may
            continue
        if name in MAY_BE_TUNED and config in _affordable(name, problem, device, (config,)):
            others = ", ".join(f"{one.algorithm} {1e6 * one.seconds:.0f} us" for one in ranking.measured if one.algorithm != name)
            reason = f"tuned: measured {1e6 * seconds:.0f} us" + (f"; {others}" if others else "")
            return planned(REGISTRY[name], problem, device, reason, config)
    return None


def _affordable(name: str, problem: Problem, device: torch.device, among: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """The configs of an algorithm that run this problem under its workspace cap, best guess first; none where it refuses."""
    algorithm = REGISTRY.get(name)
    if algorithm is None or algorithm.reject(problem, device) is not None:
        return ()
    fitting = [config for config in algorithm.configs(problem, device) if among is None or config in among]
    needed = {config: algorithm.workspace_bytes(problem, config, device) for config in fitting}
    return tuple(config for config, size in needed.items() if 0 <= size <= problem.workspace_cap)


def contenders(problem: Problem, device: torch.device) -> dict[str, tuple[int, ...]]:
    """What may be timed for a problem: algorithms, least predicted time first, and their configs, best guess first.

    Torch's operator comes last, where it may stand in and where another runs.
    """
    costs, _ = _predictions(problem, device)
    names = sorted(costs, key=lambda name: costs[name])
    if names and fallback_allowed():
        names.append(FALLBACK)
    return {name: configs for name in names if (configs := _affordable(name, problem, device))}


def _predictions(problem: Problem, device: torch.device) -> tuple[dict[str, float], dict[str, str]]:
    """The predicted seconds of each algorithm that accepts, and the refusals of the others."""
    refusals: dict[str, str] = {}
    costs: dict[str, float] = {}
    for name, algorithm in REGISTRY.items():
        if name in _NEVER_CHOSEN:
            continue
        refusal = algorithm.reject(problem, device)
        if refusal is None:
            costs[name] = predicted_seconds(name, problem, device)
        else:
            refusals[name] = refusal
    return costs, refusals


# A copy of a gradient with its channels innermost: seconds beside its bytes, which are read and written, and their rate (H200).
_TURN_SECONDS, _TURN_BYTES = 3e-6, 3.4e12
# Predictions of pairs of operators are compared: turning takes more than what is said, and sharing columns less, but more in
# TF32. Of a turned copy what steps took beside their forwards is 1.10 (dense 64 -> 128), 1.13 (pose 256), 1.15 (dense 3x7) and
# 1.27 (DCGAN 128) times what is said (H200, bfloat16). Sharing is by two steps that were timed with shared columns and without
# (H200): CycleGAN 256 in TF32, 80 and 71 us, and DCGAN 512 in bfloat16, 71.7 and 72.3, with three times the memory. HiFi-GAN 512
# and EnCodec 512 in TF32 go apart by a sum: `gemm`'s times, less what columns are said to take, are 7 us above the operators'.
_TURN_FACTOR, _SHARE_FACTOR, _SHARE_TF32 = 1.15, 0.93, 1.14


def sums_in_its_pass(problem: Problem, parts: int, asked: bool = False) -> bool:
    """Whether y's channels are summed in the pass of the weight's gradient, of so many parts: soonest so, or asked for."""
    return parts > 0 and (asked or added_sums_seconds(parts) < channel_sums_seconds(problem))


def way_of_backward(
    apart: tuple[Problem, Problem],
    turned: tuple[Problem, Problem] | None,
    can_share: bool,
    device: torch.device,
    with_bias: bool = False,
) -> str:
    """How the two operators of a backward run soonest: "apart", "turned" or "shared".

    Args:
        apart: the adjoint in x and the adjoint in w, of the gradient as it lies.
        turned: the same of a copy of the gradient whose channels are innermost; None where there can be none.
        can_share: whether matrix products can take both from one matrix of columns.
        device: where; what was tuned there is tuned apart, and stays so.
        with_bias: whether the gradient of the bias is asked for too, which apart may come in the pass of the weight's.
    """
    if tuned_allowed() and any(plans.lookup(problem, device) is not None for problem in apart):
        return "apart"
    costs = [_predictions(problem, device)[0] for problem in apart]
    if not all(costs):
        return "apart"
    ways = {"apart": sum(min(cost.values()) for cost in costs)}
    p = apart[0]
    weight = plan(apart[1], device) if with_bias else None
    parts = 0 if weight is None else REGISTRY[weight.algorithm].sums_channels(apart[1], weight.config, device)
    beside = channel_sums_seconds(p) - added_sums_seconds(parts) if sums_in_its_pass(p, parts) else 0.0
    if turned is not None:
        copied = 2 * p.batch * p.out_channels * p.out_pixels * DTYPE_BYTES[p.dtype]
        of_copy = [_predictions(problem, device)[0] for problem in turned]
        if all(of_copy):
            seconds = sum(min(cost.values()) for cost in of_copy)
            ways["turned"] = _TURN_FACTOR * (seconds + _TURN_SECONDS + copied / _TURN_BYTES) + beside
    if can_share and all("gemm" in cost for cost in costs):
        seconds = sum(cost["gemm"] for cost in costs) - shared_columns_seconds(p)
        in_tf32 = p.dtype == torch.float32 and not p.in_full_float32
        ways["shared"] = (_SHARE_TF32 if in_tf32 else _SHARE_FACTOR) * seconds + beside
    return min(ways, key=lambda way: ways[way])


def _predicted(problem: Problem, device: torch.device, may_fall_back: bool) -> Plan:
    costs, refusals = _predictions(problem, device)
    if costs:
        best = min(costs, key=lambda name: costs[name])
        ranking = ", ".join(f"{name} {1e6 * cost:.0f} us" for name, cost in sorted(costs.items(), key=lambda item: item[1]))
        return planned(REGISTRY[best], problem, device, f"least predicted time: {ranking}")
    listed = "; ".join(f"{name}: {refusal}" for name, refusal in refusals.items())
    if not may_fall_back:
        raise InvalidArgument(
            f"algorithm = 'auto'; every algorithm refuses this problem ({listed}), and falling back to torch is off"
        )
    warnings.warn(f"upfold runs torch's own operator: {listed}", RuntimeWarning, stacklevel=2)
    return planned(REGISTRY[FALLBACK], problem, device, f"every other algorithm refuses: {listed}")
