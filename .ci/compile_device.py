"""Compile the device code of CUDA sources with nvcc, warnings as errors, and print what ptxas says of each."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
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
    if done.returncode != 0:
        return False, output
    registers = [int(found) for found in re.findall(r"Used (\d+) registers", output)]
    spills = [int(found) for found in re.findall(r"(\d+) bytes spill stores", output)]
    shared = [int(found) for found in re.findall(r"(\d+) bytes smem", output)]
    if not registers:
        return False, f"no kernel was compiled\n{output}"
    summary = f"{len(registers)} kernels, {min(registers)} to {max(registers)} registers"
    summary += f", shared memory up to {max(shared)} bytes" if shared else ""
    spilling = sorted(spill for spill in spills if spill)
    return True, summary + (f", {len(spilling)} spill up to {spilling[-1]} bytes" if spilling else ", no spills")


def main() -> int:
    """Compile every given source for every architecture; the exit status says whether all passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="+", type=Path)
    parser.add_argument("--arch", default="sm_75,sm_80,sm_90a", help="separated by commas")
    parser.add_argument("--nvcc", default="nvcc")
    arguments = parser.parse_args()
    nvcc = shutil.which(arguments.nvcc)
    if nvcc is None:
        print(f"{arguments.nvcc} was not found; CUDA's compiler is needed for this step")
        return 2
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        for source in arguments.sources:
            for architecture in arguments.arch.split(","):
                passed, report = compile_one(nvcc, source, architecture, Path(folder))
                print(f"nvcc {architecture} {source}: {report if passed else 'FAILED'}")
                if not passed:
                    failures += 1
                    print(report)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
