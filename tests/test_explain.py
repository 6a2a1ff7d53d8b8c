"""`explain` says of training what training runs: the same problems, by the same algorithms, in every order of derivative."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad

import upfold
from oracle import GENERAL_ALGORITHMS, dtype_name, geometry_arguments, ours
from small_layer import ARGUMENTS, SMOKE, Run, record_runs
from upfold import InvalidArgument
from upfold.explanation import explain

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
SECOND = ("grad_input by grad", "grad_input by weight", "grad_weight by input", "grad_weight by grad")


def told(layer, x, names):
    """What `explain` says of those operators."""
    derivatives = explain(layer, x, gradients=True).derivatives
    return [Run(derivatives[name].plan.algorithm, derivatives[name].problem) for name in names]


def same(ran, expected):
    """Whether both hold the same runs, in any order."""
    rest = list(ran)
    for run in expected:
        assert run in rest, f"{run} was not among {rest}"
        rest.remove(run)
    assert not rest


def penalised(layer, leaves):
    """The result, its first gradients, and a backward through both of these."""
    x, w, b = leaves
    y = layer(x, w, b)
    g = torch.randn_like(y).requires_grad_()
    first = torch.autograd.grad(y, (x, w), g, create_graph=True)
    yield
    loss = sum((one * torch.randn_like(one)).sum() for one in first)
    torch.autograd.grad(loss, (x, w, g))
    yield


@SMOKE
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=dtype_name)
def test_double_backward_runs_what_is_explained(case, channels_last, dtype, device, monkeypatch):
    memory_format = FORMATS.get(case.ndim + 2) if channels_last else None
    operands = tuple(t if t is None else t.requires_grad_() for t in case.tensors(dtype, device, memory_format=memory_format))
    layer = SimpleNamespace(weight=operands[1], bias=operands[2], **geometry_arguments(case.geometry))
    ran = record_runs(monkeypatch)
    steps = penalised(lambda *leaves: ours(leaves, case.geometry), operands)
    next(steps)
    same(ran, told(layer, operands[0], ("forward", "grad_input", "grad_weight")))
    ran.clear()
    next(steps)
    same(ran, told(layer, operands[0], SECOND))


@SMOKE
def test_forward_mode_runs_what_is_explained(case, device, monkeypatch):
    operands = case.tensors(torch.float32, device)
    layer = SimpleNamespace(weight=operands[1], bias=operands[2], **geometry_arguments(case.geometry))
    expected = told(layer, operands[0], ("forward", "tangent by input", "tangent by weight"))
    ran = record_runs(monkeypatch)
    with forward_ad.dual_level():
        ours(tuple(t if t is None else forward_ad.make_dual(t, torch.randn_like(t)) for t in operands), case.geometry)
    same(ran, expected)


@pytest.mark.parametrize("activation", [None, "relu", "gelu", ("leaky_relu", 0.2)], ids=str)
@pytest.mark.parametrize("algorithm", [None, *GENERAL_ALGORITHMS, "fused"])
def test_activations_and_algorithms_by_name(activation, algorithm, device, monkeypatch):
    """The forward of a training step may leave the activation to torch; `fused` may leave gradients to `auto`."""
    layer = upfold.ConvTranspose2d(8, 16, 4, 2, 1, activation=activation, algorithm=algorithm, crop=((1, 0), (0, 2))).to(device)
    x = torch.randn(2, 8, 5, 6, device=device, requires_grad=True)
    refusals = {one.algorithm: one.refusal for one in explain(layer, x).candidates}
    if algorithm is not None and refusals[algorithm] is not None:
        pytest.skip(f"{algorithm}: {refusals[algorithm]}")
    expected = told(layer, x, ("forward", "grad_input", "grad_weight"))
    ran = record_runs(monkeypatch)
    y = layer(x)
    y.backward(torch.randn_like(y))
    same(ran, expected)
    assert ran[0].problem.activation.as_argument() == (None if activation == "gelu" else activation)
    assert explain(layer, x).problem.activation.as_argument() == activation
    if algorithm in GENERAL_ALGORITHMS:
        assert {run.algorithm for run in ran} == {algorithm}


def test_without_a_batch(device):
    layer = upfold.ConvTranspose2d(4, 3, 3, **ARGUMENTS).to(device)
    x = torch.randn(4, 5, 6, device=device)
    assert explain(layer, x, gradients=True).derivatives["grad_input"].problem.batch == 1


def test_text_names_each_operator_and_says_why_not(device):
    layer = upfold.ConvTranspose2d(4, 3, 3, **ARGUMENTS, dtype=torch.float64).to(device)
    x = torch.randn(2, 4, 5, 6, dtype=torch.float64, device=device)
    plain, found = explain(layer, x), explain(layer, x, gradients=True)
    assert not plain.derivatives
    assert str(found).startswith(str(plain))
    text = str(found)[len(str(plain)) :]
    for name, one in found.derivatives.items():
        (head,) = [line for line in text.splitlines() if f", {name}, " in f", {line.partition(':')[0]}, "]
        assert head.endswith(one.problem.operator.name.lower())
        assert f"runs: {one.plan.algorithm} (config {one.plan.config}" in text
    assert text.count("fused: refuses: ") == text.count("runs: ")  # in float64 each operator says why not


def test_a_problem_has_no_gradients(device):
    problem = explain(upfold.ConvTranspose2d(4, 3, 3).to(device), torch.ones(4, 5, 6, device=device)).problem
    with pytest.raises(InvalidArgument, match="gradients = True; a Problem is one operator"):
        explain(problem, gradients=True)
