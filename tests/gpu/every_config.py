"""What tests of the tiles of an algorithm share: every config that they ask for, exact on integers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import torch

from gpu import assert_repeats_under_load
from oracle import assert_exact, describe, exact_like, geometry_arguments, loop_conv, ours, reference
from upfold import cases, execute, modes
from upfold.cases import Case
from upfold.dispatch import use_config
from upfold.methods import our_method
from upfold.problem import Problem

Configs = Callable[[Problem, torch.device], Iterable[int]]
Storage = Callable[[torch.Tensor], torch.Tensor]
Places = Iterable[tuple[int, int, int]]


def equal_layer(size: tuple[int, ...], kernel: tuple[int, ...], **changes: object) -> Case:
    """A layer of planes of that size whose stride is its kernel, 48 to 40 channels of three samples if nothing else is said."""
    like = cases.find(("hifigan-512-256@64", "sam-64-32@128", "nnunet3d-64-32@64")[len(size) - 1])
    own = {"batch": 3, "in_channels": 48, "out_channels": 40, "padding": (0,) * len(size)}
    return dataclasses.replace(like, in_size=size, kernel_size=kernel, stride=kernel, **(own | changes))


def forward_is_exact(case: Case, dtype: torch.dtype, device: torch.device, storage: Storage, configs: Configs) -> None:
    """The forward by `fused`, of x as `storage` lays it out, with and without a bias."""
    x, w, b = case.tensors(dtype, device, exact=True, bias=True)
    x = storage(x)
    for bias in (b, None):
        want = reference((x, w, bias), case.geometry)
        for config in configs(describe(x, w, bias, tuple(geometry_arguments(case.geometry).values())), device):
            with use_config(config):
                assert_exact(ours((x, w, bias), case.geometry, "fused"), want, f"config {config}")


def slices_are_exact(
    case: Case,
    dtype: torch.dtype,
    device: torch.device,
    storage: Storage,
    configs: Configs,
    places: Iterable[tuple[int, int, int]],
) -> None:
    """The forward by `fused`, written where a result lies in a larger tensor: nothing beside it changes.

    Args:
        case: the layer.
        dtype: of its operands.
        device: theirs.
        storage: lays x out.
        configs: those that are asked for.
        places: how many elements stand ahead of the result on all axes but the last, on the last, and beside it on each in all.
    """
    x, w, b = case.tensors(dtype, device, exact=True, bias=True)
    x = storage(x)
    want, arguments = reference((x, w, b), case.geometry), tuple(geometry_arguments(case.geometry).values())
    for ahead, ahead_in_row, beside in places:
        big = torch.full([size + beside for size in want.shape], torch.nan, dtype=dtype, device=device)
        begins = [ahead] * (want.dim() - 1) + [ahead_in_row]
        inside = big[tuple(slice(begin, begin + size) for begin, size in zip(begins, want.shape))]
        for config in configs(execute.describe_conv_transpose(x, w, b, arguments, None, inside)[0], device):
            inside.fill_(torch.nan)
            with use_config(config):
                assert_exact(ours((x, w, b), case.geometry, "fused", out=inside), want, f"config {config}")
        inside.fill_(torch.nan)
        assert big.isnan().all()


def bad_pixels_stay(case: Case, dtype: torch.dtype, device: torch.device, storage: Storage, configs: Configs) -> None:
    """A NaN of x changes what taps carry it to, by `fused`, and nothing else."""
    x, w, b = case.tensors(dtype, device, exact=True, bias=True)
    index = (0, case.in_channels // 2, *(size // 2 for size in case.in_size))
    mark = torch.zeros(x.shape, dtype=torch.float64)
    mark[index] = 1
    reached = reference((mark, torch.ones(w.shape, dtype=torch.float64), None), case.geometry) > 0
    x = storage(x)
    poisoned = x.clone()
    poisoned[index] = torch.nan
    for config in configs(describe(x, w, b, tuple(geometry_arguments(case.geometry).values())), device):
        with use_config(config):
            clean, dirty = (ours((values, w, b), case.geometry, "fused").cpu() for values in (x, poisoned))
        assert torch.equal(dirty[~reached], clean[~reached]), f"config {config}"


def activation_is_close(case: Case, dtype: torch.dtype, device: torch.device, activation: str, configs: Configs) -> None:
    """The forward by `fused` of contiguous tensors, with a bias and an activation of `torch.nn.functional`."""
    operands = case.tensors(dtype, device, exact=True, bias=True)
    want = getattr(torch.nn.functional, activation)(reference(operands, case.geometry)).to(dtype)
    for config in configs(describe(*operands, tuple(geometry_arguments(case.geometry).values())), device):
        with use_config(config):
            got = ours(operands, case.geometry, "fused", activation=activation)
        torch.testing.assert_close(got.cpu(), want.cpu(), rtol=1e-2, atol=1e-2)


def equals_gemm(case: Case, dtype: torch.dtype, device: torch.device, configs: Configs) -> None:
    """The forward by `fused` of contiguous tensors is what another method gives: a reference of many products takes long."""
    x, w, b = case.tensors(dtype, device, exact=True, bias=True)
    want = ours((x, w, b), case.geometry, "gemm")
    for config in configs(describe(x, w, b, tuple(geometry_arguments(case.geometry).values())), device):
        with use_config(config):
            assert torch.equal(ours((x, w, b), case.geometry, "fused"), want), f"config {config}"


def repeats_under_load(case: Case, dtype: torch.dtype, device: torch.device, configs: Configs) -> None:
    """The forward by `fused` of contiguous tensors, while the device is busy with something else."""
    operands = modes.Operands(*case.tensors(dtype, device, bias=True))
    arguments = tuple(geometry_arguments(case.geometry).values())
    for config in configs(describe(operands.x, operands.w, operands.bias, arguments), device):
        run = our_method(modes.FORWARD, "fused", case.geometry, config)
        assert_repeats_under_load(lambda: run(operands), device, f"config {config}")  # noqa: B023 (called at once)


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
