"""What the tests of stale weights share: a small layer, ways to write to its weight, and the comparison with torch."""

from __future__ import annotations

import contextlib
import ctypes
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import upfold
from small_layer import TORCH
from upfold import execute
from upfold.algorithms import REGISTRY, Packing
from upfold.dispatch import use_config

FUSED = REGISTRY["fused"]


def make(device, algorithm="fused", dtype=torch.float32, **options):
    """A layer that fused takes, and its input."""
    torch.manual_seed(0)
    layer = upfold.ConvTranspose2d(16, 16, 4, 2, 1, algorithm=algorithm, **options).to(device, dtype).eval()
    return layer, image(device, dtype)


def image(device, dtype=torch.float32, shape=(2, 16, 8, 8)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)


def packing_configs(layer, x, output_padding=None):
    """The tiles of fused that pack the weight, also with another output padding; on a GPU some read it as it lies."""
    x, w, bias, arguments, activation = execute.operands_of_layer(layer, x)
    found = None
    for padding in (arguments[2], output_padding or arguments[2]):
        problem = execute.describe(x, w, bias, (*arguments[:2], padding, *arguments[3:]), activation)
        configs = FUSED.configs(problem, x.device)
        packing = [config for config in configs if isinstance(FUSED.packing(problem, config, x.device), Packing)]
        found = [config for config in packing if found is None or config in found]
    return found


def that_packs(layer, x):
    """A block in which the layer, where it asks for fused by name, runs with a tile that packs its weight."""
    return use_config(packing_configs(layer, x)[0]) if layer.algorithm == "fused" else contextlib.nullcontext()


def _wide(layer, x, take=lambda t: t):
    x, w, b = (None if t is None else take(t.detach().double().cpu()) for t in (x, layer.weight, layer.bias))
    return F.conv_transpose2d(x, w, b, layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation)


def allowed(layer, x):
    """What rounding may do to a result: both operands rounded to TF32 on a GPU, a few bits of float32 elsewhere."""
    return _wide(layer, x, torch.abs) * (2**-9 if x.is_cuda else 2**-18)


def assert_equals_torch(y, layer, x):
    """The result of torch with the weight that the layer has now."""
    assert ((y.detach().double().cpu() - _wide(layer, x)).abs() <= allowed(layer, x)).all()


def assert_differs(y, before, layer, x):
    """Whether the change of the weight would be seen if it were missed."""
    assert ((y - before).double().cpu().abs() > 2 * allowed(layer, x)).any()


def _fused_adam(layer):
    if TORCH < (2, 4) and not layer.weight.is_cuda:
        pytest.skip("torch's fused Adam came to CPUs with 2.4")
    layer.weight.grad = torch.ones_like(layer.weight)
    torch.optim.Adam([layer.weight], lr=0.5, fused=True).step()


def _vector(layer):
    values = torch.randn(sum(p.numel() for p in layer.parameters()), device=layer.weight.device)
    nn.utils.vector_to_parameters(values, layer.parameters())


def _assign(layer):
    if TORCH < (2, 1):
        pytest.skip("load_state_dict(assign=True) is younger")
    layer.load_state_dict({name: torch.randn_like(value) for name, value in layer.state_dict().items()}, assign=True)


def _elsewhere(layer):
    layer.weight.data = torch.randn_like(layer.weight)


def _again(shape, address, freed):
    """Fresh memory where the old lay; on a CPU, whose allocator need not give it back, another storage of the same."""
    device = freed.device if isinstance(freed, torch.Tensor) else freed
    if device.type == "cpu":
        count = math.prod(shape)
        return torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32, count=count).view(shape)
    passed_over = []
    while len(passed_over) < 64:
        passed_over.append(torch.empty(shape, device=device))
        if passed_over[-1].data_ptr() == address:
            return passed_over[-1]
    pytest.skip("the allocator gave the memory to another")


def _leave(layer):
    """Where the weight lies, and what tells `_again` of it: its memory on a CPU, which stays, and its device elsewhere."""
    weight = layer.weight
    layer.memory = weight.data if weight.device.type == "cpu" else weight.device
    return weight.shape, weight.data_ptr(), layer.memory


def reallocate(layer):
    """Free the weight and give the layer another that lies where it lay."""
    place = _leave(layer)
    layer.weight = None
    layer.weight = nn.Parameter(_again(*place).normal_())


def swap_data_twice(layer):
    """Let `.data` point to other memory, and then to memory that lies where the first lay."""
    place = _leave(layer)
    layer.weight.data = torch.zeros_like(layer.weight)
    layer.weight.data = _again(*place).normal_()


# Writes that torch does not count: a frozen layer's owner answers for them.
UNCOUNTED = {
    "data": lambda layer: layer.weight.data.mul_(-2),
    "data copy": lambda layer: layer.weight.data.copy_(torch.randn_like(layer.weight)),
    "init": lambda layer: nn.init.normal_(layer.weight.data),
    "init uniform": lambda layer: nn.init.kaiming_uniform_(layer.weight.data),
    "fused adam": _fused_adam,
    "moving average": lambda layer: layer.weight.data.lerp_(torch.ones_like(layer.weight), 0.5),
}
# The others, which end the freezing.
COUNTED = {
    "in place": lambda layer: layer.weight.mul_(-2),
    "vector_to_parameters": _vector,
    "state_dict": lambda layer: layer.load_state_dict({k: -2 * v for k, v in layer.state_dict().items()}),
    "assigned state_dict": _assign,
    "other memory": _elsewhere,
    "a new parameter": lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn_like(layer.weight))),
    "the same memory": reallocate,
    "the same memory by data": swap_data_twice,
}
