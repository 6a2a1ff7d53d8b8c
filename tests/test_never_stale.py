"""Weights are never stale: without freezing, whoever writes to them, however torch hears of it."""

from __future__ import annotations

import pytest
import torch

from freezing import COUNTED, UNCOUNTED, assert_differs, assert_equals_torch, make, that_packs

CHANGES = {**UNCOUNTED, **COUNTED}


@pytest.mark.parametrize("algorithm", ["auto", "gemm", "direct", "fused"])
@pytest.mark.parametrize("name", CHANGES)
def test_the_default_way_sees_every_write(name, algorithm, device):
    layer, x = make(device, algorithm)
    with torch.no_grad(), that_packs(layer, x):
        before = layer(x)
        assert_equals_torch(before, layer, x)
        CHANGES[name](layer)
        y = layer(x)
        assert_equals_torch(y, layer, x)
        assert_differs(y, before, layer, x)


@pytest.mark.parametrize("algorithm", ["auto", "gemm", "direct", "fused"])
def test_the_default_way_in_inference_mode(algorithm, device):
    with torch.inference_mode():
        layer, x = make(device, algorithm)
        with that_packs(layer, x):
            before = layer(x)
            layer.weight.mul_(-2)
            y = layer(x)
            assert_equals_torch(y, layer, x)
            assert_differs(y, before, layer, x)
            layer.weight.data.mul_(3)
            assert_equals_torch(layer(x), layer, x)


def test_the_default_way_follows_an_averaged_model(device):
    layer, x = make(device)
    averaged = torch.optim.swa_utils.AveragedModel(layer, avg_fn=lambda mean, now, count: mean.lerp(now, 0.5))
    averaged.update_parameters(layer)
    with torch.no_grad(), that_packs(layer, x):
        before = averaged(x)
        layer.weight.neg_()
        averaged.update_parameters(layer)
        y = averaged(x)
        assert_equals_torch(y, averaged.module, x)
        assert_differs(y, before, averaged.module, x)
