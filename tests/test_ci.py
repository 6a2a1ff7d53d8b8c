"""The checks themselves: each must fail when what it guards against is planted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from upfold import cases
from upfold.modes import OPERATORS
from upfold.problem import Operator

ROOT = Path(__file__).resolve().parent.parent
CI = ROOT / ".ci"
pytestmark = pytest.mark.skipif(not CI.is_dir(), reason="no source tree here")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")

KERNEL_BEGIN = "  const std::int64_t step = std::int64_t(gridDim.x) * kThreads;\n"
WGMMA = '  asm volatile("wgmma.fence.sync.aligned;\\n" ::: "memory");\n'


def loaded(name: str) -> Any:
    """A script of the checks as a module, which finds those beside it."""
    specification = spec_from_file_location(name, CI / f"{name}.py")
    module = module_from_spec(specification)
    sys.path.insert(0, str(CI))
    try:
        specification.loader.exec_module(module)
    finally:
        sys.path.remove(str(CI))
    return module


def run(*command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the repository; its output is in the answer."""
    environment = {**os.environ, **variables}
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, env=environment, check=False)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Return a copy of the C++ tree that a test may spoil."""
    return Path(shutil.copytree(ROOT / "cpp", tmp_path / "cpp"))


def plant(path: Path, before: str, text: str) -> None:
    """Put text in front of the first place of a file where `before` stands."""
    original = path.read_text()
    assert before in original
    path.write_text(original.replace(before, text + before, 1))


@needs_nvcc
def test_a_syntax_error_fails_the_device_step(sources):
    path = sources / "cuda" / "columns.cu"
    plant(path, KERNEL_BEGIN, "  int planted = ;\n")
    done = run(sys.executable, CI / "compile_device.py", "--arch", "sm_75", path)
    assert done.returncode == 1
    assert "FAILED" in done.stdout
    assert "expected an expression" in done.stdout


@needs_nvcc
def test_a_warning_fails_the_device_step(sources):
    path = sources / "cuda" / "columns.cu"
    plant(path, KERNEL_BEGIN, "  int planted = 1;\n")
    done = run(sys.executable, CI / "compile_device.py", "--arch", "sm_75", path)
    assert done.returncode == 1
    assert "planted" in done.stdout


LOG = """[1/3] Building CUDA object CMakeFiles/_cuda.dir/cpp/cuda/one.cu.o
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1av' for 'sm_75'
    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 4096 bytes smem
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1av' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers, used 0 barriers
[2/3] Building CXX object CMakeFiles/_cuda.dir/cpp/cuda/module.cpp.o
[3/3] Building CUDA object CMakeFiles/_cuda.dir/cpp/cuda/other_one.cu.o
"""


def test_the_report_on_kernels_is_read_from_the_log_of_a_build(tmp_path):
    log = tmp_path / "build.log"
    log.write_text(LOG)

    def report(name, architectures):
        return run(sys.executable, CI / "compile_device.py", "--build-log", log, "--arch", architectures, f"cpp/cuda/{name}.cu")

    done = report("one", "sm_75,sm_90a")
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines() == [
        "nvcc sm_75 cpp/cuda/one.cu: 1 kernels, 40 to 40 registers, shared memory up to 4096 bytes, 1 spill up to 4 bytes",
        "nvcc sm_90a cpp/cuda/one.cu: 1 kernels, 24 to 24 registers, no spills",
    ]
    for name, architecture, text in (
        ("one", "sm_80", "no kernel was compiled"),
        ("other_one", "sm_75", "no kernel was compiled"),
        ("absent", "sm_75", "not in the build's log"),
    ):
        done = report(name, architecture)
        assert done.returncode == 1
        assert text in done.stdout


@pytest.fixture(scope="session")
def cuda11() -> Path:
    """Return the folder that holds CUDA 11.7's compiler, brought by pip where it is not there yet."""
    if not sys.platform.startswith("linux") or os.uname().machine != "x86_64":
        pytest.skip("CUDA 11.7's packages are for Linux on x86-64")
    sys.path.insert(0, str(CI))
    try:
        import compile_cuda11
    finally:
        sys.path.remove(str(CI))
    folder = CI / ".work" / "cuda11"
    try:
        compile_cuda11.install(folder)
    except (subprocess.SubprocessError, OSError) as error:
        pytest.skip(f"CUDA 11.7 could not be installed by pip: {error}")
    return folder


