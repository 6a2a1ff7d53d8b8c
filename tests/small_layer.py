"""One small layer and its operands, ours and torch's, for the tests that are about what surrounds a call."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

import upfold
from upfold import backward, cases, execute
from upfold.algorithms import REGISTRY
from upfold.problem import Problem

TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
SMOKE = pytest.mark.parametrize("case", cases.by_tier("smoke"), ids=lambda case: case.name)
ARGUMENTS = {"stride": 2, "padding": 1, "output_padding": 1}


def operands(device, dtype=torch.float32, requires_grad=False):
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, 5, 6), (4, 3, 3, 3), (3,)
    made = (torch.randn(shape, generator=generator, dtype=dtype).to(device) for shape in shapes)
    return tuple(tensor.requires_grad_(requires_grad) for tensor in made)


def skip_half_where_torch_lacks_it(dtype, device):
    """The element-wise operators round a layer came to a CPU's float16 late."""
    if dtype is torch.float16 and device.type == "cpu" and TORCH < (2, 3):
        pytest.skip(f"torch {torch.__version__} computes little in float16 on a CPU")


def layer(x, w, b):
    return upfold.conv_transpose2d(x, w, b, **ARGUMENTS)


def torch_layer(x, w, b):
    return F.conv_transpose2d(x, w, b, **ARGUMENTS)


class Run(NamedTuple):
    algorithm: str
    problem: Problem


def record_runs(monkeypatch):
    """A list to which every call appends what runs."""
    ran = []

    def ran_by(name, run):
        return lambda problem, *rest: (ran.append(Run(name, problem)), run(problem, *rest))[1]

    def prepared_by(name, prepare):
        def prepare_recorded(problem, *rest):
            enqueue = prepare(problem, *rest)
            return enqueue and (lambda *addresses: (ran.append(Run(name, problem)), enqueue(*addresses))[1])

        return prepare_recorded

    monkeypatch.setattr(execute, "_launches", {})
    for name, method in REGISTRY.items():
        monkeypatch.setattr(method, "run", ran_by(name, method.run))
        monkeypatch.setattr(method, "prepare", prepared_by(name, method.prepare))
    record_shared(monkeypatch, ran)
    return ran


def record_shared(monkeypatch, ran):
    """The same of both gradients from one matrix of columns, which is one call."""
    problems, together, run = {}, backward.together, backward.Shared.run

    def remember(*arguments):
        found = together(*arguments)
        if found is not None and found.call is not None:
            problems[id(found.call)] = found.problems
        return found

    def run_recorded(shared, *operands):
        ran.extend(Run("gemm", problem) for problem in problems[id(shared.call)])
        return run(shared, *operands)

    monkeypatch.setattr(backward, "together", remember)
    monkeypatch.setattr(backward.Shared, "run", run_recorded)
