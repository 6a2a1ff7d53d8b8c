"""Whether writing one tensor could change another: the check behind ``out=``."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from .geometry import InvalidArgument


def check_like(out: torch.Tensor, result: torch.Tensor) -> None:
    """Refuse an `out` that differs from the result in shape, dtype or device."""
    if out.shape != result.shape:
        raise InvalidArgument(f"out.shape = {tuple(out.shape)}; must be {tuple(result.shape)}; allocate it with that shape")
    for name in ("dtype", "device"):
        mine, wanted = getattr(out, name), getattr(result, name)
        if mine != wanted:
            raise InvalidArgument(f"out.{name} = {mine} but the result has {wanted}; they must match; convert one with .to()")


def check_out(out: torch.Tensor, *inputs: torch.Tensor | None) -> None:
    """Refuse an `out` that shares an element with an input or with itself, or that autograd follows; else announce the write.

    Slices of one larger tensor are fine as long as no element is common, also when their address ranges interleave.
    """
    if out.requires_grad and torch.is_grad_enabled():
        raise InvalidArgument("out.requires_grad = True; it must be False, a gradient is needed there; pass out.detach()")
    if _overlaps_itself(tuple(out.shape), out.stride()):
        raise InvalidArgument(
            f"out has strides {out.stride()}; its elements must not share memory; pass a tensor that is not expanded"
        )
    for tensor in inputs:
        if tensor is not None and _share_an_element(out, tensor):
            raise InvalidArgument("out overlaps an operand in memory; it must not; allocate it apart or leave it out")
    out[:0].zero_()  # writes nothing, but counts as a change in place: a graph that saved `out` notices


def _share_an_element(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.numel() == 0 or b.numel() == 0 or a.device != b.device:
        return False
    begin_a, begin_b = a.data_ptr(), b.data_ptr()
    size = a.element_size()
    if begin_a + _extent(a) * size <= begin_b or begin_b + _extent(b) * b.element_size() <= begin_a:
        return False
    distance = begin_b - begin_a
    if b.element_size() != size or distance % size != 0:
        return True
    return _views_meet(tuple(a.shape), a.stride(), tuple(b.shape), b.stride(), distance // size)


def _extent(t: torch.Tensor) -> int:
    """Elements from the first to the last, inclusive."""
    return 1 + sum((size - 1) * step for size, step in zip(t.shape, t.stride()))


@lru_cache(maxsize=256)
def _overlaps_itself(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    # Axes in ascending order of stride: each must step over all that lies inside it. Stricter than needed for odd views only.
    reach = 0
    for step, size in sorted((step, size) for step, size in zip(strides, shape) if size > 1):
        if step <= reach:
            return True
        reach += (size - 1) * step
    return False


def _boxes_are_apart(shape_a: tuple[int, ...], shape_b: tuple[int, ...], strides: tuple[int, ...], distance: int) -> bool:
    """Whether two slices of one tensor certainly share no element, as parts of its channels do; False means: unknown.

    On each axis a covers [0, size_a) and b [d, d + size_b), `distance` being the sum of d * stride. Where the finer axes together
    never reach the stride of a coarser one, an element has one set of coordinates only, and one axis apart keeps all apart.
    """
    rest, apart, axes = distance, False, []
    for step, size_a, size_b in sorted(zip(strides, shape_a, shape_b), reverse=True):
        if size_a == size_b == 1:
            continue
        offset = 0 if step == 0 else abs(rest) // step * (1 if rest > 0 else -1)
        rest -= offset * step
        apart = apart or offset >= size_a or -offset >= size_b
        axes.append((step, max(size_a, offset + size_b) - min(0, offset)))
    reach = 0
    for step, extent in reversed(axes):
        if step <= reach:
            return False
        reach += (extent - 1) * step
    return apart and rest == 0


@lru_cache(maxsize=256)
def _views_meet(
    shape_a: tuple[int, ...], strides_a: tuple[int, ...], shape_b: tuple[int, ...], strides_b: tuple[int, ...], distance: int
) -> bool:
    """Whether two views of one buffer meet; `distance` is b's first element minus a's. Exact."""
    if strides_a == strides_b and _boxes_are_apart(shape_a, shape_b, strides_a, distance):
        return False
    # Any other pair: mark the elements of one, and look at those of the other.
    first_a, first_b = max(0, -distance), max(0, distance)

    def view(marks: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], first: int) -> Any:
        return marks.as_strided(shape, strides, first)

    last = max(
        first + sum((size - 1) * step for size, step in zip(shape, strides))
        for shape, strides, first in ((shape_a, strides_a, first_a), (shape_b, strides_b, first_b))
    )
    marks = torch.zeros(last + 1, dtype=torch.bool)
    view(marks, shape_a, strides_a, first_a).fill_(True)
    return bool(view(marks, shape_b, strides_b, first_b).any())
