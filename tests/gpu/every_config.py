"""What tests of the tiles of an algorithm share: every config that they ask for, exact on integers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from oracle import assert_exact, describe, exact_like, geometry_arguments, loop_conv, ours, reference
from upfold import execute, modes
from upfold.cases import Case
from upfold.dispatch import use_config
from upfold.problem import Problem

Configs = Callable[[Problem, torch.device], Iterable[int]]
Storage = Callable[[torch.Tensor], torch.Tensor]


def forward_is_exact(case: Case, dtype: torch.dtype, device: torch.device, storage: Storage, configs: Configs) -> None:
    """The forward by `fused`, of x as `storage` lays it out, with and without a bias."""
    x, w, b = case.tensors(dtype, device, exact=True, bias=True)
    x = storage(x)
    for bias in (b, None):
        want = reference((x, w, bias), case.geometry)
        for config in configs(describe(x, w, bias, tuple(geometry_arguments(case.geometry).values())), device):
            with use_config(config):
                assert_exact(ours((x, w, bias), case.geometry, "fused"), want, f"config {config}")


def gradient_is_exact(case: Case, dtype: torch.dtype, device: torch.device, storage: Storage, configs: Configs) -> None:
    """The gradient of the input by `fused`, of a gradient of the result as `storage` lays it out."""
    x, w, _ = case.tensors(dtype, device, exact=True, bias=False)
    shape = (case.batch, case.out_channels, *case.out_size)
    g = storage(exact_like(shape, case.out_channels // case.groups * w[0, 0].numel(), dtype).to(device))
    size, arguments = tuple(x.shape[2:]), modes.positional(case.geometry)
    want = loop_conv(g.cpu().double(), w.cpu().double(), size, case.geometry)
    for config in configs(execute.describe_conv(g, w, size, arguments)[0], device):
        with use_config(config):
            assert_exact(execute.conv(g, w, size, arguments, "fused"), want, f"config {config}")
