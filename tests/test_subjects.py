"""What tuning sees of a model's run: the problems that upfold would run, and operands like those that came."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import upfold
from tuning import CPU, TUNE, X, layer, own_folder, told_clock
from upfold import execute, plans
from upfold.plans import problem_key
from upfold.subjects import subjects_of

folder = pytest.fixture(autouse=True)(own_folder)
clock = pytest.fixture(told_clock)


class Calls(nn.Module):
    """A functional call beside a layer, under autocast, with an output size, without a batch, twice."""

    def __init__(self):
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 3, 4, 2, 1)
        self.weight = nn.Parameter(torch.randn(3, 2, 3, 3))

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.up(x, output_size=[2 * size + 1 for size in x.shape[-2:]])
        y = y.float()
        return upfold.conv_transpose2d(y, self.weight, stride=[2, 1]) + upfold.conv_transpose2d(y, self.weight, None, (2, 1))


@pytest.mark.parametrize("batched", [True, False], ids=["batch", "no batch"])
def test_problems_are_those_that_run(clock, monkeypatch, batched):
    """Each problem that a replaced model then runs has its plan."""
    model, x = Calls().eval(), X if batched else X[0]
    report = upfold.tune(model, x)
    assert [row.layers for row in report] == [("up",), ("",)]
    assert "bfloat16" in report.rows[0].problem
    seen = []
    original = plans.lookup
    monkeypatch.setattr(plans, "lookup", lambda *arguments: seen.append(original(*arguments)) or seen[-1])
    upfold.replace(model)
    with torch.no_grad():
        model(x)
    assert len(seen) == 2
    assert all(seen)


def test_the_model_is_left_as_it_was(clock):
    model = nn.Sequential(layer(), nn.Dropout(), nn.BatchNorm2d(3)).train()
    mean = model[2].running_mean.clone()
    upfold.tune(model, X)
    assert model.training
    assert torch.equal(model[2].running_mean, mean)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_strided_inputs_are_made_anew_as_they_came():
    wide = torch.randn(2, 8, 12, 26)
    for x in (wide[:, 2:6, :, ::2], wide[:, :4, :, :13], X.contiguous(memory_format=torch.channels_last), X.double()):
        found = TUNE.subjects_of(layer().to(x.dtype), (x,), True)
        assert [subject.mode for subject in found] == ["forward", "grad_input", "grad_weight"]
        for subject in found:
            (made, g), other = subject.operands(2)
            read, shape = (g, subject.y) if subject.mode == "grad_input" else (made, x)
            assert (read.shape, read.stride(), read.dtype) == (shape.shape, shape.stride(), x.dtype)
            assert read.data_ptr() != (other[1] if subject.mode == "grad_input" else other[0]).data_ptr()
        made = found[0].operands(1)[0][0]
        again = execute.describe(made, found[0].w, found[0].bias, found[0].arguments)
        assert problem_key(again, CPU) == problem_key(found[0].problem, CPU)


@pytest.mark.parametrize("alignment", [4, 8, 16])
def test_inputs_are_made_anew_as_aligned_as_they_came(alignment):
    forward, to_input, to_weight = TUNE.subjects_of(layer(), (X,), True)
    for subject in (forward, to_input, to_weight):
        problem = dataclasses.replace(subject.problem, alignment=alignment)
        x, g = dataclasses.replace(subject, problem=problem).operands(1)[0]
        for read in (g,) if subject is to_input else (x,) if subject is forward else (x, g):
            assert read.data_ptr() % 16 == alignment % 16


def test_a_crop_is_part_of_the_problem():
    layer = upfold.ConvTranspose1d(4, 2, 16, stride=8, crop=(0, 8))
    x = torch.randn(2, 4, 11)
    found = subjects_of(layer, (x,), True)
    assert len(found) == 3
    assert all(subject.problem.out_size[2] == layer(x).shape[2] == 88 for subject in found)
    for subject in found:
        (call,) = subject.calls(("gemm", 0), subject.operands(1))
        call()
