"""What a subcommand does where nobody says: a first look, offline, on the model in the package."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

__all__ = ["default_jobs", "with_default"]


def with_default(arguments: Sequence[str], *more: str) -> list[str]:
    """The arguments; without a model among them, the settings of a first look before them.

    A small model, maths problems to learn, and texts of the kinds that it knew before.
    """
    names = {word.split("=")[0] for word in arguments}
    if names & {"--model", "--config", "-h", "--help"}:
        return list(arguments)
    from holdfast.comparison.default import paths

    here = paths()
    texts = [str(path) for path in here.retained.values()]
    return [
        f"--model={here.model}", f"--data={here.train}", f"--target={here.dev}",
        f"--measuring.text={json.dumps(texts)}", "--measuring.max_length=256",
        "--measuring.limit=100", "--measuring.context_free=8", "--training.lr=3e-3",
        "--training.max_updates=40", "--training.batch_size=8", "--training.max_length=176",
        *more, *arguments,
    ]  # fmt: skip


def default_jobs() -> int:
    """One a GPU, or a core."""
    import torch

    return torch.cuda.device_count() or max(1, os.cpu_count() or 1)
