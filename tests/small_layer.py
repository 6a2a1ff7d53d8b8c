"""One small layer and its operands, ours and torch's, for the tests that are about what surrounds a call."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import upfold
from upfold import cases, execute
from upfold.algorithms import REGISTRY

TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
SMOKE = pytest.mark.parametrize("case", cases.by_tier("smoke"), ids=lambda case: case.name)
ARGUMENTS = {"stride": 2, "padding": 1, "output_padding": 1}


def operands(device, dtype=torch.float32, requires_grad=False):
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, 5, 6), (4, 3, 3, 3), (3,)
    made = (torch.randn(shape, generator=generator, dtype=dtype).to(device) for shape in shapes)
    return tuple(tensor.requires_grad_(requires_grad) for tensor in made)


def layer(x, w, b):
    return upfold.conv_transpose2d(x, w, b, **ARGUMENTS)


def torch_layer(x, w, b):
    return F.conv_transpose2d(x, w, b, **ARGUMENTS)


def record_runs(monkeypatch):
    """A list to which every call appends the name of the algorithm that runs it."""
    ran = []

    def watched(name, function):
        return lambda *rest: (ran.append(name), function(*rest))[1]

    def prepared(name, prepare):
        def prepare_watched(*rest):
            enqueue = prepare(*rest)
            return enqueue and watched(name, enqueue)

        return prepare_watched

    monkeypatch.setattr(execute, "_launches", {})
    for name, method in REGISTRY.items():
        monkeypatch.setattr(method, "run", watched(name, method.run))
        monkeypatch.setattr(method, "prepare", prepared(name, method.prepare))
    return ran
