"""Every tile choice of the fused forward on a GPU, against torch in float64; gradients that it refuses are left to `auto`."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from every_config import bad_pixels_stay

import upfold
from gpu import missing
from oracle import assert_exact, describe, geometry_arguments, ours, reference
from test_rounding import check, forward_case
from upfold import cases
from upfold.algorithms import REGISTRY, cuda, fused_columns, fused_last
from upfold.dispatch import use_config
from upfold.problem import Operator

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.gpu
FUSED = REGISTRY["fused"]
# Cut to a size that the reference computes in no time.
LIMIT = 0.02
_PACKED = 3  # the kind of tiles that copy x, as `fused_tiles()` says it
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@pytest.fixture(autouse=True)
def tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda dtype: str(dtype).removeprefix("torch.")
)
@pytest.mark.parametrize("case", cases.by_tier("smoke", "seeds", "decoders", "irregular", "survey"), ids=lambda case: case.name)
def test_every_tile_is_exact(case, dtype, last, device):
    case = case.scaled(LIMIT)
    x, w, b = case.tensors(dtype, device, exact=True, bias=True)
    if last:
        if x.dim() not in CHANNELS_LAST:
            pytest.skip("torch has no channels_last for one axis")
        x = x.contiguous(memory_format=CHANNELS_LAST[x.dim()])
        if dtype is not torch.float32:  # as models have it whose parameters are converted too
            w = w.contiguous(memory_format=CHANNELS_LAST[x.dim()])
    problem = describe(x, w, b, tuple(geometry_arguments(case.geometry).values()))
    refusal = FUSED.reject(problem, device)
    if refusal is not None:
        pytest.skip(refusal)
    want = reference((x, w, b), case.geometry)
    for config in FUSED.configs(problem, device):
        with use_config(config):
            assert_exact(ours((x, w, b), case.geometry, "fused"), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_inputs_beyond_the_cap_are_packed_in_parts(dtype, device):
    """Tiles that copy x take as many samples at a time as the cap allows; the last part may be smaller."""
    case = dataclasses.replace(
        cases.find("k7s2p3op1-32-64@128"), batch=3
    )  # too few channels for partial sums, which are no smaller
    x, w, b = case.tensors(dtype, device, exact=True, bias=True)
    arguments = tuple(geometry_arguments(case.geometry).values())
    whole = describe(x, w, b, arguments)
    want = reference((x, w, b), case.geometry)
    needed = {config: FUSED.workspace_bytes(whole, config, device) for config in FUSED.configs(whole, device)}
    tiles = cuda.module().fused_tiles()
    if not any(fused_last.FIRST <= config < fused_columns.FIRST or tiles[config][5] == _PACKED for config in needed):
        pytest.skip("tiles that copy x are of compute capability 9.0, and must have been compiled for it")
    parted = 0
    for megabytes in (2, 3, 5):
        with upfold.use(workspace_mb=megabytes):
            capped = describe(x, w, b, arguments)
            for config in FUSED.configs(capped, device):
                parted += FUSED.workspace_bytes(capped, config, device) < needed[config]
                with use_config(config):
                    assert_exact(ours((x, w, b), case.geometry, "fused"), want)
    assert parted > 0


@pytest.mark.parametrize(
    "name", ["seed0-grouped-dilated", "seed2-square", "dcgan-64-3@32", "fcn8s-21-21-k16@70", "sam-64-32@128"]
)
def test_full_float32_keeps_the_rounding_rule(name, device, monkeypatch):
    """Three products of TF32 for each of float32: no worse than twice a sum of multiply-adds."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    case = cases.find(name).scaled(LIMIT)
    (x, w, b), want, magnitude, oracle = forward_case.__wrapped__(case, torch.float32, device)
    problem = describe(x, w, b, tuple(geometry_arguments(case.geometry).values()))
    assert FUSED.reject(problem, device) is None
    for config in FUSED.configs(problem, device):
        with use_config(config):
            check(ours((x, w, b), case.geometry, "fused"), want, oracle, magnitude, f"config {config}")


@pytest.mark.parametrize("tf32", [True, False], ids=["tf32", "ieee"])
@pytest.mark.parametrize("name", ["seed0-grouped-dilated", "k5s3p1-64-64@128", "k3s4d3-64-64@64", "fcn8s-21-21-k4@16"])
def test_bad_pixels_stay_where_taps_carry_them_in_every_tile(name, tf32, device, monkeypatch):
    """Phases with fewer taps share a tile with the others, channels are padded: no zero of these meets a NaN."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    case = dataclasses.replace(cases.find(name).scaled(LIMIT), batch=1)
    bad_pixels_stay(case, torch.float32, device, torch.Tensor.contiguous, FUSED.configs)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("name", ["k2s2", "k4s2p1", "dcgan-128-64@16", "seed3-wide-kernel"])
def test_every_tile_applies_the_activation(name, activation, device):
    """Some tiles store from registers what others stage, by activation."""
    case = cases.find(name).scaled(LIMIT)
    x, w, b = case.tensors(torch.bfloat16, device, exact=True, bias=True)
    want = getattr(torch, activation)(reference((x, w, b), case.geometry)).to(torch.bfloat16)
    for config in FUSED.configs(describe(x, w, b, tuple(geometry_arguments(case.geometry).values())), device):
        with use_config(config):
            got = ours((x, w, b), case.geometry, "fused", activation=activation)
            torch.testing.assert_close(got.cpu(), want.cpu(), rtol=1e-2, atol=1e-2)


def test_refused_gradients_are_left_to_auto(device, monkeypatch):
    """The adjoints that fused refuses, here in full float32, run by another method, and give what `auto` gives."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    x, w, b = (tensor.requires_grad_() for tensor in cases.find("k2s2").tensors(torch.float32, device, exact=True))
    geometry = cases.find("k2s2").geometry
    problem = describe(x, w, b, tuple(geometry_arguments(geometry).values()))
    assert FUSED.reject(dataclasses.replace(problem, operator=Operator.CONV), device)
    with upfold.use(algorithm="fused"):
        got = torch.autograd.grad(ours((x, w, b), geometry).sum(), (x, w, b))
    want = torch.autograd.grad(ours((x, w, b), geometry).sum(), (x, w, b))
    assert all(torch.equal(g, v) for g, v in zip(got, want))


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("name", ["pose-256-256@32x24", "seed3-wide-kernel", "pose-2048-256@8x6"])
def test_every_tile_repeats_its_bits_while_the_device_is_busy(name, dtype, last, device):
    """What hands buffers from warp to warp must not depend on their speed, which other work on the device changes."""
    case = cases.find(name).scaled(2.0)
    x, w, b = case.tensors(dtype, device, bias=True)
    x = x.contiguous(memory_format=CHANNELS_LAST[4]) if last else x
    problem = describe(x, w, b, tuple(geometry_arguments(case.geometry).values()))
    other, stream = torch.randn(2048, 2048, device=device), torch.cuda.Stream(device)
    for config in FUSED.configs(problem, device):
        with use_config(config):
            want = ours((x, w, b), case.geometry, "fused")
            torch.cuda.synchronize(device)
            for _ in range(12):
                with torch.cuda.stream(stream):
                    other = (other @ other).clamp(-1, 1)
                assert torch.equal(ours((x, w, b), case.geometry, "fused"), want), config
            torch.cuda.synchronize(device)
