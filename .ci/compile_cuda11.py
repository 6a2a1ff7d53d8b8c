"""Compile the device code of CUDA sources with CUDA 11.7's own compiler, by NVRTC, on a machine without a GPU.

NVRTC sees no host headers: sources keep host code behind `#ifndef __CUDACC_RTC__` and name their kernels by explicit
instantiation. A real architecture (sm_80, not compute_80) is asked for, so that ptxas reads inline assembly too.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from itertools import repeat
from pathlib import Path

from compile_device import code_bytes

# The only standard header that the device code includes.
CSTDINT = b"""#pragma once
namespace std {
using int8_t = signed char; using uint8_t = unsigned char; using int16_t = short; using uint16_t = unsigned short;
using int32_t = int; using uint32_t = unsigned; using int64_t = long long; using uint64_t = unsigned long long;
using intptr_t = long; using uintptr_t = unsigned long; using size_t = unsigned long;
}
using std::int32_t; using std::uint32_t; using std::int64_t; using std::uint64_t; using std::uintptr_t;
"""


HERE = Path(__file__).resolve().parent
PACKAGES = ["nvidia-cuda-nvrtc-cu11", "nvidia-cuda-runtime-cu11"]


def install(folder: Path) -> None:
    """Put the pinned packages of CUDA 11.7 into a folder of their own, unless they are there."""
    if (folder / "nvidia" / "cuda_nvrtc").is_dir() and (folder / "nvidia" / "cuda_runtime").is_dir():
        return
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += [
        "--only-binary",
        ":all:",
        "--target",
        str(folder),
        "-c",
        str(HERE.parent / "constraints.txt"),
        *PACKAGES,
    ]
    subprocess.run(command, check=True, timeout=300)


class Nvrtc:
    """The few functions of NVRTC that are needed."""

    def __init__(self, folder: Path) -> None:
        self.headers = folder / "nvidia" / "cuda_runtime" / "include"
        libraries = folder / "nvidia" / "cuda_nvrtc" / "lib"
        ctypes.CDLL(str(libraries / "libnvrtc-builtins.so.11.7"), mode=ctypes.RTLD_GLOBAL)
        self.library = ctypes.CDLL(str(libraries / "libnvrtc.so.11.2"))
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value}"

    def compile(self, source: Path, architecture: str) -> tuple[bool, str]:
        """Return whether a source compiles without a warning to machine code, and the compiler's log."""
        program = ctypes.c_void_p()
        headers = (ctypes.c_char_p * 1)(CSTDINT)
        names = (ctypes.c_char_p * 1)(b"cstdint")
        text = source.read_bytes()
        status = self.library.nvrtcCreateProgram(ctypes.byref(program), text, str(source).encode(), 1, headers, names)
        if status != 0:
            return False, f"nvrtcCreateProgram answered {status}"
        options = [
            "--std=c++17",
            f"--gpu-architecture={architecture}",
            f"--include-path={self.headers}",
            f"--include-path={source.parent}",
        ]
        encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = self.library.nvrtcCompileProgram(program, len(options), encoded)
        size = ctypes.c_size_t()
        self.library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        self.library.nvrtcGetProgramLog(program, log)
        self.library.nvrtcGetCUBINSize(program, ctypes.byref(size))
        self.library.nvrtcDestroyProgram(ctypes.byref(program))
        message = log.value.decode(errors="replace").strip()
        if status == 0 and size.value < 1024:
            return False, f"no kernel was compiled ({size.value} bytes of code): name them by explicit instantiation"
        return status == 0 and "warning" not in message, message


@lru_cache
def compiler_in(folder: Path) -> Nvrtc:
    """The compiler of this process; NVRTC compiles one program at a time in each."""
    return Nvrtc(folder)


def compile_one(folder: Path, source: Path, architecture: str) -> tuple[bool, str, str]:
    """Return whether a source compiles, the compiler's log and its version."""
    compiler = compiler_in(folder)
    return *compiler.compile(source.resolve(), architecture), compiler.version


def main() -> int:
    """Compile every given source for every architecture; the exit status says whether all passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="+", type=Path)
    parser.add_argument("--arch", default="sm_75,sm_80,sm_86", help="separated by commas")
    parser.add_argument("--packages", type=Path, default=HERE / ".work" / "cuda11", help="where CUDA 11.7 is installed")
    arguments = parser.parse_args()
    install(arguments.packages)
    ordered = sorted(arguments.sources, key=code_bytes, reverse=True)
    works = [(source, architecture) for source in ordered for architecture in arguments.arch.split(",")]
    failures = 0
    with ProcessPoolExecutor(min(len(works), os.cpu_count() or 1)) as pool:
        for (source, architecture), found in zip(works, pool.map(compile_one, repeat(arguments.packages), *zip(*works))):
            passed, log, version = found
            print(f"CUDA {version} {architecture} {source}: {'ok' if passed else 'FAILED'}", flush=True)
            if not passed:
                failures += 1
                print(log)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
