"""What a suite says as a whole: means, worst cases and losses of each method, against each of torch's ways and the floor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .comparison import Comparison, Row
from .methods import MATMUL_FOLD, TORCH, TORCH_CHANNELS_LAST, TORCH_NATIVE
from .timing import geometric_mean

BEST = "best peer"
PEERS = (TORCH, TORCH_CHANNELS_LAST, BEST, TORCH_NATIVE, MATMUL_FOLD)
FLOOR = "floor"
# Below it a launch takes longer than the work, and the ratio says nothing of the kernel.
_SHORTEST_FLOOR = 5e-6


def summarize(comparisons: Sequence[Comparison]) -> dict[str, dict[str, dict[str, Any]]]:
    """Sum a suite up.

    Args:
        comparisons: of its layers.

    Returns:
        For each method of upfold's and for ``auto``, by peer: how many times faster in geometric mean and at worst, on how many
        layers, and on how many of them slower; and the time in floors, over the layers whose floor is above 5 microseconds.
        Peers that ran on no layer are left out, and so are methods that did not run.
    """
    ours = list(dict.fromkeys(row.method for c in comparisons for row in c.rows if row.ours))
    found = {method: _against_all(comparisons, method) for method in [*ours, "auto"]}
    return {method: entries for method, entries in found.items() if entries}


def _against_all(comparisons: Sequence[Comparison], method: str) -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = {}
    for peer in PEERS:
        ratios = [ratio for c in comparisons if (ratio := c.ratio(c.row(method), _peer(c, peer))) is not None]
        if ratios:
            slower = sum(ratio < 1 for ratio in ratios)
            entries[peer] = {**_mean(ratios), "worst": min(ratios), "slower": slower}
    long = [c for c in comparisons if c.floor_seconds > _SHORTEST_FLOOR]
    floors = [row.seconds / c.floor_seconds for c in long if (row := c.row(method)) is not None and row.seconds]
    if floors:
        entries[FLOOR] = {**_mean(floors), "worst": max(floors)}
    return entries


def _peer(comparison: Comparison, name: str) -> Row | None:
    return comparison.best_peer if name == BEST else comparison.row(name)


def _mean(ratios: Sequence[float]) -> dict[str, Any]:
    return {"geometric_mean": geometric_mean(ratios), "layers": len(ratios)}
