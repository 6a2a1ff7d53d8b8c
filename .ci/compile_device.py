"""Compile the device code of CUDA sources with nvcc, warnings as errors, and print what ptxas says of each.

With --build-log nothing is compiled: ptxas's words are read from the log of a build of the module that had -Xptxas=-v.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def compile_one(nvcc: str, source: Path, architecture: str, folder: Path) -> tuple[bool, str]:
    """Return whether a source compiles for an architecture, and a summary of its kernels or the compiler's output."""
    command = [
        nvcc,
        "-std=c++17",
        "-O3",
        "--Werror=all-warnings",
        "-Xcompiler",
        "-Wall,-Wextra,-Werror",
        "-Xptxas",
        "-v",
    ]
    command += [f"-arch={architecture}", "-c", str(source), "-o", str(folder / f"{source.stem}_{architecture}.o")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    return (False, output) if done.returncode != 0 else summary(output)


def summary(output: str) -> tuple[bool, str]:
    """Return whether ptxas compiled a kernel, and a line about them all."""
    registers = [int(found) for found in re.findall(r"Used (\d+) registers", output)]
    spills = [int(found) for found in re.findall(r"(\d+) bytes spill stores", output)]
    shared = [int(found) for found in re.findall(r"(\d+) bytes smem", output)]
    if not registers:
        return False, f"no kernel was compiled\n{output}"
    text = f"{len(registers)} kernels, {min(registers)} to {max(registers)} registers"
    text += f", shared memory up to {max(shared)} bytes" if shared else ""
    spilling = sorted(spill for spill in spills if spill)
    return True, text + (f", {len(spilling)} spill up to {spilling[-1]} bytes" if spilling else ", no spills")


def in_build_log(log: str, source: Path, architecture: str) -> tuple[bool, str]:
    """Return the same of a source that Ninja had compiled, for one of the architectures of that build."""
    edge = re.compile(rf"^\[\d+/\d+\] Building CUDA object \S*/{re.escape(source.name)}\.o$", re.MULTILINE)
    begin = edge.search(log)
    if begin is None:
        return False, "it is not in the build's log"
    end = re.compile(r"^\[\d+/\d+\] ", re.MULTILINE).search(log, begin.end())
    section = log[begin.end() : end.start() if end else len(log)]
    # Each kernel's lines follow the one that names its architecture.
    kernels = re.split(r"^(?=ptxas info\s*: Compiling entry function )", section, flags=re.MULTILINE)
    return summary("".join(kernel for kernel in kernels if f"for '{architecture}'" in kernel.partition("\n")[0]))


def code_bytes(source: Path) -> int:
    """Size of a source and of the repository's headers that it includes: the longest are compiled first, for a short tail."""
    seen, waiting = set(), [source.resolve()]
    while waiting:
        path = waiting.pop()
        if path not in seen and path.is_file():
            seen.add(path)
            waiting += [
                (path.parent / name).resolve() for name in re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE)
            ]
    return sum(path.stat().st_size for path in seen)


def main() -> int:
    """Report on every given source for every architecture; the exit status says whether all passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="+", type=Path)
    parser.add_argument("--arch", default="sm_75,sm_80,sm_90a", help="separated by commas")
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--build-log", type=Path, help="of Ninja, in place of compiling")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at a time (default: %(default)s)")
    arguments = parser.parse_args()
    nvcc = shutil.which(arguments.nvcc)
    if nvcc is None and arguments.build_log is None:
        print(f"{arguments.nvcc} was not found; CUDA's compiler is needed for this step")
        return 2
    ordered = sorted(arguments.sources, key=code_bytes, reverse=True)
    works = [(source, architecture) for source in ordered for architecture in arguments.arch.split(",")]
    failures = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        if arguments.build_log is not None:
            log = arguments.build_log.read_text(errors="replace")
            reports = (in_build_log(log, *work) for work in works)
        else:
            reports = pool.map(lambda work: compile_one(str(nvcc), *work, Path(folder)), works)
        for (source, architecture), (passed, report) in zip(works, reports):
            print(f"nvcc {architecture} {source}: {report if passed else 'FAILED'}", flush=True)
            if not passed:
                failures += 1
                print(report)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
