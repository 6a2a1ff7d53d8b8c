"""The timer, the floor, the reference and the bench: that they measure what they say. No test asserts a speed."""

from __future__ import annotations

import io
import json
import math
import time

import pytest
import torch
import torch.nn.functional as F

from upfold import cases, floor, precision, timing
from upfold.reference import reference, round_to_tf32

pytest.importorskip("rich", reason="the bench's tables need rich")

from upfold import bench, compare, methods, tables


def test_timer_calls_each_function_and_reads_the_clock():
    counts = [0, 0]

    def first():
        counts[0] += 1
        time.sleep(0.002)

    def second():
        counts[1] += 1

    slow, fast = timing.medians([first, second], "cpu", seconds=0.02)
    assert slow >= 0.002  # a sleep never returns early
    assert fast < slow
    assert min(counts) >= 4  # a warm-up and three samples


def test_timer_takes_turns_over_data_sets():
    order = []
    works = [[lambda: order.append("a"), lambda: order.append("b")]]
    (measured,) = timing.measure(works, "cpu", seconds=0.001)
    assert order[:4] == ["a", "b", "a", "b"]
    assert measured.how == "wall"
    assert measured.samples >= 3


def test_one_data_set_on_a_cpu():
    assert timing.data_sets(1, "cpu") == 1


def test_geometric_mean():
    assert timing.geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert math.isnan(timing.geometric_mean([]))


def test_floor_is_the_larger_of_memory_and_arithmetic():
    ceilings = floor.Ceilings(1e9, 1e12, 1e9, 1e12, "measured")
    assert ceilings.floor_seconds(2e9, 1e12) == pytest.approx(2.0)
    assert ceilings.floor_seconds(1e9, 5e12) == pytest.approx(5.0)


def test_measured_ceilings_are_kept():
    found = floor.ceilings("cpu", torch.float32)
    assert found.bytes_per_second > 0
    assert found.flops_per_second > 0
    assert floor.ceilings("cpu", torch.float32) is found
    assert not precision.tf32_allowed("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_reference_accepts_torch_and_finds_one_wrong_tap(dtype):
    case = cases.find("k4s2p1")
    x, w, b = case.tensors(dtype, bias=True)
    truth = reference(x, w, b, case.geometry)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    y = F.conv_transpose2d(x.to(wide), w.to(wide), b.to(wide), **case.arguments())
    assert truth.error(y.to(dtype)) <= truth.bound
    wrong = w.clone()
    wrong[3, 2, 1, 0] *= 1.5
    y = F.conv_transpose2d(x.to(wide), wrong.to(wide), b.to(wide), **case.arguments())
    assert truth.error(y.to(dtype)) > 2 * truth.bound
    y.view(-1)[5] = math.nan
    assert truth.error(y) == math.inf


def test_reference_sees_a_value_where_no_tap_reaches():
    case = cases.find("empty-phases")
    x, w, _ = case.tensors()
    truth = reference(x, w, None, case.geometry)
    y = truth.values.float()
    untouched = (truth.magnitude == 0).nonzero()[0].tolist()
    y[tuple(untouched)] = 1e-30
    assert truth.error(y) == math.inf


def test_rounding_to_tf32():
    step = 2.0**-10
    values = torch.tensor([1.0, 1 + step, 1 + 0.4 * step, 1 + 0.6 * step, 1 + 0.5 * step, 1 + 1.5 * step, -(1 + 0.6 * step), 0.0])
    want = torch.tensor([1.0, 1 + step, 1.0, 1 + step, 1.0, 1 + 2 * step, -(1 + step), 0.0])
    assert torch.equal(round_to_tf32(values), want)


def test_a_wrong_result_is_shown_and_not_timed(monkeypatch):
    case = cases.find("k4s2p1")
    original = methods.functional.conv_transpose2d

    def spoiled(x, w, bias=None, *arguments, algorithm=None, **options):
        y = original(x, w, bias, *arguments, algorithm=algorithm, **options)
        if algorithm == "direct":
            y[0, 0, 0, 0] += 1.0
        return y

    monkeypatch.setattr(methods.functional, "conv_transpose2d", spoiled)
    result = compare.compare_case(case, seconds=0.002)
    wrong, right = result.row("direct"), result.row("gemm")
    assert not wrong.correct
    assert wrong.seconds is None
    assert "WRONG" in wrong.note
    assert right.correct
    assert right.seconds > 0
    assert "WRONG" in render(tables.comparison_table(result))
    assert "WRONG" in render(tables.suite_table("suite", [result]))


def render(*parts, width=160):
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width)
    console.print(*parts)
    return console.file.getvalue()


def test_losses_are_shown_as_losses():
    assert "red" in tables.ratio_text(0.5)
    assert "0.50x" in tables.ratio_text(0.5)
    assert "green" in tables.ratio_text(3.0)
    assert tables.ratio_text(None) == "-"


