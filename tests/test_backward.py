"""What a backward computes and what its forward keeps for it: only what the wanted gradients need."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
import torch.nn.functional as F

import upfold
from oracle import dtype_name
from small_layer import ARGUMENTS, layer, operands, record_runs, skip_half_where_torch_lacks_it, torch_layer
from test_transforms import compiled
from upfold import autograd, backward, execute
from upfold.problem import Operator

WANTED = pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=3))[1:], ids=str)
KINDS = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
    ("leaky_relu", 0.25): lambda t: F.leaky_relu(t, 0.25),
    ("leaky_relu", 0.0): lambda t: F.leaky_relu(t, 0.0),
    ("leaky_relu", -0.5): lambda t: F.leaky_relu(t, -0.5),
}
# Their derivative follows from their result.
FROM_RESULT = ("relu", "tanh", "sigmoid", ("leaky_relu", 0.25), ("leaky_relu", 0.0))
EVERY_KIND = pytest.mark.parametrize("activation", KINDS, ids=str)


def autocast(device):
    return torch.autocast(device.type, dtype=torch.bfloat16)


ROUTES = {
    "plain": lambda device: contextlib.nullcontext(),
    "autocast": autocast,
    # A mode that passes everything on: the way through torch's dispatcher.
    "mode": lambda device: PassingOn(),
}
EACH_ROUTE = pytest.mark.parametrize("route", ROUTES)


class PassingOn(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        return function(*arguments, **(keywords or {}))


def counted(monkeypatch):
    """A list to which every sum over the gradient of a bias appends, by the kernel or through what watches."""
    sums = []
    for module, name in ((backward, "channel_sums"), (autograd, "summed_by_torch")):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda grad, original=original: (sums.append(1), original(grad))[1])
    return sums


@EACH_ROUTE
@WANTED
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_only_wanted_gradients_are_computed(activation, wanted, route, device, monkeypatch):
    ran, sums = record_runs(monkeypatch), counted(monkeypatch)
    x, w, b = (t.requires_grad_(needs) for t, needs in zip(operands(device), wanted, strict=True))
    with ROUTES[route](device):
        y = upfold.conv_transpose2d(x, w, b, **ARGUMENTS, activation=activation)
        assert [run.problem.operator for run in ran] == [Operator.CONV_TRANSPOSE]
        ran.clear()
        y.float().sum().backward()
    expected = [Operator.CONV] * wanted[0] + [Operator.CONV_TRANSPOSE_WEIGHT] * wanted[1]
    assert sorted(run.problem.operator for run in ran) == expected
    assert len(sums) == wanted[2]
    assert [t.grad is not None for t in (x, w, b)] == list(wanted)


@pytest.mark.skipif(not hasattr(torch._C, "_will_engine_execute_node"), reason="this torch does not tell what is asked for")
@WANTED
@pytest.mark.parametrize("asked_for", ["operands", "results as operands", "what they came from"])
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
def test_only_gradients_asked_for_are_computed(with_bias, asked_for, wanted, device, monkeypatch):
    """All three need one, `torch.autograd.grad` asks for some: of leaves, of other results, or of their leaves."""
    if not with_bias and not any(wanted[:2]):
        return
    ran, sums = record_runs(monkeypatch), counted(monkeypatch)
    leaves = operands(device, requires_grad=True)
    x, w, b = given = leaves if asked_for == "operands" else tuple(t * 1 for t in leaves)
    y = layer(x, w, b if with_bias else None)
    ran.clear()
    sources = leaves if asked_for == "what they came from" else given
    asked = [t for t, is_wanted in zip(sources, wanted[: 2 + with_bias]) if is_wanted]
    assert all(found is not None for found in torch.autograd.grad(y.sum(), asked))
    expected = [Operator.CONV] * wanted[0] + [Operator.CONV_TRANSPOSE_WEIGHT] * wanted[1]
    assert sorted(run.problem.operator for run in ran) == expected
    assert len(sums) == (wanted[2] and with_bias)


@pytest.mark.parametrize("first", [Operator.CONV, Operator.CONV_TRANSPOSE_WEIGHT], ids=lambda operator: operator.name)
def test_the_operator_with_more_scratch_runs_first(first, device, monkeypatch):
    """Its scratch lies where the other's result will."""
    ran, init = record_runs(monkeypatch), execute.Launch.__init__

    def with_scratch(launch, problem, *rest):
        init(launch, problem, *rest)
        launch.workspace_bytes += (problem.operator == first) << 20
        launch.elements = (launch.workspace_bytes,)

    monkeypatch.setattr(execute.Launch, "__init__", with_scratch)
    x, w, b = operands(device, requires_grad=True)
    with upfold.use(algorithm="direct"):  # each by itself, on a GPU too
        y = layer(x, w, b)
        ran.clear()
        y.sum().backward()
    second = {Operator.CONV, Operator.CONV_TRANSPOSE_WEIGHT} - {first}
    assert [run.problem.operator for run in ran] == [first, *second]


def test_only_wanted_second_gradients_are_computed(device, monkeypatch):
    """A gradient penalty of a linear loss: the gradient of x depends on w alone, whatever else needs a gradient."""
    ran = record_runs(monkeypatch)
    x, w, b = operands(device, requires_grad=True)
    (first,) = torch.autograd.grad(layer(x, w, b).sum(), x, create_graph=True)
    first.square().sum().backward()
    kinds = [run.problem.operator for run in ran]
    assert kinds == [Operator.CONV_TRANSPOSE, Operator.CONV, Operator.CONV_TRANSPOSE_WEIGHT]
    assert w.grad is not None
    assert b.grad is None