def compile_cuda11_one(folder: Path, path: Path) -> subprocess.CompletedProcess[str]:
    """Compile one source by CUDA 11.7 for sm_80."""
    return run(sys.executable, CI / "compile_cuda11.py", "--packages", folder, "--arch", "sm_80", path)


def test_wgmma_outside_its_guard_fails_the_cuda_11_step(cuda11, sources):
    path = sources / "cuda" / "columns.cu"
    plant(path, KERNEL_BEGIN, WGMMA)
    done = compile_cuda11_one(cuda11, path)
    assert done.returncode == 1, done.stdout
    assert "wgmma" in done.stdout


def test_wgmma_inside_its_guard_passes_the_cuda_11_step(cuda11, sources):
    path = sources / "cuda" / "columns.cu"
    plant(path, KERNEL_BEGIN, f"#ifdef __CUDA_ARCH_FEAT_SM90_ALL\n{WGMMA}#endif\n")
    done = compile_cuda11_one(cuda11, path)
    assert done.returncode == 0, done.stdout


def test_a_source_without_kernels_fails_the_cuda_11_step(cuda11, tmp_path):
    path = tmp_path / "empty.cu"
    path.write_text("template <typename T> __global__ void never(T* p) { *p = 0; }\n")
    done = compile_cuda11_one(cuda11, path)
    assert done.returncode == 1
    assert "no kernel was compiled" in done.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="make and bash are Unix's")
class TestSetup:
    """A missing prerequisite is named in one line, before anything is created."""

    def test_python_missing(self, tmp_path):
        done = run("bash", CI / "setup", PYTHON="no-such-python", VENV=str(tmp_path / "venv"))
        assert done.returncode != 0
        assert done.stderr == "upfold: no-such-python was not found; on Debian or Ubuntu: apt-get install python3\n"
        assert not (tmp_path / "venv").exists()

    def test_compiler_missing(self, tmp_path):
        tools = tmp_path / "bin"
        tools.mkdir()
        for tool in ("bash", "dirname", "env"):
            (tools / tool).symlink_to(shutil.which(tool))
        done = run("bash", CI / "setup", PYTHON=sys.executable, VENV=str(tmp_path / "venv"), PATH=str(tools), CXX="")
        assert done.returncode != 0
        assert done.stderr.endswith("apt-get install g++\n")
        assert done.stderr.count("\n") == 1


def test_versions_are_compared(tmp_path):
    names = ["pyproject.toml", "constraints.txt", "CHANGELOG.md", "CMakeLists.txt"]
    for name in names:
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(CI, tmp_path / ".ci", ignore=shutil.ignore_patterns(".work", "__pycache__"))
    script = tmp_path / ".ci" / "check_versions.py"
    assert run(sys.executable, script).returncode == 0
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("## [0.", "## [9.", 1))
    pins = tmp_path / "constraints.txt"
    pins.write_text(pins.read_text().replace("ruff==", "rough=="))
    done = run(sys.executable, script)
    assert done.returncode == 1
    assert "CHANGELOG.md: newest version" in done.stdout
    assert "ruff is not pinned" in done.stdout


@pytest.mark.parametrize("beyond, seconds, passes", [(0, 1e-6, True), (1, 1e-6, False), (0, float("nan"), False)])
def test_plans_that_cannot_be_are_found(monkeypatch, beyond, seconds, passes):
    check_plans = loaded("check_plans")
    planner = SimpleNamespace(
        name="planned",
        reject=lambda problem, device: None,
        configs=lambda problem, device: (0, 1),
        workspace_bytes=lambda problem, config, device: problem.workspace_cap + config * beyond,
        prepare=lambda problem, config, device: None,
    )
    monkeypatch.setattr(import_module("upfold.algorithms"), "REGISTRY", {"planned": planner})
    monkeypatch.setattr(import_module("upfold.cost"), "predicted_seconds", lambda name, problem, device: seconds)
    monkeypatch.setattr(cases, "CASES", cases.by_tier("smoke"))
    if not passes:
        with pytest.raises(AssertionError, match="planned"):
            check_plans.check(torch)
        return
    counted, planned = check_plans.check(torch)
    assert counted > 3 * len(cases.by_tier("smoke"))
    assert planned == 2 * counted


