"""The gradient of the bias by the pass that reads y for the gradient of the weight, on a GPU: exact, rounded once, repeatable."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import upfold
from gpu import assert_repeats_under_load, missing
from oracle import assert_exact, dtype_name, exact_like, geometry_arguments, reference_gradients
from upfold import backward, cases, execute
from upfold.algorithms import REGISTRY
from upfold.dispatch import use_config
from upfold.geometry import cached_geometry

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.gpu
HALVES = (torch.float16, torch.bfloat16)
FUSED = REGISTRY["fused"]

# (batch, in_channels, out_channels, input size, kernel = stride, groups)
LAYERS = {
    "as wide as a tile": (2, 128, 64, (16, 16), (2, 2), 1),
    "several tiles of channels": (3, 200, 72, (8, 24), (2, 2), 1),
    "few input channels": (2, 24, 40, (10, 16), (2, 2), 1),
    "odd output channels": (2, 64, 35, (8, 8), (2, 2), 1),
    "rows that are packed": (5, 64, 48, (7, 14), (2, 2), 1),
    "odd rows": (3, 64, 32, (9, 13), (2, 2), 1),
    "kernel of the height": (2, 64, 48, (6, 16), (3, 2), 1),
    "three axes": (2, 64, 32, (3, 6, 16), (2, 2, 2), 1),
    "one axis": (4, 64, 32, (200,), (2,), 1),
    "groups": (2, 64, 96, (8, 16), (2, 2), 2),
    "long sums": (8, 32, 16, (64, 64), (2, 2), 1),
}
parametrize_layers = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)


def operands(layer, dtype, device, exact):
    batch, in_channels, out_channels, in_size, kernel, groups = layer
    out_size = tuple(size * step for size, step in zip(in_size, kernel, strict=True))
    shapes = (batch, in_channels, *in_size), (in_channels, out_channels // groups, *kernel), (batch, out_channels, *out_size)
    terms = batch * torch.Size(out_size).numel()
    make = (lambda shape, seed: exact_like(shape, 8 * terms, dtype, seed)) if exact else lambda shape, seed: torch.randn(shape)
    x, w, g = (make(shape, seed).to(device, dtype) for seed, shape in enumerate(shapes))
    ndim = len(in_size)
    return x, w, g, (kernel, (0,) * ndim, (0,) * ndim, groups, (1,) * ndim)


def summing_configs(x, g, kernel, arguments, device):
    """The tiles that sum the channels of this gradient, of which there are some."""
    if torch.cuda.get_device_capability(device) < (9, 0):
        pytest.skip("tiles that sum need compute capability 9.0")
    problem = execute.describe_conv_transpose_weight(x, g, kernel, arguments)[0]
    configs = [config for config in FUSED.configs(problem, device) if FUSED.sums_channels(problem, config, device)]
    assert configs, "some tile sums"
    return configs


def weight_and_bias(g, x, kernel, arguments, algorithm=None):
    sizes = tuple(x.shape[2:]), kernel
    _, w_grad, bias_grad = backward.gradients(g, (x, None), sizes, (False, True, True), arguments, algorithm)
    return w_grad, bias_grad


@parametrize_layers
@pytest.mark.parametrize("dtype", HALVES, ids=dtype_name)
def test_every_tile_that_sums_is_exact(layer, dtype, device):
    x, w, g, arguments = operands(layer, dtype, device, exact=True)
    kernel = tuple(w.shape[2:])
    geometry = cached_geometry(len(kernel), *arguments)
    bias = torch.zeros(g.shape[1], dtype=torch.float64)
    wide = tuple(t.double().cpu() for t in (x, w))
    _, want_w, want_bias = reference_gradients((*wide, bias), g.double().cpu(), geometry)
    for config in summing_configs(x, g, kernel, arguments, device):
        with use_config(config):
            w_grad, bias_grad = weight_and_bias(g, x, kernel, arguments, "fused")
        assert_exact(w_grad, want_w, f"weight by config {config}")
        assert_exact(bias_grad, want_bias, f"bias by config {config}")


@parametrize_layers
@pytest.mark.parametrize("dtype", HALVES, ids=dtype_name)
def test_every_tile_that_sums_rounds_once(layer, dtype, device):
    x, w, g, arguments = operands(layer, dtype, device, exact=False)
    kernel, axes = tuple(w.shape[2:]), [axis for axis in range(g.dim()) if axis != 1]
    want, scale = g.double().sum(axes), g.double().abs().sum(axes)
    oracle = ((want.float().to(dtype).double() - want).abs() / scale).max()
    for config in summing_configs(x, g, kernel, arguments, device):
        with use_config(config):
            _, bias_grad = weight_and_bias(g, x, kernel, arguments, "fused")
        # Beside one rounding: sums of products in float32, which tensor cores cut off instead of rounding them.
        assert ((bias_grad.double() - want).abs() / scale).max() <= 2 * oracle + 1e-6


def test_the_weight_is_the_same_with_and_without(device):
    x, w, g, arguments = operands(LAYERS["several tiles of channels"], torch.bfloat16, device, exact=False)
    kernel = tuple(w.shape[2:])
    for config in summing_configs(x, g, kernel, arguments, device):
        with use_config(config):
            w_grad, _ = weight_and_bias(g, x, kernel, arguments, "fused")
            assert torch.equal(w_grad, execute.conv_transpose_weight(x, g, kernel, arguments, "fused"))


def test_a_large_layer_sums_by_itself(device, monkeypatch):
    if torch.cuda.get_device_capability(device) < (9, 0):
        pytest.skip("tiles that sum need compute capability 9.0")
    monkeypatch.setattr(backward, "channel_sums", lambda g: pytest.fail("the gradient was read once more"))
    monkeypatch.setattr(backward, "way_of_backward", lambda *problems: "apart")
    monkeypatch.setattr(execute, "sums_in_its_pass", lambda problem, parts, asked: parts > 0)
    case = cases.find("unet-128-64@256").scaled(8.0)
    x, w, b = (t.requires_grad_() for t in case.tensors(torch.bfloat16, device))
    y = upfold.conv_transpose2d(x, w, b, stride=case.stride)
    g = torch.randn_like(y)
    y.backward(g)
    want, scale = g.double().sum((0, 2, 3)), g.double().abs().sum((0, 2, 3))
    assert ((b.grad.double() - want).abs() / scale).max() <= 2**-8 * (want.abs() / scale).max() + 1e-6


def test_a_nan_stays_in_its_channel(device):
    x, w, g, arguments = operands(LAYERS["several tiles of channels"], torch.bfloat16, device, exact=True)
    kernel = tuple(w.shape[2:])
    g[1, 9, 3, 5] = float("nan")
    for config in summing_configs(x, g, kernel, arguments, device):
        with use_config(config):
            _, bias_grad = weight_and_bias(g, x, kernel, arguments, "fused")
        assert bias_grad.isnan().nonzero().flatten().tolist() == [9]


def test_the_same_bits_under_load(device):
    x, w, g, arguments = operands(LAYERS["long sums"], torch.bfloat16, device, exact=False)
    kernel = tuple(w.shape[2:])
    for config in summing_configs(x, g, kernel, arguments, device):
        with use_config(config):
            assert_repeats_under_load(
                lambda: weight_and_bias(g, x, kernel, arguments, "fused")[1], device, "a bias gradient changed from run to run"
            )


def test_geometry_that_is_not_equal_is_summed_apart(device):
    x, w = torch.randn(2, 64, 8, 16, device=device).bfloat16(), torch.randn(64, 32, 2, 2, device=device).bfloat16()
    for options in ({"stride": 2, "padding": 1}, {"stride": 2, "output_padding": 1}):
        g = torch.randn_like(F.conv_transpose2d(x, w, **options))
        b = torch.zeros(32, device=device, dtype=torch.bfloat16, requires_grad=True)
        upfold.conv_transpose2d(x, w.requires_grad_(), b, **options).backward(g)
        want = g.double().sum((0, 2, 3))
        assert (b.grad.double() - want).abs().max() <= want.abs().max() * 2**-7
        problem = execute.describe_conv_transpose_weight(x, g, (2, 2), tuple(geometry_arguments(_geometry(options)).values()))[0]
        assert not any(FUSED.sums_channels(problem, config, device) for config in FUSED.configs(problem, device))


def _geometry(options):
    pair = lambda name, default: (options.get(name, default),) * 2  # noqa: E731 - both axes alike
    return cached_geometry(2, pair("stride", 1), pair("padding", 0), pair("output_padding", 0), 1, (1, 1))
