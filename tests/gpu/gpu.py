"""Whether the CUDA module can be tested here."""

from __future__ import annotations

import torch

from upfold import native


def missing() -> str | None:
    """Why it cannot, in a sentence, or None."""
    if not torch.cuda.is_available():
        return "torch finds no usable GPU"
    module, reason = native.load_cuda()
    return reason if module is None else None
