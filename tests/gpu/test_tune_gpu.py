"""Tuning on a GPU: every config is timed by graph replay, and the fastest runs from then on."""

from __future__ import annotations

import pytest
import torch

import upfold
from gpu import missing
from upfold import plans

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_every_config_is_timed_and_the_fastest_runs(device, dtype, monkeypatch, tmp_path):
    monkeypatch.setenv("UPFOLD_CACHE_DIR", str(tmp_path))
    plans.forget()
    layer = upfold.ConvTranspose2d(16, 8, 4, 2, 1, device=device, dtype=dtype)
    x = torch.randn(2, 16, 24, 25, device=device, dtype=dtype)
    report = upfold.tune(layer, x, gradients=True, again=True)
    assert [row.operator for row in report] == ["forward", "grad_input", "grad_weight"]
    for row in report:
        assert (row.state, row.not_reached) == ("tuned", 0)
        assert {"gemm", "direct", "torch"} <= {one.algorithm for one in row.ranking}
    with torch.no_grad():
        plan = upfold.explain(layer, x).plan
        assert plan.reason.startswith("tuned: measured")
        assert (plan.algorithm, plan.config) == report.rows[0].ranking[0][:2]
        y = layer(x)
    want = torch.nn.functional.conv_transpose2d(x.double(), layer.weight.double(), layer.bias.double(), 2, 1)
    torch.testing.assert_close(y.double(), want, rtol=1e-2, atol=1e-2)
    machine = plans.machine_of(device)
    assert machine.device == torch.cuda.get_device_name(device)
    assert machine.driver not in ("", "unknown")
    assert plans.count(plans.in_force(), {machine}) == 3


def test_misaligned_inputs_have_plans_of_their_own(device, monkeypatch, tmp_path):
    monkeypatch.setenv("UPFOLD_CACHE_DIR", str(tmp_path))
    plans.forget()
    layer = upfold.ConvTranspose2d(8, 8, 2, 2, device=device, dtype=torch.float16)
    memory = torch.randn(8 * 12 * 12 + 1, device=device, dtype=torch.float16)
    x, odd = memory[:-1].view(1, 8, 12, 12), memory[1:].view(1, 8, 12, 12)
    assert upfold.tune(layer, odd).rows[0].state == "tuned"
    assert upfold.explain(layer, odd).plan.reason.startswith("tuned")
    assert not upfold.explain(layer, x).plan.reason.startswith("tuned")
