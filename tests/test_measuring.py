"""The timer, the floor and the reference: that they measure what they say. No test asserts a speed."""

from __future__ import annotations

import math
import time

import pytest
import torch
import torch.nn.functional as F

from upfold import cases, floor, precision, timing
from upfold.modes import Operands
from upfold.reference import reference, round_to_tf32


def test_timer_calls_each_function_and_reads_the_clock():
    counts = [0, 0]

    def first():
        counts[0] += 1
        time.sleep(0.002)

    def second():
        counts[1] += 1

    slow, fast = timing.medians([first, second], "cpu", seconds=0.02)
    assert slow >= 0.002  # a sleep never returns early
    assert fast < slow
    assert min(counts) >= 4  # a warm-up and three samples


def test_timer_takes_turns_over_data_sets():
    order = []
    works = [[lambda: order.append("a"), lambda: order.append("b")]]
    (measured,) = timing.measure(works, "cpu", seconds=0.001)
    assert order[:4] == ["a", "b", "a", "b"]
    assert measured.how == "wall"
    assert measured.samples >= 3


def test_one_data_set_on_a_cpu():
    assert timing.data_sets(1, "cpu") == 1


def test_geometric_mean():
    assert timing.geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert math.isnan(timing.geometric_mean([]))


def test_floor_is_the_larger_of_memory_and_arithmetic():
    ceilings = floor.Ceilings(1e9, 1e12, 1e9, 1e12, "measured")
    assert ceilings.floor_seconds(2e9, 1e12) == pytest.approx(2.0)
    assert ceilings.floor_seconds(1e9, 5e12) == pytest.approx(5.0)


def test_measured_ceilings_are_kept():
    found = floor.ceilings("cpu", torch.float32)
    assert found.bytes_per_second > 0
    assert found.flops_per_second > 0
    assert floor.ceilings("cpu", torch.float32) is found
    assert not precision.tf32_allowed("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_reference_accepts_torch_and_finds_one_wrong_tap(dtype):
    case = cases.find("k4s2p1")
    x, w, b = case.tensors(dtype, bias=True)
    truth = reference(Operands(x, w, b), case.geometry)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    y = F.conv_transpose2d(x.to(wide), w.to(wide), b.to(wide), **case.arguments())
    assert truth.error(y.to(dtype)) <= truth.bound
    wrong = w.clone()
    wrong[3, 2, 1, 0] *= 1.5
    y = F.conv_transpose2d(x.to(wide), wrong.to(wide), b.to(wide), **case.arguments())
    assert truth.error(y.to(dtype)) > 2 * truth.bound
    y.view(-1)[5] = math.nan
    assert truth.error(y) == math.inf


def test_reference_sees_a_value_where_no_tap_reaches():
    case = cases.find("empty-phases")
    x, w, _ = case.tensors()
    truth = reference(Operands(x, w), case.geometry)
    y = truth.values.float()
    untouched = (truth.magnitude == 0).nonzero()[0].tolist()
    y[tuple(untouched)] = 1e-30
    assert truth.error(y) == math.inf


def test_rounding_to_tf32():
    step = 2.0**-10
    values = torch.tensor([1.0, 1 + step, 1 + 0.4 * step, 1 + 0.6 * step, 1 + 0.5 * step, 1 + 1.5 * step, -(1 + 0.6 * step), 0.0])
    want = torch.tensor([1.0, 1 + step, 1.0, 1 + step, 1.0, 1 + 2 * step, -(1 + step), 0.0])
    assert torch.equal(round_to_tf32(values), want)
