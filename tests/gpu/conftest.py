from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The first GPU; whether there is one has been settled before anything here is collected."""
    return torch.device("cuda", torch.cuda.current_device())
