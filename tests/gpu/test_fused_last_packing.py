"""Weights are packed to the same bytes in whichever order threads take them: lines through shared memory, vectors, values."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from test_fused_last_weights import LAYERS, SPLIT, STORAGES

from gpu import missing
from upfold import cases, execute, modes
from upfold.algorithms import cuda, fused_exact, fused_last

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.gpu
_UNET, _K4S2 = cases.find("unet-1024-512@32"), cases.find("dcgan-512-256@4")
# Weights from 5 MB on: columns that are taps too, in pieces and groups, and channels that fill no line or no tile.
LARGE = {
    "k2s2 large": dataclasses.replace(_UNET, out_channels=1024, in_size=(4, 4), batch=1),
    "k2s2 large, groups": dataclasses.replace(_UNET, out_channels=2048, groups=2, in_size=(4, 4), batch=1),
    "k2s2 large, 1000 to 1032": dataclasses.replace(_UNET, in_channels=1000, out_channels=1032, in_size=(4, 4), batch=1),
    "k4s2 large, groups": dataclasses.replace(_K4S2, in_channels=1024, out_channels=1024, groups=2, batch=2),
    "k4s2 large, 520 to 520": dataclasses.replace(_K4S2, in_channels=520, out_channels=520, batch=2),
    "k10s5 large": dataclasses.replace(cases.find("encodec-256-128@600"), in_channels=512, out_channels=424, batch=1),
    "3d large": dataclasses.replace(cases.find("nnunet3d-320-320@4"), in_channels=640, out_channels=640, batch=1),
}
CASES = {**LAYERS, **SPLIT, **LARGE}


def _apart(w):
    """In the same order, every second value of a memory of NaN: nothing of it lies together."""
    room = torch.full((2 * w.numel(),), torch.nan, device=w.device, dtype=w.dtype)
    return room.as_strided(w.shape, [2 * stride for stride in w.stride()]).copy_(w)


def _packed(problem, config, weight, device, fill):
    """What a tile's launch packs, into memory that holds something else; None where it packs nothing."""
    module, index = cuda.module(), device.index or 0
    if not module.fused_last_fits(index, problem.cuda, config, 16):
        return None
    call = module.FusedLastCall(index, problem.cuda, config, 16, problem.workspace_cap)
    if call.packed_bytes == 0:
        return None
    packed = torch.full((call.packed_bytes,), fill, dtype=torch.uint8, device=device)
    call.pack(weight.data_ptr(), packed.data_ptr(), torch.cuda.current_stream(device).cuda_stream)
    return packed


@pytest.mark.parametrize("storage", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("operator", ["forward", "grad_input"])
@pytest.mark.parametrize("name", CASES)
def test_every_order_gives_the_same_bytes(name, operator, dtype, storage, device, monkeypatch):
    """A weight whose values lie apart is packed value by value: others to the same bytes, where they are not read as they lie."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    case = CASES[name]
    arguments = modes.positional(case.geometry)
    x = torch.randn(case.batch, case.in_channels, *case.in_size, device=device, dtype=dtype)
    y = torch.empty(case.batch, case.out_channels, *case.out_size, device=device, dtype=dtype)
    w = torch.randn(case.in_channels, case.out_channels // case.groups, *case.kernel_size, device=device, dtype=dtype)

    def described(weight):
        if operator == "forward":
            return execute.describe_conv_transpose(x, weight, None, arguments, None)[0]
        return execute.describe_conv(y, weight, tuple(case.in_size), arguments)[0]

    weights = STORAGES[storage](w), _apart(STORAGES[storage](w))
    compared = 0
    for full in (False, True):
        of_each = [dataclasses.replace(described(one), allow_tf32=not full) for one in weights]
        for config in range(len(cuda.module().fused_last_tiles())):
            # Of runs the columns that nobody has may stay as they are: zeros are written there, or nothing.
            fills = (0, 0) if config >= fused_last.TILES + fused_exact.TILES else (0x5A, 0xA5)
            fast, slow = (_packed(problem, config, one, device, fill) for problem, one, fill in zip(of_each, weights, fills))
            if fast is not None and slow is not None:
                assert torch.equal(fast, slow), config
                compared += 1
    assert compared > 0 or storage == "channels_last" or torch.cuda.get_device_capability(device)[0] != 9
