from __future__ import annotations

import pytest
import torch

from upfold import native


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The first GPU; whether there is one has been settled before anything here is collected."""
    return torch.device("cuda", torch.cuda.current_device())


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
