"""What this installation is and can do, as text and as a dictionary; needs nothing beyond torch."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from . import dispatch, native, plans

_VARIABLES = (
    "UPFOLD_CPU_ISA",
    "UPFOLD_FALLBACK",
    "UPFOLD_TUNED",
    "UPFOLD_WORKSPACE_MB",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
)


def version() -> str:
    """The version of the installed package."""
    from importlib import metadata

    try:
        return metadata.version("upfold")
    except metadata.PackageNotFoundError:
        return "not installed (run from a source tree)"


def commit() -> str | None:
    """The commit of upfold's source tree, where the current folder is one; ``+`` marks uncommitted changes."""
    if not Path("cpp/problem.h").is_file():
        return None
    commands = ("git", "rev-parse", "HEAD"), ("git", "status", "--porcelain", "--untracked-files=no")
    try:
        head, changes = (subprocess.run(c, capture_output=True, text=True, check=True, timeout=10).stdout for c in commands)
    except (OSError, subprocess.SubprocessError):
        return None
    return head.strip() + ("+" if changes.strip() else "")


def processor() -> str:
    """The CPU's name, as far as the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cuda_state() -> dict[str, Any]:
    """Whether CUDA can be used by upfold, and why not; what its module says of itself, of GPUs and of cuBLAS."""
    module, reason = native.load_cuda()
    state: dict[str, Any] = {"available": False, "reason": reason}
    if module is not None:
        state.update(module.info())
        state["build"] = module.build_info()
    if torch.cuda.is_available():
        state["torch_devices"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    elif reason is None:
        state["reason"] = "torch was built without CUDA" if torch.version.cuda is None else "torch finds no usable GPU"
    state["available"] = module is not None and torch.cuda.is_available()
    return state


def gather() -> dict[str, Any]:
    """Everything that `upfold info` prints and that results files carry."""
    module = native.cpu()
    return {
        "upfold": version(),
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "platform": platform.platform(),
        "processor": processor(),
        "logical_cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instruction_set": module.instruction_set(),
        "threading": module.threading(),
        "build": {"compiler": module.compiler(), **(module.build_info() if hasattr(module, "build_info") else {})},
        "algorithms": list(dispatch.algorithms()),
        "tuned_plans": plans.count(plans.in_force(), plans.here()),
        "cuda": cuda_state(),
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def info_text(facts: dict[str, Any] | None = None) -> str:
    """The facts of `gather` as aligned lines."""
    facts = gather() if facts is None else facts
    cuda = facts["cuda"]
    lines = [
        ("upfold", facts["upfold"] + (f", commit {facts['commit']}" if facts["commit"] else "")),
        ("installed in", str(Path(__file__).parent)),
        ("Python", f"{facts['python']} ({sys.executable})"),
        ("torch", f"{facts['torch']}, CUDA {facts['torch_cuda'] or 'not built in'}"),
        ("system", facts["platform"]),
        ("CPU", f"{facts['processor']}, {facts['logical_cores']} logical cores, {facts['threads']} threads in use"),
        ("CPU kernels", f"{facts['instruction_set']} instructions, threads by {facts['threading']}"),
        ("built as", _build_text(facts["build"])),
        ("algorithms", ", ".join(facts["algorithms"])),
        ("tuned plans", _plans_text(facts["tuned_plans"])),
        ("CUDA", "available" if cuda["available"] else f"unavailable: {cuda['reason']}"),
    ]
    lines += [
        (f"  {_words(key)}", _show(value)) for key, value in cuda.items() if key not in ("available", "reason", "build") and value
    ]
    lines += [(name, value) for name, value in facts["environment"].items()]
    width = max(len(name) for name, _ in lines) + 2
    return "\n".join(f"{name:<{width}}{value}" for name, value in lines)


def _words(key: str) -> str:
    return key.replace("_", " ")


def _build_text(build: dict[str, str]) -> str:
    """What was built, by which compiler; an older module tells the compiler alone."""
    parts = [build.get("summary"), build["compiler"], build.get("build_type")]
    if build.get("cuda_version"):
        parts.append(f"CUDA {build['cuda_version']} for {build.get('cuda_architectures')}")
    return "; ".join(part for part in parts if part)


def _plans_text(count: int) -> str:
    """Where the plans are, and how many of them are for this machine."""
    text = f"{count} for this machine, in {plans.cache_file()}"
    return text if dispatch.tuned_allowed() else text + "; not used: UPFOLD_TUNED is off"


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{_words(str(key))} {_show(inner)}" for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(_show(inner) for inner in value) or "none"
    return str(value)
