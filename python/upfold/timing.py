"""The one timer: interleaved rounds, medians, device time by graph replay on a GPU."""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Call = Callable[[], object]
# One call, or the same call on several data sets that take turns so that no cache holds the operands.
Work = Call | Sequence[Call]

# A sample shorter than this says more about the clock than about the work.
_SHORTEST_SAMPLE = 200e-6
_FEWEST_SAMPLES = 3
_LONG_CALL = 0.25
_MOST_SAMPLES = 500
_MOST_DATA_SETS = 512
# Of the H100 and H200; used where the installed torch does not tell.
_L2_BYTES = 50 * 2**20


@dataclass(frozen=True)
class Timing:
    """What one piece of work took.

    Attributes:
        seconds: median time of one call.
        fastest: time of one call in the fastest sample.
        spread: distance of the quartiles divided by the median; above 0.1 the machine was busy with something else.
        samples: number of timed samples behind the median.
        how: "wall" (host clock), "cpu" (time of the process, `cpu_clock`), "graph" (device time, CUDA graph replay) or "events"
            (device time, eager calls).
    """

    seconds: float
    fastest: float
    spread: float
    samples: int
    how: str


@dataclass
class _Runner:
    """One piece of work made ready: `sample` runs `calls` calls and returns the seconds that they took together."""

    sample: Callable[[], float]
    calls: int
    how: str
    spent: float = 0.0
    times: list[float] = field(default_factory=list)

    def wants_more(self, seconds: float) -> bool:
        return len(self.times) < _FEWEST_SAMPLES or (self.spent < seconds and len(self.times) < _MOST_SAMPLES)

    def step(self) -> None:
        elapsed = self.sample()
        self.spent += elapsed
        self.times.append(elapsed / self.calls)

    def timing(self) -> Timing:
        median = statistics.median(self.times)
        low, _, high = statistics.quantiles(self.times, n=4)
        return Timing(median, min(self.times), (high - low) / median if median else 0.0, len(self.times), self.how)


_clock: Callable[[], float] = time.perf_counter


@contextlib.contextmanager
def cpu_clock() -> Iterator[None]:
    """Time host work by what the process computes, on one thread: on a CPU that others use too the wall clock measures them."""
    global _clock
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    _clock = time.process_time
    try:
        yield
    finally:
        _clock = time.perf_counter
        torch.set_num_threads(threads)


def medians(functions: Sequence[Work], device: torch.device | str, *, seconds: float = 0.3) -> list[float]:
    """Time several functions against each other.

    Args:
        functions: each is called without arguments, or is a sequence of such calls that take turns.
        device: where the work runs; on a CPU the host clock is read, on a GPU a CUDA graph is replayed.
        seconds: time spent on each function, after one warm-up; at least three samples are taken whatever it says.

    Returns:
        Seconds per call, one median per function. The rounds are interleaved, so a disturbance meets all alike.
    """
    return [timing.seconds for timing in measure(functions, device, seconds=seconds)]


def measure(functions: Sequence[Work], device: torch.device | str, *, seconds: float = 0.3) -> list[Timing]:
    """As `medians`, with the spread and the way of measuring."""
    device = torch.device(device)
    prepare = _device_runner if device.type == "cuda" else _host_runner
    return _interleave([prepare(_as_calls(work), device) for work in functions], seconds)


def host_medians(functions: Sequence[Work], device: torch.device | str, *, seconds: float = 0.3) -> list[float]:
    """Time what each call costs the caller: host seconds per call, a GPU's own work left out.

    Args:
        functions: as for `medians`.
        device: where the work runs.
        seconds: as for `medians`.

    Returns:
        Host seconds per call, one median per function.
    """
    device = torch.device(device)
    return [t.seconds for t in _interleave([_host_runner(_as_calls(work), device) for work in functions], seconds)]


def latencies(functions: Sequence[Call], device: torch.device | str, *, seconds: float = 0.3) -> list[Timing]:
    """Time what a caller waits for who needs each result before the next call: the host's part and a GPU's work.

    Args:
        functions: each is called without arguments.
        device: where the work runs; it is waited for after each call.
        seconds: as for `medians`.

    Returns:
        Wall times, one for each function; the rounds are interleaved.
    """
    device = torch.device(device)
    return _interleave([_waiting_runner(call, device) for call in functions], seconds)


