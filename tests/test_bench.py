"""The bench: that it measures what it says. No test asserts a speed."""

from __future__ import annotations

import io
import json
import math

import pytest
import torch
import torch.nn.functional as F

from upfold import InvalidArgument, cases, execute, floor, precision
from upfold.algorithms import REGISTRY
from upfold.modes import FORWARD, GRAD_INPUT, GRAD_WEIGHT, MODES, Operands, describe, with_gradient
from upfold.reference import reference

pytest.importorskip("rich", reason="the bench's tables need rich")

from upfold import bench, compare, comparison, methods, pairs, summary, tables

QUICK = compare.Conditions(seconds=0.002)


def test_a_wrong_result_is_shown_and_not_timed(monkeypatch):
    case = cases.find("k4s2p1")
    original = methods.functional.conv_transpose2d

    def spoiled(x, w, bias=None, *arguments, algorithm=None, **options):
        y = original(x, w, bias, *arguments, algorithm=algorithm, **options)
        if algorithm == "direct":
            y[0, 0, 0, 0] += 1.0
        return y

    monkeypatch.setattr(methods.functional, "conv_transpose2d", spoiled)
    result = compare.compare_case(case, QUICK)
    wrong, right = result.row("direct"), result.row("gemm")
    assert not wrong.correct
    assert wrong.seconds is None
    assert "WRONG" in wrong.note
    assert right.correct
    assert right.seconds > 0
    assert "WRONG" in render(tables.comparison_table(result))
    assert "WRONG" in render(tables.suite_table("suite", [result]))
    (failure,) = result.failures
    assert failure.startswith("k4s2p1: direct: WRONG")
    assert "repro: upfold compare" in failure


def test_a_method_that_writes_nothing_is_found_out(monkeypatch):
    original, results = methods.functional.conv_transpose2d, []

    def lazy(x, w, bias=None, *arguments, algorithm=None, **options):
        if algorithm == "direct" and results:
            return results[-1]  # as an allocator gives the memory of a result that nobody holds any more
        results.append(original(x, w, bias, *arguments, algorithm=algorithm, **options))
        return results[-1]

    monkeypatch.setattr(methods.functional, "conv_transpose2d", lazy)
    result = compare.compare_case(cases.find("k4s2p1"), QUICK)
    assert "WRONG" in result.row("direct").note
    assert result.row("gemm").correct


def breaking(monkeypatch, algorithm, error):
    """Make one of the algorithms, or torch (None), raise instead of computing a layer."""
    owner = methods.functional if algorithm else methods.F
    original = owner.conv_transpose2d

    def broken(*arguments, **options):
        if options.get("algorithm") == algorithm:
            raise error
        return original(*arguments, **options)

    if algorithm:
        monkeypatch.setattr(owner, "conv_transpose2d", broken)
    else:
        monkeypatch.setattr(methods, "torch_conv_transpose", lambda ndim: broken)


BREAKS = [RuntimeError("direct: an illegal memory access\nmore"), ValueError("no such tile"), InvalidArgument("a late refusal")]


@pytest.mark.parametrize("error", BREAKS, ids=lambda error: type(error).__name__)
def test_a_method_of_ours_that_breaks_is_a_failure(monkeypatch, error):
    breaking(monkeypatch, "direct", error)
    result = compare.compare_case(cases.find("k4s2p1"), QUICK)
    row = result.row("direct")
    assert row.failed
    assert row.seconds is None
    assert row.note == f"FAILED: {type(error).__name__}: {str(error).splitlines()[0]}"
    assert result.row("gemm").seconds > 0
    assert len(result.failures) == 1
    assert "FAILED" in render(tables.comparison_table(result))
    assert "FAILED" in render(tables.suite_table("suite", [result]))
    assert [row["method"] for row in result.to_dict()["rows"] if row["failed"]] == ["direct"]


OUT_OF_MEMORY = [
    torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["gpu", "cpu"])
