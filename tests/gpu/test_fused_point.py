"""The tile for maps of one pixel: exact in every layout of the weight, rounded once, alone in what it writes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gpu import missing
from oracle import assert_exact, describe, dtype_name, geometry_arguments, ours, reference
from test_rounding import absolute, check, running_conv_transpose, single
from upfold import cases, execute
from upfold.algorithms import REGISTRY, fused_point
from upfold.dispatch import use_config

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.gpu
FUSED = REGISTRY["fused"]
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=dtype_name)
INNERMOST = cases.find("pix2pix-512-512@1")
LAYERS = {
    "pix2pix": INNERMOST,
    "pix2pix, some samples": dataclasses.replace(INNERMOST, in_channels=96, out_channels=40, batch=3),
    "dcgan": dataclasses.replace(cases.find("dcgan-100-512@1"), batch=1),
    "dcgan, some samples": dataclasses.replace(cases.find("dcgan-100-512@1"), out_channels=72, batch=9),
    "groups": dataclasses.replace(INNERMOST, in_channels=66, out_channels=24, groups=3, batch=5),
    "many channels": dataclasses.replace(INNERMOST, in_channels=2048, out_channels=8, batch=2),
    "one channel": dataclasses.replace(INNERMOST, in_channels=1, out_channels=8),
    "columns of part of a block": dataclasses.replace(INNERMOST, in_channels=40, out_channels=5, batch=2),
    "1d": dataclasses.replace(cases.find("hifigan-512-256@64"), in_channels=48, in_size=(1,), batch=2),
    "3d": dataclasses.replace(cases.find("nnunet3d-320-320@4"), in_channels=40, out_channels=24, in_size=(1, 1, 1), batch=2),
}
EVERY_LAYER = pytest.mark.parametrize("name", LAYERS)


def last(w):
    return w.contiguous(memory_format={4: torch.channels_last, 5: torch.channels_last_3d}.get(w.dim(), torch.contiguous_format))


def of_more_rows(w):
    """Rows that lie apart."""
    wide = torch.full((w.shape[0], w.shape[1] + 8, *w.shape[2:]), torch.nan, dtype=w.dtype, device=w.device)
    return wide[:, : w.shape[1]].copy_(w)


WEIGHTS = {"contiguous": torch.Tensor.contiguous, "channels_last": last, "of more rows": of_more_rows}


def positional(case):
    return tuple(geometry_arguments(case.geometry).values())


def fits(problem, device):
    return fused_point.FIRST in FUSED.configs(problem, device)


@TYPES
@pytest.mark.parametrize("weight", WEIGHTS)
@EVERY_LAYER
def test_every_layer_is_exact(name, weight, dtype, device):
    """With a bias and without, written where a result lies in a larger tensor: nothing beside it changes."""
    case = LAYERS[name]
    x, w, b = case.tensors(dtype, device, exact=True, bias=True)
    w = WEIGHTS[weight](w)
    want = reference((x, w, b), case.geometry)
    for bias in (b, None):
        expected = want if bias is not None else reference((x, w, None), case.geometry)
        # Behind 8 elements, so that addresses are whole vectors still: a plan asks for the alignment of all operands.
        big = torch.full([*want.shape[:-1], 16 + want.shape[-1] // 8 * 8], torch.nan, dtype=dtype, device=device)
        inside = big[..., 8 : 8 + want.shape[-1]]
        problem = execute.describe_conv_transpose(x, w, bias, positional(case), None, inside)[0]
        assert fits(problem, device), name
        with use_config(fused_point.FIRST):
            assert_exact(ours((x, w, bias), case.geometry, "fused", out=inside), expected)
        inside.fill_(torch.nan)
        assert big.isnan().all()


@TYPES
@pytest.mark.parametrize("tf32", [True, False], ids=["tf32", "full"])
@EVERY_LAYER
def test_rounding(name, tf32, dtype, device, monkeypatch):
    """As float32 rounds, where TF32 is allowed too."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    case = LAYERS[name]
    operands = case.tensors(dtype, device, seed=5, bias=True)
    want, magnitude = reference(operands, case.geometry), reference(absolute(operands), case.geometry)
    with use_config(fused_point.FIRST):
        got = ours(operands, case.geometry, "fused")
        assert torch.equal(ours(operands, case.geometry, "fused"), got)
    check(got, want, running_conv_transpose(tuple(map(single, operands)), case.geometry), magnitude)


@pytest.mark.parametrize("activation", ["relu", "gelu", "tanh", "silu"])
def test_activations(activation, device):
    case = LAYERS["pix2pix, some samples"]
    x, w, b = case.tensors(torch.float32, device, exact=True, bias=True)
    want = getattr(torch.nn.functional, activation)(reference((x, w, b), case.geometry))
    with use_config(fused_point.FIRST):
        got = ours((x, w, b), case.geometry, "fused", activation=activation)
    torch.testing.assert_close(got.cpu().double(), want.cpu().double(), rtol=2e-6, atol=2e-6)


OTHERS = {
    "two pixels": {"in_size": (2, 1)},
    "outputs without a tap": {"output_padding": (1, 1), "padding": (0, 0)},
    "dilation": {"dilation": (2, 2)},
    "rows that are no vectors": {"out_channels": 3, "kernel_size": (3, 3)},
}


@pytest.mark.parametrize("changed", OTHERS)
def test_others_are_left_to_others(changed, device):
    case = dataclasses.replace(INNERMOST, **{"in_channels": 16, "out_channels": 8, **OTHERS[changed]})
    x, w, b = case.tensors(torch.float32, device, exact=True, bias=True)
    assert not fits(describe(x, w, b, positional(case)), device)
