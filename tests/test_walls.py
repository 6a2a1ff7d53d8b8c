"""The walls of the architecture: who may include, import, call and name what."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python" / "upfold"
ALGORITHMS = ("gemm", "gemm_atomic", "direct", "depthwise", "fused", "torch")
pytestmark = pytest.mark.skipif(not PACKAGE.is_dir(), reason="no source tree here")

CPP = sorted(path for path in (ROOT / "cpp").rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh"))
PYTHON = sorted(PACKAGE.rglob("*.py"))


def matches(paths: list[Path], pattern: str) -> list[str]:
    """Return file:line of every line that matches."""
    found = []
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if re.search(pattern, line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    return found


def dotted(node: ast.AST) -> str:
    """Return `a.b.c` for an attribute chain that starts at a name, else an empty string."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def imports(path: Path) -> set[str]:
    """Return the dotted names that a module of the package imports, relative ones made absolute."""
    module = ["upfold", *path.relative_to(PACKAGE).with_suffix("").parts]
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = module[: len(module) - node.level] if node.level else []
            origin = ".".join(base + ([node.module] if node.module else []))
            names |= {origin, *(f"{origin}.{alias.name}" for alias in node.names)}
    return names


def test_there_is_something_to_check():
    assert len(CPP) > 10
    assert len(PYTHON) > 10


def test_the_compiled_core_is_torch_free():
    assert not matches(CPP, r'#\s*include\s*[<"](torch|ATen|c10|caffe2)/')


def test_cublas_is_named_where_it_is_loaded_and_used_alone():
    others = [path for path in CPP if path.stem not in ("gemm", "cublas")]
    assert not matches(others, r"\bcublas[A-Z]\w*|#\s*include\s*[<\"]cublas_v2|#\s*include\s*[<\"]cublas\.h>")
    assert not matches([ROOT / "CMakeLists.txt", *(ROOT / "cpp").rglob("*.cmake")], r"CUDA::cublas|-lcublas|cudart_shared")


def test_no_convolution_but_our_own():
    assert not matches(CPP, r"\bcudnn\w*|\bcutlass\b|\bconvolutionForward")
    forbidden = re.compile(
        r"^(torch|F|nn|aten)\.(.*\.)?(conv\w*|_conv\w*|cudnn_\w+|mkldnn_conv\w*|fold|unfold|col2im|im2col)(\.|$)"
    )
    found = []
    for path in PACKAGE.glob("algorithms/*.py"):
        if path.stem == "torch":
            continue  # the named peer: torch's own operator
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and forbidden.match(dotted(node)):
                found.append(f"{path.name}:{node.lineno}: {dotted(node)}")
        assert not any(forbidden.match(name.replace("torch.nn.functional", "F")) for name in imports(path)), path
    assert not found


def test_only_gemm_multiplies_matrices():
    found = []
    for path in PACKAGE.glob("algorithms/*.py"):
        if path.stem.startswith("gemm"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = dotted(node).rpartition(".")[2] if isinstance(node, ast.Attribute) else ""
            product = isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)
            if product or name in ("matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "tensordot"):
                found.append(f"{path.name}:{node.lineno}")
    assert not found


def test_algorithms_do_not_import_each_other():
    for path in PACKAGE.glob("algorithms/*.py"):
        if path.stem in ALGORITHMS:
            others = {f"upfold.algorithms.{name}" for name in ALGORITHMS if name != path.stem}
            assert not imports(path) & others, path


def test_nothing_imports_the_programs():
    for path in PYTHON:
        programs = {"upfold.cli"} if path.stem == "bench" else {"upfold.cli", "upfold.bench"}
        if path.stem not in ("cli", "__main__"):
            assert not imports(path) & programs, path


def test_functional_and_nn_know_no_algorithm():
    for stem in ("functional", "nn"):
        path = PACKAGE / f"{stem}.py"
        tree = ast.parse(path.read_text(encoding="utf-8"))
        words = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        assert not [word for word in words if word in ALGORITHMS], path
        assert not [name for name in imports(path) if name.startswith("upfold.algorithms")], path


def test_importing_the_package_needs_torch_alone():
    code = (
        "import sys, torch; before = set(sys.modules); import upfold; "
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "upfold" in done.stdout.split()
    assert not {"rich", "matplotlib", "platformdirs", "filelock", "numpy", "onnx"} & set(done.stdout.split())
    assert not done.stderr


def test_cpu_code_is_never_built_for_the_machine_at_hand():
    paths = [
        ROOT / "CMakeLists.txt",
        ROOT / "pyproject.toml",
        ROOT / "Makefile",
        *(ROOT / "cpp").rglob("*.cmake"),
        *CPP,
    ]
    assert not matches([path for path in paths if path.exists()], r"-march=native|-mtune=native|/arch:native")


def test_inline_assembly_has_one_home():
    homes = ("mma.cuh", "warpgroup.cuh", "copy_engine.cuh")
    assert not matches([path for path in CPP if path.name not in homes], r"\basm\s+volatile|\basm\s*\(")


def test_one_word_for_the_operator():
    assert not matches([*CPP, *PYTHON], r"\b[Dd]econv")


def test_files_stay_readable():
    long_files = {path.name: n for path in [*CPP, *PYTHON] if (n := len(path.read_text(encoding="utf-8").splitlines())) > 400}
    assert not long_files


def test_functions_stay_readable():
    found = []
    for path in PYTHON:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = node.body[0]
                words = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
                documented = (first.end_lineno or 0) - first.lineno + 1 if words else 0
                if (node.end_lineno or 0) - node.lineno + 1 - documented > 60:
                    found.append(f"{path.name}:{node.lineno}: {node.name}")
    assert not found
