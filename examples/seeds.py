"""The five tasks that upfold was written for: `Model` is torch's layer, `ModelNew` the same with upfold's, both with the task's
own signature.

    python examples/seeds.py                  # each task, cut to what a CPU does in a moment; the size that ran is printed
    python examples/seeds.py --device cuda    # full size

Both models get the same weights, float32, no bias. Printed are the shapes, the largest error of each against float64
(max |y - y64| / conv_transpose(|x|, |w|)) and the time of a call.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import upfold
from upfold import cases
from upfold.modes import Operands
from upfold.precision import tf32_allowed
from upfold.reference import reference
from upfold.timing import medians


class GroupedDilated:
    """Everything at once: strided, padded, dilated, grouped, all of it asymmetric."""

    case = "seed0-grouped-dilated"
    arguments = (32, 64, (3, 5), (2, 3), (1, 2), (2, 1), 4)

    class Model(nn.Module):
        layer: type[nn.ConvTranspose2d] = nn.ConvTranspose2d

        def __init__(
            self,
            in_channels: int,
            out_channels: int,
            kernel_size: tuple[int, int],
            stride: tuple[int, int] = (1, 1),
            padding: tuple[int, int] = (0, 0),
            dilation: tuple[int, int] = (1, 1),
            groups: int = 1,
            bias: bool = False,
        ) -> None:
            super().__init__()
            self.conv_transpose2d = self.layer(
                in_channels, out_channels, kernel_size, stride, padding, groups=groups, bias=bias, dilation=dilation
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.conv_transpose2d(x)

    class ModelNew(Model):
        layer = upfold.ConvTranspose2d


class AsymmetricKernel:
    """A small map under a 3x5 kernel, with every argument a pair."""

    case = "seed1-asymmetric"
    arguments = (32, 64, (3, 5))

    class Model(nn.Module):
        layer: type[nn.ConvTranspose2d] = nn.ConvTranspose2d

        def __init__(
            self,
            in_channels: int,
            out_channels: int,
            kernel_size: tuple[int, int],
            stride: tuple[int, int] = (1, 1),
            padding: tuple[int, int] = (0, 0),
            output_padding: tuple[int, int] = (0, 0),
            dilation: tuple[int, int] = (1, 1),
            groups: int = 1,
            bias: bool = False,
        ) -> None:
            super().__init__()
            self.conv_transpose2d = self.layer(
                in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias, dilation
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.conv_transpose2d(x)

    class ModelNew(Model):
        layer = upfold.ConvTranspose2d


class SquareKernel:
    """A wide image under a 3x3 kernel, with every argument one integer."""

    case = "seed2-square"
    arguments = (32, 32, 3)

    class Model(nn.Module):
        layer: type[nn.ConvTranspose2d] = nn.ConvTranspose2d

        def __init__(
            self,
            in_channels: int,
            out_channels: int,
            kernel_size: int,
            stride: int = 1,
            padding: int = 0,
            output_padding: int = 0,
            groups: int = 1,
            bias: bool = False,
        ) -> None:
            super().__init__()
            self.conv_transpose2d = self.layer(
                in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.conv_transpose2d(x)

    class ModelNew(Model):
        layer = upfold.ConvTranspose2d


class WideKernel:
    """A square image under a 3x7 kernel, with integers for stride and padding."""

    case = "seed3-wide-kernel"
    arguments = (64, 64, (3, 7))

    class Model(nn.Module):
        layer: type[nn.ConvTranspose2d] = nn.ConvTranspose2d

        def __init__(
            self,
            in_channels: int,
            out_channels: int,
            kernel_size: tuple[int, int],
            stride: int = 1,
            padding: int = 0,
            output_padding: int = 0,
            groups: int = 1,
            bias: bool = False,
        ) -> None:
            super().__init__()
            self.conv_transpose2d = self.layer(
                in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.conv_transpose2d(x)

    class ModelNew(Model):
        layer = upfold.ConvTranspose2d


class WideImage:
    """A large batch of wide images under a 3x5 kernel; groups and dilation are accepted."""

    case = "seed4-wide-image"
    arguments = (64, 128, (3, 5))

    class Model(nn.Module):
        layer: type[nn.ConvTranspose2d] = nn.ConvTranspose2d

        def __init__(
            self,
            in_channels: int,
            out_channels: int,
            kernel_size: tuple[int, int],
            stride: tuple[int, int] = (1, 1),
            padding: tuple[int, int] = (0, 0),
            output_padding: tuple[int, int] = (0, 0),
            groups: int = 1,
            dilation: tuple[int, int] = (1, 1),
            bias: bool = False,
        ) -> None:
            super().__init__()
            self.conv_transpose2d = self.layer(
                in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias, dilation
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.conv_transpose2d(x)

    class ModelNew(Model):
        layer = upfold.ConvTranspose2d


TASKS: tuple[Any, ...] = (GroupedDilated, AsymmetricKernel, SquareKernel, WideKernel, WideImage)


@dataclass(frozen=True)
class Outcome:
    """One task: what ran, the shapes of both results, errors against float64, and seconds per call."""

    task: str
    size: str
    torch_shape: tuple[int, ...]
    upfold_shape: tuple[int, ...]
    torch_error: float
    upfold_error: float
    error_bound: float
    torch_seconds: float
    upfold_seconds: float


def run(task: Any, device: torch.device | str = "cpu", max_gflop: float | None = None, seconds: float = 0.5) -> Outcome:
    """Run both models of one task on the same weights and input, at the task's size or cut to `max_gflop`."""
    case = cases.find(task.case)
    case = case if max_gflop is None else case.scaled(max_gflop)
    torch.manual_seed(0)
    model = task.Model(*task.arguments).to(device)
    model_new = task.ModelNew(*task.arguments).to(device)
    model_new.load_state_dict(model.state_dict())
    x = torch.rand(case.batch, case.in_channels, *case.in_size, device=device)
    with torch.no_grad():
        theirs, ours = model(x), model_new(x)
        truth = reference(Operands(x, model.conv_transpose2d.weight), case.geometry, tf32=tf32_allowed(device))
        torch_seconds, upfold_seconds = medians([lambda: model(x), lambda: model_new(x)], device, seconds=seconds)
    return Outcome(
        task.__name__,
        case.size_text,
        tuple(theirs.shape),
        tuple(ours.shape),
        truth.error(theirs),
        truth.error(ours),
        truth.bound,
        torch_seconds,
        upfold_seconds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="The five tasks, torch's layer against upfold's.")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--max-gflop", type=float, help="cut each task down to this (default: 1 on a CPU, whole on a GPU)")
    parser.add_argument("--seconds", type=float, default=0.5, help="time spent on each model (default: %(default)s)")
    options = parser.parse_args()
    limit = options.max_gflop
    if limit is None and options.device == "cpu":
        limit = 1.0
    for task in TASKS:
        found = run(task, options.device, limit, options.seconds)
        verdict = "equal" if found.torch_shape == found.upfold_shape else "DIFFERENT"
        print(f"{found.task}: {found.size}")
        print(f"  shapes {verdict}: {found.torch_shape} and {found.upfold_shape}")
        print(f"  largest error: torch {found.torch_error:.1e}, upfold {found.upfold_error:.1e}")
        ratio = found.torch_seconds / found.upfold_seconds
        print(
            f"  time: torch {found.torch_seconds * 1e3:.3f} ms, upfold {found.upfold_seconds * 1e3:.3f} ms ({ratio:.2f}x torch)"
        )


if __name__ == "__main__":
    main()
