"""The bench on a CPU: the share of fresh memory, products beside a 1x1 convolution's, the clock for a busy machine."""

from __future__ import annotations

import time

import pytest
import torch

from test_bench import run_bench
from upfold import activated, cases, fresh, functional, rates
from upfold.compare import Conditions, compare_case
from upfold.timing import cpu_clock, measure

QUICK = Conditions(seconds=0.002)


@pytest.fixture(autouse=True)
def _on_cpu(device):
    if device.type != "cpu":
        pytest.skip("fresh memory is a matter of the CPU")


def large():
    return cases.find("nnunet2d-64-32@256").scaled(0.05)


def test_the_choice_is_timed_with_out_too():
    result = compare_case(large(), QUICK)
    assert result.fresh_seconds >= 0
    assert result.auto_row.out_seconds > 0
    assert all(row.out_seconds is None for row in result.rows if row is not result.auto_row)
    found = result.to_dict()
    assert found["fresh_seconds"] == result.fresh_seconds
    assert sum(row["out_seconds"] is not None for row in found["rows"]) == 1


def test_small_results_and_gradients_are_not():
    for case, mode in ((cases.find("k2s2"), "forward"), (large(), "grad_input"), (large(), "grad_weight")):
        result = compare_case(case, Conditions(seconds=0.002, mode=mode))
        assert result.fresh_seconds is None
        assert fresh.fresh_shares(result) is None
        assert fresh.fresh_line([result]) is None


def test_shares():
    result = compare_case(large(), QUICK)
    result.fresh_seconds = 2.0
    result.torch_row.seconds, result.auto_row.seconds, result.auto_row.out_seconds = 8.0, 4.0, 3.0
    assert fresh.fresh_shares(result) == (0.25, 0.25, 2.0)
    assert "25% of what auto takes and 25% of torch's time (mean of 1 layers)" in fresh.fresh_line([result])
    assert "auto is 2.00x torch with it and 2.00x without" in fresh.fresh_line([result])


def test_rate(monkeypatch):
    monkeypatch.setattr(rates, "_LAYERS", (rates._Layer(8, 5, 1, (6, 7)), rates._Layer(6, 4, 2, (3, 4))))
    results, text = run_bench(["rate"])
    found = results.to_dict()["rate"]
    assert [row["name"] for row in found] == ["8-5 k1s1"] * 2 + ["6-4 k2s2"] * 2
    assert [row["flops"] for row in found[1:3]] == [2 * 8 * 5 * 42, 2 * 6 * 4 * 4 * 12]
    for row in found:
        assert row["error"] < 1e-6
        assert row["gflops"] == pytest.approx(row["flops"] / row["upfold_seconds"] / 1e9)
        assert row["x_torch"] == pytest.approx(row["gflops"] / row["torch_gflops"])
        assert row["name"] in text
    assert not results.failures


def test_a_wrong_rate_is_a_failure(monkeypatch):
    right = functional.conv_transpose2d
    monkeypatch.setattr(functional, "conv_transpose2d", lambda *args, **options: right(*args, **options).flip(-1))
    monkeypatch.setattr(rates, "_LAYERS", (rates._Layer(6, 4, 2, (3, 4)),))
    rows = rates.run_rate(torch.device("cpu"), torch.float32, 0.001, "upfold bench --suite rate")
    assert all("WRONG" in line for row in rows for line in row.failures)
    assert all(row.failures for row in rows)


def test_cpu_time_leaves_waiting_out():
    threads = torch.get_num_threads()
    with cpu_clock():
        assert torch.get_num_threads() == 1
        (timing,) = measure([lambda: time.sleep(0.01)], "cpu", seconds=0.001)
    assert torch.get_num_threads() == threads
    assert timing.how == "cpu"
    assert timing.seconds < 0.005
    (timing,) = measure([lambda: time.sleep(0.01)], "cpu", seconds=0.001)
    assert timing.how == "wall"
    assert timing.seconds >= 0.01


def test_bench_in_cpu_time():
    threads = torch.get_num_threads()
    results, text = run_bench(["smoke"], max_gflop=0.0002, cpu_time=True)
    assert "CPU time of one thread" in text
    found = results.to_dict()
    assert found["cpu_time"]
    assert found["machine"]["threads"] == 1
    assert {row["how"] for entry in found["suites"]["smoke"] for row in entry["rows"] if row["seconds"]} == {"cpu"}
    assert torch.get_num_threads() == threads


def test_activation(monkeypatch):
    monkeypatch.setattr(activated, "_LAYERS", ("k2s2",))
    results, text = run_bench(["activation"])
    found = results.to_dict()["activation"]
    assert [row["name"] for row in found] == ["torch", "torch.compile"]
    assert all(0 < row["error"] < 1e-5 and row["x_torch"] > 0 for row in found)
    assert "torch.compile" in text
    assert "activation='relu'" in text
    assert not results.failures


def test_a_layer_that_does_not_compile_keeps_its_eager_row(monkeypatch):
    def refuse(*_args, **_options):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", lambda _layer: refuse)
    monkeypatch.setattr(activated, "_LAYERS", ("k2s2",))
    with pytest.warns(UserWarning, match="k2s2: torch.compile failed: RuntimeError: no compiler here"):
        rows = activated.run_activation(torch.device("cpu"), torch.float32, 0.001, "upfold bench --suite activation")
    assert [row.name for row in rows] == ["torch"]


def test_a_wrong_activation_is_a_failure(monkeypatch):
    right = functional.conv_transpose2d

    def without(*args, activation, **options):
        assert activation == "relu"
        return right(*args, **options)

    monkeypatch.setattr(functional, "conv_transpose2d", without)
    monkeypatch.setattr(activated, "_LAYERS", ("k2s2",))
    rows = activated.run_activation(torch.device("cpu"), torch.float32, 0.001, "upfold bench --suite activation")
    assert rows
    assert all(row.failures for row in rows)
