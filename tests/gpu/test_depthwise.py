"""Both choices of the depthwise kernels on a GPU, for all three operators, against torch in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

import upfold
from gpu import missing
from oracle import assert_exact, describe, exact_like, geometry_arguments, ours, reference, reference_gradients
from upfold import cases
from upfold.algorithms import REGISTRY
from upfold.dispatch import plan, use_config
from upfold.geometry import cached_geometry

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)
if "depthwise" not in upfold.algorithms():
    pytest.skip("this build has no depthwise kernel for CUDA", allow_module_level=True)

pytestmark = pytest.mark.gpu
DEPTHWISE = REGISTRY["depthwise"]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
# x, output channels of an input channel, kernel, (stride, padding, output_padding, dilation)
LAYERS = {
    "k4s2p1": ((2, 5, 9, 21), 1, (4, 4), (2, 1, 0, 1)),
    "k4s2p0 aligned": ((2, 3, 7, 31), 2, (4, 4), (2, 0, 0, 1)),
    "k3s2p1op1": ((2, 6, 9, 16), 1, (3, 3), (2, 1, 1, 1)),
    "k3s2p0": ((1, 3, 5, 8), 3, (3, 3), (2, 0, 0, 1)),
    "k2s2": ((2, 3, 9, 37), 2, (2, 2), (2, 0, 0, 1)),
    "k3s1p1": ((2, 4, 20, 33), 1, (3, 3), (1, 1, 0, 1)),
    "k5s1p2": ((2, 3, 11, 16), 2, (5, 5), (1, 2, 0, 1)),
    "k5s2p2op1": ((2, 5, 9, 21), 1, (5, 5), (2, 2, 1, 1)),
    "k5s2p1": ((2, 3, 7, 11), 2, (5, 5), (2, 1, 0, 1)),
    "k6s2p2": ((2, 3, 7, 13), 2, (6, 6), (2, 2, 0, 1)),
    "k8s2p3": ((2, 3, 9, 15), 1, (8, 8), (2, 3, 0, 1)),
    "k8s4p2": ((2, 3, 5, 12), 1, (8, 8), (4, 2, 0, 1)),
    "k8s4p1": ((1, 3, 6, 7), 1, (8, 8), (4, 1, 0, 1)),
    "k16s8p4": ((2, 3, 10, 16), 1, (16, 16), (8, 4, 0, 1)),
    "k16s8p3": ((2, 2, 5, 9), 2, (16, 16), (8, 3, 1, 1)),
    "k64s32p16": ((1, 2, 3, 5), 1, (64, 64), (32, 16, 0, 1)),
    "k64s32": ((1, 3, 2, 2), 1, (64, 64), (32, 0, 0, 1)),
    "k4s4": ((2, 3, 5, 7), 1, (4, 4), (4, 0, 0, 1)),
    "k9s9p2": ((2, 3, 5, 7), 1, (9, 9), (9, 2, 0, 1)),
    "k10s5p2": ((2, 2, 4, 9), 1, (10, 10), (5, 2, 0, 1)),
    "1d k4s2p1": ((11, 3, 40), 2, (4,), (2, 1, 0, 1)),
    "1d k12s2": ((11, 3, 27), 1, (12,), (2, 0, 0, 1)),
    "1d k12s2p5": ((4, 3, 40), 2, (12,), (2, 5, 0, 1)),
    "1d k16s8p4": ((9, 4, 13), 1, (16,), (8, 4, 0, 1)),
    "3d k4s2p1": ((2, 3, 3, 4, 9), 2, (4, 4, 4), (2, 1, 0, 1)),
    "3d plane k2s2": ((1, 3, 4, 5, 8), 1, (1, 2, 2), ((1, 2, 2), 0, 0, 1)),
    "dilated": ((2, 3, 6, 20), 2, (3, 3), (2, 2, 1, 3)),
    "empty phases": ((2, 3, 4, 9), 1, (2, 3), ((3, 5), 1, (2, 4), (1, 2))),
    "one pixel": ((3, 4, 1, 1), 2, (4, 4), (2, 1, 0, 1)),
    # Whole aligned rows, down which the kernels walk.
    "whole k4s2p1": ((2, 6, 19, 16), 1, (4, 4), (2, 1, 0, 1)),
    "whole k3s2p1op1": ((2, 4, 9, 12), 1, (3, 3), (2, 1, 1, 1)),
    "whole k2s2": ((2, 3, 9, 20), 2, (2, 2), (2, 0, 0, 1)),
    "whole k3s1p1": ((2, 4, 37, 24), 1, (3, 3), (1, 1, 0, 1)),
    "whole k5s1p2": ((3, 2, 2, 8), 1, (5, 5), (1, 2, 0, 1)),
    "whole k5s2p2op1": ((2, 4, 19, 16), 1, (5, 5), (2, 2, 1, 1)),
    "whole k6s2p2": ((2, 3, 11, 24), 2, (6, 6), (2, 2, 0, 1)),
    "whole k8s2p3": ((2, 3, 13, 32), 1, (8, 8), (2, 3, 0, 1)),
    "whole k8s4p2": ((2, 3, 5, 12), 2, (8, 8), (4, 2, 0, 1)),
    "whole k16s8p4, three warps": ((1, 2, 9, 64), 1, (16, 16), (8, 4, 0, 1)),
    "whole k16s8, two warps": ((2, 2, 11, 33), 1, (16, 16), (8, 0, 0, 1)),
    "whole k16s8p12": ((2, 2, 3, 9), 1, (16, 16), (8, 12, 0, 1)),
    "whole k32s16p8": ((1, 2, 3, 5), 1, (32, 32), (16, 8, 0, 1)),
    "whole k8s8": ((2, 4, 5, 7), 1, (8, 8), (8, 0, 0, 1)),
    "whole 1d k4s2p1": ((11, 3, 40), 1, (4,), (2, 1, 0, 1)),
    "whole 3d plane": ((1, 2, 3, 5, 16), 1, (1, 4, 4), ((1, 2, 2), (0, 1, 1), 0, 1)),
    "whole 3d k4s2p1": ((1, 2, 3, 4, 8), 1, (4, 4, 4), (2, 1, 0, 1)),
    # Whole vectors of channels, which lanes own where x and y are channels_last.
    "lanes k4s2p1": ((2, 12, 9, 7), 1, (4, 4), (2, 1, 0, 1)),
    "lanes k4s2p0op1, two groups": ((1, 260, 5, 6), 1, (4, 4), (2, 0, 1, 1)),
    "lanes k2s2": ((2, 8, 5, 7), 1, (2, 2), (2, 0, 0, 1)),
    "lanes k2s2p1op1": ((2, 4, 5, 3), 1, (2, 2), (2, 1, 1, 1)),
    "lanes k3s2p1op1": ((2, 20, 9, 6), 1, (3, 3), (2, 1, 1, 1)),
    "lanes k3s1p1": ((2, 16, 12, 11), 1, (3, 3), (1, 1, 0, 1)),
    "lanes k3s4": ((2, 8, 3, 4), 1, (3, 3), (4, 0, 2, 1)),
    "lanes k5s2p2op1": ((2, 12, 7, 9), 1, (5, 5), (2, 2, 1, 1)),
    "lanes k6x4 s3x2": ((2, 8, 4, 5), 1, (6, 4), ((3, 2), (2, 1), 0, 1)),
    "lanes k16s8p4": ((2, 64, 6, 5), 1, (16, 16), (8, 4, 0, 1)),
    "lanes k16s8p3op3": ((1, 12, 3, 4), 1, (16, 16), (8, 3, 3, 1)),
    "lanes k16s8p4, nine columns": ((2, 16, 11, 9), 1, (16, 16), (8, 4, 0, 1)),
    "lanes k16s8p9": ((2, 32, 5, 15), 1, (16, 16), (8, 9, 2, 1)),
    "lanes k64s32p16": ((1, 8, 3, 2), 1, (64, 64), (32, 16, 0, 1)),
    "lanes k300s150": ((1, 8, 1, 3), 1, (1, 300), ((1, 150), 0, 0, 1)),
    "lanes k2100s1050": ((1, 8, 1, 2), 1, (1, 2100), ((1, 1050), 0, 0, 1)),
    "lanes row k4s2": ((3, 8, 1, 9), 1, (1, 4), ((1, 2), (0, 1), 0, 1)),
    "lanes dilated by the stride": ((2, 8, 5, 6), 1, (3, 3), (2, 2, 1, 2)),
    "lanes dilated along rows": ((2, 8, 5, 9), 1, (4, 3), ((2, 1), (1, 2), 0, (1, 2))),
    "lanes dilated": ((2, 8, 6, 9), 1, (3, 3), (2, 2, 1, 3)),
    "lanes k7s1p3": ((2, 8, 9, 8), 1, (7, 7), (1, 3, 0, 1)),
    "lanes 3d k4s2p1": ((2, 8, 3, 4, 5), 1, (4, 4, 4), (2, 1, 0, 1)),
    "lanes 3d plane": ((2, 12, 3, 5, 6), 1, (1, 4, 4), ((1, 2, 2), (0, 1, 1), 0, 1)),
    "lanes 3d plane padded": ((2, 8, 4, 3, 5), 1, (1, 2, 2), ((1, 2, 2), (1, 0, 0), 0, 1)),
    "lanes one pixel": ((3, 8, 1, 1), 1, (4, 4), (2, 1, 0, 1)),
    "lanes tall": ((1, 8, 150, 3), 1, (4, 4), (2, 1, 0, 1)),
}


def in_lanes(t, name):
    """In channels_last where a layer is of the kernels for it."""
    return t.contiguous(memory_format=CHANNELS_LAST[t.dim()]) if name.startswith("lanes") else t


@pytest.mark.parametrize("last", list(itertools.product([False, True], repeat=2)), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("name", LAYERS)
def test_every_choice_is_exact(device, name, dtype, last):
    """Forward and both gradients; x and w may be channels_last."""
    x_shape, multiplier, kernel, (stride, padding, output_padding, dilation) = LAYERS[name]
    if any(last) and len(x_shape) not in CHANNELS_LAST:
        pytest.skip("torch has no channels_last for one axis")
    channels = x_shape[1]
    geometry = cached_geometry(len(kernel), stride, padding, output_padding, channels, dilation)
    terms = x_shape[0] * torch.Size(x_shape[2:]).numel() * 4 + torch.Size(kernel).numel()
    x, w = (
        exact_like(shape, terms, dtype, seed).to(device) for seed, shape in ((1, x_shape), (2, (channels, multiplier, *kernel)))
    )
    b = exact_like((channels * multiplier,), 9, dtype, 3).to(device)
    x, w = (t.contiguous(memory_format=CHANNELS_LAST[t.dim()]) if wanted else t for t, wanted in zip((x, w), last))
    want = reference((x, w, b), geometry)
    grad = exact_like(want.shape, terms, dtype, 4).to(device)
    want_x, want_w, _ = reference_gradients((x, w, b), grad, geometry)
    problem = describe(x, w, b, tuple(geometry_arguments(geometry).values()))
    assert DEPTHWISE.reject(problem, device) is None
    ran = 0
    for config in DEPTHWISE.configs(problem, device):
        with use_config(config):
            assert_exact(ours((x, w, b), geometry, "depthwise"), want, f"config {config}")
        ran += 1
    assert ran
    x.requires_grad_()
    w.requires_grad_()
    for config in (None, 1):  # the best guess, and the kernels that take everything
        with upfold.use(algorithm="depthwise"), use_config(config):
            grad_x, grad_w = torch.autograd.grad(ours((x, w, b), geometry), (x, w), grad)
        assert_exact(grad_x, want_x, f"x.grad, config {config}")
        assert_exact(grad_w, want_w, f"w.grad, config {config}")


@pytest.mark.parametrize("name", ["dla-depthwise-256@64", "dla-depthwise-64@32-k16"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_auto_takes_it(device, name, dtype):
    x, w, b = cases.find(name).tensors(dtype, device)
    arguments = tuple(geometry_arguments(cases.find(name).geometry).values())
    assert plan(describe(x, w, b, arguments), device).algorithm == "depthwise"


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("name", ["k4s2p1", "k16s8p4", "k3s1p1", "whole k4s2p1", "lanes k4s2p1", "lanes k7s1p3"])
def test_misaligned_results(device, name, dtype):
    """A result that starts at a multiple of its element alone, and rows that end before their tensor does."""
    x_shape, multiplier, kernel, (stride, padding, output_padding, dilation) = LAYERS[name]
    geometry = cached_geometry(len(kernel), stride, padding, output_padding, x_shape[1], dilation)
    x = in_lanes(exact_like(x_shape, 16, dtype, 1).to(device), name)
    w = exact_like((x_shape[1], multiplier, *kernel), 16, dtype, 2).to(device)
    want = reference((x, w, None), geometry)
    wide = in_lanes(torch.full([size + 3 for size in want.shape], torch.nan, dtype=dtype, device=device), name)
    flat = torch.full((want.numel() + 2,), torch.nan, dtype=dtype, device=device)
    for out in (
        flat[1:-1].as_strided(want.shape, in_lanes(want, name).stride()),
        wide[tuple(slice(1, 1 + size) for size in want.shape)],
    ):
        assert_exact(ours((x, w, None), geometry, "depthwise", out=out), want)
    assert int(wide.isnan().sum()) == wide.numel() - want.numel()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("name", [name for name in LAYERS if name.startswith("lanes")])
def test_lanes_keep_to_their_tensors(device, name, dtype):
    """All three operators between guard bands, channels of whose own lie beside the result's; the same bits each time."""
    x_shape, _, kernel, (stride, padding, output_padding, dilation) = LAYERS[name]
    geometry = cached_geometry(len(kernel), stride, padding, output_padding, x_shape[1], dilation)
    x = in_lanes(torch.randn(x_shape, generator=torch.Generator().manual_seed(1)).to(device, dtype), name)
    w = torch.randn((x_shape[1], 1, *kernel), generator=torch.Generator().manual_seed(2)).to(device, dtype)
    x.requires_grad_()
    w.requires_grad_()
    results = []
    with upfold.use(algorithm="depthwise"):
        for _ in range(2):
            y = ours((x, w, None), geometry)
            grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y)
            results.append((y.detach(), *torch.autograd.grad(y, (x, w), in_lanes(grad, name))))
    for first, second in zip(*results):
        assert torch.equal(first, second)
    y = results[0][0]
    bands = [size + (8 if axis == 1 else 2) for axis, size in enumerate(y.shape)]
    wide = in_lanes(torch.full(bands, torch.nan, dtype=dtype, device=device), name)
    out = wide[tuple(slice(4 if axis == 1 else 1, size + (4 if axis == 1 else 1)) for axis, size in enumerate(y.shape))]
    with torch.no_grad():
        assert torch.equal(ours((x, w, None), geometry, "depthwise", out=out), y)
    assert int(wide.isnan().sum()) == wide.numel() - y.numel()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("name", ["dla-depthwise-256@64", "dla-depthwise-64@32-k16"])
