from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import warnings

import pytest
import torch

try:
    import hypothesis
except ImportError:  # the smoke tests run where only pytest is installed
    hypothesis = None

if hypothesis is not None:
    common = {"deadline": None, "print_blob": True, "suppress_health_check": list(hypothesis.HealthCheck)}
    hypothesis.settings.register_profile("ci", max_examples=40, derandomize=True, database=None, **common)
    hypothesis.settings.register_profile("thorough", max_examples=1000, **common)
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


# A tuned plan of the developer's would change what the tests run, and no test may add to the developer's plans.
_FOLDER = tempfile.mkdtemp(prefix="upfold-tests-")
os.environ["UPFOLD_CACHE_DIR"] = os.path.join(_FOLDER, "cache")
os.environ.pop("UPFOLD_TUNED", None)
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores: a pool of threads in each would only wait for the others. Tests about threads set their own number.
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where a test's tensors live; tests/gpu overrides it and runs the same functions there."""
    return torch.device("cpu")


@pytest.fixture(autouse=True)
def _restore_torch_state():
    """A test that changes threads, the default dtype or the grad mode must not reach the next one."""
    threads, dtype, grad = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)


@pytest.fixture(autouse=True)
def _forget_tuned_plans():
    """A test that tunes must not choose for the next one."""
    yield
    from upfold import dispatch, execute, plans

    folder = os.path.join(_FOLDER, "cache")
    if plans._in_force or os.path.exists(folder):
        shutil.rmtree(folder, ignore_errors=True)
        plans.forget()
        dispatch.forget()
        execute.forget()


@pytest.fixture
def packing(device):
    """Fused runs with a tile that packs the weight of `freezing.make`'s layer."""
    from freezing import make, that_packs

    with that_packs(*make(device)):
        yield


@pytest.fixture
def deterministic():
    """Torch's deterministic mode: what has no repeatable way raises, a warning is an error, and fresh memory holds NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
