"""Whole suites from a results file: a chart of each method's time in floors, and the same figures as a Markdown table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .geometry import InvalidArgument
from .methods import AUTO, MATMUL_FOLD, TORCH, TORCH_CHANNELS_LAST, TORCH_NATIVE
from .modes import FORWARD
from .timing import geometric_mean

# Those that a reader compares first, of which a chart shows what was timed.
METHODS = (AUTO, "gemm", "direct", "depthwise", "fused", TORCH, TORCH_CHANNELS_LAST)
# Those that are not upfold's.
PEERS = (TORCH, TORCH_CHANNELS_LAST, TORCH_NATIVE, MATMUL_FOLD)


@dataclass(frozen=True)
class Layer:
    """One layer of a suite: its time by method, in seconds, and what upfold takes by itself."""

    name: str
    size: str
    suite: str
    floor: float
    auto: str
    peer: str
    times: dict[str, float]
    flops: float = 0.0
    bytes: float = 0.0
    repro: str = ""

    @property
    def best_peer(self) -> str | None:
        """The fastest of the methods that are not upfold's."""
        return min((name for name in self.times if name in PEERS), key=self.times.__getitem__, default=None)

    @property
    def ratio(self) -> float | None:
        """How many times faster than `peer`, torch in the same layout, upfold's choice is."""
        ours, theirs = self.times.get(self.auto), self.times.get(self.peer)
        return None if ours is None or theirs is None or self.auto == TORCH else theirs / ours


@dataclass(frozen=True)
class Run:
    """One run of the bench: what it ran on and in which type, and its layers, suite after suite."""

    device: str
    kind: str
    layers: tuple[Layer, ...]
    bytes_per_second: float = 0.0
    flops_per_second: float = 0.0

    @property
    def text(self) -> str:
        """``NVIDIA H200, float32 tf32: auto 1.52x torch in geometric mean over 45 layers``."""
        ratios = [layer.ratio for layer in self.layers if layer.ratio is not None]
        mean = f": auto {geometric_mean(ratios):.2f}x torch, geometric mean of {len(ratios)} layers" if ratios else ""
        return f"{self.device}, {self.kind}{mean}"


def read_facts(paths: str | Path | Sequence[str | Path]) -> dict[str, Any]:
    """What a results file holds; of several, the run of each by the name of its file, and those of a file that holds several.

    A name that an earlier file has as well gets the file's put before it.
    """
    if isinstance(paths, (str, Path)) or len(paths) == 1:
        (path,) = [paths] if isinstance(paths, (str, Path)) else paths
        alone: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        return alone
    runs: dict[str, Any] = {}
    for path in map(Path, paths):
        facts = json.loads(path.read_text(encoding="utf-8"))
        found = {path.stem: facts} if "suites" in facts else facts
        runs.update({f"{path.stem} {name}" if name in runs else name: run for name, run in found.items()})
    return runs


def read_runs(
    path: str | Path | Sequence[str | Path], names: Sequence[str] = (), suites: Sequence[str] = (), layers: Sequence[str] = ()
) -> list[Run]:
    """Read runs of a file that ``upfold bench --json`` or ``make gpu-check`` wrote.

    Args:
        path: the file, or several.
        names: of the runs, in a file that holds several; none takes the first.
        suites: which; none takes all forward ones. Others are called as ``decoders grad_input``, ``decoders step``.
        layers: which, by name; none takes all.

    Raises:
        InvalidArgument: the file holds no such run, suite or layer.
    """
    facts = read_facts(path)
    several = {name: run for name, run in facts.items() if isinstance(run, dict) and "suites" in run}
    runs = {"": facts} if "suites" in facts else several
    for name in names:
        if name not in runs:
            raise InvalidArgument(f"run = {name!r}; {path} has {', '.join(runs) or 'none'}")
    if not runs:
        raise InvalidArgument(f"{path}: holds no suites; it must come from upfold bench --json")
    return [run_of(runs[name], suites, layers) for name in names or list(runs)[:1]]


def run_of(facts: dict[str, Any], suites: Sequence[str] = (), layers: Sequence[str] = ()) -> Run:
    """One run, as the bench's JSON holds it."""
    found: dict[str, list[dict[str, Any]]] = facts["suites"]
    if missing := [name for name in suites if name not in found]:
        raise InvalidArgument(f"suite = {missing[0]!r}; the run has {', '.join(found)}")
    chosen = suites or [name for name, rows in found.items() if all(row["mode"] == FORWARD for row in rows)] or list(found)
    taken = tuple(_layer(suite, row) for suite in chosen for row in found[suite] if not layers or row["name"] in layers)
    if missing := [name for name in layers if name not in [layer.name for layer in taken]]:
        raise InvalidArgument(f"layer = {missing[0]!r}; the suites {', '.join(chosen)} have none of that name")
    if not taken:
        raise InvalidArgument("the run holds no layers; fold and host have none")
    kind = facts["dtype"] + (f" {facts['precision']}" if facts.get("precision") else "")
    ceilings = next(iter(found[chosen[0]]), {}).get("ceilings", {})
    return Run(facts["device"], kind, taken, ceilings.get("bytes_per_second", 0.0), ceilings.get("flops_per_second", 0.0))


def _layer(suite: str, facts: dict[str, Any]) -> Layer:
    times = {row["method"]: row["seconds"] for row in facts["rows"] if row["seconds"]}
    size = facts["size"].partition(" (cut from")
    peer = TORCH if facts["layout"] == "contiguous" else f"{TORCH} {facts['layout']}"
    shown = size[0] + ("*" if size[1] else "")
    work = facts.get("gflop", 0.0) * 1e9, facts.get("megabytes", 0.0) * 1e6, facts.get("repro", "")
    return Layer(facts["name"], shown, suite, facts["floor_seconds"], facts["auto"], peer, times, *work)


def shown_methods(runs: Sequence[Run], methods: Sequence[str] = ()) -> list[str]:
    """The methods to show: those asked for, else the usual ones, as far as one run timed them."""
    timed = {method for run in runs for layer in run.layers for method in layer.times}
    return [method for method in methods or METHODS if method in timed]


def markdown(runs: Sequence[Run], methods: Sequence[str] = ()) -> str:
    """A table for each run: times in microseconds, the fastest in bold, and what `auto` makes of torch's time."""
    shown = shown_methods(runs, methods)
    parts = []
    for run in runs:
        lines = [f"{run.text} (microseconds)", "", f"| layer | floor | {' | '.join(shown)} | auto | x torch |"]
        lines.append("|---" * (len(shown) + 4) + "|")
        for layer in run.layers:
            fastest = min(layer.times.values(), default=None)
            cells = [_cell(layer.times.get(method), fastest) for method in shown]
            ratio = "-" if layer.ratio is None else f"{layer.ratio:.2f}"
            lines.append(f"| {layer.name}, {layer.size} | {_cell(layer.floor)} | {' | '.join(cells)} | {layer.auto} | {ratio} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _cell(seconds: float | None, fastest: float | None = None) -> str:
    if seconds is None:
        return "-"
    text = f"{seconds * 1e6:.1f}" if seconds < 10e-6 else f"{seconds * 1e6:.0f}"
    return f"**{text}**" if seconds == fastest else text