def comparison_with(times):
    """A comparison whose rows took `times`, without measuring."""
    case = cases.find("k2s2")
    x, w, b = case.tensors()
    problem = compare.describe(x, w, b, case.geometry)
    ceilings = floor.Ceilings(1e9, 1e9, 1e9, 1e9, "measured")
    result = compare.Comparison(
        "k2s2",
        "n2 5x6",
        "upfold compare",
        problem,
        case.geometry,
        torch.device("cpu"),
        "contiguous",
        ceilings,
        1e-6,
        "gemm",
    )
    for method, seconds in times.items():
        result.rows.append(compare.Row(method, method in ("gemm", "direct"), "contiguous", 1e-8, True, seconds))
    return result


def test_ratios_and_summary():
    result = comparison_with({"gemm": 2.0, "direct": 8.0, "torch": 4.0, "torch channels_last": 1.0})
    figures = result.figures(result.row("gemm"))
    assert figures["x_torch"] == pytest.approx(2.0)
    assert figures["x_best_peer"] == pytest.approx(0.5)
    gemm, direct, auto = tables.summary_lines([result])
    assert "gemm: 2.00x torch, 0.50x the best peer" in gemm
    assert "direct: 0.50x torch" in direct
    assert "slower than torch on 1" in direct
    assert "auto: 2.00x torch" in auto
    result.layout = "channels_last"
    assert result.figures(result.row("gemm"))["x_torch"] == pytest.approx(0.5)


def test_torch_standing_in_is_no_figure_of_ours():
    result = comparison_with({"torch": 4.0, "torch channels_last": 1.0})
    result.auto = "torch"
    assert result.auto_row is None
    assert tables.summary_lines([result]) == []


@pytest.mark.parametrize("width", [80, 110, 160])
def test_tables_fit_the_console(width):
    result = comparison_with({"gemm": 2.0, "direct": 8.0, "torch": 4.0, "torch channels_last": 1.0, "matmul + F.fold": 3.0})
    text = render(tables.suite_table("title", [result], width), width=width)
    assert "\u2026" not in text  # nothing was cut
    assert "2.00 s" in text


def run_bench(names, **options):
    from rich.console import Console

    console = Console(file=io.StringIO(), width=160)
    results = bench.run(names, bench.Options(torch.device("cpu"), seconds=0.001, **options), console)
    return results, console.file.getvalue()


def test_bench_runs_a_suite_and_its_json_carries_every_figure(tmp_path):
    results, text = run_bench(["smoke"], max_gflop=0.0002)
    found = json.loads(results.write(tmp_path / "folder" / "results.json").read_text())
    assert found["schema"] == bench.SCHEMA
    assert found["machine"]["torch"] == torch.__version__
    assert found["device"]
    assert found["machine"]["threads"] == torch.get_num_threads()
    assert [row["name"] for row in found["suites"]["smoke"]] == [case.name for case in cases.by_tier("smoke")]
    for comparison in found["suites"]["smoke"]:
        assert comparison["repro"] in text
        assert comparison["name"] in text
        for row in comparison["rows"]:
            assert (row["seconds"] is not None) or row["note"], row
            if row["ours"]:
                assert "WRONG" not in row["note"], row
                assert row["seconds"] is None if row["note"].startswith("refuses") else row["seconds"] > 0
    assert any("cut from" in comparison["size"] for comparison in found["suites"]["smoke"])
    assert "geometric means" in text


def test_bench_in_another_dtype_and_layout():
    results, _ = run_bench(["smoke"], max_gflop=0.0001, dtype=torch.bfloat16, layout="channels_last")
    comparison = results.to_dict()["suites"]["smoke"][0]
    assert comparison["dtype"] == "bfloat16"
    assert {row["layout"] for row in comparison["rows"] if row["ours"]} == {"channels_last"}


def test_bench_times_fold_and_the_host(monkeypatch):
    small = (bench.FoldCase(1, 2, (8, 9), 3, 2, 1), bench.FoldCase(2, 3, (6, 6), 4, 2, 1))
    assert small[0].columns_shape == F.unfold(torch.zeros(1, 2, 8, 9), 3, 1, 1, 2).shape
    monkeypatch.setattr(bench, "_FOLD_CPU", small)
    results, text = run_bench(["fold", "host"])
    found = results.to_dict()
    assert [row["name"] for row in found["fold"]] == ["fold", "unfold"] * 2
    assert all(row["error"] < 1e-6 for row in found["fold"])
    assert [row["name"] for row in found["host"]] == [
        "function, no gradients",
        "layer, no gradients",
        "layer, forward with gradients",
        "layer, forward and backward",
    ]
    for row in found["fold"] + found["host"]:
        assert row["x_torch"] == pytest.approx(row["torch_seconds"] / row["upfold_seconds"])
        assert row["name"] in text
        assert row["repro"].startswith("upfold bench --suite ")
