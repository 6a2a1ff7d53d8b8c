"""Copies into parts of a larger tensor: what `fuse` does with skip connections."""

from __future__ import annotations

import pytest
import torch

from gpu import missing
from upfold import parts

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SHAPES = ((2, 16, 8, 8), (3, 5, 7, 9), (1, 64, 1, 1), (2, 24, 130), (2, 8, 3, 5, 4), (1, 8, 1, 70001))


def laid(t: torch.Tensor, last: bool) -> torch.Tensor:
    """The tensor, its channels innermost or not."""
    return t.movedim(1, -1).contiguous().movedim(-1, 1) if last else t.contiguous()


@pytest.mark.parametrize("relu", [False, True], ids=["as it is", "relu"])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("shift", [0, 1])
def test_parts_hold_what_was_copied_and_nothing_else_changes(cuda, device, shape, dtype, last, relu, shift):
    generator = torch.Generator(device).manual_seed(3)
    batch, channels, *spatial = shape
    source = torch.randn(shape, generator=generator, device=device, dtype=torch.float64).to(dtype)
    source.view(-1)[::5] = torch.nan
    source = laid(source, last)
    memory = torch.zeros(source.numel() + shift, dtype=dtype, device=device)[shift:]  # from a shifted address
    source = memory.as_strided(shape, source.stride(), shift).copy_(source)
    for first in (0, 3, 8):
        buffer = laid(torch.full((batch, 2 * channels + 8, *spatial), 7.0, dtype=dtype, device=device), last)
        want, part = buffer.clone(), buffer[:, first : first + channels]
        want[:, first : first + channels] = source.relu() if relu else source
        rows = parts.rows_between(source, part)
        assert rows is not None
        parts.copy(source, part, rows, relu)
        assert torch.equal(buffer.isnan(), want.isnan())
        assert torch.equal(buffer.nan_to_num(9.0), want.nan_to_num(9.0))


def test_parts_are_copied_on_the_current_stream(cuda, device):
    source, stream = torch.randn(4, 64, 128, 128, device=device), torch.cuda.Stream(device)
    buffer = torch.zeros(4, 128, 128, 128, device=device)
    part = buffer[:, :64]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        source.mul_(-1.0)
        parts.copy(source, part, parts.rows_between(source, part), True)
    torch.cuda.current_stream(device).wait_stream(stream)
    assert torch.equal(part, source.relu())
    assert not buffer[:, 64:].any()


def test_a_refused_type_says_which(cuda, device):
    source, part = (torch.zeros(2, 4, 4, dtype=torch.complex64, device=device) for _ in range(2))
    with pytest.raises(ValueError, match="rows of real numbers"):
        cuda.copy_rows(4, (2, 16, 16, 16), False, source.data_ptr(), part.data_ptr(), device.index, 0)
    parts.copy(source, part, parts.rows_between(source, part), False)  # by torch
