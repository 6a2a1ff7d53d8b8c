"""What `auto` predicts of a GPU: the order of the methods where it was measured, on the host too. No GPU is needed."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch

from upfold import cases, cost, dispatch
from upfold.algorithms import cuda
from upfold.cost import predicted_seconds
from upfold.modes import FORWARD, GRAD_INPUT, GRAD_WEIGHT, Operands, describe, in_layout

GPU = torch.device("cuda", 0)


def problem(name, mode=FORWARD, dtype=torch.float32, tf32=True, layout="contiguous"):
    case = cases.find(name)
    x = torch.empty((case.batch, case.in_channels, *case.in_size), dtype=dtype, device="meta")
    w = torch.empty((case.in_channels, case.out_channels // case.groups, *case.kernel_size), dtype=dtype, device="meta")
    x = in_layout(x, layout)
    forward = describe(FORWARD, Operands(x, w), case.geometry)
    g = torch.empty((forward.batch, forward.out_channels, *forward.out_size[3 - case.ndim :]), dtype=dtype, device="meta")
    g = in_layout(g, layout)
    found = describe(mode, Operands(x, w, None, g), case.geometry)
    return dataclasses.replace(found, allow_tf32=tf32 and dtype == torch.float32)


def preferred(found):
    return min(("gemm", "direct"), key=lambda name: predicted_seconds(name, found, GPU))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["fcn8s-21-21-k4@16", "dcgan-100-512@1", "pix2pix-512-512@1", "pix2pix-128-3@128", "nnunet3d-320-320@4"]
)
def test_short_layers_take_the_product(name, dtype):
    """It was measured shorter on the device, as a replayed graph runs it; the host launches direct sooner."""
    assert preferred(problem(name, dtype=dtype)) == "gemm"


def test_the_gradient_of_a_tiny_layers_input_stays_with_the_product():
    assert preferred(problem("fcn8s-21-21-k4@16", GRAD_INPUT)) == "gemm"


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_gradient_of_a_tiny_layers_weight_is_summed_by_threads(dtype, layout):
    """Measured 3.6 us in one launch, by the product 10.4 and 8.5."""
    found = problem("fcn8s-21-21-k4@16", GRAD_WEIGHT, dtype, layout=layout)
    assert preferred(found) == "direct"
    assert 3e-6 < predicted_seconds("direct", found, GPU) < 4.5e-6


@pytest.mark.parametrize("name", ["seed1-asymmetric", "nnunet3d-320-320@4", "digits-32-1@14", "lapsrn-1-1", "dcgan-100-512@1"])
def test_threads_sum_no_more_positions_and_channels_than_they_are_fast_for(name):
    """They took 7 to 57 times as long as the product there."""
    assert cuda.dots_seconds(problem(name, GRAD_WEIGHT)) is None
    assert preferred(problem(name, GRAD_WEIGHT)) == "gemm"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(("name", "mode"), [("fcn32s-21-21-k64@16", GRAD_WEIGHT), ("dcgan-64-3@32", GRAD_INPUT)])
def test_gradients_of_few_channels_take_the_product_in_either_layout(name, mode, layout, dtype):
    """By way of planes channels_last was measured 1.8 to 3 times as fast as direct, which led before."""
    assert preferred(problem(name, mode, dtype, layout=layout)) == "gemm"


@pytest.mark.parametrize(("name", "mode"), [("fcn32s-21-21-k64@16", GRAD_WEIGHT), ("dcgan-64-3@32", GRAD_INPUT)])
def test_planes_cost_what_copying_them_takes(name, mode):
    """Measured 31 and 33 % on top of the contiguous gradient."""
    contiguous, last = (
        predicted_seconds("gemm", problem(name, mode, layout=layout), GPU) for layout in ("contiguous", "channels_last")
    )
    assert 1.05 * contiguous < last < 2 * contiguous


def test_no_product_is_predicted_shorter_than_its_launches():
    shortest = predicted_seconds("gemm", problem("k2s2"), GPU)
    assert shortest > 6e-6
    assert predicted_seconds("gemm", problem("unet-128-64@256"), GPU) > 10 * shortest


@pytest.mark.parametrize(
    ("name", "mode", "instructions", "best"),
    [
        ("fcn8s-21-21-k16@70", FORWARD, "avx512", "direct"),
        ("fcn8s-21-21-k16@70", GRAD_INPUT, "avx512", "fused"),
        ("fcn8s-21-21-k16@70", GRAD_INPUT, "avx2", "fused"),
        ("fcn8s-21-21-k16@70", GRAD_WEIGHT, "avx2", "fused"),
        ("seed0-grouped-dilated", GRAD_INPUT, "avx512", "direct"),
        ("seed0-grouped-dilated", FORWARD, "avx512", "fused"),
    ],
)
def test_vectors_that_are_half_full_count_on_a_cpu(name, mode, instructions, best, monkeypatch):
    """By what was measured on machines of two cores, `benchmarks/results/cpu_*.json`."""
    module = types.SimpleNamespace(instruction_set=lambda: instructions)
    monkeypatch.setattr(cost.native, "cpu", lambda: module)
    found, device = problem(name, mode, tf32=False), torch.device("cpu")
    assert min(("gemm", "direct", "fused"), key=lambda method: predicted_seconds(method, found, device)) == best


@pytest.mark.parametrize("mode", [FORWARD, GRAD_INPUT])
@pytest.mark.parametrize("pixels, fused", [(1, False), (2, True), (11, True), (64, True)])
def test_products_of_a_few_pixels_are_slow_on_a_cpu(mode, pixels, fused):
    """By what was measured on two cores: 3 ms for one pixel and 96 for two to eleven, where `fused` took 8 to 12."""
    found = problem("dac-1536-768@87", mode, tf32=False)
    found = dataclasses.replace(found, batch=1, in_size=(1, 1, pixels), out_size=(1, 1, 8 * pixels))
    gemm, other = (predicted_seconds(method, found, torch.device("cpu")) for method in ("gemm", "fused"))
    assert (other < gemm) == fused
    if 1 < pixels < 12 and mode == FORWARD:
        assert gemm > 4 * other


def test_half_full_vectors_take_longer_where_they_are_wider(monkeypatch):
    times = {}
    for instructions in ("avx2", "avx512"):
        monkeypatch.setattr(cost.native, "cpu", lambda set=instructions: types.SimpleNamespace(instruction_set=lambda: set))
        found = problem("fcn8s-21-21-k16@70", tf32=False)
        times[instructions] = predicted_seconds("fused", found, torch.device("cpu"))
    assert times["avx512"] > times["avx2"]


# Microseconds of each operator's method, apart and of the turned copy, and the way that a backward takes. Columns of pose 2048 in
# bfloat16 take 8 us to be written; its gradient takes 8 to be turned.
WAYS = {
    "products": ({"gemm": 100}, {"gemm": 100}, {"gemm": 120}, {"gemm": 120}, "shared"),
    "a faster method for one": ({"gemm": 100, "fused": 70}, {"gemm": 100}, {"gemm": 120}, {"gemm": 120}, "apart"),
    "a method hardly faster": ({"gemm": 100, "fused": 98}, {"gemm": 100}, {"gemm": 120}, {"gemm": 120}, "shared"),
    "a faster copy": ({"gemm": 100}, {"gemm": 100}, {"fused": 60}, {"fused": 60}, "turned"),
    "a copy hardly faster": ({"fused": 100}, {"fused": 100}, {"fused": 97}, {"fused": 97}, "apart"),
    "nothing accepts": ({}, {"gemm": 100}, {"fused": 1}, {"fused": 1}, "apart"),
}


def operators(name="pose-2048-256@8x6"):
    apart = tuple(problem(name, mode, torch.bfloat16) for mode in (GRAD_INPUT, GRAD_WEIGHT))
    return apart, tuple(dataclasses.replace(p, y_strides=tuple(s + 1 for s in p.y_strides)) for p in apart)


def predict(monkeypatch, apart, turned, microseconds):
    found = dict(zip((*apart, *turned), microseconds, strict=True))
    monkeypatch.setattr(dispatch, "_predictions", lambda p, device: ({k: 1e-6 * v for k, v in found[p].items()}, {}))
    monkeypatch.setattr(dispatch, "tuned_allowed", lambda: False)
    # What a fit moves is none of what is held here.
    monkeypatch.setattr(dispatch, "_SHARE_FACTOR", 0.91)
    monkeypatch.setattr(dispatch, "_TURN_FACTOR", 1.15)


@pytest.mark.parametrize("case", WAYS)
def test_the_way_of_a_backward(case, monkeypatch):
    (*microseconds, way), (apart, turned) = WAYS[case], operators()
    predict(monkeypatch, apart, turned, microseconds)
    assert dispatch.way_of_backward(apart, turned, True, GPU) == way
    if way == "shared":
        assert dispatch.way_of_backward(apart, turned, False, GPU) == "apart"
    if way == "turned":
        assert dispatch.way_of_backward(apart, None, False, GPU) == "apart"


@pytest.mark.parametrize("in_its_pass", [True, False])
def test_a_bias_that_comes_with_the_weight_speaks_for_apart(in_its_pass, monkeypatch):
    """Sums of a pass of their own take 5 us here; without them sharing leads by 171 us for 174."""
    apart, turned = operators()
    predict(monkeypatch, apart, turned, ({"gemm": 100, "fused": 87}, {"gemm": 100, "fused": 87}, {}, {}))
    chosen = types.SimpleNamespace(algorithm="fused", config=0)
    monkeypatch.setattr(dispatch, "plan", lambda problem, device: chosen)
    monkeypatch.setattr(type(dispatch.REGISTRY["fused"]), "sums_channels", lambda self, p, config, device: in_its_pass)
    assert dispatch.way_of_backward(apart, turned, True, GPU) == "shared"
    assert dispatch.way_of_backward(apart, turned, True, GPU, with_bias=True) == ("apart" if in_its_pass else "shared")


def test_sums_of_many_parts_have_a_pass_of_their_own():
    """Of 6 MB of y here: a pass of its own takes 5 us, 384 parts of the other 17."""
    weight = operators()[0][1]
    assert [dispatch.sums_in_its_pass(weight, parts) for parts in (0, 4, 384)] == [False, True, False]
    assert dispatch.sums_in_its_pass(weight, 384, asked=True)
    assert not dispatch.sums_in_its_pass(weight, 0, asked=True)


def test_products_that_leave_a_gpu_idle_take_longer():
    """In full float32: 160 tiles of a product take two turns, as 264 do, and 96 one, as 132."""
    layer = problem("encodec-512-256@75", tf32=False)
    assert (layer.batch, layer.in_size[2], layer.out_channels * layer.taps) == (8, 75, 4096)
    # 5, 8, 3 and 4.1 tiles wide
    lengths = [dataclasses.replace(layer, in_size=(1, 1, length)) for length in (75, 128, 48, 66)]
    assert [cost._idle_share(longer) for longer in lengths] == [264 / 160, 264 / 256, 132 / 96, 264 / 160]


def test_what_was_tuned_stays_apart(monkeypatch):
    apart, turned = operators()
    predict(monkeypatch, apart, turned, ({"gemm": 100}, {"gemm": 100}, {}, {}))
    monkeypatch.setattr(dispatch, "tuned_allowed", lambda: True)
    monkeypatch.setattr(dispatch.plans, "lookup", lambda p, device: object() if p == apart[0] else None)
    assert dispatch.way_of_backward(apart, turned, True, GPU) == "apart"