def test_whole_layers(device, name, last, dtype):
    """Large enough for threads that take several tiles, and blocks that share sums out: integers, so equal to direct's."""
    case = cases.find(name)
    x, w, b = case.tensors(dtype, device, exact=True, bias=True)
    memory_format = torch.channels_last if last else torch.contiguous_format
    x = x.contiguous(memory_format=memory_format).requires_grad_()
    w.requires_grad_()
    results = []
    for algorithm in ("depthwise", "direct"):
        y = ours((x, w, b), case.geometry, algorithm)
        generator = torch.Generator().manual_seed(5)
        grad = cases.sparse_integers(tuple(y.shape), 0.002, generator).to(device, dtype).contiguous(memory_format=memory_format)
        results.append((y.detach(), *torch.autograd.grad(y, (x, w), grad)))
    for got, want in zip(*results):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("name", ["whole k4s2p1", "k16s8p4", "lanes k4s2p1", "lanes k16s8p4", "lanes 3d k4s2p1"])
def test_activations_are_those_of_the_general_kernel(device, name, activation, dtype):
    x_shape, multiplier, kernel, (stride, padding, output_padding, dilation) = LAYERS[name]
    geometry = cached_geometry(len(kernel), stride, padding, output_padding, x_shape[1], dilation)
    x, w, b = (
        exact_like(shape, 16, dtype, seed).to(device)
        for seed, shape in enumerate((x_shape, (x_shape[1], multiplier, *kernel), (x_shape[1] * multiplier,)))
    )
    x = in_lanes(x, name)
    results = []
    for config in (0, 1):
        with use_config(config):
            results.append(ours((x, w, b), geometry, "depthwise", activation=activation))
    assert torch.equal(*results)
    if activation == "relu":
        assert_exact(results[0], reference((x, w, b), geometry).relu())


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize(
    "name",
    ["whole k4s2p1", "whole k3s1p1", "k16s8p4", "whole k16s8p12", "lanes k4s2p1", "lanes k2s2", "lanes k3s1p1", "lanes k16s8p4"],
)
def test_bad_gradients_reach_the_taps_that_meet_them(device, name, dtype):
    """A gradient at a corner is not multiplied with the zeros that stand for pixels outside."""
    if dtype == torch.float32 and not name.startswith("lanes"):
        pytest.skip("there are no walks of whole rows in float32")
    x_shape, _, kernel, (stride, padding, output_padding, dilation) = LAYERS[name]
    geometry = cached_geometry(len(kernel), stride, padding, output_padding, x_shape[1], dilation)
    x = in_lanes(exact_like(x_shape, 16, dtype, 1).to(device), name)
    w = exact_like((x_shape[1], 1, *kernel), 16, dtype, 2).to(device).requires_grad_()
    with upfold.use(algorithm="depthwise"):
        y = ours((x, w, None), geometry)
        grad = in_lanes(exact_like(y.shape, 16, dtype, 3).to(device), name)
        for row, column in itertools.product((0, -1), repeat=2):
            mark = torch.zeros(y.shape, dtype=torch.float64)
            mark[0, 1, row, column] = 1
            bad = grad.masked_fill(mark.bool().to(device), torch.nan)
            met = reference_gradients((torch.ones_like(x), w.detach(), None), mark, geometry)[1].to(device) != 0
            kept, spoiled = (torch.autograd.grad(y, w, g, retain_graph=True)[0] for g in (grad, bad))
            assert torch.equal(spoiled[~met], kept[~met])
            assert spoiled[met].isnan().all()
