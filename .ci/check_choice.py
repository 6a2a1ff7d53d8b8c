"""What the choice among methods and tiles costs on a GPU that is not there, by timings of all of them.

`benchmarks/timings/` holds, for the forwards of the layers of published models, how long each way took. The choice is made anew,
as check_plans.py plans without a GPU, and looked up there: so a change of a prediction shows what it loses before it is measured.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

TIMINGS = Path(__file__).resolve().parent.parent / "benchmarks" / "timings" / "nvidia-h100-80gb-hbm3.json"
# Times the fastest way: the geometric mean of a group of layers, and of one layer.
MOST_IN_MEAN, MOST = 1.03, 1.2
GROUPS = (("seeds", "decoders", "irregular"), ("survey",))


def losses(torch: Any, dtype: str, tiers: tuple[str, ...], timings: dict[str, dict[str, float]]) -> dict[str, float]:
    """How many times as long as the fastest way what is chosen took, by layer.

    Raises:
        AssertionError: a layer or what is chosen for it was not timed.
    """
    from upfold import cases, dispatch, execute, modes

    found = {}
    for case in cases.by_tier(*tiers):
        x_shape, w_shape = (case.batch, case.in_channels, *case.in_size), (case.in_channels, case.out_channels // case.groups)
        x = torch.empty(x_shape, dtype=getattr(torch, dtype), device="meta")
        w = torch.empty((*w_shape, *case.kernel_size), dtype=x.dtype, device="meta")
        bias = torch.empty(case.out_channels, dtype=x.dtype, device="meta") if case.bias else None
        problem = execute.describe(x, w, bias, modes.positional(case.geometry))
        plan = dispatch.plan(replace(problem, allow_tf32=dtype == "float32"), torch.device("cuda", 0))
        way, timed = f"{plan.algorithm}:{plan.config}", timings.get(case.name, {})
        assert way in timed, f"{way}, which is chosen for {case.name} in {dtype}, was not timed; add it to {TIMINGS.name}"
        found[case.name] = timed[way] / min(timed.values())
    return found


def check(torch: Any) -> str:
    """Compare every choice with the timings; a line that tells of them."""
    timings, said = json.loads(TIMINGS.read_text()), []
    for tiers in GROUPS:
        for dtype in ("float32", "bfloat16"):
            loss = losses(torch, dtype, tiers, timings[dtype])
            mean = math.exp(sum(map(math.log, loss.values())) / len(loss))
            worst = max(loss, key=lambda name: loss[name])
            said.append(f"{mean:.3f} in {dtype} ({worst} {loss[worst]:.2f})")
            assert mean <= MOST_IN_MEAN, said[-1]
            assert loss[worst] <= MOST, said[-1]
    return "times the fastest way, chosen: " + ", ".join(said)
