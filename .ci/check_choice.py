"""What the choice among methods and tiles costs on a GPU that is not there, by timings of all of them.

`benchmarks/timings/` holds, for layers of published models and of the seeds, how long each way took, forward and either gradient.
The choice is made anew, as check_plans.py plans without a GPU, and looked up there: so a change of a prediction shows what it
loses before it is measured.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

TIMINGS = Path(__file__).resolve().parent.parent / "benchmarks" / "timings"
FORWARDS, GRADIENTS = (TIMINGS / f"nvidia-h100-80gb-hbm3{name}.json" for name in ("", "-gradients"))
# Times the fastest way: the geometric mean of a group of layers, and of one layer.
MOST_IN_MEAN, MOST = 1.03, 1.2
# An operator and layers: those of a group are one mean.
GROUPS = (
    ("forward", ("seeds", "decoders", "irregular")),
    ("forward", ("survey",)),
    ("grad_input", ("seeds", "decoders")),
    ("grad_weight", ("seeds", "decoders")),
)


def operators(torch: Any, case: Any, dtype: Any, layout: Any) -> dict[str, Any]:
    """Describe the problems of a layer by mode, the forward and both gradients of tensors in that layout, without data."""
    from upfold import execute, modes

    arguments = modes.positional(case.geometry)
    x_shape, y_shape = (case.batch, case.in_channels, *case.in_size), (case.batch, case.out_channels, *case.out_size)
    w_shape = case.in_channels, case.out_channels // case.groups, *case.kernel_size
    x, w, y = (torch.empty(shape, dtype=dtype, device="meta", memory_format=layout) for shape in (x_shape, w_shape, y_shape))
    bias = torch.empty(case.out_channels, dtype=dtype, device="meta") if case.bias else None
    return {
        "forward": execute.describe(x, w, bias, arguments),
        "grad_input": execute.describe_conv(y, w, tuple(case.in_size), arguments)[0],
        "grad_weight": execute.describe_conv_transpose_weight(x, y, tuple(case.kernel_size), arguments)[0],
    }


def losses(
    torch: Any, dtype: str, tiers: tuple[str, ...], timings: dict[str, dict[str, float]], mode: str = "forward"
) -> dict[str, float]:
    """How many times as long as the fastest way what is chosen took, by layer.

    Raises:
        AssertionError: a layer or what is chosen for it was not timed.
    """
    from upfold import cases, dispatch

    found = {}
    for case in cases.by_tier(*tiers):
        problem = operators(torch, case, getattr(torch, dtype), torch.contiguous_format)[mode]
        plan = dispatch.plan(replace(problem, allow_tf32=dtype == "float32"), torch.device("cuda", 0))
        way, timed = f"{plan.algorithm}:{plan.config}", timings.get(case.name, {})
        assert way in timed, f"{way}, which is chosen for {case.name} in {dtype}, {mode}, was not timed; add it to {TIMINGS.name}"
        found[case.name] = timed[way] / min(timed.values())
    return found


def check(torch: Any) -> str:
    """Compare every choice with the timings; a line that tells of them."""
    timings = {"forward": json.loads(FORWARDS.read_text())} | json.loads(GRADIENTS.read_text())
    said = []
    for mode, tiers in GROUPS:
        for dtype in ("float32", "bfloat16"):
            loss = losses(torch, dtype, tiers, timings[mode][dtype], mode)
            mean = math.exp(sum(map(math.log, loss.values())) / len(loss))
            worst = max(loss, key=lambda name: loss[name])
            said.append(f"{mean:.3f} in {dtype}, {mode} ({worst} {loss[worst]:.2f})")
            assert mean <= MOST_IN_MEAN, said[-1]
            assert loss[worst] <= MOST, said[-1]
    return "times the fastest way, chosen: " + ", ".join(said)
