"""Every watcher that the short cut past the dispatcher must notice, and that the call is right under it."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import upfold
from small_layer import layer, operands, torch_layer
from upfold.watch import needs_gradient, nobody_intercepts


class Labelled(torch.Tensor):
    pass


class Passing(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Silent(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


SURROUNDINGS = {
    "dispatch mode": Silent,
    "function mode": Passing,
    "fake tensors": FakeTensorMode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "forward mode": torch.autograd.forward_ad.dual_level,
}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_surroundings(name):
    x = torch.ones(1)
    assert nobody_intercepts(x, None)
    with SURROUNDINGS[name]():
        assert not nobody_intercepts(x, None)
    assert nobody_intercepts(x, None)


def outlived():
    kept = []
    torch.func.grad(lambda x: (kept.append(x), x.sum())[1])(torch.ones(2))
    return kept[0]


TENSORS = {
    "subclass": lambda: torch.ones(2).as_subclass(Labelled),
    "conjugate": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "negation": lambda: torch._neg_view(torch.ones(2)),
    "sparse": lambda: torch.ones(2).to_sparse(),
    "meta": lambda: torch.ones(2, device="meta"),
    "zero without memory": lambda: torch._efficientzerotensor(2),
    "one that outlived its transform": outlived,
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors(name):
    assert not nobody_intercepts(TENSORS[name]())
    assert not nobody_intercepts(torch.ones(2), None, TENSORS[name]())
    assert nobody_intercepts(torch.nn.Parameter(torch.ones(2)), None)
    assert nobody_intercepts(torch.ones(0, 2))  # an empty batch has a null address too


def test_transforms():
    seen = []

    def look(x):
        seen.append(nobody_intercepts(x))
        return x.sum()

    torch.func.grad(look)(torch.ones(2))
    torch.func.vmap(look)(torch.ones(2, 2))
    torch.func.jvp(look, (torch.ones(2),), (torch.ones(2),))
    assert seen == [False] * 3


def test_gradients():
    x = torch.ones(2, requires_grad=True)
    assert needs_gradient(None, x)
    assert not needs_gradient(x.detach(), None)
    with torch.no_grad():
        assert not needs_gradient(x)
    with torch.inference_mode():
        assert not needs_gradient(x)


def test_function_mode_gets_the_public_function():
    """As for torch's own functions, a mode is handed the function that was called."""
    calls = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            calls.append(function)
            return function(*args, **(kwargs or {}))

    x, w, b = operands("cpu")
    want = layer(x, w, b)
    with Watch():
        got = layer(x, w, b)
        upfold.unfold(x, 3)
    assert upfold.conv_transpose2d in calls
    assert upfold.unfold in calls
    assert torch.equal(got, want)


def test_tracing_records_the_operator():
    """A trace that missed the call would repeat the first result for every input."""
    x, w, b = operands("cpu")
    with contextlib.suppress(DeprecationWarning):
        traced = torch.jit.trace(lambda x: layer(x, w, b), x, check_trace=False)
    other = torch.randn_like(x)
    torch.testing.assert_close(traced(other), torch_layer(other, w, b))


def test_lazy_negation_of_dense_memory():
    """A negation that shares the memory of what it negates: the pointer alone has the wrong sign."""
    x, w, b = operands("cpu")
    for operands_, negated in (
        ((torch._neg_view(x), w, b), (-x, w, b)),
        ((x, torch._neg_view(w), torch._neg_view(b)), (x, -w, -b)),
    ):
        torch.testing.assert_close(layer(*operands_), torch_layer(*negated))
    assert torch.equal(upfold.unfold(torch._neg_view(x), 3), -upfold.unfold(x, 3))
    columns = upfold.unfold(x, 3)
    assert torch.equal(upfold.fold(torch._neg_view(columns), (5, 6), 3), -upfold.fold(columns, (5, 6), 3))


def test_lazy_conjugate_of_dense_memory():
    x, w, b = operands("cpu", torch.complex64)
    torch.testing.assert_close(layer(x.conj(), w, b), torch_layer(x.conj().resolve_conj(), w, b))
    torch.testing.assert_close(layer(x, w.conj(), b.conj()), torch_layer(x, w.conj().resolve_conj(), b.conj().resolve_conj()))


