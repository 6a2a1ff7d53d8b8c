"""Tiles of float32 in full, whose products are three of TF32: exact, rounded as float32 rounds, and the same in every run."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from every_config import forward_is_exact, gradient_is_exact
from test_fused_last import LAYERS, PLANES, STORAGES

import upfold
from gpu import assert_repeats_under_load, missing
from oracle import (
    assert_exact,
    describe,
    exact_like,
    geometry_arguments,
    loop_conv,
    ours,
    reference,
    running_conv,
    running_conv_transpose,
)
from test_rounding import absolute, check
from upfold import cases, execute, modes
from upfold.algorithms import REGISTRY, fused_exact
from upfold.dispatch import use_config

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.gpu
FUSED = REGISTRY["fused"]
LIMIT = 0.02
# Of few and of odd channels, groups of whole and of no whole chunks, long sums, other dimensions.
SHAPES = {
    "odd channels": dataclasses.replace(cases.find("dcgan-128-64@16").scaled(LIMIT), in_channels=37, out_channels=21, batch=2),
    "groups": dataclasses.replace(cases.find("dcgan-128-64@16"), in_channels=96, out_channels=48, groups=3, batch=1),
    "long sums": dataclasses.replace(cases.find("dcgan-512-256@4"), in_channels=2048, out_channels=32, batch=1),
    "1d": cases.find("hifigan-128-64@4096").scaled(LIMIT),
    "3d": cases.find("nnunet3d-64-32@64").scaled(LIMIT),
    "dilation": cases.find("k3s4d3-64-64@64").scaled(LIMIT),
    "output padding": cases.find("k3s2p1op1-128-64@256").scaled(LIMIT),
    "kernel and stride equal": cases.find("sam-64-32@128").scaled(LIMIT),
    "wide kernel": cases.find("seed3-wide-kernel").scaled(LIMIT),
}


@pytest.fixture(autouse=True)
def full_float32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def _configs(problem, device):
    """Those of full float32, which must be there on Hopper."""
    found = [config for config in FUSED.configs(problem, device) if config >= fused_exact.FIRST]
    assert found or torch.cuda.get_device_capability(device)[0] != 9
    return found


def _positional(case):
    return tuple(geometry_arguments(case.geometry).values())


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", LAYERS)
def test_any_storage_is_exact(name, storage, device):
    forward_is_exact(cases.find(name).scaled(LIMIT), torch.float32, device, STORAGES[storage], _configs)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_any_storage_are_exact(name, storage, device):
    gradient_is_exact(cases.find(name).scaled(LIMIT), torch.float32, device, STORAGES[storage], _configs)


@pytest.mark.parametrize("name", PLANES)
def test_slices_of_planes_are_exact(name, device):
    """Written where a result lies in a larger tensor: nothing beside it changes. And gradients of the same layers."""
    case = PLANES[name]
    x, w, b = case.tensors(torch.float32, device, exact=True, bias=True)
    want = reference((x, w, b), case.geometry)
    big = torch.full([size + 9 for size in want.shape], torch.nan, device=device)
    inside = big[tuple(slice(3 * (axis == want.dim() - 1), None) for axis in range(want.dim()))]
    inside = inside[tuple(slice(0, size) for size in want.shape)]
    for config in _configs(execute.describe_conv_transpose(x, w, b, _positional(case), None, inside)[0], device):
        inside.fill_(torch.nan)
        with use_config(config):
            assert_exact(ours((x, w, b), case.geometry, "fused", out=inside), want, f"config {config}")
    inside.fill_(torch.nan)
    assert big.isnan().all()
    shape = (case.batch, case.out_channels, *case.out_size)
    g = exact_like(shape, case.out_channels // case.groups * w[0, 0].numel(), torch.float32).to(device)
    size, arguments = tuple(x.shape[2:]), modes.positional(case.geometry)
    want = loop_conv(g.cpu().double(), w.cpu().double(), size, case.geometry)
    for config in _configs(execute.describe_conv(g, w, size, arguments)[0], device):
        with use_config(config):
            assert_exact(execute.conv(g, w, size, arguments, "fused"), want, f"config {config}")


def _all_bits(x):
    """Values whose last bits count: integers of 24 bits, so that products of two need more than float32 has."""
    return (x.sign() * (2**23 + (x.abs() * 2**20).round())).to(x)


@pytest.mark.parametrize("values", ["normal", "of all bits"])
@pytest.mark.parametrize("name", SHAPES)
def test_rounding(name, values, device):
    """No worse than twice one running sum in float32: neither parts nor sums of warpgroups may lose what float32 keeps."""
    case = SHAPES[name]
    x, w, b = case.tensors(torch.float32, device, seed=5, bias=True)
    if values == "of all bits":
        x, w = _all_bits(x), _all_bits(w)
    operands = (x, w, b)
    want, magnitude = reference(operands, case.geometry), reference(absolute(operands), case.geometry)
    oracle = running_conv_transpose(tuple(t.cpu() for t in operands), case.geometry)
    for config in _configs(describe(x, w, b, _positional(case)), device):
        with use_config(config):
            check(ours(operands, case.geometry, "fused"), want, oracle, magnitude, f"y, config {config}")
    g = torch.randn(case.batch, case.out_channels, *case.out_size, generator=torch.Generator().manual_seed(7)).to(device)
    g = _all_bits(g) if values == "of all bits" else g
    size, arguments = tuple(x.shape[2:]), modes.positional(case.geometry)
    want = loop_conv(g.cpu().double(), w.cpu().double(), size, case.geometry)
    magnitude = loop_conv(g.cpu().double().abs(), w.cpu().double().abs(), size, case.geometry)
    oracle = running_conv(g.cpu(), w.cpu(), size, case.geometry)
    for config in _configs(execute.describe_conv(g, w, size, arguments)[0], device):
        with use_config(config):
            check(execute.conv(g, w, size, arguments, "fused"), want, oracle, magnitude, f"x.grad, config {config}")


@pytest.mark.parametrize("name", ["dcgan-128-64@16", "seed2-square"])
def test_the_same_in_every_run(name, device):
    case = cases.find(name).scaled(0.2)
    operands = case.tensors(torch.float32, device, seed=3)
    for config in _configs(describe(*operands, _positional(case)), device):
        with use_config(config):
            assert_repeats_under_load(lambda: ours(operands, case.geometry, "fused"), device, f"config {config}")


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 3.4e38, -3.4e38, 1e-39])
def test_values_without_a_second_part(value, device):
    """What is infinite or no number stays so, as in torch; the largest numbers do not become infinite."""
    case = dataclasses.replace(cases.find("dcgan-128-64@16").scaled(LIMIT), batch=1)
    x, w, _ = case.tensors(torch.float32, device, exact=True, bias=False)
    x[0, 5, 1, 1] = value
    w[5] = w[5].abs() + 1 if abs(value) < 1e30 else (w[5] != 0).float() * 0.5
    want = reference((x, w, None), case.geometry)
    for config in _configs(describe(x, w, None, _positional(case)), device):
        with use_config(config):
            got = ours((x, w, None), case.geometry, "fused").cpu().double()
        torch.testing.assert_close(got, want.float().double(), rtol=1e-6, atol=1e-6, equal_nan=True, msg=f"config {config}")


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("activation", ["relu", "leaky_relu"])
def test_activations(activation, last, device):
    case = cases.find("sam-64-32@128").scaled(LIMIT)
    x, w, b = case.tensors(torch.float32, device, exact=True, bias=True)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    want = getattr(torch.nn.functional, activation)(reference((x, w, b), case.geometry))
    for config in _configs(describe(x, w, b, _positional(case)), device):
        with use_config(config):
            got = ours((x, w, b), case.geometry, "fused", activation=activation)
            torch.testing.assert_close(got.cpu().double(), want.cpu().double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("activation", ["gelu", "tanh"])
def test_activations_that_are_rounded_are_left_to_others(activation, device):
    case = cases.find("sam-64-32@128").scaled(LIMIT)
    x, w, b = case.tensors(torch.float32, device, exact=True, bias=True)
    problem = execute.describe_conv_transpose(x, w, b, _positional(case), activation)[0]
    assert not [config for config in FUSED.configs(problem, device) if config >= fused_exact.FIRST]


@pytest.mark.parametrize("megabytes", [3, 4, 6])
def test_a_source_beyond_the_cap_is_packed_in_parts(megabytes, device):
    case = dataclasses.replace(cases.find("seed2-square").scaled(0.2), batch=5)
    x, w, b = case.tensors(torch.float32, device, exact=True, bias=True)
    want = reference((x, w, b), case.geometry)
    with upfold.use(workspace_mb=megabytes):
        problem = describe(x, w, b, _positional(case))
        for config in _configs(problem, device):
            assert FUSED.workspace_bytes(problem, config, device) <= problem.workspace_cap
            with use_config(config):
                assert_exact(ours((x, w, b), case.geometry, "fused"), want)


def test_frozen_weights(device):
    """Packed ahead in two parts."""
    torch.manual_seed(0)
    layer = upfold.nn.ConvTranspose2d(64, 32, 4, 2, 1, device=device).eval()
    x = torch.randn(2, 64, 32, 32, device=device)
    with torch.no_grad(), upfold.use(algorithm="fused"):
        want = layer(x)
        upfold.freeze(layer)
        assert torch.equal(layer(x), want)
        upfold.unfreeze(layer)


def test_the_gradient_of_the_weight_says_why_not(device):
    case = cases.find("dcgan-128-64@16").scaled(LIMIT)
    x = torch.zeros(case.batch, case.in_channels, *case.in_size, device=device)
    g = torch.zeros(case.batch, case.out_channels, *case.out_size, device=device)
    problem = execute.describe_conv_transpose_weight(x, g, tuple(case.kernel_size), modes.positional(case.geometry))[0]
    assert "full float32" in FUSED.reject(problem, device)
