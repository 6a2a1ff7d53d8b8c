"""The survey of a model: its layers, what torch and upfold take for each, and what replacing and fusing them gains."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from dataclasses import replace as _with
from typing import Any

import torch
from torch import nn

from . import observe
from .fuse import fuse
from .patch import unpatched
from .replace import Contest, find, measure, replace, restore, row_of
from .report import Report, WholeModel

# Time spent on each of torch's layers, upfold's and the fused ones in the whole model; at least `_LEAST_RUNS` runs.
_SECONDS_EACH = 0.5
_LEAST_RUNS = 5


def scan(model: nn.Module, *inputs: Any) -> Report:
    """List the transposed-convolution, fold and unfold layers of a model, without changing it.

    Args:
        model: any module; it may itself be such a layer.
        inputs: the model's positional arguments. With them the model runs for some seconds, in evaluation mode and without
            gradients, and the report tells each layer's shapes, time and share of the time, what its calls take by torch's
            operator and by upfold's, the algorithm and why it is taken, and the time of the whole model with torch's layers,
            with upfold's, and fused.

    Returns:
        A `Report` with one row for each layer.
    """
    found = find(model)
    if not inputs:
        return Report("scan", tuple(map(row_of, found)))
    call: observe.Call = (inputs, {})
    watched = [entry.layer for entry in found if not isinstance(entry.layer, torch.jit.ScriptModule)]
    traffic, totals = observe.time_layers(model, call, watched)
    found = find(model)  # a lazy layer has its sizes by now
    takeable = [entry.layer for entry in found if entry.refusal is None or entry.is_ours]
    contests = measure(model, call, takeable, None)
    total = statistics.median(totals)
    rows = []
    for entry in found:
        row, seen = row_of(entry), traffic.get(entry.layer)
        if seen is not None:
            seconds = statistics.median(seen.seconds)
            row = _with(
                row,
                calls=seen.calls,
                input_shapes=tuple(seen.input_shapes),
                output_shapes=tuple(seen.output_shapes),
                seconds=seconds,
                share=seconds / total,
                **_of_contest(contests.get(entry.layer)),
            )
        rows.append(row)
    whole = _whole_model(model, call) if takeable else WholeModel("no layer of it can be upfold's")
    return Report("scan", tuple(rows), total, whole)


def _of_contest(contest: Contest | None) -> dict[str, Any]:
    """What was measured of a layer, as entries of its row."""
    if contest is None:
        return {}
    if contest.refusal is not None:
        return {"why": contest.verdict()}
    times = {"torch_seconds": contest.torch_seconds, "upfold_seconds": contest.upfold_seconds}
    return {"algorithm": contest.algorithm, "why": contest.why, **times}


def _whole_model(model: nn.Module, call: observe.Call) -> WholeModel:
    """Time the model with torch's layers, with upfold's and fused, in turns: three copies that share its tensors."""
    ways: dict[str, Callable[[nn.Module], Any]] = {"torch": restore, "upfold": replace, "fused": fuse}
    variants = {}
    with observe.undisturbed(model, call), unpatched():
        for name, way in ways.items():
            shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
            try:
                variants[name] = copy.deepcopy(model, shared)
            except Exception as error:  # the model's own, or torch's for tensors that are no leaves
                return WholeModel(f"the model cannot be copied: {str(error).partition('.')[0]}")
            report = way(variants[name])
        if not any(row.fused for row in report):
            del variants["fused"]
        seconds = observe.time_models(variants, call, _SECONDS_EACH, _LEAST_RUNS)
    return WholeModel(None, seconds["torch"], seconds["upfold"], seconds.get("fused"), sum(len(row.fused) for row in report))
