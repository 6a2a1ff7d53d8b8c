"""Forwards that a graph would not do justice are left as they are, with the reason; parts that can be traced are fused."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn

import upfold
from fusing import Up, assert_like, block, image
from models import assert_same, snapshot
from upfold.fused_model import is_fused
from upfold.models.networks import trained


class Branching(Up):
    def forward(self, x):
        return super().forward(x) if x.mean() > 0 else x


class Asking(Up):
    def forward(self, x):
        return super().forward(x) * (2 if isinstance(x, torch.Tensor) else 1)


class AskingTorch(Up):
    def forward(self, x):
        return super().forward(x) * (2 if torch.is_tensor(x) else 1)


class Lowering(Up):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            return super().forward(x)


class Drawing(Up):
    def forward(self, x):
        return super().forward(x) * random.random()


class Noisy(Up):
    def forward(self, x):
        return super().forward(x) + torch.randn(1)


class Counting(Up):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Keeping(Up):
    def forward(self, x):
        self.last = super().forward(x)
        return self.last


class Collecting(Up):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(x)
        return super().forward(x)


class Making(Up):
    def forward(self, x):
        return super().forward(x) + torch.arange(12.0)


class Gathering(Up):
    def forward(self, *inputs):
        return super().forward(*inputs)


class Naming(Up):
    def forward(self, *, x):
        return super().forward(x)


class Choosing(Up):
    def forward(self, x):
        with upfold.use(algorithm="direct"):
            return super().forward(x)


class Result(dict):
    pass


class Wrapping(Up):
    def forward(self, x):
        return Result(y=super().forward(x))


UNTRACEABLE = {
    Branching: "cannot be used as inputs to control flow",
    Asking: "asks for the type of a value",
    AskingTorch: "asks for the type of a value",
    Lowering: "opens an autocast block",
    Drawing: "draws random numbers",
    Noisy: "",  # told as random or as a tensor of its own
    Counting: "sets attributes of its own",
    Keeping: "sets attributes of its own",
    Collecting: "sets attributes of its own",
    Making: "makes tensors",
    Gathering: "has no arguments of its own",
    Naming: "must be given by name",
    Choosing: "changes torch's or upfold's modes",
    Wrapping: "returns Result",
}


@pytest.mark.parametrize("cls", UNTRACEABLE, ids=lambda cls: cls.__name__)
def test_forwards_that_cannot_be_traced(cls):
    model = block(cls)
    before = snapshot(model)
    (row,) = upfold.fuse(model)
    assert (row.name, row.state, row.fused) == ("layer", "replaced", ())
    assert row.reason.startswith(f"{cls.__name__}: ")
    assert UNTRACEABLE[cls] in row.reason
    assert not is_fused(model)
    upfold.restore(model)
    assert_same(before, snapshot(model))


def test_what_an_instance_does_itself_is_refused():
    model = block()
    model.forward = lambda x: x
    (row,) = upfold.fuse(model)
    assert "the instance has its own forward" in row.reason


def test_parts_that_can_be_traced_are_fused():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Sequential(nn.ConvTranspose2d(4, 6, 2, 2), nn.BatchNorm2d(6), nn.ReLU())
            self.blocks = nn.ModuleList([nn.Sequential(nn.ConvTranspose2d(6, 6, 2, 2), nn.Tanh()) for _ in range(2)])
            self.last, self.lone = nn.ConvTranspose2d(6, 3, 1), nn.ModuleList([nn.ConvTranspose2d(4, 4, 1)])

        def forward(self, x):
            x = self.first(self.lone[0](x))
            for one in self.blocks:
                x = one(x) if x.sum() != 0 else x
            return self.last(x).relu()

    torch.manual_seed(3)
    model = trained(Model())
    other = copy.deepcopy(model)
    report = upfold.fuse(model)
    rows = {row.name: row for row in report}
    assert {name: row.fused for name, row in rows.items()} == {
        "first.0": ("BatchNorm2d 1", "ReLU 2"),
        "blocks.0.0": ("Tanh 1",),
        "blocks.1.0": ("Tanh 1",),
        "last": (),
        "lone.0": (),
    }
    assert "Model: torch.fx cannot trace it" in rows["last"].reason
    assert rows["lone.0"].reason == rows["last"].reason
    with torch.no_grad():
        assert_like(model(image()), other, image())


def test_a_container_with_hooks_is_fused_by_itself():
    model = nn.Sequential(block(), nn.ReLU()).eval()
    seen = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(module))
    report = upfold.fuse(model)
    assert is_fused(model[0])
    assert not is_fused(model)
    assert "1 of 1 layer fused" in str(report)
    with torch.no_grad():
        model(image())
    assert seen == [model[0]]
