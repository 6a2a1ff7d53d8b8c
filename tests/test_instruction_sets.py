"""Every instruction set that the CPU kernels are built for gives exact results; each is forced in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from upfold import native

INSTRUCTION_SETS = ("portable", "avx2", "avx512")

CHECK = """
import sys
import torch
from oracle import assert_exact, ours, reference, reference_gradients, refusal
from test_weight_gradient import exact_operands, gradient, refusal as refusal_of_gradient
from upfold import cases, native

assert native.cpu().instruction_set() == sys.argv[1]
torch.set_num_threads(1)
for case in (case.scaled(0.002) for case in cases.CASES):
    for dtype in (torch.float32, torch.bfloat16):
        x, w, b = case.tensors(dtype, exact=True)
        want = reference((x, w, b), case.geometry)
        formats = {2: (torch.channels_last,), 3: (torch.channels_last_3d,)}.get(case.ndim, ())
        for one in (x, *(x.contiguous(memory_format=last) for last in formats)):
            for algorithm in ("direct", "fused"):
                if refusal(algorithm, one, w, b, case.geometry) is None:
                    assert_exact(ours((one, w, b), case.geometry, algorithm), want, f"{algorithm} {case.name} {dtype}")
        x, g = exact_operands(case, dtype)
        if refusal_of_gradient(case, x, g) is None:
            assert_exact(gradient(case, x, g), reference_gradients((x, w, b), g, case.geometry)[1], f"{case.name} {dtype}")
print("exact")
"""


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_exact(name, device):
    if device.type != "cpu":
        pytest.skip("of the CPU kernels")
    present = native.cpu().instruction_set()
    if INSTRUCTION_SETS.index(name) > INSTRUCTION_SETS.index(present):
        pytest.skip(f"this processor has {present} at most")
    environment = {**os.environ, "UPFOLD_CPU_ISA": name}
    arguments = [sys.executable, "-c", CHECK, name]
    done = subprocess.run(arguments, cwd=Path(__file__).parent, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "exact\n", done.stderr