def kept(run):
    """The tensors that autograd keeps while `run` runs, by address: how many bytes."""
    found = {}

    def keep(t):
        found[t.data_ptr()] = t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        run()
    return found


@WANTED
@pytest.mark.parametrize("route", ["plain", "autocast"])
def test_a_frozen_operand_keeps_nothing_alive(route, wanted, device):
    """The gradient of x needs w alone, that of w needs x alone, and that of the bias neither."""
    x, w, b = (t.requires_grad_(needs) for t, needs in zip(operands(device), wanted, strict=True))
    result = []
    with ROUTES[route](device):
        sizes = kept(lambda: result.append(layer(x, w, b)))
    unit = result[0].element_size()
    assert sorted(sizes.values()) == sorted(unit * t.numel() for t in [w] * wanted[0] + [x] * wanted[1])
    if route == "plain":
        assert set(sizes) == {t.data_ptr() for t in [w] * wanted[0] + [x] * wanted[1]}
        with torch.no_grad():
            (w if wanted[1] and not wanted[0] else x if wanted[0] and not wanted[1] else b).zero_()
        result[0].sum().backward()  # what was not kept may change meanwhile


@EVERY_KIND
@pytest.mark.parametrize("route", ["plain", "autocast"])
def test_an_activation_keeps_one_tensor_of_the_results_size(route, activation, device):
    """Its result where the derivative follows from that, which the next layer keeps anyhow; else what went in."""
    x, w, b = operands(device, requires_grad=True)
    result = []
    with ROUTES[route](device):
        sizes = kept(lambda: result.append(upfold.conv_transpose2d(x, w, b, **ARGUMENTS, activation=activation)))
    (y,) = result
    assert sorted(sizes.values()) == sorted(y.element_size() * t.numel() for t in (x, w, y))
    assert (y.data_ptr() in sizes) == (activation in FROM_RESULT)


@pytest.mark.parametrize("activation", FROM_RESULT, ids=str)
@pytest.mark.parametrize("route", ["plain", "autocast"])
def test_the_forward_applies_it_in_the_kernel(route, activation, device, monkeypatch):
    ran = record_runs(monkeypatch)
    x, w, b = operands(device, requires_grad=True)
    with ROUTES[route](device):
        y = upfold.conv_transpose2d(x, w, b, **ARGUMENTS, activation=activation)
    assert [run.problem.activation.as_argument() for run in ran] == [activation]
    assert "Activated" in y.grad_fn.name()


def activated(x, w, b, activation, **options):
    return upfold.conv_transpose2d(x, w, b, **ARGUMENTS, activation=activation, **options)


@EVERY_KIND
def test_derivatives_of_activations(activation, device):
    x, w, b = operands(device, torch.float64, requires_grad=True)
    small = x[:1, :, :2, :3].detach().requires_grad_(), w.detach()[:, :2].requires_grad_(), b.detach()[:2].requires_grad_()
    function = lambda *leaves: activated(*leaves, activation)  # noqa: E731
    assert torch.autograd.gradcheck(function, small, check_batched_grad=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, small)


@EVERY_KIND
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=dtype_name)
def test_gradients_are_those_of_the_two_steps(activation, dtype, device):
    """Also where the sum is exactly 0: integers, so that both sides hold the same numbers."""
    skip_half_where_torch_lacks_it(dtype, device)
    generator = torch.Generator().manual_seed(3)
    made = [torch.randint(-1, 2, t.shape, generator=generator).to(device, dtype) for t in operands(device)]
    ours, theirs = ([t.clone().requires_grad_() for t in made] for _ in range(2))
    y = activated(*ours, activation)
    want = KINDS[activation](torch_layer(*theirs).float()).to(dtype)
    assert bool((torch_layer(*theirs) == 0).any())
    exact = activation == "relu" or "leaky_relu" in activation  # those multiply by powers of two
    unit = torch.finfo(dtype).eps
    options = {"rtol": 0 if exact else 4 * unit, "atol": 0 if exact else 64 * unit}
    torch.testing.assert_close(y, want, **options)
    grad = torch.randint(-1, 2, y.shape, generator=generator).to(device, dtype)
    for one, two in zip(torch.autograd.grad(y, ours, grad), torch.autograd.grad(want, theirs, grad), strict=True):
        torch.testing.assert_close(one, two, **options)


@pytest.mark.parametrize("activation", ["relu", "silu", ("leaky_relu", 0.25)], ids=str)
def test_a_compiled_step_with_an_activation(activation, device):
    leaves = operands(device, torch.float64, requires_grad=True)
    run = compiled(lambda x, w, b: activated(x, w, b, activation), backend="aot_eager")
    want = KINDS[activation](torch_layer(*leaves))
    got = run(*leaves)
    torch.testing.assert_close(got, want)
    for one, other in zip(
        torch.autograd.grad(got.square().sum(), leaves), torch.autograd.grad(want.square().sum(), leaves), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("activation", FROM_RESULT[:3], ids=str)
def test_an_activated_result_may_not_be_changed(activation, device):
    """Its backward reads it; as after torch's own."""
    y = activated(*operands(device, requires_grad=True), activation)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
