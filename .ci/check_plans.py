"""Plan every case for an H200 that is not there: no planner may crash, refuse what it offered, or pass the workspace's cap.

Gradients that share their columns are computed too, with their launches done on the host; and what is chosen is set against
timings (check_choice.py).

usage: check_plans.py BUILD, a folder in which CMake and Ninja have built _cuda; _cpu is that of the installed package.
"""

from __future__ import annotations

import importlib.util
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

import check_choice  # beside this file, which is on the path where it is run as a script

ROOT = Path(__file__).resolve().parent.parent
MEGABYTES = (256, 24, 1)


def link(build: Path, to: Path) -> None:
    """Link the objects of _cuda behind the answers of a device that is absent, and what stands for its kernels."""
    commands = subprocess.run(["ninja", "-t", "commands", "_cuda"], cwd=build, capture_output=True, text=True, check=True)
    lines = commands.stdout.splitlines()
    compile_module = next(line.split() for line in lines if line.endswith("module.cpp"))
    folders = [word for word in compile_module if word.startswith(("-I", "/")) or word == "-isystem"]
    includes = [word for word in folders if not word.endswith((".cpp", "c++", "g++"))]
    answers = []
    for source in (ROOT / ".ci" / "absent_device.cpp", ROOT / ".ci" / "absent_gemm.cpp"):
        answers.append(str(to / f"{source.stem}.o"))
        compiled = ["c++", "-std=c++17", "-O2", "-fPIC", *includes, "-c", str(source), "-o", answers[-1]]
        subprocess.run(compiled, cwd=build, check=True)
    words = lines[-1].removeprefix(": && ").removesuffix(" && :").split()
    name = words[words.index("-o") + 1]
    words[words.index("-o") + 1 : words.index("-o") + 2] = [str(to / name), *answers, "-Wl,--allow-multiple-definition"]
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

    from upfold.problem import pad_strides

    last = {2: torch.channels_last, 3: torch.channels_last_3d}.get(case.ndim)
    kinds = [
        (torch.float32, True),
        (torch.float32, False),
        (torch.bfloat16, False),
        (torch.float16, False),
        (torch.float64, False),
    ]
    for (dtype, tf32), layout in itertools.product(kinds, [torch.contiguous_format, *([last] if last else [])]):
        forward, *gradients = check_choice.operators(torch, case, dtype, layout).values()
        for operator in (forward, *gradients):
            yield replace(operator, allow_tf32=tf32)
        if last and layout is torch.contiguous_format and dtype.itemsize == 2:
            y = torch.empty((case.batch, case.out_channels, *case.out_size), dtype=dtype, device="meta", memory_format=last)
            strides = pad_strides(y.stride(), tuple(y.shape))
            yield from (replace(operator, y_strides=strides) for operator in gradients)


def check_pairs(torch: Any) -> int:
    """Plan both gradients of every case from one matrix of columns; how many pairs there can be one of."""
    from upfold import cases
    from upfold.algorithms import cuda
    from upfold.problem import Operator

    conv, shared = None, 0
    for case in cases.CASES:
        for problem in problems(torch, case):
            if problem.operator is Operator.CONV:
                conv = problem
            if problem.operator is not Operator.CONV_TRANSPOSE_WEIGHT:
                continue
            assert conv is not None
            for megabytes in MEGABYTES:
                call = cuda.module().GemmGradientsCall(0, conv.cuda, problem.cuda, megabytes << 20, problem.allow_tf32)
                assert not call.shares or call.workspace_bytes <= megabytes << 20, (case.name, problem)
                shared += call.shares
    assert shared > len(cases.CASES)
    return shared


