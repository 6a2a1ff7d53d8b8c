"""Derivatives against finite differences: first, second, forward mode, complex, and each combination of what needs one."""

from __future__ import annotations

import itertools

import pytest
import torch

from oracle import ALGORITHMS, GENERAL_ALGORITHMS, dtype_name, ours, skip_if_refused, torchs
from upfold.geometry import make_geometry

# (geometry arguments in torch's order, x shape, w shape): tiny, for the finite differences.
LAYERS = {
    "1d": ((1, 2, 1, 1, 1, 2), (2, 2, 4), (2, 2, 3)),
    "k2s2": ((2, 2, 0, 0, 1, 1), (1, 2, 2, 3), (2, 2, 2, 2)),
    "k3s2p1op1": ((2, 2, 1, 1, 1, 1), (1, 2, 2, 3), (2, 1, 3, 3)),
    "grouped": ((2, (2, 1), (1, 0), (1, 0), 2, (1, 2)), (1, 4, 3, 2), (4, 1, 2, 2)),
    "depthwise": ((2, 1, 1, 0, 3, 1), (2, 3, 3, 2), (3, 1, 3, 2)),
    "empty-phases": ((2, 4, 0, 1, 1, 3), (1, 2, 2, 2), (2, 2, 2, 1)),
    "op-over-stride": ((2, 2, 0, 3, 1, 4), (1, 1, 2, 2), (1, 2, 2, 1)),
    "3d": ((3, (1, 2, 1), (0, 1, 0), (0, 1, 0), 1, 1), (1, 2, 2, 2, 2), (2, 1, 1, 2, 2)),
}


def layer(name, dtype, device, seed=0):
    arguments, x_shape, w_shape = LAYERS[name]
    geometry = make_geometry(*arguments)
    generator = torch.Generator().manual_seed(seed)
    shapes = (x_shape, w_shape, (w_shape[1] * geometry.groups,))
    operands = tuple(torch.randn(shape, generator=generator, dtype=dtype).to(device).requires_grad_() for shape in shapes)
    return geometry, operands


BOTH = pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=dtype_name)
EACH = pytest.mark.parametrize("algorithm", ALGORITHMS)
EVERY_LAYER = pytest.mark.parametrize("name", LAYERS)


@EACH
@EVERY_LAYER
@BOTH
def test_first_derivatives(algorithm, name, dtype, device):
    geometry, operands = layer(name, dtype, device)
    skip_if_refused(algorithm, operands, geometry)
    function = lambda x, w, b: ours((x, w, b), geometry, algorithm)  # noqa: E731
    assert torch.autograd.gradcheck(function, operands, check_batched_grad=True, check_forward_ad=True)


@EACH
@EVERY_LAYER
@BOTH
def test_second_derivatives(algorithm, name, dtype, device):
    geometry, operands = layer(name, dtype, device)
    skip_if_refused(algorithm, operands, geometry)
    function = lambda x, w, b: ours((x, w, b), geometry, algorithm)  # noqa: E731
    fast = dtype.is_complex  # a random projection of the complex Jacobians, each entry of the real ones
    assert torch.autograd.gradgradcheck(function, operands, check_fwd_over_rev=True, fast_mode=fast)


@EACH
@pytest.mark.parametrize("name", ["1d", "grouped", "3d"])
def test_third_derivatives(algorithm, name, device):
    """The three operators are closed: differentiating again needs nothing new."""
    geometry, operands = layer(name, torch.float64, device)
    skip_if_refused(algorithm, operands, geometry)

    def second(x, w, b):
        y = ours((x, w, b), geometry, algorithm)
        (grad_x,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        return (grad_x**2).sum()

    assert torch.autograd.gradgradcheck(second, operands)


@EACH
@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=3)), ids=str)
def test_only_what_needs_a_gradient_gets_one(algorithm, wanted, device):
    geometry, operands = layer("grouped", torch.float64, device)
    skip_if_refused(algorithm, operands, geometry)
    for tensor, needs in zip(operands, wanted, strict=True):
        tensor.requires_grad_(needs)
    y = ours(operands, geometry, algorithm)
    want = torchs(operands, geometry)
    assert y.requires_grad == want.requires_grad == any(wanted)
    torch.testing.assert_close(y, want)
    if any(wanted):
        grad = torch.randn_like(y)
        y.backward(grad)
        got = [tensor.grad for tensor in operands]
        for tensor in operands:
            tensor.grad = None
        want.backward(grad)
        for one, tensor in zip(got, operands, strict=True):
            assert (one is None) == (tensor.grad is None)
            if one is not None:
                torch.testing.assert_close(one, tensor.grad)


@EACH
@BOTH
def test_gradients_equal_torchs(algorithm, dtype, device):
    """Conjugation included: torch's convention for complex gradients."""
    geometry, operands = layer("k3s2p1op1", dtype, device)
    skip_if_refused(algorithm, operands, geometry)
    y, want = ours(operands, geometry, algorithm), torchs(operands, geometry)
    grad = torch.randn_like(want)
    first = torch.autograd.grad(y, operands, grad, create_graph=True)
    other = torch.autograd.grad(want, operands, grad, create_graph=True)
    for one, two in zip(first, other, strict=True):
        torch.testing.assert_close(one, two)
    twice = torch.autograd.grad(sum(one.abs().square().sum() for one in first), operands[:2])
    expected = torch.autograd.grad(sum(two.abs().square().sum() for two in other), operands[:2])
    for one, two in zip(twice, expected, strict=True):
        torch.testing.assert_close(one, two)


def test_expanded_and_zero_gradients(device):
    """`y.sum().backward()` hands over a gradient whose strides are all zero."""
    geometry, operands = layer("k3s2p1op1", torch.float64, device)
    for algorithm in GENERAL_ALGORITHMS:
        got = torch.autograd.grad(ours(operands, geometry, algorithm).sum(), operands)
        want = torch.autograd.grad(torchs(operands, geometry).sum(), operands)
        for one, two in zip(got, want, strict=True):
            torch.testing.assert_close(one, two)


def test_operands_changed_in_place_are_noticed(device):
    geometry, (x, w, b) = layer("k2s2", torch.float64, device)
    y = ours((x, w, b), geometry)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_graph_is_freed(device):
    geometry, operands = layer("k2s2", torch.float64, device)
    y = ours(operands, geometry)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_nothing_is_saved_without_gradients(device):
    geometry, operands = layer("k2s2", torch.float64, device)
    with torch.no_grad():
        assert ours(operands, geometry).grad_fn is None
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ours(tuple(tensor.detach() for tensor in operands), geometry)
    assert not saved


def test_mixed_gradients_of_shared_operands(device):
    """One tensor as both operands: both contributions arrive."""
    t = torch.randn(2, 2, 3, dtype=torch.float64, device=device, requires_grad=True)
    geometry = make_geometry(1, 2, 1, 1, 1, 1)
    (got,) = torch.autograd.grad(ours((t, t, None), geometry).square().sum(), t)
    (want,) = torch.autograd.grad(torchs((t, t, None), geometry).square().sum(), t)
    torch.testing.assert_close(got, want)
