"""Launches that begin while the one ahead still runs: none reads what that writes too early, and none writes what that reads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gpu import missing
from upfold import cases
from upfold.algorithms import REGISTRY
from upfold.methods import our_method
from upfold.modes import FORWARD, GRAD_INPUT, GRAD_WEIGHT, OPERATORS, STEP, Operands, describe, with_gradient

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.gpu

# What writes each operand that a mode reads.
WRITERS = {
    FORWARD: {"x": GRAD_INPUT, "w": GRAD_WEIGHT},
    GRAD_INPUT: {"g": FORWARD, "w": GRAD_WEIGHT},
    GRAD_WEIGHT: {"x": GRAD_INPUT, "g": FORWARD},
}
LAYERS = {case.name: case.scaled(4.0) for case in cases.by_tier("decoders", "seeds")}
MILLISECOND = 2_000_000  # cycles, about


@pytest.fixture(autouse=True)
def tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)


def _operands(case, dtype, device, seed):
    o = with_gradient(STEP, Operands(*case.tensors(dtype, device, seed=seed)), case.geometry)
    return replace(o, g=o.grad * seed)


def _chain(mode, run, operands, geometry, awaits):
    """The results of `run` with each of its operands written by the launch right ahead of it."""
    results = []
    torch.cuda._sleep(0 if awaits else MILLISECOND)  # so that launches follow one another without a gap
    for operand, writer in WRITERS[mode].items():
        written = our_method(writer, "auto", geometry)(operands)
        if awaits:
            torch.cuda.synchronize()
        results.append(run(replace(operands, **{operand: written})))
        if awaits:
            torch.cuda.synchronize()
    return results


@pytest.mark.parametrize("algorithm", ["fused", "depthwise", "direct"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("mode", OPERATORS)
@pytest.mark.parametrize("name", LAYERS)
def test_calls_await_what_was_launched_before_them(name, mode, dtype, algorithm, device):
    case = LAYERS[name]
    operands, others = (_operands(case, dtype, device, seed) for seed in (1, 2))
    problem = describe(mode, operands, case.geometry)
    method = REGISTRY[algorithm]
    refusal = method.reject(problem, device)
    if refusal is not None:
        pytest.skip(refusal)
    for config in method.configs(problem, device):
        if method.workspace_bytes(problem, config, device) > problem.workspace_cap:
            continue
        run = our_method(mode, algorithm, case.geometry, config)
        want = _chain(mode, run, operands, case.geometry, True)
        _chain(mode, run, others, case.geometry, True)  # leaves other values in the memory that the next calls get
        got = _chain(mode, run, operands, case.geometry, False)
        for operand, a, b in zip(WRITERS[mode], got, want):
            assert torch.equal(a, b), f"config {config}, {operand} written ahead"
