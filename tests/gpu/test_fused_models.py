"""Fused generators on a GPU: the numbers, the memory formats, captured graphs, and models that move there after fusing."""

from __future__ import annotations

import copy

import pytest
import torch

import upfold
from gpu import missing
from models import assert_within_rule
from upfold.fused_model import is_fused
from upfold.models.networks import Pix2Pix, dcgan, trained
from upfold.models.rule import in_double

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.gpu

MODELS = {"dcgan": (lambda: dcgan(16, 32), (8, 32, 1, 1)), "pix2pix": (lambda: Pix2Pix(16, levels=5), (2, 3, 64, 64))}


def build(name, device, dtype=torch.float32, layout=torch.contiguous_format):
    make, shape = MODELS[name]
    torch.manual_seed(1)
    model = trained(make()).to(device, dtype).to(memory_format=layout)
    return model, torch.randn(shape).to(device, dtype).contiguous(memory_format=layout)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_numbers_and_formats(name, dtype, layout, device):
    model, x = build(name, device, dtype, layout)
    fused = copy.deepcopy(model)
    report = upfold.fuse(fused)
    assert {row.state for row in report} == {"fused"}
    # In TF32 cuDNN's choice of kernels, some of which do not round, would decide about the bound.
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        want, got = model(x), fused(x)
        assert got.stride() == want.stride()
        assert_within_rule(got, want, in_double(model, x))
        assert torch.equal(fused(x), got)


@pytest.mark.parametrize("name", MODELS)
def test_captured_graph(name, device):
    model, x = build(name, device)
    upfold.fuse(model)
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            want = model(x)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = model(x)
        graph.replay()
    torch.testing.assert_close(got, want)


def test_a_model_that_moves_after_fusing(device):
    model, x = build("pix2pix", "cpu")
    with torch.no_grad():
        want = model(x)
        upfold.fuse(model)
        model.to(device)
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            got = model(x.to(device))
    assert is_fused(model)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-3, atol=1e-4)


def test_autocast(device):
    model, x = build("dcgan", device)
    fused = copy.deepcopy(model)
    upfold.fuse(fused)
    with torch.no_grad():
        exact = in_double(model, x)
        with torch.autocast("cuda", torch.bfloat16):
            assert_within_rule(fused(x), model(x), exact)


def test_scan_times_the_whole_model(device):
    model, x = build("dcgan", device)
    report = upfold.scan(model, x)
    assert report.whole.fused_seconds > 0
    assert all(row.torch_seconds > 0 and row.upfold_seconds > 0 for row in report)
