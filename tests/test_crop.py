"""`crop=` leaves out the ends of a result: the same values, bit for bit where sums are exact, as slicing the whole result."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

import upfold
from oracle import FORWARD_ALGORITHMS, GENERAL_ALGORITHMS
from upfold.algorithms import REGISTRY
from upfold.crop import parse_crop
from upfold.execute import describe
from upfold.geometry import InvalidArgument

# ndim, in_size, kernel, stride, padding, output_padding, dilation, groups, crop
LAYERS = {
    "encodec right": (1, (7,), 16, 8, 0, 0, 1, 1, ((0, 8),)),
    "both ends": (1, (9,), 4, 2, 1, 0, 1, 2, ((3, 2),)),
    "left alone": (1, (5,), 3, 3, 0, 2, 1, 1, ((4, 0),)),
    "beyond the stride": (1, (6,), 5, 2, 2, 1, 1, 1, ((5, 1),)),
    "images": (2, (5, 4), 4, 2, 1, 0, 1, 1, ((0, 1), (2, 0))),
    "dilated groups": (2, (4, 5), 3, 2, 1, 1, 2, 2, ((1, 3), (0, 2))),
    "stride 1": (2, (4, 4), 3, 1, 1, 0, 1, 1, ((2, 0), (0, 3))),
    "empty phases": (2, (3, 3), 2, 4, 0, 3, 1, 1, ((1, 5), (3, 0))),
    "depthwise": (2, (5, 5), 4, 2, 1, 0, 1, 6, ((1, 2), (0, 1))),
    "volumes": (3, (3, 2, 3), 2, 2, 0, 1, 1, 1, ((1, 0), (0, 1), (2, 1))),
}
NAMES = pytest.mark.parametrize("name", LAYERS)


def operands(name, dtype=torch.float64, exact=True):
    ndim, size, kernel, stride, padding, extra, dilation, groups, crop = LAYERS[name]
    generator = torch.Generator().manual_seed(len(name))

    def make(*shape):
        if exact:  # float64 holds every sum of such integers
            return torch.randint(-2, 3, shape, generator=generator).to(dtype)
        return torch.randn(shape, generator=generator, dtype=dtype)

    x, w, b = make(2, 6, *size), make(6, 6 // groups, *(kernel,) * ndim), make(6)
    return x, w, b, (stride, padding, extra, groups, dilation), crop


def functions(name):
    ndim = LAYERS[name][0]
    return getattr(upfold, f"conv_transpose{ndim}d"), getattr(F, f"conv_transpose{ndim}d")


def sliced(y, crop):
    return y[(..., *(slice(before, y.shape[axis + 2] - after) for axis, (before, after) in enumerate(crop)))]


def assert_same(got, want, algorithm):
    """Sums of these integers are exact, but torch's library on a GPU may transform them."""
    if algorithm == "torch" and got.is_cuda:
        torch.testing.assert_close(got.cpu().double(), want, rtol=1e-5, atol=1e-4)
    else:
        assert torch.equal(got.cpu().double(), want)


@NAMES
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("algorithm", [None, "torch", *FORWARD_ALGORITHMS])
def test_it_is_a_slice_of_the_whole_result(name, algorithm, dtype, device):
    x, w, b, arguments, crop = (t.to(device, dtype) if isinstance(t, torch.Tensor) else t for t in operands(name))
    ours, theirs = functions(name)
    if algorithm in ("depthwise", "fused"):
        refusal = REGISTRY[algorithm].reject(describe(x, w, b, arguments), device)
        if refusal is not None:
            pytest.skip(f"{algorithm}: {refusal}")
    y = ours(x, w, b, *arguments, crop=crop, algorithm=algorithm)
    want = sliced(theirs(*(t.cpu().double() for t in (x, w, b)), *arguments), crop)
    assert_same(y, want, algorithm)
    assert y.is_contiguous()  # and nothing larger behind it
    assert y.untyped_storage().nbytes() == y.numel() * y.element_size()


@NAMES
@pytest.mark.parametrize("algorithm", [None, "torch", *GENERAL_ALGORITHMS])
def test_gradients(name, algorithm, device):
    x, w, b, arguments, crop = (t.to(device) if isinstance(t, torch.Tensor) else t for t in operands(name))
    ours, theirs = functions(name)
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    y = ours(*leaves, *arguments, crop=crop, algorithm=algorithm)
    g = torch.randint(-2, 3, y.shape).to(y)
    plain = [t.detach().cpu().requires_grad_() for t in leaves]
    want = torch.autograd.grad(sliced(theirs(*plain, *arguments), crop), plain, g.cpu())
    for one, other in zip(torch.autograd.grad(y, leaves, g), want, strict=True):
        assert_same(one, other, algorithm)


@pytest.mark.parametrize("name", ["both ends", "beyond the stride", "dilated groups"])
def test_second_derivatives_and_forward_mode(name):
    x, w, b, arguments, crop = operands(name, exact=False)
    ours, _ = functions(name)
    leaves = [t[:1].clone().requires_grad_() if t is x else t.clone().requires_grad_() for t in (x, w, b)]

    def function(*tensors):
        return ours(*tensors, *arguments, crop=crop)

    assert gradcheck(function, leaves, check_forward_ad=True)
    assert gradgradcheck(function, leaves)


