"""The run of a command without ``--model``: a first look, offline, at the model in the package."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["default_jobs", "demo_settings"]


def demo_settings() -> dict[str, Any]:
    """Return options for a small model, maths problems to learn, and texts to retain."""
    from holdfast.comparison.default import paths

    here = paths()
    return {
        "model": str(here.model), "data": str(here.train), "target": str(here.dev),
        "text": [str(path) for path in here.retained.values()], "test_max_length": 256,
        "limit": 100, "context_free": 8, "lr": 3e-3, "max_updates": 40, "batch_size": 8,
        "max_length": 176,
    }  # fmt: skip


def default_jobs() -> int:
    """Return the number of trainings at a time: one per GPU, or one per CPU core."""
    import torch

    return torch.cuda.device_count() or max(1, os.cpu_count() or 1)