@pytest.mark.parametrize(
    "timed, loss", [({"gemm:0": 3.0, "fused:1": 2.0}, 1.5), ({"gemm:0": 3.0}, 1.0), ({"fused:1": 2.0}, None)]
)
@pytest.mark.parametrize("mode", OPERATORS)
def test_what_a_choice_loses_is_found(monkeypatch, mode, timed, loss):
    check_choice, planned = loaded("check_choice"), []

    def plan(problem, device):
        planned.append(problem.operator)
        return SimpleNamespace(algorithm="gemm", config=0)

    monkeypatch.setattr(import_module("upfold.dispatch"), "plan", plan)
    timings = {case.name: timed for case in cases.by_tier("smoke")}
    if loss is None:
        with pytest.raises(AssertionError, match="was not timed"):
            check_choice.losses(torch, "bfloat16", ("smoke",), timings, mode)
        return
    assert check_choice.losses(torch, "bfloat16", ("smoke",), timings, mode) == dict.fromkeys(timings, loss)
    assert set(planned) == {dict(zip(OPERATORS, Operator))[mode]}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("chosen, loss", [("gemm", 1.5), ("fused", 1.0), ("depthwise", None)])
def test_what_a_choice_among_methods_loses_is_found(monkeypatch, chosen, loss, channels_last):
    """Beside what may be chosen and was timed alone: not torch, a method that is compared only, or one that refused."""
    check_choice, dispatch, planned = loaded("check_choice"), import_module("upfold.dispatch"), []

    def plan(problem, device):
        planned.append((problem.in_full_float32, problem.x_strides[1] == 1))
        return SimpleNamespace(algorithm=chosen, config=0)

    monkeypatch.setattr(dispatch, "plan", plan)
    monkeypatch.setattr(dispatch, "contenders", lambda problem, device: {"fused": (1,), "gemm": (0,), "direct": (0,)})
    times = {"gemm": 3.0, "gemm_atomic": 1.0, "direct": None, "fused": 2.0}
    rows = [{"method": name, "ours": True, "seconds": seconds} for name, seconds in times.items()]
    rows.append({"method": "torch", "ours": False, "seconds": 0.5})
    layers = [case for case in cases.by_tier("decoders") if min(case.in_channels, *case.in_size) > 1]
    run = {"suites": {"decoders": [{"name": case.name, "rows": rows} for case in layers]}}
    if loss is None:
        with pytest.raises(AssertionError, match="was not timed"):
            check_choice.losses_of_methods(torch, run, "float32", False, channels_last)
        return
    names = [case.name for case in layers if not channels_last or len(case.in_size) > 1]
    assert (len(names) < len(layers)) == channels_last
    assert check_choice.losses_of_methods(torch, run, "float32", False, channels_last) == dict.fromkeys(names, loss)
    assert set(planned) == {(True, channels_last)}


BARELY, IN_ALL, ON_ONE = [1.0, 1.02], [1.03, 1.06], [1.0] * 20 + [1.4]


@pytest.mark.parametrize(
    "lost, of_methods, found",
    [
        (BARELY, BARELY, None),
        (IN_ALL, BARELY, "in float32"),
        (ON_ONE, BARELY, "in float32"),
        (BARELY, IN_ALL, "methods alone"),
        (BARELY, ON_ONE, "methods alone"),
    ],
)
def test_choices_that_lose_too_much_are_found(monkeypatch, lost, of_methods, found):
    check_choice = loaded("check_choice")
    for name, all_lost in (("losses", lost), ("losses_of_methods", of_methods)):
        by_layer = {f"layer {i}": loss for i, loss in enumerate(all_lost)}
        monkeypatch.setattr(check_choice, name, lambda *given, by_layer=by_layer: by_layer)
    if found is not None:
        with pytest.raises(AssertionError, match=found):
            check_choice.check(torch)
        return
    said = check_choice.check(torch)
    assert "in bfloat16, grad_weight (layer 1 1.02)" in said
    assert "in float32-ieee, methods alone (layer 1 1.02)" in said


def test_every_layer_of_a_model_has_timings():
    timings = json.loads((ROOT / "benchmarks" / "timings" / "nvidia-h100-80gb-hbm3.json").read_text())
    names = {case.name for case in cases.by_tier("seeds", "decoders", "irregular", "survey")}
    assert set(timings["float32"]) == set(timings["bfloat16"]) == names
    assert all(time > 0 for dtype in ("float32", "bfloat16") for ways in timings[dtype].values() for time in ways.values())
