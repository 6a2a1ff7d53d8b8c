"""The cap on scratch, as torch's allocator sees it, over every layer at its full size."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch

from gpu import missing
from oracle import dtype_name
from upfold import cases, use
from upfold.algorithms import REGISTRY
from upfold.memory import held_beside_result
from upfold.methods import our_method
from upfold.modes import FORWARD, GRAD_WEIGHT, OPERATORS, Operands, describe

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.gpu


def zeros(case, dtype, mode, device):
    """Operands of a mode; their values do not matter here."""
    g = None if mode == FORWARD else torch.zeros(case.batch, case.out_channels, *case.out_size, device=device, dtype=dtype)
    x = torch.zeros(case.batch, case.in_channels, *case.in_size, device=device, dtype=dtype)
    w = torch.zeros(case.in_channels, case.out_channels // case.groups, *case.kernel_size, device=device, dtype=dtype)
    return Operands(x, w, None, g)


@pytest.mark.parametrize("megabytes", [None, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(
    ("algorithm", "mode"), [*itertools.product(["gemm", "direct"], OPERATORS), ("fused", GRAD_WEIGHT)], ids=str
)
def test_no_call_takes_more_than_the_cap(algorithm, case, dtype, mode, megabytes, device):
    needed = 2 * case.bytes(dtype) + (512 << 20)
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed >> 20} MiB of free GPU memory")
    operands = zeros(case, dtype, mode, device)
    if "requested_bytes.all.peak" not in torch.cuda.memory_stats(device):
        pytest.skip("this torch does not tell how much was asked for, only how much was given")
    with torch.no_grad(), use(workspace_mb=megabytes):
        problem = describe(mode, operands, case.geometry)
        refusal = REGISTRY[algorithm].reject(problem, device)
        if refusal is not None:
            pytest.skip(refusal)
        run = our_method(mode, algorithm, case.geometry)
        y, held = held_beside_result(partial(run, operands), device)
    del y, operands
    if needed > 4 << 30:  # other processes test on this device too
        torch.cuda.empty_cache()
    assert problem.workspace_cap == (megabytes or 256) << 20
    assert held <= problem.workspace_cap
