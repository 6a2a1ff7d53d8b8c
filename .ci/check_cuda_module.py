"""Import a freshly built _cuda, perhaps with no driver, before and beside torch, and check what it says of itself."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def main() -> int:
    """Import the module from the folder named on the command line; an assertion fails where a promise is broken."""
    folder = Path(sys.argv[1])
    (module,) = folder.glob("_cuda.*.so")
    needed = subprocess.run(["ldd", str(module)], capture_output=True, text=True, check=True).stdout
    linked = re.findall(r"lib(?:cudart|cublas|cuda|torch|c10)\S*", needed)
    assert not linked, f"_cuda is linked to {linked}; the runtime must be static and cuBLAS taken at run time"
    sys.path.insert(0, str(folder))
    import _cuda

    before = _cuda.info()
    import torch

    after = _cuda.info()
    build = _cuda.build_info()
    assert before["compiled_version"] == after["compiled_version"] == build["cuda_version"], (before, build)
    assert before["architectures"] == build["cuda_architectures"]
    assert bool(before["devices"]) != bool(before["no_device_reason"]), before
    assert bool(after["cublas_version"]) != bool(after["cublas_reason"]), after
    if not torch.cuda.is_available():
        assert before["no_device_reason"], before
    print(f"{build['summary']}; devices: {after['no_device_reason'] or after['devices']}")
    print(f"cuBLAS: {after['cublas_version'] or after['cublas_reason']}; torch {torch.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
