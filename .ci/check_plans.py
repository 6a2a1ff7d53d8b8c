"""Plan every case for an H200 that is not there: no planner may crash, refuse what it offered, or pass the workspace's cap.

usage: check_plans.py BUILD, a folder in which CMake and Ninja have built _cuda and _cpu.
"""

from __future__ import annotations

import itertools
import math
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MEGABYTES = (256, 24, 1)


def link(build: Path, to: Path) -> None:
    """Link the objects of _cuda behind the answers of a device that is absent."""
    commands = subprocess.run(["ninja", "-t", "commands", "_cuda"], cwd=build, capture_output=True, text=True, check=True)
    lines = commands.stdout.splitlines()
    compile_module = next(line.split() for line in lines if line.endswith("module.cpp"))
    folders = [word for word in compile_module if word.startswith(("-I", "/")) or word == "-isystem"]
    includes = [word for word in folders if not word.endswith((".cpp", "c++", "g++"))]
    answers = to / "absent_device.o"
    source = str(ROOT / ".ci" / "absent_device.cpp")
    subprocess.run(["c++", "-std=c++17", "-fPIC", *includes, "-c", source, "-o", str(answers)], cwd=build, check=True)
    words = lines[-1].removeprefix(": && ").removesuffix(" && :").split()
    name = words[words.index("-o") + 1]
    words[words.index("-o") + 1 : words.index("-o") + 2] = [str(to / name), str(answers), "-Wl,--allow-multiple-definition"]
    subprocess.run(words, cwd=build, check=True)


def absent(torch: Any) -> None:
    """Let torch tell of one H200."""
    facts = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=141 << 30)
    torch.cuda.get_device_properties = lambda device=None: facts
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.current_device = lambda: 0
    torch.cuda.is_available = lambda: True


def problems(torch: Any, case: Any) -> Any:
    """The three operators of a case in types, precisions and layouts, and gradients that read a turned copy of y's."""
    from dataclasses import replace

    from upfold import execute, modes
    from upfold.problem import pad_strides

    arguments = modes.positional(case.geometry)
    last = {2: torch.channels_last, 3: torch.channels_last_3d}.get(case.ndim)
    kinds = [
        (torch.float32, True),
        (torch.float32, False),
        (torch.bfloat16, False),
        (torch.float16, False),
        (torch.float64, False),
    ]
    for (dtype, tf32), layout in itertools.product(kinds, [torch.contiguous_format, *([last] if last else [])]):
        x_shape, y_shape = (case.batch, case.in_channels, *case.in_size), (case.batch, case.out_channels, *case.out_size)
        w_shape = case.in_channels, case.out_channels // case.groups, *case.kernel_size
        x, w, y = (torch.empty(shape, dtype=dtype, device="meta", memory_format=layout) for shape in (x_shape, w_shape, y_shape))
        bias = torch.empty(case.out_channels, dtype=dtype, device="meta") if case.bias else None
        gradients = (
            execute.describe_conv(y, w, tuple(case.in_size), arguments)[0],
            execute.describe_conv_transpose_weight(x, y, tuple(case.kernel_size), arguments)[0],
        )
        for operator in (execute.describe(x, w, bias, arguments), *gradients):
            yield replace(operator, allow_tf32=tf32)
        if last and layout is torch.contiguous_format and dtype.itemsize == 2:
            strides = pad_strides(y.to(memory_format=last).stride(), y_shape)
            yield from (replace(operator, y_strides=strides) for operator in gradients)


def check_pairs(torch: Any) -> int:
    """Plan both gradients of every case from one matrix of columns; how many pairs there can be one of."""

    from upfold import cases
    from upfold.algorithms import cuda
    from upfold.problem import Operator

    device, conv, shared = torch.device("cuda", 0), None, 0
    for case in cases.CASES:
        for problem in problems(torch, case):
            if problem.operator is Operator.CONV:
                conv = problem
            if problem.operator is not Operator.CONV_TRANSPOSE_WEIGHT:
                continue
            assert conv is not None
            for megabytes in MEGABYTES:
                call = cuda.module().GemmGradientsCall(device.index, conv.cuda, problem.cuda, megabytes << 20, problem.allow_tf32)
                assert not call.shares or call.workspace_bytes <= megabytes << 20, (case.name, problem)
                shared += call.shares
    assert shared > len(cases.CASES)
    return shared


def check(torch: Any) -> tuple[int, int]:
    """Ask every algorithm for its plans and predictions; the numbers of problems and plans."""
    from dataclasses import replace

    from upfold import cases, cost
    from upfold.algorithms import REGISTRY

    device, counted, planned = torch.device("cuda", 0), 0, 0
    for case in cases.CASES:
        for problem, megabytes in itertools.product(problems(torch, case), MEGABYTES):
            problem = replace(problem, workspace_cap=megabytes << 20)
            accepting = [a for a in REGISTRY.values() if a.name != "torch" and a.reject(problem, device) is None]
            assert accepting or megabytes == 1, (case.name, problem)
            counted += 1
            for algorithm in accepting:
                what = case.name, algorithm.name, problem
                configs = algorithm.configs(problem, device)
                assert configs, what
                if algorithm.name != "gemm_atomic":
                    seconds = cost.predicted_seconds(algorithm.name, problem, device)
                    assert 0 < seconds < math.inf, (seconds, what)
                for config in configs:
                    scratch = algorithm.workspace_bytes(problem, config, device)
                    assert scratch <= problem.workspace_cap, (config, scratch, what)
                    if scratch >= 0:  # blocks of another config may be too large
                        algorithm.prepare(problem, config, device)
                        planned += 1
    return counted, planned


def main() -> int:
    """Link, import and check; the exit status is that of the plans."""
    if "--linked" not in sys.argv:
        with tempfile.TemporaryDirectory() as folder:
            build, package = Path(sys.argv[1]).resolve(), Path(folder) / "upfold"
            shutil.copytree(ROOT / "python" / "upfold", package, ignore=shutil.ignore_patterns("__pycache__"))
            for module in build.glob("_cpu.*.so"):
                shutil.copy(module, package)
            link(build, package)
            return subprocess.run([sys.executable, __file__, folder, "--linked"], check=False).returncode
    sys.path.insert(0, sys.argv[1])
    import torch

    absent(torch)
    begin = time.monotonic()
    counted, planned = check(torch)
    shared = check_pairs(torch)
    print(f"{counted} problems, {planned} plans, {shared} shared columns, {time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
