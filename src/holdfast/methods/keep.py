"""Keep the tuned model as it is: the identity of stage 4."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.stages import Merging

__all__ = ["Keep"]


@dataclass(frozen=True)
class Keep(Merging):
    """Keep the tuned model.

    Example:
        >>> import torch
        >>> from holdfast.methods.keep import Keep
        >>> model = torch.nn.Linear(2, 1)
        >>> Keep().merge(model, None) is model
        True
    """
