"""What it costs to write into fresh memory: on a CPU every page of a new result is faulted in by its first write."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from .comparison import Comparison
from .methods import forward_into, our_method
from .modes import FORWARD, Operands
from .timing import Work, geometric_mean, measure

_LEAST_BYTES = 2**20


def time_fresh(result: Comparison, operands: Operands, seconds: float) -> None:
    """Time what `auto` takes with and without ``out=``, and the filling of a fresh and of a written result.

    Fills in `Row.out_seconds` of that method, and `Comparison.fresh_seconds`; for the forward on a CPU only, and where the result
    has pages enough to be seen.

    Args:
        result: the comparison, its methods timed.
        operands: of one call.
        seconds: time spent on each of the four.
    """
    row = result.auto_row
    if result.device.type != "cpu" or result.mode != FORWARD or row is None or not row.seconds:
        return
    data = operands.laid_out(row.layout)
    ours = our_method(FORWARD, row.method, result.geometry)
    y = ours(data)
    assert isinstance(y, torch.Tensor), "a forward has one result"
    if y.numel() * y.element_size() < _LEAST_BYTES:
        return
    into = forward_into(row.method, result.geometry, y)
    works: list[Work] = [lambda: torch.empty_like(y).zero_(), y.zero_, lambda: ours(data), lambda: into(data)]
    fill, fill_again, call, call_again = (timing.seconds for timing in measure(works, "cpu", seconds=seconds))
    result.fresh_seconds = max(0.0, fill - fill_again)
    row.out_seconds = row.seconds * call_again / call  # the machine may have been busier than when the methods were timed


def fresh_shares(result: Comparison) -> tuple[float, float, float] | None:
    """The share of fresh memory in upfold's time and in torch's, and how many times faster upfold is without it; None: not timed.

    Torch's operator takes no ``out=``, so its share is that of filling such a result.
    """
    row, peer, fresh = result.auto_row, result.torch_row, result.fresh_seconds
    if fresh is None or row is None or not row.seconds or not row.out_seconds or peer is None or not peer.seconds:
        return None
    left = max(peer.seconds - fresh, 0.0)
    return 1 - row.out_seconds / row.seconds, fresh / peer.seconds, left / row.out_seconds


def fresh_line(results: Sequence[Comparison]) -> str | None:
    """A sentence for a suite: the mean shares, and upfold against torch in the same layout with and without them."""
    timed = [result for result in results if fresh_shares(result) is not None]
    shares = [found for result in timed if (found := fresh_shares(result)) is not None and found[2] > 0]
    if not shares:
        return None
    ours, theirs = (statistics.fmean(share[which] for share in shares) for which in (0, 1))
    with_pages = geometric_mean([r for c in timed if (r := c.ratio(c.auto_row, c.torch_row)) is not None])
    return (
        f"First touch of a fresh result: {ours:.0%} of what auto takes and {theirs:.0%} of torch's time (mean of {len(shares)} "
        f"layers); auto is {with_pages:.2f}x torch with it and {geometric_mean([share[2] for share in shares]):.2f}x without."
    )
