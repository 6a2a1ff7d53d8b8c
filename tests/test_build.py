"""What was built: the facts the modules carry, what they are linked to, and the build's one decision, UPFOLD_CUDA."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import upfold
from upfold import _cpu, native

ROOT = Path(__file__).resolve().parent.parent
FACTS = {
    "version",
    "compiler",
    "build_type",
    "cuda_mode",
    "cuda_version",
    "cuda_architectures",
    "cuda_reason",
    "summary",
}


def test_the_module_says_how_it_was_built():
    facts = _cpu.build_info()
    assert set(facts) == FACTS
    assert facts["cuda_mode"] in ("AUTO", "ON", "OFF")
    assert facts["summary"].startswith(f"upfold {facts['version']}: ")
    if facts["cuda_version"]:
        assert facts["cuda_architectures"]
        assert not facts["cuda_reason"]
    else:
        assert facts["cuda_reason"] in facts["summary"]


def test_one_version_everywhere():
    assert _cpu.build_info()["version"] == upfold.__version__
    try:
        installed = metadata.version("upfold")
    except metadata.PackageNotFoundError:
        pytest.skip("upfold is imported from a source tree, not installed")
    assert installed == upfold.__version__


def test_the_base_package_needs_torch_alone():
    try:
        required = metadata.requires("upfold") or []
    except metadata.PackageNotFoundError:
        pytest.skip("upfold is imported from a source tree, not installed")
    base = [item for item in required if "extra ==" not in item]
    assert [re.match(r"[\w-]+", item).group() for item in base] == ["torch"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ldd is Linux's")
def test_the_module_is_linked_to_neither_torch_nor_cuda():
    linked = subprocess.run(["ldd", _cpu.__file__], capture_output=True, text=True, check=True).stdout
    assert "libc.so" in linked  # ldd did answer
    assert not re.search(r"lib(torch|c10|cuda|cublas|cudart)", linked), linked


def test_cuda_is_there_or_its_absence_explained():
    module, reason = native.load_cuda()
    if module is None:
        assert reason
        return
    facts = module.info()
    assert bool(facts["devices"]) != bool(facts["no_device_reason"])
    assert bool(facts["cublas_version"]) != bool(facts["cublas_reason"])
    assert set(module.build_info()) == FACTS


def test_every_source_is_in_the_build():
    if not (ROOT / "CMakeLists.txt").exists():
        pytest.skip("no source tree here")
    text = (ROOT / "CMakeLists.txt").read_text()
    sources = [path for path in (ROOT / "cpp").rglob("*") if path.suffix in (".cpp", ".cu")]
    missing = [path.name for path in sources if path.relative_to(ROOT).as_posix() not in text]
    assert sources
    assert not missing


def configure(folder: Path, *options: str, **variables: str) -> tuple[int, str]:
    """Run CMake's configure step alone; return its status and what it printed."""
    pybind11 = pytest.importorskip("pybind11", reason="building needs pybind11")
    for tool in ("cmake", "ninja"):
        if shutil.which(tool) is None and not (Path(sys.executable).parent / tool).exists():
            pytest.skip(f"building needs {tool}")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UPFOLD_")}
    environment.update(PATH=path, **variables)
    command = ["cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", *options]
    command += [f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return done.returncode, done.stdout + done.stderr


def test_an_unknown_mode_is_refused_in_one_sentence(tmp_path):
    status, output = configure(tmp_path, UPFOLD_CUDA="PERHAPS")
    assert status != 0
    assert "UPFOLD_CUDA = PERHAPS; must be AUTO, ON or OFF" in output


def test_the_option_goes_before_the_environment_variable(tmp_path):
    status, output = configure(tmp_path, "-DUPFOLD_CUDA=OFF", UPFOLD_CUDA="ON")
    assert status == 0, output
    assert f"upfold {upfold.__version__}: CPU module only: UPFOLD_CUDA=OFF" in output


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
def test_on_builds_for_the_whole_list(tmp_path):
    status, output = configure(tmp_path, UPFOLD_CUDA="ON")
    assert status == 0, output
    built = re.search(r"CPU and CUDA modules \(CUDA ([\d.]+), architectures (.*)\)", output)
    assert built, output
    architectures = built.group(2).split()
    known = subprocess.run(["nvcc", "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout.split()
    wanted = [number for number in ("75", "80", "86", "89", "90", "100", "120") if f"compute_{number}" in known]
    assert [re.match(r"\d+", entry).group() for entry in architectures] == [*wanted, wanted[-1]]
    assert architectures[-1].endswith("-virtual")
    if int(built.group(1).split(".")[0]) >= 12:
        assert "90a-real" in architectures


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
def test_the_architectures_can_be_chosen(tmp_path):
    status, output = configure(tmp_path, "-DUPFOLD_CUDA=ON", "-DUPFOLD_CUDA_ARCH=75-virtual")
    assert status == 0, output
    assert "architectures 75-virtual)" in output
