"""What every algorithm must answer."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, Protocol

import torch

from ..problem import Problem

# Enqueues one call: the addresses of x, w, bias, y and the workspace (0: none), and the CUDA stream's handle (0 on a CPU). A bias
# is read, but by the gradient of the weight, which writes its gradient there (`Algorithm.sums_channels`).
Enqueue = Callable[[int, int, int, int, int, int], None]


class Tensors(NamedTuple):
    """The operands of one call: `Problem.operator` says which of x, w, y is written."""

    x: torch.Tensor
    w: torch.Tensor
    bias: torch.Tensor | None
    y: torch.Tensor


class Packing(NamedTuple):
    """A weight laid out once for many calls, where the kernels would otherwise lay it out in each.

    Attributes:
        layout: equal for two problems exactly where a copy made for one serves the other.
        copy_bytes: bytes of the copy, which begins where torch's allocators begin.
        workspace_bytes: scratch of a call that gets the copy.
        pack: enqueues the packing: the addresses of w and of the copy, and the CUDA stream's handle.
        enqueue: as an `Enqueue`, with the address of the copy behind the stream; w is given all the same.
    """

    layout: Hashable
    copy_bytes: int
    workspace_bytes: int
    pack: Callable[[int, int, int], None]
    enqueue: Callable[[int, int, int, int, int, int, int], None]


class Algorithm(Protocol):
    """What the rest of the package knows of an algorithm."""

    name: str

    def reject(self, problem: Problem, device: torch.device) -> str | None:
        """Say in a clause why this problem cannot be run on this device, or None."""

    def configs(self, problem: Problem, device: torch.device) -> Sequence[int]:
        """The tile choices that fit, best guess first."""

    def workspace_bytes(self, problem: Problem, config: int, device: torch.device) -> int:
        """Scratch that a call needs, in bytes."""

    def prepare(self, problem: Problem, config: int, device: torch.device) -> Enqueue | None:
        """Settle all that calls of this problem have in common; None where a call needs the tensors, by `run`."""

    def packing(self, problem: Problem, config: int, device: torch.device) -> Packing | str:
        """How a transposed convolution's weight can be packed apart from the calls, or why nothing of it is worth keeping."""

    def sums_channels(self, problem: Problem, config: int, device: torch.device) -> int:
        """In how many parts the gradient of the weight sums y's channels, the gradient of a bias that a call names; 0: not."""

    def run(self, problem: Problem, tensors: Tensors, config: int, workspace: torch.Tensor | None, stream: int) -> None:
        """Compute into the operand that the operator writes. `stream` is the CUDA stream's handle, 0 on a CPU."""


def enqueue_tensors(enqueue: Enqueue, tensors: Tensors, workspace: torch.Tensor | None, stream: int) -> None:
    """Call what `prepare` gave with the addresses of tensors that the caller keeps alive."""
    x, w, bias, y = tensors
    enqueue(
        x.data_ptr(),
        w.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        0 if workspace is None else workspace.data_ptr(),
        stream,
    )


def on_cpu(kernel: Callable[..., None], problem: Problem) -> Enqueue:
    """A kernel of the CPU module, bound to a problem and its threads."""
    struct, threads = problem.cpu, problem.threads

    def call(x: int, w: int, bias: int, y: int, workspace: int, stream: int) -> None:
        kernel(struct, x, w, bias, y, workspace, threads)

    return call
