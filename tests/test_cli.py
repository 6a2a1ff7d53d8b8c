"""The command line: every command, every example of its help, and every complaint in one line."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

import pytest
import torch

import upfold
from upfold import cases, cli, explanation, methods

pytest.importorskip("rich", reason="the command line's tables need rich")
pytest.importorskip("matplotlib", reason="the command line's charts need matplotlib")

COMMANDS = ("demo", "compare", "bench", "chart", "explain", "scan", "tune", "info")
TINY = shlex.split("--in 4 --out 3 --kernel 4 --stride 2 --padding 1 --size 5 6 --batch 2 --seconds 0.002")


def run(capsys, *words):
    status = cli.main([str(word) for word in words])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def help_examples():
    """Each command line below an "example:" of a --help."""
    found = []
    for action in cli._parser()._subparsers._group_actions:
        for name, command in action.choices.items():
            lines = command.epilog.splitlines()
            assert lines[0] in ("example:", "examples:")
            found += [(name, line.strip()) for line in lines[1:]]
    return found


def bench_facts(layers, suite="decoders", auto="gemm", mode="forward"):
    """A run of the bench as its JSON holds it, with the entries that charts read."""
    seconds = {
        "gemm": 2e-5,
        "direct": 3e-6,
        "gemm_atomic": None,
        "torch": 4e-5,
        "torch channels_last": 1e-5,
        "torch native": 1e-3,
    }
    rows = [{"method": name, "seconds": time} for name, time in seconds.items()]
    shared = {"size": "n2 8x8", "mode": mode, "layout": "contiguous", "floor_seconds": 2e-6, "auto": auto, "rows": rows}
    entries = [{"name": name, **shared} for name in layers]
    return {"device": "a GPU", "dtype": "float32", "precision": "tf32", "suites": {suite: entries}}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(capsys, command):
    status, out, _ = run(capsys, command, "--help")
    assert status == 0
    assert f"upfold {command}" in out.split("example", 1)[1]


@pytest.mark.parametrize(("command", "line"), help_examples(), ids=lambda text: text[:60])
def test_help_examples_run(capsys, tmp_path, monkeypatch, command, line):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line)
    assert words[0] == "upfold"
    assert words[1] == command
    words = words[1:]
    if "--seconds" not in words and command in ("demo", "compare", "bench"):
        words += ["--seconds", "0.002"]  # the example as it stands, but for the patience of its timer
    if command == "demo":
        words += ["--size", "128"]
    if command == "chart":
        (tmp_path / "bench.json").write_text(json.dumps(bench_facts(("k4s2p1", "3d-k2s2"), "smoke")))
    status, out, err = run(capsys, *words)
    assert (status, err) == (0, "")
    assert out
    for flag in ("--json", "--chart"):
        if flag in words:
            assert (tmp_path / words[words.index(flag) + 1]).stat().st_size > 0


def test_installed_as_a_module(tmp_path):
    done = subprocess.run([sys.executable, "-m", "upfold.cli", "info"], capture_output=True, text=True, cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr
    assert torch.__version__ in done.stdout


def test_version(capsys):
    assert run(capsys, "--version") == (0, f"upfold {upfold.__version__}\n", "")


def test_compare_prints_every_method(capsys):
    status, out, _ = run(capsys, "compare", *TINY)
    assert status == 0
    for word in (
        "upfold gemm",
        "upfold direct",
        "torch channels_last",
        "matmul + F.fold",
        "GFLOP/s",
        "GB/s",
        "x floor",
        "<- auto",
    ):
        assert word in out
    assert "repro: upfold compare --in 4 --out 3 --kernel 4 --stride 2 --padding 1 --size 5 6 --batch 2 --dtype float32" in out


def test_repro_line_repeats_the_comparison(capsys, tmp_path):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    words = shlex.split("--in 4 --out 6 --kernel 3 1 --stride 2 1 --padding 1 0 --dilation 1 2 --output-padding 1 0 --groups 2")
    words += shlex.split("--size 5 4 --batch 2 --dtype float64 --bias --layout channels_last --seconds 0.002")
    assert run(capsys, "compare", *words, "--json", first)[0] == 0
    repro = shlex.split(json.loads(first.read_text())["comparison"]["repro"])
    assert run(capsys, *repro[1:], "--seconds", "0.002", "--json", second)[0] == 0
    kept = (
        "in_channels",
        "kernel_size",
        "stride",
        "padding",
        "output_padding",
        "dilation",
        "groups",
        "bias",
        "dtype",
        "layout",
        "gflop",
        "repro",
    )
    one, two = (json.loads(path.read_text())["comparison"] for path in (first, second))
    assert {key: one[key] for key in kept} == {key: two[key] for key in kept}


def test_compare_writes_json_and_chart(capsys, tmp_path):
    figures, chart = tmp_path / "a" / "figures.json", tmp_path / "b" / "chart.png"
    status, _, _ = run(capsys, "compare", *TINY, "--json", figures, "--chart", chart)
    assert status == 0
    found = json.loads(figures.read_text())
    assert found["machine"]["torch"] == torch.__version__
    comparison = found["comparison"]
    assert comparison["out_size"] == [10, 12]
    assert {row["method"] for row in comparison["rows"]} >= {"gemm", "direct", "torch", "matmul + F.fold"}
    for row in comparison["rows"]:
        if row["note"].startswith("refuses"):
            assert row["method"] in ("depthwise", "gemm_atomic", "fused"), row
            continue
        assert row["error"] < 1e-6, row
        assert row["seconds"] > 0
        assert row["gflops"] == pytest.approx(comparison["gflop"] / row["seconds"])
        assert row["x_floor"] == pytest.approx(row["seconds"] / comparison["floor_seconds"])
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_bench_draws_its_suites(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(cases, "by_tier", lambda tier: (cases.find("k4s2p1"), cases.find("k2s2")))
    chart, figures = tmp_path / "a" / "chart.svg", tmp_path / "figures.json"
    status, out, _ = run(capsys, "bench", "--suite", "smoke", "--seconds", 0.002, "--chart", chart, "--json", figures)
    assert status == 0
    assert f"wrote {chart}" in out
    assert "<svg" in chart.read_text()
    again = tmp_path / "again.png"
    assert run(capsys, "chart", figures, "--chart", again) == (0, f"wrote {again}\n", "")
    assert again.read_bytes().startswith(b"\x89PNG")


def test_chart_of_a_file_with_several_runs(capsys, tmp_path):
    file, chart = tmp_path / "gpu.json", tmp_path / "gpu.png"
    runs = {"float32": bench_facts(("one", "two")), "bfloat16": bench_facts(("one", "two"), auto="direct")}
    runs["gradients"] = bench_facts(("one",), "decoders grad_input", mode="grad_input")
    file.write_text(json.dumps(runs))
    status, out, _ = run(capsys, "chart", file, "--run", "bfloat16", "gradients")
    assert status == 0
    bfloat16, gradients = out.split("\n\na GPU")
    assert "auto 13.33x torch, geometric mean of 2 layers" in bfloat16
    assert "| layer | floor | gemm | direct | torch | torch channels_last | auto | x torch |" in bfloat16
    assert "| two, n2 8x8 | 2.0 | 20 | **3.0** | 40 | 10 | direct | 13.33 |" in bfloat16
    assert "two" not in gradients
    status, out, _ = run(capsys, "chart", file, "--layer", "two", "--method", "torch native", "gemm")
    assert status == 0
    assert "| two, n2 8x8 | 2.0 | 1000 | 20 | gemm | 2.00 |" in out  # the fastest is not among those asked for
    assert run(capsys, "chart", file, "--run", "float32", "bfloat16", "--chart", chart) == (0, f"wrote {chart}\n", "")
    assert chart.read_bytes().startswith(b"\x89PNG")
    for words, text in (
        (["--run", "int8"], "run = 'int8'; "),
        (["--suite", "seeds"], "suite = 'seeds'; the run has decoders"),
        (["--layer", "three"], "layer = 'three'; "),
        (["--chart", "picture.exe"], "must end in .png"),
        (["--run", "float32", "gradients", "--chart", str(chart)], "over the same layers"),
    ):
        status, _, err = run(capsys, "chart", file, *words)
        assert status == 2
        assert text in err


@pytest.mark.parametrize("size", [("9",), ("3", "4", "5")])
def test_compare_in_one_and_three_dimensions(capsys, size):
    status, out, _ = run(
        capsys, "compare", "--in", 4, "--out", 3, "--kernel", 3, "--stride", 2, "--size", *size, "--seconds", 0.002
    )
    assert status == 0
    assert ("F.fold has no 3-D form" in out) == (len(size) == 3)


def test_compare_says_why_a_peer_does_not_run(capsys):
    words = shlex.split("--in 4 --out 3 --kernel 2 --dilation 4 --output-padding 3 --stride 2 --size 5 6 --seconds 0.002")
    status, out, _ = run(capsys, "compare", *words)
    assert status == 0
    assert "F.fold cannot express output_padding >= stride" in out


@pytest.mark.parametrize("command", ["compare", "bench"])
def test_a_method_that_breaks_ends_the_command_with_status_1_after_all_was_measured(capsys, tmp_path, monkeypatch, command):
    original = methods.functional.conv_transpose2d

    def broken(*arguments, algorithm=None, **options):
        if algorithm == "direct":
            raise RuntimeError("an illegal memory access")
        return original(*arguments, algorithm=algorithm, **options)

    monkeypatch.setattr(methods.functional, "conv_transpose2d", broken)
    monkeypatch.setattr(cases, "by_tier", lambda tier: (cases.find("k4s2p1"), cases.find("k2s2")))
    file = tmp_path / "figures.json"
    words = ["--case", "k4s2p1"] if command == "compare" else ["--suite", "smoke"]
    status, out, err = run(capsys, command, *words, "--seconds", 0.002, "--json", file)
    assert status == 1
    lines = err.splitlines()
    assert len(lines) == (1 if command == "compare" else 2)
    assert lines[0].startswith(f"upfold {command}: k4s2p1: direct: FAILED: RuntimeError: an illegal memory access; repro: upfold")
    assert f"wrote {file}" in out
    facts = json.loads(file.read_text())
    rows = facts["comparison"]["rows"] if command == "compare" else facts["suites"]["smoke"][1]["rows"]
    assert all(row["failed"] == (row["method"] == "direct") for row in rows)
    assert command == "compare" or len(facts["failures"]) == 2


def test_explain_lists_every_algorithm(capsys):
    status, out, _ = run(capsys, "explain", "--in", 8, "--out", 4, "--size", 5, 5)
    assert status == 0
    for name in upfold.algorithms():
        assert name in out


def test_scan_reads_a_model_from_the_current_folder(capsys, tmp_path, monkeypatch):
    lines = (
        "from torch import nn",
        "def build():",
        "    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 3, 4, 2, 1))",
    )
    (tmp_path / "my_model_of_test_cli.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    report = tmp_path / "report.json"
    words = ("scan", "my_model_of_test_cli:build", "--input", "1x3x9x9", "--json", report)
    status, out, err = run(capsys, *words)
    assert (status, err) == (0, "")
    assert "ConvTranspose2d" in out
    assert json.loads(report.read_text())["rows"][0]["layer"] == "ConvTranspose2d"


def test_info_tells_what_this_is(capsys):
    status, out, _ = run(capsys, "info", "--report")
    assert status == 0
    for word in (torch.__version__, "threads in use", "built as", "tuned plans", "CUDA", "gemm", "repro: upfold info --report"):
        assert word in out
    status, out, _ = run(capsys, "info", "--json")
    assert status == 0
    facts = json.loads(out)
    assert facts["instruction_set"] in ("avx512", "avx2", "portable")
    assert facts["cuda"]["available"] or facts["cuda"]["reason"]


BAD = {
    "no command": ([], "required"),
    "unknown command": (["fly"], "fly"),
    "unknown flag": (["compare", "--wings", "2"], "--wings"),
    "no number": (["compare", "--in", "many"], "many"),
    "stride 0": (["compare", "--stride", "0"], "stride = (0, 0)"),
    "groups": (["compare", "--in", "6", "--out", "4", "--groups", "4"], "--groups = 4; must divide"),
    "axes": (["compare", "--kernel", "2", "2", "2", "--size", "4", "4"], "--kernel = [2, 2, 2]; one number, or 2"),
    "four axes": (["explain", "--size", "4", "4", "4", "4"], "1 to 3 numbers"),
    "output size": (["compare", "--padding", "9"], "padding = (9, 9)"),
    "empty batch": (["compare", "--batch", "0"], "--batch = 0"),
    "no such case": (["compare", "--case", "nothing"], "'nothing'; no such case"),
    "no such suite": (["bench", "--suite", "nothing"], "nothing"),
    "chart suffix": (["compare", "--chart", "picture.exe"], "must end in .png"),
    "chart of no layers": (["bench", "--suite", "fold", "--chart", "fold.png"], "--suite fold has no layers to draw"),
    "no results file": (["chart", "no_such_file.json"], "no_such_file.json"),
    "dtype": (["compare", "--dtype", "int8"], "int8"),
    "device": (["compare", "--device", "abacus"], "--device = 'abacus'; must be cpu, cuda or cuda:N"),
    "device without kernels": (["explain", "--device", "mps"], "--device = 'mps'; must be cpu, cuda or cuda:N"),
    "mode": (["bench", "--mode", "sideways"], "sideways"),
    "precision of a CPU": (["compare", "--precision", "ieee"], "--precision = ieee; --dtype float32 on cpu has no such switch"),
    "complex gradient": (["compare", "--mode", "grad_input", "--dtype", "complex64"], "gradients are of real numbers only"),
    "seconds": (["bench", "--seconds", "0"], "must be above 0"),
    "model without colon": (["scan", "json"], "must be package.module:build"),
    "no such module": (["scan", "no_such_module_of_upfold:build"], "cannot import no_such_module_of_upfold"),
    "no such function": (["scan", "json:nothing"], "json has no nothing"),
    "no model": (["scan", "collections:OrderedDict"], "gives OrderedDict, not a torch.nn.Module"),
    "function with arguments": (["scan", "upfold:conv_transpose2d"], "conv_transpose2d() fails: TypeError: "),
    "shape": (["scan", "upfold.decoder:build", "--input", "axb"], "sizes joined by x"),
    "nothing to tune": (["tune"], "nothing to do; name a model (package.module:build), --import FILE or --export FILE"),
    "no budget": (["tune", "upfold.decoder:build", "--seconds", "-1"], "must be above 0"),
    "no plans": (["tune", "--import", "no_such_file.json"], "no_such_file.json"),
    "wrong input to tune": (["tune", "upfold.decoder:build", "--input", "1x5x32x32"], "1x5x32x32"),
    "wrong input": (["scan", "upfold.decoder:build", "--input", "1x5x32x32"], "1x5x32x32"),
}


@pytest.mark.parametrize(("words", "text"), BAD.values(), ids=BAD.keys())
def test_a_mistake_gets_one_line(capsys, words, text):
    status, out, err = run(capsys, *words)
    assert status == 2
    assert text in err
    assert len(err.splitlines()) == 1
    assert "Traceback" not in out + err


def test_cuda_without_a_gpu_says_why(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    status, _, err = run(capsys, "compare", "--device", "cuda")
    assert status == 2
    assert "CUDA is unavailable: " in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(("module", "words"), [("rich", ["compare", *TINY]), ("matplotlib", ["demo"]), ("rich", ["bench"])])
def test_a_missing_extra_is_named(tmp_path, module, words):
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{module!r}] = None\n")
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-m", "upfold.cli", *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=100,
    )
    assert done.returncode == 2
    assert done.stderr.strip() == f"upfold {words[0]}: {module} is not installed; pip install 'upfold[cli]' brings it"


@pytest.mark.parametrize(
    "axes, laid", [("5 4", torch.channels_last), ("3 5 4", torch.channels_last_3d), ("9", torch.contiguous_format)]
)
def test_explain_lays_out_the_weight_too(axes, laid, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(explanation, "explain", lambda layer, x, gradients: seen.extend([x, layer.weight]))
    words = f"explain --in 8 --out 6 --kernel 4 --stride 2 --size {axes} --layout channels_last".split()
    assert cli.main(words) == 0
    assert [t.is_contiguous(memory_format=laid) for t in seen] == [True, True]
    assert [t.is_contiguous() for t in seen] == [len(axes.split()) == 1] * 2