def compute_pairs(torch: Any, gflop: float) -> int:
    """Both gradients of small cases from one matrix of columns, against torch in float64; how many there were."""
    from dataclasses import replace

    from upfold import cases, execute, modes
    from upfold.algorithms import cuda

    last, guard, computed = {4: torch.channels_last, 5: torch.channels_last_3d}, 64, 0
    layouts = list(itertools.product((False, True), repeat=2))
    for case, dtype, (x_last, w_last) in itertools.product(cases.CASES, (torch.float32, torch.float64), layouts):
        case = case.scaled(gflop)
        x, w, _ = case.tensors(dtype)
        g = torch.randn(case.batch, case.out_channels, *case.out_size, dtype=dtype)
        if ((x_last or w_last) and x.dim() not in last) or g.numel() > 1 << 20:
            continue
        x, w = (t.to(memory_format=last[t.dim()]) if turns else t for t, turns in ((x, x_last), (w, w_last)))
        arguments = modes.positional(case.geometry)
        conv, dx = execute.describe_conv(g, w, tuple(case.in_size), arguments)
        weight, dw = execute.describe_conv_transpose_weight(x, g, tuple(case.kernel_size), arguments)
        tf32 = dtype == torch.float32
        pair = (replace(problem, allow_tf32=tf32).cuda for problem in (conv, weight))
        call = cuda.module().GemmGradientsCall(0, *pair, MEGABYTES[0] << 20, tf32)
        if not call.shares:
            continue
        got = [torch.full_like(t, math.nan, device="cpu") for t in (dx, dw)]
        room = torch.full((call.workspace_bytes // 4 + 2 * guard,), math.nan)
        call.run(*(t.data_ptr() for t in (x, w, g, *got, room[guard:])), 0)
        leaves = [t.double().requires_grad_() for t in (x, w)]
        y = getattr(torch.nn.functional, f"conv_transpose{case.ndim}d")(*leaves, None, *arguments)
        want = torch.autograd.grad(y, leaves, g.double())
        allowed = 1e-4 if tf32 else 1e-11  # of products that were summed in float64 and rounded once
        for one, other in zip(got, want, strict=True):
            assert (one - other).abs().max() <= allowed * max(1.0, float(other.abs().max())), (case.name, dtype, x_last, w_last)
        assert room[:guard].isnan().all(), (case.name, dtype)
        assert room[-guard:].isnan().all(), (case.name, dtype)
        computed += 1
    assert computed > len(cases.CASES)
    return computed


def compute_rows(torch: Any, gflop: float) -> int:
    """What is a product of rows of channels, of small cases, against torch in float64; how many operators there were."""
    from dataclasses import replace
    from math import prod

    from upfold import cases, cost, execute, modes
    from upfold.algorithms import cuda

    last, guard, computed, options = {4: torch.channels_last, 5: torch.channels_last_3d}, 64, 0, cuda.module().GemmOptions
    for case, dtype in itertools.product(cases.CASES, (torch.float32, torch.float64)):
        case = case.scaled(gflop)
        x, w, _ = case.tensors(dtype)
        g = torch.randn(case.batch, case.out_channels, *case.out_size, dtype=dtype)
        if x.dim() not in last or case.in_channels == 1 or g.numel() > 1 << 20:
            continue
        x, w, g = (t.contiguous(memory_format=last[x.dim()]) for t in (x, w, g))
        arguments, tf32 = modes.positional(case.geometry), dtype == torch.float32
        leaves = [t.double().requires_grad_() for t in (x, w)]
        y = getattr(torch.nn.functional, f"conv_transpose{case.ndim}d")(*leaves, None, *arguments)
        of_conv = execute.describe_conv(g, w, tuple(case.in_size), arguments)
        of_weight = execute.describe_conv_transpose_weight(x, g, tuple(case.kernel_size), arguments)
        wanted = (y, *torch.autograd.grad(y, leaves, g.double()))
        for place, (problem, result) in zip((2, 0, 1), ((execute.describe(x, w, None, arguments), g), of_conv, of_weight)):
            problem = replace(problem, allow_tf32=tf32)
            columns = case.batch * case.out_channels * prod(case.kernel_size) * prod(case.in_size)
            if not cost.by_rows(problem, columns):
                continue
            chosen = options(
                workspace_cap=MEGABYTES[0] << 20, chunk_bytes=0, allow_tf32=tf32, atomic=False, has_bias=False, form=0
            )
            call = cuda.module().GemmCall(0, problem.cuda, chosen)
            room = torch.full((call.workspace_bytes // 4 + 2 * guard,), math.nan)
            operands, got = [x, w, g], torch.full_like(result, math.nan, device="cpu")
            operands[place] = got
            call.run(operands[0].data_ptr(), operands[1].data_ptr(), 0, operands[2].data_ptr(), room[guard:].data_ptr(), 0)
            want = wanted[(1, 2, 0)[place]].detach()
            allowed = (1e-4 if tf32 else 1e-11) * max(1.0, float(want.abs().max()))
            assert (got - want).abs().max() <= allowed, (case.name, dtype, problem.operator)
            assert room[:guard].isnan().all(), (case.name, dtype)
            assert room[-guard:].isnan().all(), (case.name, dtype)
            computed += 1
    assert computed > len(cases.CASES)
    return computed


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


def check_small_room(torch: Any) -> int:
    """Plan every tile by boxes of channels with no room for what is packed, so a sample at a time; how many plans there were.

    The planner refuses a box whose bytes are not those that its block waits for.
    """
    from upfold import cases
    from upfold.algorithms import cuda
    from upfold.problem import Operator

    module, planned = cuda.module(), 0
    for case in cases.CASES:
        for problem in problems(torch, case):
            if problem.operator is Operator.CONV_TRANSPOSE_WEIGHT or problem.dtype.itemsize > 4:
                continue
            for tile in range(len(module.fused_last_tiles())):
                if module.fused_last_fits(0, problem.cuda, tile, problem.alignment):
                    module.FusedLastCall(0, problem.cuda, tile, problem.alignment, 0)
                    planned += 1
    assert planned > len(cases.CASES)
    return planned


def check_tiles(torch: Any) -> int:
    """How full tiles are that once were not, in bfloat16; how many plans that were."""
    from upfold import cases
    from upfold.algorithms import cuda, fused_alternating

    def operator(name: str, mode: str) -> Any:
        return check_choice.operators(torch, cases.find(name), torch.bfloat16, torch.contiguous_format)[mode]

    # Of 132 multiprocessors the gradient of the input fills whole rounds, with few tiles behind them, which are split: boxes of
    # less to copy, which fit the maps less well, would take a round more.
    rounds = {("pose-256-256@32x24", 3): (384, 0), ("yolo-proto-256-256@80", 18): (396, 4)}
    for (name, config), tiles in rounds.items():
        problem = operator(name, "grad_input")
        work = cuda.module().FusedInputCall(0, problem.cuda, config, problem.alignment).work
        assert work[:2] == tiles, (name, work)
    # Two rows of two samples are a tile, whose results are whole sectors; channels are four tiles.
    work = fused_alternating.call(operator("maskrcnn-256-256@14", "forward"), 33, 0).work
    assert fused_alternating.Work(*work).tiles == 256 // 2 * 14 // 2 * 4, work
    return len(rounds) + 1


def main() -> int:
    """Link, import and check; the exit status is that of the plans."""
    if "--linked" not in sys.argv:
        with tempfile.TemporaryDirectory() as folder:
            build, package = Path(sys.argv[1]).resolve(), Path(folder) / "upfold"
            shutil.copytree(ROOT / "python" / "upfold", package, ignore=shutil.ignore_patterns("__pycache__"))
            installed = Path(str(importlib.util.find_spec("upfold").origin)).parent
            for module in installed.glob("_cpu.*.so"):
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
    print(f"{check_tiles(torch)} plans of full tiles")
    print(f"{check_small_room(torch)} plans of a sample at a time, {time.monotonic() - begin:.0f} s")
    print(f"{compute_pairs(torch, 0.001)} pairs of gradients computed, {time.monotonic() - begin:.0f} s")
    print(f"{compute_rows(torch, 0.001)} products of rows of channels computed, {time.monotonic() - begin:.0f} s")
    print(check_choice.check(torch))
    return 0


if __name__ == "__main__":
    sys.exit(main())
