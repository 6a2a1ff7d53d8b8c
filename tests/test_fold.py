"""fold and unfold: torch's own in 2-D, plain loops on one and three axes, exact, differentiable."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st

import upfold
from oracle import DTYPES, assert_exact, blocks_of, dtype_name, exact_like, fold_geometry, loop_fold, loop_unfold, wide
from strategies import STORAGES
from upfold import InvalidArgument

# kernel, dilation, padding, stride of each axis
WINDOWS = {
    "k3s1p1": ((3, 3), (1, 1), (1, 1), (1, 1)),
    "k4s2p1": ((4, 4), (1, 1), (1, 1), (2, 2)),
    "k2s2": ((2, 2), (1, 1), (0, 0), (2, 2)),
    "k2s3-gaps": ((2, 1), (1, 1), (0, 0), (3, 4)),
    "k3d2": ((3, 2), (2, 3), (2, 1), (1, 2)),
    "k16s8p4": ((16, 16), (1, 1), (4, 4), (8, 8)),
    "k1": ((1, 1), (1, 1), (0, 0), (1, 1)),
    "k1p2": ((1, 1), (1, 1), (2, 1), (1, 2)),
    "asymmetric": ((3, 5), (2, 1), (1, 2), (2, 3)),
}
SIZES = [(16, 18), (17, 37), (11, 11)]
EVERY_WINDOW = pytest.mark.parametrize("window", WINDOWS.values(), ids=list(WINDOWS))
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)


@EVERY_WINDOW
@EVERY_DTYPE
def test_against_torch(window, dtype, device):
    kernel = window[0]
    for size, batch, channels in itertools.product(SIZES, (1, 3), (1, 5)):
        if any(n < 1 for n in blocks_of(size, kernel, fold_geometry(*window))):
            continue
        image = exact_like((batch, channels, *size), 1, dtype).to(device)
        want = F.unfold(wide(image), *window)
        columns = upfold.unfold(image, *window)
        assert_exact(columns, want, "unfold")
        assert_exact(upfold.fold(columns, size, *window), F.fold(want, size, *window), "fold")
        assert_exact(upfold.unfold(image[0], *window), want[0], "unfold, unbatched")
        assert_exact(upfold.fold(columns[0], size, *window), F.fold(want, size, *window)[0], "fold, unbatched")


@st.composite
def windows(draw):
    ndim = draw(st.integers(1, 3))
    axes = []
    for _ in range(ndim):
        size = draw(st.integers(1, {1: 40, 2: 12, 3: 6}[ndim]))
        axes.append((size, draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(0, 3)), draw(st.integers(1, 4))))
    return tuple(zip(*axes, strict=True))


@given(
    window=windows(), dtype=st.sampled_from(DTYPES), batch=st.integers(0, 3), channels=st.integers(1, 4), seed=st.integers(0, 99)
)
def test_against_loops(window, dtype, batch, channels, seed, device):
    size, kernel, dilation, padding, stride = window
    geometry = fold_geometry(kernel, dilation, padding, stride)
    blocks = blocks_of(size, kernel, geometry)
    assume(all(count >= 1 for count in blocks))
    image = exact_like((batch, channels, *size), 1, dtype, seed).to(device)
    want = loop_unfold(wide(image), kernel, geometry)
    assert_exact(upfold.unfold(image, kernel, dilation, padding, stride), want, "unfold")
    columns = exact_like(want.shape, 1, dtype, seed + 1).to(device)
    assert_exact(
        upfold.fold(columns, size, kernel, dilation, padding, stride), loop_fold(wide(columns), size, kernel, geometry), "fold"
    )


@given(window=windows(), seed=st.integers(0, 99))
def test_adjoint(window, seed, device):
    size, kernel, dilation, padding, stride = window
    assume(all(count >= 1 for count in blocks_of(size, kernel, fold_geometry(kernel, dilation, padding, stride))))
    image = exact_like((2, 3, *size), 1, torch.float64, seed).to(device)
    columns = upfold.unfold(image, kernel, dilation, padding, stride)
    other = exact_like(columns.shape, 1, torch.float64, seed + 1).to(device)
    assert (columns * other).sum() == (image * upfold.fold(other, size, kernel, dilation, padding, stride)).sum()


@given(window=windows(), storage=st.sampled_from(sorted(STORAGES)), seed=st.integers(0, 99))
def test_storage_does_not_matter(window, storage, seed, device):
    size, kernel, dilation, padding, stride = window
    geometry = fold_geometry(kernel, dilation, padding, stride)
    assume(all(count >= 1 for count in blocks_of(size, kernel, geometry)))
    image = STORAGES[storage](exact_like((2, 3, *size), 1, torch.float32, seed).to(device))
    want = loop_unfold(wide(image), kernel, geometry)
    assert_exact(upfold.unfold(image, kernel, dilation, padding, stride), want)
    columns = STORAGES[storage](exact_like(want.shape, 1, torch.float32, seed).to(device))
    assert_exact(upfold.fold(columns, size, kernel, dilation, padding, stride), loop_fold(wide(columns), size, kernel, geometry))


@pytest.mark.parametrize("name", ["k3s1p1", "k4s2p1", "k2s2", "k16s8p4", "k1"])
def test_integer_arguments_mean_two_axes(name, device):
    window = WINDOWS[name]
    image = torch.randn(2, 3, 24, 24, device=device)
    numbers = [pair[0] for pair in window]
    columns = upfold.unfold(image, *numbers)
    assert torch.equal(columns, upfold.unfold(image, *window))
    assert torch.equal(upfold.fold(columns, 24, *numbers), upfold.fold(columns, (24, 24), *window))


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=dtype_name)
def test_derivatives(ndim, dtype, device):
    kernel, dilation, padding, stride, size = ((values * 3)[:ndim] for values in ((2, 3), (2, 1), (1, 0), (1, 2), (4, 5)))
    image = torch.randn((2, 2, *size), dtype=dtype, device=device, requires_grad=True)
    unfold = lambda t: upfold.unfold(t, kernel, dilation, padding, stride)  # noqa: E731
    columns = unfold(image).detach().requires_grad_()
    fold = lambda t: upfold.fold(t, size, kernel, dilation, padding, stride)  # noqa: E731
    for function, operand in ((unfold, image), (fold, columns)):
        fast = {"fast_mode": True} if ndim == 3 else {}
        assert torch.autograd.gradcheck(function, (operand,), check_forward_ad=True, check_batched_grad=not fast, **fast)
        assert torch.autograd.gradgradcheck(function, (operand,), fast_mode=True)


def test_vmap_and_transforms(device):
    images = torch.randn(5, 2, 3, 6, 7, device=device)
    columns = torch.func.vmap(lambda t: upfold.unfold(t, 3, 1, 1, 2))(images)
    for one, image in zip(columns, images, strict=True):
        assert torch.equal(one, upfold.unfold(image, 3, 1, 1, 2))
    folded = torch.func.vmap(lambda t: upfold.fold(t, (6, 7), 3, 1, 1, 2))(columns)
    for one, column in zip(folded, columns, strict=True):
        assert torch.equal(one, upfold.fold(column, (6, 7), 3, 1, 1, 2))
    gradient = torch.func.grad(lambda t: upfold.unfold(t, 3, 1, 1, 2).square().sum())(images[0])
    leaf = images[0].clone().requires_grad_()
    (want,) = torch.autograd.grad(F.unfold(leaf, 3, 1, 1, 2).square().sum(), leaf)
    torch.testing.assert_close(gradient, want)


def test_out_and_guard_bands(device):
    image = torch.randn(2, 3, 8, 9, device=device)
    columns = upfold.unfold(image, 3, 1, 1, 2)
    folded = upfold.fold(columns, (8, 9), 3, 1, 1, 2)
    for want, run in (
        (columns, lambda out: upfold.unfold(image, 3, 1, 1, 2, out=out)),
        (folded, lambda out: upfold.fold(columns, (8, 9), 3, 1, 1, 2, out=out)),
    ):
        buffer = torch.full((want.numel() + 13,), torch.nan, device=device)
        out = buffer[5:-8].view(want.shape)
        assert run(out) is out
        assert torch.equal(out, want)
        assert int(buffer.isnan().sum()) == 13
        with pytest.raises(InvalidArgument, match="out"):
            run(torch.empty(1, device=device))


def test_repeats_on_any_number_of_threads():
    image = torch.randn(3, 5, 33, 29)
    columns = torch.randn(3, 5 * 9, 17 * 15)
    results = []
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        results.append((upfold.unfold(image, 3, 1, 1, 2), upfold.fold(columns, (33, 29), 3, 1, 1, 2)))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_bad_pixels_stay_in_their_patches(device):
    image = torch.ones(1, 1, 9, 9, device=device)
    clean = upfold.unfold(image, 3, 1, 1, 1)
    image[0, 0, 4, 4] = torch.nan
    dirty = upfold.unfold(image, 3, 1, 1, 1)
    assert int(dirty.isnan().sum()) == 9
    assert torch.equal(dirty[~dirty.isnan()], clean[~dirty.isnan()])
    assert int(upfold.fold(dirty, (9, 9), 3, 1, 1, 1).isnan().sum()) == 1


def test_modules_equal_torchs(device):
    image = torch.randn(2, 3, 8, 9, device=device)
    unfold, fold = upfold.Unfold(3, 1, 1, 2), upfold.Fold((8, 9), 3, 1, 1, 2)
    assert isinstance(unfold, torch.nn.Unfold)
    assert isinstance(fold, torch.nn.Fold)
    assert repr(unfold) == repr(torch.nn.Unfold(3, 1, 1, 2))
    columns = unfold(image)
    assert torch.equal(columns, torch.nn.Unfold(3, 1, 1, 2)(image))
    torch.testing.assert_close(fold(columns), torch.nn.Fold((8, 9), 3, 1, 1, 2)(columns))


BAD = {
    "rank": (lambda: upfold.unfold(torch.ones(5, 5), 3), r"input\.shape"),
    "rank of columns": (lambda: upfold.fold(torch.ones(5), (4, 4), 2), r"input\.shape"),
    "kernel": (lambda: upfold.unfold(torch.ones(1, 1, 5, 5), 0), r"kernel_size = "),
    "stride": (lambda: upfold.unfold(torch.ones(1, 1, 5, 5), 3, stride=0), r"stride = "),
    "dilation": (lambda: upfold.unfold(torch.ones(1, 1, 5, 5), 3, dilation=0), r"dilation = "),
    "padding": (lambda: upfold.unfold(torch.ones(1, 1, 5, 5), 3, padding=-1), r"padding = "),
    "window": (lambda: upfold.unfold(torch.ones(1, 1, 2, 2), 3), r"kernel_size = \(3, 3\).*at least one"),
    "channels": (lambda: upfold.fold(torch.ones(1, 5, 4), (4, 4), 2, stride=2), r"5.*4"),
    "blocks": (lambda: upfold.fold(torch.ones(1, 4, 5), (4, 4), 2, stride=2), r"5.*4"),
    "output size": (lambda: upfold.fold(torch.ones(1, 4, 4), (1, 1), 2), r"gives \(0, 0\) blocks in size \(1, 1\)"),
    "axes": (lambda: upfold.fold(torch.ones(1, 4, 4), (4, 4), (2, 2, 2)), r"kernel_size = "),
    "four axes": (
        lambda: upfold.unfold(torch.ones(1, 1, 2, 2, 2, 2), (1, 1, 1, 1)),
        r"kernel_size = \(1, 1, 1, 1\); must name 1, 2 or 3 axes; got 4",
    ),
    "dtype": (lambda: upfold.unfold(torch.ones(1, 1, 5, 5, dtype=torch.int64), 3), r"int64"),
}


@pytest.mark.parametrize("call, pattern", BAD.values(), ids=list(BAD))
def test_bad_input(call, pattern):
    with pytest.raises(InvalidArgument, match=pattern) as caught:
        call()
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, RuntimeError)
    assert "\n" not in str(caught.value)


def test_empty_batch(device):
    assert upfold.unfold(torch.empty(0, 3, 8, 8, device=device), 3).shape == (0, 27, 36)
    assert upfold.fold(torch.empty(0, 27, 36, device=device), (8, 8), 3).shape == (0, 3, 8, 8)
