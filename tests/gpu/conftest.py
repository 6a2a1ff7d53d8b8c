from __future__ import annotations

import pytest
import torch

from upfold import native


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The first GPU; whether there is one has been settled before anything here is collected."""
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(autouse=True)
def returned_memory():
    """What torch keeps of large tests is another process's to have: with many of them 80 GB do not last otherwise."""
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > 1 << 30:
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def exact_float32(request, monkeypatch):
    """Tests that compare two ways by torch's tolerances for float32 are about the ways, not about TF32."""
    if request.node.name.startswith(("test_machinery_", "test_transforms_", "test_backward_", "test_training_", "test_graphed_")):
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture(scope="module")
def cuda():
    """Return the compiled module, or skip with the reason why it cannot run here."""
    module, reason = native.load_cuda()
    if module is None:
        pytest.skip(reason)
    if not torch.cuda.is_available():
        pytest.skip("torch finds no usable GPU")
    if not module.info()["devices"]:
        pytest.skip(module.info()["no_device_reason"])
    return module
