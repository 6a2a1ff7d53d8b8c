"""Tuning: times every algorithm and config on what a model's transposed convolutions get, and keeps the fastest as plans."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import dispatch, execute, plans, timing
from .geometry import InvalidArgument
from .plans import Measured, Ranking
from .report import TuneReport, TuneRow
from .subjects import Subject, Way, subjects_of

# Time spent on measuring one candidate: the most, and the least where the budget is short.
_MOST_SECONDS_EACH, _LEAST_SECONDS_EACH = 0.1, 0.01
# Calls that measuring takes at least: a trial, the timer's warm-up and its fewest samples.
_CALLS_EACH = 6
_now = time.perf_counter


def tune(
    model: nn.Module,
    *inputs: Any,
    seconds: float = 60.0,
    algorithms: Sequence[str] | None = None,
    gradients: bool = False,
    again: bool = False,
    progress: bool = True,
) -> TuneReport:
    """Time every algorithm that accepts what a model's transposed convolutions get, and remember the fastest.

    From then on `auto` takes it, in this process and in later ones, for these sizes and near ones: batch and spatial sizes
    share a plan within a quarter of an octave, every other part of a problem (`upfold.explain` names them) and on a CPU the
    number of threads must be the same. The model runs once, in evaluation mode and without gradients; torch's layers
    and upfold's are seen alike, so it may be tuned before `replace` or after. Torch's own operator takes part unless
    ``UPFOLD_FALLBACK=0`` or ``use(fallback=False)`` forbids it.

    Args:
        model: any module; it may itself be a transposed convolution.
        inputs: the model's positional arguments.
        seconds: how long the measuring may take. Best guesses come first, each problem's before any problem's rest.
        algorithms: names of those to time (default: all but gemm_atomic, which `auto` never takes).
        gradients: also tune the gradients of x and w, which a backward computes.
        again: measure anew what has a plan already.
        progress: show a progress bar on stderr where that is a terminal and rich is installed.

    Returns:
        A `TuneReport`: each problem with its plan, its time and the time of what upfold would have taken untuned.

    Raises:
        InvalidArgument: `seconds` is not positive, or `algorithms` names one that is unknown or never chosen.
    """
    if not 0 < seconds < math.inf:
        raise InvalidArgument(f"seconds = {seconds}; must be positive and finite")
    names = _checked_names(algorithms)
    races = [_prepare(subject, names, again) for subject in subjects_of(model, inputs, gradients)]
    start = _now()
    kept = False
    try:
        _run(races, start + seconds, seconds, progress)
    finally:  # an interruption leaves what was measured
        found: plans.Plans = {}
        for race in races:
            if race.is_decided:
                found.setdefault(plans.machine_of(race.subject.device), {})[race.key] = race.ranking(names is None)
        if found:
            kept = plans.remember(found)
            _take_effect()
    file = str(plans.cache_file()) if kept else None
    return TuneReport(tuple(race.row() for race in races), _now() - start, seconds, file, dispatch.tuned_allowed())


def save_plans(path: str | PathLike[str]) -> int:
    """Write all plans in force to a file, to be shipped with a model and read by `load_plans`.

    Args:
        path: the file, which is replaced.

    Returns:
        The number of plans in it.

    Raises:
        OSError: it cannot be written.
    """
    found = plans.in_force()
    plans.write(Path(path), found)
    return plans.count(found)


def load_plans(path: str | PathLike[str], keep: bool = False) -> int:
    """Take the plans of a file that `save_plans` wrote; they take the place of those for the same problems.

    Plans belong to a device's name, its driver and a version of upfold. Those of others are read, and not used here.

    Args:
        path: the file.
        keep: whether they are also added to the user's cache file, for later processes.

    Returns:
        The number of plans for this machine's devices.

    Raises:
        InvalidArgument: the file holds something else.
        OSError: it cannot be read.
    """
    try:
        found = plans.read(Path(path))
    except plans.DamagedFile as damage:
        raise InvalidArgument(f"path = {str(path)!r}; {damage}; upfold.save_plans writes such files") from None
    if keep:
        plans.remember(found)
    else:
        plans.add(found)
    _take_effect()
    return plans.count(found, plans.here())


def _take_effect() -> None:
    dispatch.forget()
    execute.forget()


def _checked_names(algorithms: Sequence[str] | None) -> tuple[str, ...] | None:
    if algorithms is None:
        return None
    names = (algorithms,) if isinstance(algorithms, str) else tuple(algorithms)
    for name in names:
        if name not in dispatch.MAY_BE_TUNED:
            known = ", ".join(map(repr, dispatch.MAY_BE_TUNED))
            raise InvalidArgument(f"algorithms = {names}; each must be one of {known}; auto takes no other")
    return names


# --- timing ----------------------------------------------------------------------------------------------------------


@dataclass
class _Race:
    """The candidates for one subject, and their times so far; infinite where one cannot run after all."""

    subject: Subject
    key: str
    contenders: dict[str, tuple[int, ...]]
    untuned: Way | None = None
    known: Ranking | None = None
    reason: str | None = None
    times: dict[Way, float] = field(default_factory=dict)

    @property
    def ways(self) -> list[Way]:
        return [(name, config) for name, configs in self.contenders.items() for config in configs]

    @property
    def not_reached(self) -> int:
        return sum(way not in self.times for way in self.ways)

    @property
    def best(self) -> tuple[Measured, ...]:
        """The best config of each algorithm, fastest first."""
        fastest: dict[str, Measured] = {}
        for (name, config), seconds in self.times.items():
            if seconds < (fastest[name].seconds if name in fastest else math.inf):
                fastest[name] = Measured(name, config, seconds)
        return tuple(sorted(fastest.values(), key=lambda one: one.seconds))

    @property
    def is_decided(self) -> bool:
        """Whether there is something to remember: one candidate of several, alone, was not compared with anything."""
        return bool(self.best) and (len(self.times) > 1 or not self.not_reached)

    def ranking(self, all_algorithms: bool) -> Ranking:
        return Ranking(self.best, all_algorithms and not self.not_reached)

    def row(self) -> TuneRow:
        subject, best = self.subject, self.best
        if self.known is not None:
            state, best = "known", self.known.measured
        elif self.is_decided:
            state = "tuned"
        else:
            state = "left alone" if self.reason else "not reached"
        untuned = f"{self.untuned[0]}#{self.untuned[1]}" if self.untuned else None
        seconds = self.times.get(self.untuned) if self.untuned else None
        counts = len(self.times), self.not_reached
        layers = tuple(subject.layers)
        return TuneRow(layers, subject.mode, subject.text(), state, self.reason, best, untuned, seconds, *counts)


def _prepare(subject: Subject, names: tuple[str, ...] | None, again: bool) -> _Race:
    problem, device = subject.problem, subject.device
    race = _Race(subject, plans.problem_key(problem, device), {})
    if subject.algorithm is not None:
        race.reason = f"asks for {subject.algorithm} by name"
        return race
    found = dispatch.contenders(problem, device)
    if not found:
        race.reason = "no algorithm of upfold accepts it"
        return race
    with dispatch.use(tuned=False):
        untuned = dispatch.plan(problem, device)
    race.untuned = untuned.algorithm, untuned.config
    known = plans.in_force().get(plans.machine_of(device), {}).get(race.key)
    if known is not None and known.complete and not again:
        race.known = known
        return race
    race.contenders = {name: configs for name, configs in found.items() if names is None or name in names}
    if not race.contenders:
        race.reason = "none of the algorithms asked for accepts it"
    return race


def _run(races: Sequence[_Race], deadline: float, seconds: float, progress: bool) -> None:
    """Time the best guess of every algorithm, problem by problem; then the other configs, against the fastest so far."""
    total = sum(len(race.ways) for race in races)
    each = min(_MOST_SECONDS_EACH, max(_LEAST_SECONDS_EACH, seconds / max(1, total)))
    with _progress(total, progress) as advance:
        for race in races:
            heat = [(name, configs[0]) for name, configs in race.contenders.items()]
            _run_heat(race, heat, each, deadline)
            advance(race.subject.layers[0], len(heat))
        for race in races:
            for name in [one.algorithm for one in race.best]:
                heat = [(name, config) for config in race.contenders[name][1:]]
                if heat:
                    _run_heat(race, heat, each, deadline)
                    advance(race.subject.layers[0], len(heat))


def _run_heat(race: _Race, heat: list[Way], each: float, deadline: float) -> None:
    """Time some candidates together, and beside the fastest of an earlier heat, whose time is the measure of theirs."""
    if not heat or _now() >= deadline:
        return
    leader = race.best[0] if race.best else None
    ways = heat if leader is None else [(leader.algorithm, leader.config), *heat]
    times = _times(race.subject, ways, each, deadline)
    scale = 1.0
    if leader is not None:
        again, *times = times
        if again is not None and 0 < again < math.inf:
            scale = leader.seconds / again  # the machine may run at another pace by now
    race.times.update({way: scale * found for way, found in zip(heat, times) if found is not None})


def _times(subject: Subject, ways: Sequence[Way], seconds: float, deadline: float) -> list[float | None]:
    """Seconds per call of each way; infinite where it cannot run, None where the time left does not suffice for it."""
    device = subject.device
    sets = subject.operands(timing.data_sets(subject.problem.bytes, device))
    found: list[float | None] = [None] * len(ways)
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        works: dict[int, list[timing.Call]] = {}
        needed = 0.0
        for index, way in enumerate(ways):
            calls = subject.calls(way, sets)
            trial = _trial(calls[0], device)
            if trial == math.inf:
                found[index] = trial
                continue
            needed += max(seconds, _CALLS_EACH * trial)
            if len(works) >= 2 and _now() + needed > deadline:
                break
            works[index] = calls
        for index, measured in zip(works, _medians(list(works.values()), device, seconds)):
            found[index] = measured
    return found


def _trial(call: timing.Call, device: torch.device) -> float:
    """Seconds of the second call, infinite where the first fails: torch lacks some types, and memory may run out."""

    def settled() -> float:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return _now()

    try:
        begin = settled()
        return settled() - begin
    except (RuntimeError, InvalidArgument):
        return math.inf


def _medians(works: list[list[timing.Call]], device: torch.device, seconds: float) -> list[float]:
    if not works:
        return []
    try:
        return timing.medians(works, device, seconds=seconds)
    except torch.cuda.OutOfMemoryError:  # all results of a graph are held: with one data set each, one by one
        torch.cuda.empty_cache()
        return [timing.medians([work[:1]], device, seconds=seconds)[0] for work in works]


@contextlib.contextmanager
def _progress(total: int, wanted: bool) -> Iterator[Callable[[str, int], None]]:
    bar: Any = None
    if wanted and total and sys.stderr is not None and sys.stderr.isatty():
        with contextlib.suppress(ImportError):
            from rich.console import Console

            from .tables import progress_bar

            bar = progress_bar(Console(stderr=True))
    if bar is None:
        yield lambda name, count: None
        return
    with bar:
        task = bar.add_task("", total=total)

        def advance(name: str, count: int) -> None:
            bar.update(task, advance=count, description=f"timed {name or 'the model'}")

        yield advance
