"""Two processes over gloo: DistributedDataParallel and FSDP2 give the weights that one process gives, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed

from programs import FOLDER


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch was built without torch.distributed")
def test_two_processes(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(FOLDER / "train_distributed.py"), "--backend", "gloo", "--steps", "1", "--json", str(tmp_path / "steps.json")]
    done = subprocess.run(
        [*launcher, *script], capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "steps.json").read_text())
    assert (found["backend"], found["processes"]) == ("gloo", 2)
    for name in ("ddp", "fsdp2"):
        if "skipped" in found[name]:
            pytest.skip(f"{name}: {found[name]['skipped']}")
        assert found[name]["differing_weights"] == {"torch": 0, "upfold": 0}
        assert min(found[name]["step_seconds"].values()) > 0
        assert f"{name}, 2 processes over gloo: weights after two exact steps equal bit for bit" in done.stdout