def test_the_ways_to_write_it():
    assert parse_crop(2, 3) == ((3, 3), (3, 3))
    assert parse_crop(1, (0, 8)) == parse_crop(1, [(0, 8)]) == parse_crop(1, ([0, 8],)) == ((0, 8),)
    assert parse_crop(3, [(1, 0), (0, 1), (2, 1)]) == ((1, 0), (0, 1), (2, 1))


@pytest.mark.parametrize(
    ("ndim", "crop", "error", "text"),
    [
        (2, (1, 2), InvalidArgument, "pair"),
        (2, ((1, 2),), InvalidArgument, "the operator has 2"),
        (2, ((1, 2, 3), (0, 0)), InvalidArgument, "pair"),
        (1, (-1, 0), InvalidArgument, "at least 0"),
        (1, -1, InvalidArgument, "at least 0"),
        (1, 1.5, TypeError, "integer"),
        (1, ((0.5, 1),), TypeError, "integer"),
    ],
)
def test_what_is_refused(ndim, crop, error, text):
    x, w = torch.randn(1, 2, *(4,) * ndim), torch.randn(2, 2, *(3,) * ndim)
    with pytest.raises(error, match=text):
        getattr(upfold, f"conv_transpose{ndim}d")(x, w, crop=crop)
    with pytest.raises(error, match=text):
        getattr(upfold, f"ConvTranspose{ndim}d")(2, 2, 3, crop=crop)


def test_nothing_left_and_hidden_padding_are_refused():
    x, w = torch.randn(1, 2, 4), torch.randn(2, 2, 3)
    with pytest.raises(InvalidArgument, match="output size"):
        upfold.conv_transpose1d(x, w, crop=(3, 3))
    with pytest.raises(InvalidArgument, match="padding"):
        upfold.conv_transpose1d(x, w, padding=-1, crop=2)
    with pytest.raises(TypeError):
        upfold.conv_transpose1d(x, w, padding=((0, 1),))  # torch's padding is the same at both ends


def test_without_a_batch_with_out_and_with_an_activation():
    x, w, b, arguments, crop = operands("images")
    want = sliced(F.conv_transpose2d(x, w, b, *arguments), crop).relu()
    assert torch.equal(upfold.conv_transpose2d(x[0], w, b, *arguments, crop=crop, activation="relu"), want[0])
    buffer = torch.full((2, 9, *want.shape[2:]), 7.0, dtype=x.dtype)
    upfold.conv_transpose2d(x, w, b, *arguments, crop=crop, activation="relu", out=buffer[:, 2:8])
    assert torch.equal(buffer[:, 2:8], want)
    assert bool((buffer[:, :2] == 7).all())
    assert bool((buffer[:, 8:] == 7).all())


@pytest.mark.parametrize("name", ["both ends", "images", "volumes"])
def test_fakes_transforms_and_autocast(name):
    x, w, b, arguments, crop = operands(name)
    ours, theirs = functions(name)
    want = sliced(theirs(x, w, b, *arguments), crop)
    on_meta = ours(x.to("meta"), w.to("meta"), b.to("meta"), *arguments, crop=crop)
    assert on_meta.shape == want.shape
    mapped = torch.func.vmap(lambda t: ours(t, w, b, *arguments, crop=crop))(torch.stack([x, -x]))
    assert torch.equal(mapped[0], want)
    with torch.autocast("cpu", torch.bfloat16):
        lower = ours(x.float(), w.float(), b.float(), *arguments, crop=crop)
    assert lower.dtype is torch.bfloat16
    assert lower.shape == want.shape


@pytest.mark.skipif(not hasattr(torch, "compiler") or torch.__version__.startswith("2.0."), reason="torch.compile of 2.0")
def test_it_compiles_in_one_graph():
    x, w, b, arguments, crop = operands("images")
    compiled = torch.compile(lambda t: upfold.conv_transpose2d(t, w, b, *arguments, crop=crop), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), sliced(F.conv_transpose2d(x, w, b, *arguments), crop))


def test_layers():
    layer = upfold.ConvTranspose1d(4, 2, 16, stride=8, crop=(0, 8), dtype=torch.float64)
    plain = torch.nn.ConvTranspose1d(4, 2, 16, stride=8, dtype=torch.float64)
    plain.load_state_dict(layer.state_dict(), strict=True)
    x = torch.randn(3, 4, 11, dtype=torch.float64)
    torch.testing.assert_close(layer(x), plain(x)[..., :-8])
    assert "crop=(0, 8)" in repr(layer)
    assert layer(x[0]).shape == (2, 88)
    assert str(upfold.explain(layer, x).problem.out_size[2]) == "88"
    traced = torch.jit.trace(layer, x)
    torch.testing.assert_close(traced(x), layer(x))
    with pytest.raises(InvalidArgument, match="TorchScript"):
        torch.jit.script(layer)
