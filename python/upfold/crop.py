"""Leaving out the ends of a result without computing them: a cropped transposed convolution is one with more padding.

Output position o of the cropped operator is position o + before of the whole one, so that a padding of ``padding + before`` at
the begin of an axis and ``padding + after`` at its end gives the same values, gradients included. No kernel knows of it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from .geometry import Edges, IntOrInts, InvalidArgument, per_axis

Crop = Any  # of the public functions: None, an integer, or what `parse_crop` takes
Pairs = tuple[tuple[int, int], ...]


def parse_crop(ndim: int, crop: Crop) -> Pairs:
    """Normalise and check a crop.

    Args:
        ndim: number of spatial axes.
        crop: pixels at both ends of every axis, or a pair (before, after) for each axis; for one axis also the pair alone.

    Returns:
        (before, after) of each axis.

    Raises:
        InvalidArgument: an amount is negative, or the pairs are not those of `ndim` axes.
        TypeError: an amount is no integer.
    """
    if not isinstance(crop, Sequence):
        pairs: list[tuple[int, ...]] = [(operator.index(crop),) * 2] * ndim
    else:
        alone = ndim == 1 and len(crop) == 2 and not any(isinstance(entry, Sequence) for entry in crop)
        pairs = [tuple(operator.index(v) for v in e) if isinstance(e, Sequence) else () for e in ([crop] if alone else crop)]
    if len(pairs) != ndim or any(len(pair) != 2 for pair in pairs):
        raise InvalidArgument(
            f"crop = {crop}; must be an integer, or a pair (before, after) for each spatial axis; the operator has {ndim}"
        )
    if any(amount < 0 for pair in pairs for amount in pair):
        raise InvalidArgument(f"crop = {crop}; must be at least 0; output_padding makes the result larger")
    return tuple((before, after) for before, after in pairs)


def cropped_padding(ndim: int, padding: IntOrInts, crop: Crop) -> Edges:
    """The padding that also leaves out what `crop` names (`parse_crop`).

    Raises:
        InvalidArgument: the crop does not fit, or the padding is negative.
    """
    pairs, pads = parse_crop(ndim, crop), per_axis("padding", padding, ndim)
    if any(pad < 0 for pad in pads):  # a crop could hide it
        raise InvalidArgument(f"padding = {pads}; must be at least 0 on every axis")
    begins = tuple(pad + before for pad, (before, _) in zip(pads, pairs, strict=True))
    return Edges(begins, tuple(pad + after for pad, (_, after) in zip(pads, pairs, strict=True)))


def cropped(y: torch.Tensor, crop: Crop, ndim: int) -> torch.Tensor:
    """A view of a whole result without what `crop` names, for operators that can't leave it out."""
    if crop is None:
        return y
    first = y.dim() - ndim
    for axis, (before, after) in enumerate(parse_crop(ndim, crop)):
        y = y.narrow(first + axis, before, y.shape[first + axis] - before - after)
    return y