def test_batched_gradients():
    """The tensors of `is_grads_batched` have no memory of their own."""
    x, w, b = operands("cpu", torch.float64, requires_grad=True)
    many = torch.randn(3, 2, 3, 10, 12, dtype=torch.float64)
    got = torch.autograd.grad(layer(x, w, b), (x, w, b), many, is_grads_batched=True)
    want = torch.autograd.grad(torch_layer(x, w, b), (x, w, b), many, is_grads_batched=True)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


def test_fakes_do_not_reach_a_kernel():
    with FakeTensorMode():
        y = layer(torch.ones(2, 4, 5, 6), torch.ones(4, 3, 3, 3), torch.ones(3))
    assert tuple(y.shape) == (2, 3, 10, 12)


OUTS = {
    "conv_transpose": lambda x, w, out: upfold.conv_transpose2d(x, w, out=out),
    "unbatched": lambda x, w, out: upfold.conv_transpose2d(x[0], w, out=out),
    "unfold": lambda x, w, out: upfold.unfold(x, 3, out=out),
    "fold": lambda x, w, out: upfold.fold(upfold.unfold(x, 3), (5, 6), 3, out=out),
}


@pytest.mark.parametrize("name", OUTS)
def test_lazy_views_as_out(name):
    """Written through its pointer alone, an `out` that is to be read negated or conjugated would hold the opposite."""
    for dtype, lazy in ((torch.float32, torch._neg_view), (torch.complex64, torch.conj)):
        x, w, _ = operands("cpu", dtype)
        want = OUTS[name](x, w, None)
        out = lazy(torch.zeros_like(want))
        assert OUTS[name](x, w, out) is out
        assert torch.equal(out, want)


@pytest.mark.parametrize("name", OUTS)
def test_out_is_checked_under_every_watcher(name):
    x, w, _ = operands("cpu")
    want = OUTS[name](x, w, None)
    for make in (Passing, Silent):
        with make():
            out = torch.full_like(want, 7)
            assert torch.equal(OUTS[name](x, w, out), want)
            too_wide = torch.full((2, *want.shape), 7.0)
            for wrong, text in ((too_wide, r"out\.shape"), (out.double(), r"out\.dtype"), (out.to("meta"), r"out\.device")):
                with pytest.raises(upfold.InvalidArgument, match=text):
                    OUTS[name](x, w, wrong)
            assert (too_wide == 7).all()


def test_out_must_not_overlap_under_a_watcher():
    x, w = torch.ones(2, 4, 6, 5), torch.ones(4, 4, 1, 1)
    for surroundings in (Passing, Silent, torch.autograd.forward_ad.dual_level):
        with surroundings(), pytest.raises(upfold.InvalidArgument, match=r"out.*overlap"):
            upfold.conv_transpose2d(x, w, out=x)
    assert (x == 1).all()


def test_subclass_as_out_sees_the_call():
    x, w, _ = operands("cpu")
    want = upfold.conv_transpose2d(x, w)
    out = torch.zeros_like(want).as_subclass(Labelled)
    assert isinstance(upfold.conv_transpose2d(x, w, out=out), Labelled)
    assert torch.equal(out.as_subclass(torch.Tensor), want)
    columns = torch.zeros_like(upfold.unfold(x, 3)).as_subclass(Labelled)
    assert isinstance(upfold.unfold(x, 3, out=columns), Labelled)


def test_fake_out_is_refused():
    """Its pointer leads nowhere."""
    x, w, _ = operands("cpu")
    with FakeTensorMode():
        out = torch.empty(2, 3, 7, 8)
    with pytest.raises(Exception, match=r"FakeTensor|fake"):
        upfold.conv_transpose2d(x, w, out=out)


def test_zeros_without_memory():
    """Their address is null."""
    x, w, b = operands("cpu")
    zeros = torch._efficientzerotensor(x.shape)
    torch.testing.assert_close(layer(zeros, w, b), torch_layer(torch.zeros_like(x), w, b))
