"""What blocks of a cluster do together in the fused gradient of the weight, exactly, on a GPU: share y, or add parts up."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from test_fused_weight import DTYPES, FUSED, box_tiles, describe, exact_operands, gradient, layer, want

import upfold
from gpu import missing
from oracle import assert_exact, exact_like
from upfold import cases
from upfold.algorithms import cuda, fused_weight

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)


# Of few parts, so that a block reads much of the gradient, which two tiles of input channels then share: whole, the second of 72
# channels, in groups, with taps that overlap, of three dimensions; and three tiles, which share nothing.
SHARED = {
    "equal": (layer(in_channels=256, out_channels=40, in_size=(48, 64), kernel_size=(2, 2), stride=(2, 2)), True),
    "part of a tile": (layer(in_channels=200, out_channels=24, in_size=(60, 64), kernel_size=(2, 2), stride=(2, 2)), True),
    "four tiles": (layer(in_channels=500, out_channels=16, in_size=(64, 64), kernel_size=(2, 2), stride=(2, 2)), True),
    "groups": (layer(in_channels=512, out_channels=64, in_size=(64, 64), kernel_size=(2, 2), stride=(2, 2), groups=2), True),
    "overlapping": (
        layer(in_channels=256, out_channels=24, in_size=(64, 72), kernel_size=(4, 4), stride=(2, 2), padding=(1, 1)),
        True,
    ),
    "depth": (
        dataclasses.replace(cases.find("3d-k2s2"), batch=2, in_channels=256, out_channels=20, in_size=(3, 40, 48)),
        True,
    ),
    "maps": (layer(batch=160, in_channels=256, out_channels=40, in_size=(8, 16), kernel_size=(2, 2), stride=(2, 2)), True),
    "cut maps": (layer(batch=200, in_channels=200, out_channels=40, in_size=(8, 14), kernel_size=(2, 2), stride=(2, 2)), True),
    "fours": (layer(batch=4, in_channels=256, out_channels=40, in_size=(37, 37), kernel_size=(4, 4), stride=(4, 4)), True),
    "three tiles": (layer(in_channels=384, out_channels=40, in_size=(48, 64), kernel_size=(2, 2), stride=(2, 2)), False),
}

# Of many steps and few tiles, so that there are parts to add; of the last two clusters some have parts that begin behind the last
# step (40 parts of 7 steps for 256, 88 of 2 for 171).
ADDED = {
    "equal": layer(batch=4, in_channels=128, out_channels=64, in_size=(64, 64), kernel_size=(2, 2), stride=(2, 2)),
    "part of a tile": layer(batch=4, in_channels=104, out_channels=56, in_size=(64, 64), kernel_size=(2, 2), stride=(2, 2)),
    "fours, cut": layer(batch=4, in_channels=128, out_channels=64, in_size=(37, 37), kernel_size=(4, 4), stride=(4, 4)),
    "overlapping": layer(in_channels=100, out_channels=50, in_size=(64, 64), kernel_size=(4, 4), stride=(2, 2), padding=(1, 1)),
    "depth": dataclasses.replace(cases.find("3d-k2s2"), batch=2, in_channels=120, out_channels=40, in_size=(8, 16, 32)),
    "parts behind the end": cases.find("cyclegan-128-64@128"),
    "parts behind the end, few channels": cases.find("pix2pix-128-3@128"),
}


def assert_sums(planned, problem, config, x, g, expected):
    """The gradient of the bias where a tile sums channels on the way, of a gradient whose sums are exact."""
    if not planned.sums:
        return
    g = exact_like(g.shape, g[:, 0].numel(), g.dtype, 5).to(g.device)
    w, bias = torch.empty_like(expected, dtype=x.dtype, device=x.device), g.new_empty(g.shape[1])
    scratch = torch.empty(planned.workspace_bytes, dtype=torch.uint8, device=x.device)
    stream = torch.cuda.current_stream(x.device).cuda_stream
    addresses = (x.data_ptr(), w.data_ptr(), bias.data_ptr(), g.data_ptr(), scratch.data_ptr())
    FUSED.prepare(problem, config, x.device)(*addresses, stream)
    assert_exact(bias, g.double().cpu().transpose(0, 1).flatten(1).sum(1), f"config {config}")


@DTYPES
@pytest.mark.parametrize("what", SHARED)
def test_shared_gradients_are_exact(what, dtype, device):
    """Of the weight, and of the bias where a tile sums channels on the way; the same again and again."""
    case, shares = SHARED[what]
    x, g = exact_operands(case, dtype, device)
    expected, shared = want(case, x, g), 0
    megabytes = (2.5 * expected.numel() * 4 + min(box_tiles(case, x, g, device).values())) / 2**20
    with upfold.use(workspace_mb=megabytes):
        problem = describe(case, x, g)
        for config in box_tiles(case, x, g, device):
            planned = fused_weight.call(problem, config, cuda.index(device))
            shared += planned.work[6] == 2
            for _ in range(10):
                assert_exact(gradient(case, x, g, config), expected, f"config {config}")
            assert_sums(planned, problem, config, x, g, expected)
    assert (shared > 0) == shares


@DTYPES
@pytest.mark.parametrize("what", ADDED)
def test_added_parts_are_exact(what, dtype, device):
    """By every tile of which there are clusters that add; the gradient of the bias too; the same again and again."""
    case = ADDED[what]
    x, g = exact_operands(case, dtype, device)
    expected, problem, clusters = want(case, x, g), describe(case, x, g), set()
    for config in box_tiles(case, x, g, device):
        planned = fused_weight.call(problem, config, cuda.index(device))
        if planned.work[8] == 1:
            continue
        clusters.add(planned.work[8])
        for _ in range(10):
            assert_exact(gradient(case, x, g, config), expected, f"config {config}")
        assert_sums(planned, problem, config, x, g, expected)
    assert clusters
    assert clusters <= {2, 4}
