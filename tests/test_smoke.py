"""The smoke tier alone, with nothing but pytest and torch installed: what a freshly built wheel is tried with."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import upfold
from upfold import cases

CASES = cases.by_tier("smoke")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("algorithm", ["auto", "gemm", "direct"])
def test_equals_torch(case, algorithm):
    x, w, b = case.tensors(torch.float64, exact=True)
    want = getattr(F, f"conv_transpose{case.ndim}d")(x, w, b, **case.arguments())
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        operands = (None if tensor is None else tensor.to(dtype) for tensor in (x, w, b))
        got = getattr(upfold, f"conv_transpose{case.ndim}d")(*operands, **case.arguments(), algorithm=algorithm)
        assert torch.equal(got.double(), want)


def test_replaced_model_gives_the_same_numbers():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.ConvTranspose2d(6, 8, 4, 2, 1), torch.nn.ReLU(), torch.nn.ConvTranspose2d(8, 3, 2, 2))
    x = torch.randn(2, 6, 5, 7)
    want = model(x)
    upfold.replace(model)
    assert isinstance(model[0], upfold.ConvTranspose2d)
    torch.testing.assert_close(model(x), want)
    model(x).sum().backward()
    assert model[0].weight.grad is not None


def test_fold_and_unfold():
    image = torch.randn(2, 3, 8, 9)
    columns = upfold.unfold(image, 3, 1, 1, 2)
    assert torch.equal(columns, F.unfold(image, 3, 1, 1, 2))
    torch.testing.assert_close(upfold.fold(columns, (8, 9), 3, 1, 1, 2), F.fold(columns, (8, 9), 3, 1, 1, 2))


def test_version_and_algorithms():
    assert upfold.__version__.count(".") == 2
    assert {"gemm", "direct", "torch"} <= set(upfold.algorithms())
