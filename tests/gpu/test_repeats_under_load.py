"""Every tile of the fused method gives the same again while the GPU is busy: nothing is read before it is there, nor after."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gpu import assert_repeats_under_load, missing
from upfold import cases
from upfold.algorithms import REGISTRY
from upfold.methods import our_method
from upfold.modes import OPERATORS, Operands, describe, with_gradient

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.gpu


def _like(name, **changes):
    return dataclasses.replace(cases.find(name), **changes)


# Of reductions so long that buffers are filled many times in a tile, and of several tiles for each multiprocessor.
LAYERS = {
    "equal": _like("unet-1024-512@32", in_channels=512, out_channels=256, batch=8),
    "equal, planes of odd rows": _like("maskrcnn-256-256@14", batch=90),
    "3d": _like("nnunet3d-64-32@64", in_channels=256, out_channels=128, in_size=(16, 16, 16), batch=2),
    "spans": _like("dcgan-128-64@16", in_channels=256, out_channels=128, batch=48),
    "spans, wide": _like("dcgan-128-64@16", in_channels=256, out_channels=64, in_size=(64, 64), batch=8),
    "stride 1": _like("seed2-square", in_channels=128, out_channels=128, padding=(1, 1), in_size=(40, 64), batch=9),
}


@pytest.fixture(autouse=True)
def tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("mode", OPERATORS)
@pytest.mark.parametrize("name", LAYERS)
def test_every_tile_repeats(name, mode, dtype, layout, device):
    case = LAYERS[name]
    x, w, b = case.tensors(dtype, device)
    operands = with_gradient(mode, Operands(x, w, b), case.geometry).laid_out(layout)
    problem = describe(mode, operands, case.geometry)
    refusal = REGISTRY["fused"].reject(problem, device)
    if refusal is not None:
        assert torch.cuda.get_device_capability(device)[0] != 9, refusal
        pytest.skip(refusal)
    for config in REGISTRY["fused"].configs(problem, device):
        run = our_method(mode, "fused", case.geometry, config)
        assert_repeats_under_load(lambda: run(operands), device, f"config {config}")  # noqa: B023 (called at once)