def test_a_full_memory_is_no_failure_of_ours(monkeypatch, error):
    breaking(monkeypatch, "direct", error)
    result = compare.compare_case(cases.find("k4s2p1"), QUICK)
    assert result.row("direct").note.endswith(str(error))
    assert result.row("direct").seconds is None
    assert result.failures == []


def test_a_refusal_of_a_peer_is_a_note(monkeypatch):
    breaking(monkeypatch, None, NotImplementedError("not implemented for this type"))
    result = compare.compare_case(cases.find("k4s2p1"), QUICK)
    assert result.row("torch").note == "NotImplementedError: not implemented for this type"
    assert result.failures == []
    breaking(monkeypatch, None, TypeError("a mistake in the comparison itself"))
    with pytest.raises(TypeError, match="mistake"):
        compare.compare_case(cases.find("k4s2p1"), QUICK)


def test_a_broken_device_ends_the_comparison(monkeypatch):
    def synchronize(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    row = comparison.Row("direct", True, "contiguous", note="FAILED: RuntimeError: x")
    with pytest.raises(RuntimeError, match="cuda:0 cannot be used any more; the last method was direct: FAILED"):
        compare._check_device(torch.device("cuda", 0), row)
    compare._check_device(torch.device("cpu"), row)


def test_wrong_pairs_are_failures():
    def pair(error):
        return pairs.PairRow("unfold", "n1", 1.0, 1.0, "upfold bench --suite fold", error)

    assert pair(1e-3).failures == pair(None).failures == []
    for error in (math.inf, math.nan, 1.0):
        assert pair(error).failures[0].startswith("unfold n1: WRONG")


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
    problem = describe(FORWARD, Operands(x, w, b), case.geometry)
    ceilings = floor.Ceilings(1e9, 1e9, 1e9, 1e9, "measured")
    result = comparison.Comparison(
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
        result.rows.append(comparison.Row(method, method in ("gemm", "direct"), "contiguous", 1e-8, True, seconds))
    return result


def test_ratios_and_summary():
    result = comparison_with({"gemm": 2.0, "direct": 8.0, "torch": 4.0, "torch channels_last": 1.0})
    figures = result.figures(result.row("gemm"))
    assert figures["x_torch"] == pytest.approx(2.0)
    assert figures["x_best_peer"] == pytest.approx(0.5)
    found = summary.summarize([result])
    assert list(found) == ["gemm", "direct", "auto"]
    assert found["gemm"] == found["auto"]
    assert found["gemm"]["torch"] == {"geometric_mean": pytest.approx(2.0), "layers": 1, "worst": 2.0, "slower": 0}
    assert found["gemm"]["best peer"] == found["gemm"]["torch channels_last"]
    assert found["direct"]["torch"] == {"geometric_mean": pytest.approx(0.5), "layers": 1, "worst": 0.5, "slower": 1}
    assert "torch native" not in found["gemm"]
    result.layout = "channels_last"
    assert result.figures(result.row("gemm"))["x_torch"] == pytest.approx(0.5)


def test_torch_standing_in_is_no_figure_of_ours():
    result = comparison_with({"torch": 4.0, "torch channels_last": 1.0})
    result.auto = "torch"
    assert result.auto_row is None
    assert summary.summarize([result]) == {}


def test_summary_over_layers():
    """Means are geometric, the worst of a time in floors is the largest, and layers too short for the floor do not count."""
    layers = [comparison_with({"gemm": 2.0, "torch": 4.0}), comparison_with({"gemm": 8.0, "torch": 4.0})]
    layers.append(comparison_with({"gemm": 1.0}))
    layers[2].ceilings = floor.Ceilings(1e15, 1e15, 1e15, 1e15, "measured")
    found = summary.summarize(layers)["gemm"]
    assert found["torch"] == {"geometric_mean": pytest.approx(1.0), "layers": 2, "worst": 0.5, "slower": 1}
    floors = [row.seconds / layer.floor_seconds for layer in layers[:2] for row in layer.rows[:1]]
    assert found["floor"] == {"geometric_mean": pytest.approx(math.sqrt(math.prod(floors))), "layers": 2, "worst": max(floors)}
    text = render(tables.summary_table("three", layers))
    assert "1.00x 0.50x" in text


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
    for layer in found["suites"]["smoke"]:
        assert layer["repro"] in text
        assert layer["name"] in text
        for row in layer["rows"]:
            assert (row["seconds"] is not None) or row["note"], row
            if row["method"] in ("gemm", "direct"):
                assert "WRONG" not in row["note"], row
                assert row["seconds"] > 0, row
    assert any("cut from" in layer["size"] for layer in found["suites"]["smoke"])
    assert "geometric mean" in text
    assert found["summary"]["smoke"]["gemm"]["torch"]["layers"] == len(found["suites"]["smoke"])


@pytest.mark.parametrize("mode", [GRAD_INPUT, GRAD_WEIGHT])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_gradient_reference_accepts_autograd_and_finds_one_wrong_entry(mode, dtype):
    case = cases.find("k4s2p1")
    operands = with_gradient(mode, Operands(*case.tensors(dtype, bias=True)), case.geometry)
    assert operands.bias is None
    truth = reference(operands, case.geometry, mode=mode)
    leaves = operands.x.double().requires_grad_(), operands.w.double().requires_grad_()
    y = F.conv_transpose2d(*leaves, None, **case.arguments())
    got = torch.autograd.grad(y, leaves, operands.g.double())[0 if mode == GRAD_INPUT else 1].to(dtype)
    assert truth.error(got) <= truth.bound
    got[1, 2, 1, 0] *= 1.5
    assert truth.error(got) > 2 * truth.bound


def test_gradients_of_complex_numbers_are_refused():
    case = cases.find("k4s2p1")
    with pytest.raises(InvalidArgument, match="mode = 'grad_input'; the operands are torch"):
        compare.compare_case(case, compare.Conditions(mode=GRAD_INPUT), dtype=torch.complex64)


def test_bench_of_every_mode_and_config():
    results, text = run_bench(["smoke"], max_gflop=0.0002, modes=MODES, configs=True)
    found = results.to_dict()
    suites = ["smoke", "smoke grad_input", "smoke grad_weight", "smoke step"]
    assert list(found["suites"]) == suites == list(found["summary"])
    for mode, suite in zip(MODES, found["suites"].values(), strict=True):
        assert [row["name"] for row in suite] == [case.name for case in cases.by_tier("smoke")]
        for row in suite:
            assert row["mode"] == mode
            assert (f"--mode {mode}" in row["repro"]) == (mode != FORWARD)
            methods_of_ours = {entry["method"]: entry for entry in row["rows"] if entry["ours"]}
            for name in ("gemm", "direct"):
                assert "WRONG" not in methods_of_ours[name]["note"], methods_of_ours[name]
                assert methods_of_ours[name]["seconds"] > 0
            assert {entry["method"] for entry in row["rows"] if not entry["ours"]} >= {"torch"}
    assert "smoke grad_weight: " in text


def test_warm_times_where_the_layer_fits_the_cache(monkeypatch):
    case = cases.find("k4s2p1")
    x, w, b = case.tensors()
    exactly = describe(FORWARD, Operands(x, w, b), case.geometry).bytes
    for size, warm in ((exactly - 1, False), (exactly, True)):
        monkeypatch.setattr(compare, "cache_bytes", lambda device, size=size: size)
        result = compare.compare_case(case, QUICK)
        timed = [row for row in result.rows if row.seconds]
        assert timed
        assert all((row.warm_seconds is not None) == warm for row in timed)
        assert ("warm" in render(tables.comparison_table(result))) == warm
        assert ("warm" in render(tables.suite_table("suite", [result]))) == warm
    gemm = result.row("gemm")
    assert result.figures(gemm)["x_torch_warm"] == pytest.approx(result.row("torch").warm_seconds / gemm.warm_seconds)


def test_the_precision_of_float32_is_switched_and_put_back():
    switch, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = switch.allow_tf32, matmul.allow_tf32
    for tf32 in (False, True):
        with precision.float32_precision(tf32):
            assert precision.convolutions_take_tf32() == tf32
            assert (switch.allow_tf32, matmul.allow_tf32) == (tf32, tf32)
    assert (switch.allow_tf32, matmul.allow_tf32) == before


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="this torch has the older switch alone")
def test_the_newer_switch_of_convolutions_goes_first():
    """Also while that of recurrent layers differs, when torch refuses to read the older switch."""
    switch = torch.backends.cudnn.conv
    before = switch.fp32_precision
    try:
        for text in ("ieee", "tf32"):
            switch.fp32_precision = text
            assert precision.convolutions_take_tf32() == (text == "tf32")
    finally:
        switch.fp32_precision = before


def test_a_config_is_measured_under_its_own_name(monkeypatch):
    """What runs is the config that the row names."""
    seen = []
    direct = REGISTRY["direct"]
    prepare = direct.prepare
    monkeypatch.setattr(execute, "_launches", {})
    monkeypatch.setattr(direct, "configs", lambda problem, device: (0, 3))
    monkeypatch.setattr(direct, "prepare", lambda problem, config, device: (seen.append(config), prepare(problem, 0, device))[1])
    result = compare.compare_case(cases.find("k4s2p1"), compare.Conditions(seconds=0.002, configs=True))
    assert [row.method for row in result.rows if row.ours and row.seconds] == ["gemm", "direct", "direct#3", "fused"]
    assert seen == [0, 3]
    assert result.row("direct#3").note.startswith("config 3")


def test_bench_in_another_dtype_and_layout():
    results, _ = run_bench(["smoke"], max_gflop=0.0001, dtype=torch.bfloat16, layout="channels_last")
    comparison = results.to_dict()["suites"]["smoke"][0]
    assert comparison["dtype"] == "bfloat16"
    assert {row["layout"] for row in comparison["rows"] if row["ours"]} == {"channels_last"}


@pytest.mark.parametrize("mode", MODES)
def test_a_layout_is_that_of_the_data_and_the_weight(monkeypatch, mode):
    seen = set()
    original = compare._check

    def watched(row, method, operands, truth):
        for name, operand in zip("xwg", (operands.x, operands.w, operands.g)):
            if operand is not None:
                laid = operand.is_contiguous(memory_format=torch.channels_last), operand.is_contiguous()
                seen.add((row.ours, row.layout, name, *laid))
        return original(row, method, operands, truth)

    monkeypatch.setattr(compare, "_check", watched)
    case = cases.find("k4s2p1")
    result = compare.compare_case(case, compare.Conditions(layout="channels_last", seconds=0.002, mode=mode))
    names = "xw" if mode == FORWARD else "xwg"
    assert {entry for entry in seen if entry[0]} == {(True, "channels_last", name, True, False) for name in names}
    assert {entry for entry in seen if entry[1] == "contiguous"} == {(False, "contiguous", name, False, True) for name in names}
    assert mode == GRAD_WEIGHT or result.problem.w_strides[1] == 1  # of which w is the result


def test_bench_times_fold_and_the_host(monkeypatch):
    small = (pairs.FoldCase(1, 2, (8, 9), 3, 2, 1), pairs.FoldCase(2, 3, (6, 6), 4, 2, 1))
    assert small[0].columns_shape == F.unfold(torch.zeros(1, 2, 8, 9), 3, 1, 1, 2).shape
    monkeypatch.setattr(pairs, "_FOLD_CPU", small)
    results, text = run_bench(["fold", "host"])
    found = results.to_dict()
    assert [row["name"] for row in found["fold"]] == ["fold", "unfold"] * 2
    assert all(row["error"] < 1e-6 for row in found["fold"])
    for row in found["fold"]:
        assert row["gbytes_per_second"] == pytest.approx(row["moved_bytes"] / row["upfold_seconds"] / 1e9)
        share = row["gbytes_per_second"] * 1e9 / row["elementwise_bytes_per_second"]
        assert row["share_of_elementwise"] == pytest.approx(share)
    assert found["fold"][0]["moved_bytes"] == 4 * (2 * 8 * 9 + 2 * 9 * 4 * 5)
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