def data_sets(bytes_touched: int, device: torch.device | str) -> int:
    """Number of data sets that must take turns so that each call finds its operands outside the cache.

    Args:
        bytes_touched: bytes of operands and result of one call.
        device: where the work runs.

    Returns:
        1 on a CPU, where callers find their data warm too; else enough for more than twice the L2 cache.
    """
    cache = cache_bytes(device)
    return min(_MOST_DATA_SETS, 2 * cache // max(1, bytes_touched) + 2) if cache else 1


def cache_bytes(device: torch.device | str) -> int:
    """Size of the last cache of a GPU; 0 for a CPU, whose callers find their data warm or cold as it comes."""
    device = torch.device(device)
    if device.type != "cuda":
        return 0
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or _L2_BYTES


def geometric_mean(ratios: Sequence[float]) -> float:
    """Geometric mean; NaN for an empty sequence."""
    return math.exp(statistics.fmean(map(math.log, ratios))) if ratios else math.nan


def _as_calls(work: Work) -> tuple[Call, ...]:
    return (work,) if callable(work) else tuple(work)


def _interleave(runners: Sequence[_Runner], seconds: float) -> list[Timing]:
    with _no_collection():
        while True:
            busy = [runner for runner in runners if runner.wants_more(seconds)]
            if not busy:
                return [runner.timing() for runner in runners]
            for runner in busy:
                runner.step()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _waiting_runner(call: Call, device: torch.device) -> _Runner:
    def sample() -> float:
        start = time.perf_counter()
        call()
        settle(device)
        return time.perf_counter() - start

    for _ in range(2):
        sample()
    return _Runner(sample, 1, "wall")


def settle(device: torch.device) -> None:
    """Wait until a GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _host_runner(calls: tuple[Call, ...], device: torch.device) -> _Runner:
    def once() -> float:
        start = _clock()
        for call in calls:
            call()
        return _clock() - start

    estimate = once()
    settle(device)
    if estimate < _LONG_CALL:  # the first call paid for planning and fresh memory; a long one hardly noticed
        estimate = once()
        settle(device)
    repeats = range(max(1, math.ceil(_SHORTEST_SAMPLE / max(estimate, 1e-9))))

    def sample() -> float:
        start = _clock()
        for _ in repeats:
            for call in calls:
                call()
        elapsed = _clock() - start
        settle(device)
        return elapsed

    return _Runner(sample, len(repeats) * len(calls), "wall" if _clock is time.perf_counter else "cpu")


def _device_runner(calls: tuple[Call, ...], device: torch.device) -> _Runner:
    with torch.cuda.device(device):
        # Libraries allocate and tune themselves in their first calls, which a capture forbids.
        stream: Any = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                for call in calls:
                    call()
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.synchronize(device)
        graph: Any = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                # Held together, the results lie in different memory: none is written while its lines are still in the cache.
                held = [call() for call in calls]
        except RuntimeError:  # something in the call cannot be captured
            torch.cuda.synchronize(device)
            _end_failed_capture(device)
            return _event_runner(calls, len(calls), "events", device, [])
        replay: tuple[Call, ...] = (graph.replay,)
        return _event_runner(replay, len(calls), "graph", device, held)


def _end_failed_capture(device: torch.device) -> None:
    """Capture something harmless: a failed capture leaves torch's random generator in capture mode, a good one takes it out."""
    graph: Any = torch.cuda.CUDAGraph()
    counter = torch.zeros(1, device=device)
    with torch.cuda.graph(graph):
        counter += 1


def _event_runner(calls: tuple[Call, ...], count: int, how: str, device: torch.device, held: list[object]) -> _Runner:
    def timed(repeats: int) -> float:
        with torch.cuda.device(device):
            start: Any = torch.cuda.Event(enable_timing=True)
            end: Any = torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(repeats):
                for call in calls:
                    call()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3

    timed(1)
    repeats = max(1, math.ceil(_SHORTEST_SAMPLE / max(timed(1), 1e-9)))

    def sample(keep: list[object] = held) -> float:  # a graph writes into what it captured: the results must stay alive
        return timed(repeats)

    return _Runner(sample, repeats * count, how)
