"""What the choice among methods and tiles costs on a GPU that is not there, by timings of all of them.

`benchmarks/timings/` holds, for layers of published models and of the seeds, how long each way took, forward and either gradient.
The choice is made anew, as check_plans.py plans without a GPU, and looked up there: so a change of a prediction shows what it
loses before it is measured. Where tiles were not timed, in full float32 and in channels_last, the bench's runs of each method by
its best guess serve: they tell of the choice among methods alone.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
TIMINGS = BENCHMARKS / "timings"
FORWARDS, GRADIENTS = TIMINGS / "nvidia-h100-80gb-hbm3.json", TIMINGS / "nvidia-h200-gradients.json"
# Times the fastest way: the geometric mean of a group of layers, and of one layer.
MOST_IN_MEAN, MOST = 1.03, 1.2
# An operator and layers: those of a group are one mean.
GROUPS = (
    ("forward", ("seeds", "decoders", "irregular")),
    ("forward", ("survey",)),
    ("grad_input", ("seeds", "decoders")),
    ("grad_weight", ("seeds", "decoders")),
)
# Runs of the bench: a file's ending, a run of it, its dtype, whether it took TF32, and whether tensors were channels_last.
RUNS = (
    ("", "float32-ieee", "float32", False, False),
    ("-channels_last", "float32", "float32", True, True),
    ("-channels_last", "bfloat16", "bfloat16", False, True),
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


def losses_of_methods(torch: Any, run: dict[str, Any], dtype: str, allow_tf32: bool, channels_last: bool) -> dict[str, float]:
    """How many times as long as the fastest method that may be chosen the chosen one took, by layer, in a run of the bench.

    Raises:
        AssertionError: what is chosen for a layer was not timed.
    """
    from upfold import cases, dispatch

    device, found = torch.device("cuda", 0), {}
    for entry in (entry for suite in run["suites"].values() for entry in suite):
        case = cases.find(entry["name"])
        axes = len(case.in_size)
        if channels_last and axes == 1:
            continue
        layouts = {2: torch.channels_last, 3: torch.channels_last_3d} if channels_last else {}
        problem = operators(torch, case, getattr(torch, dtype), layouts.get(axes, torch.contiguous_format))["forward"]
        problem = replace(problem, allow_tf32=allow_tf32)
        may_run, chosen = dispatch.contenders(problem, device), dispatch.plan(problem, device).algorithm
        timed = {
            row["method"]: row["seconds"] for row in entry["rows"] if row["ours"] and row["seconds"] and row["method"] in may_run
        }
        assert chosen in timed, f"{chosen}, which is chosen for {case.name} in {dtype}, was not timed"
        found[case.name] = timed[chosen] / min(timed.values())
    return found


def _said(loss: dict[str, float], where: str) -> str:
    """What a group of layers loses.

    Raises:
        AssertionError: it is too much.
    """
    mean = math.exp(sum(map(math.log, loss.values())) / len(loss))
    worst = max(loss, key=lambda name: loss[name])
    said = f"{mean:.3f} in {where} ({worst} {loss[worst]:.2f})"
    assert mean <= MOST_IN_MEAN, said
    assert loss[worst] <= MOST, said
    return said


def check(torch: Any) -> str:
    """Compare every choice with the timings; a line that tells of them."""
    timings = {"forward": json.loads(FORWARDS.read_text())} | json.loads(GRADIENTS.read_text())
    said = []
    for mode, tiers in GROUPS:
        for dtype in ("float32", "bfloat16"):
            said.append(_said(losses(torch, dtype, tiers, timings[mode][dtype], mode), f"{dtype}, {mode}"))
    for ending, name, dtype, allow_tf32, channels_last in RUNS:
        results = json.loads((BENCHMARKS / "results" / f"nvidia-h200{ending}.json").read_text())
        found = losses_of_methods(torch, results[name], dtype, allow_tf32, channels_last)
        said.append(_said(found, f"{name}{ending}, methods alone"))
    return "times the fastest way, chosen: " + ", ".join(said)
