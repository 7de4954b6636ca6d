"""A copy of the pretrained head, which is put back to measure what a tuned body has forgotten."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

from torch import Tensor, nn

from holdfast._torch.batch import evaluating
from holdfast._torch.layers import submodule
from holdfast._torch.names import shorten


class PretrainedHead:
    """The pretrained head and BatchNorm statistics, to measure what a tuned body has forgotten.

    Copy the head before it is replaced, and attach it later for an evaluation:

        kept = PretrainedHead.of(model, "classifier")
        model.classifier = nn.Linear(1280, 102)
        ...                                             # fine-tune
        with kept.on(model):
            accuracy_on_imagenet = evaluate(model)      # tuned body, pretrained head and statistics

    Args:
        name: the head's name in the model, such as ``"classifier"`` or ``"classifier.1"``.
        head: a copy of the head.
        buffers: the model's other floating-point buffers (running means and variances).
    """

    def __init__(self, name: str, head: nn.Module, buffers: dict[str, Tensor]) -> None:
        self.name, self.head, self.buffers = name, head, buffers

    def __repr__(self) -> str:
        return f"PretrainedHead({self.name!r}, {self.head}, {len(self.buffers)} statistics)"

    @classmethod
    def of(cls, model: nn.Module, name: str) -> PretrainedHead:
        """Copy the head called ``name`` and all running statistics of a pretrained model."""
        head = submodule(model, name)
        buffers = {
            n: b.detach().clone()
            for n, b in model.named_buffers()
            if b.is_floating_point() and not n.startswith(f"{name}.")
        }
        return cls(name, copy.deepcopy(head), buffers)

    @contextlib.contextmanager
    def on(self, model: nn.Module) -> Iterator[nn.Module]:
        """Attach the pretrained head and statistics, in eval mode; restore the model on exit."""
        head = model.get_submodule(self.name)
        here = {n: b for n, b in model.named_buffers() if n in self.buffers}
        if missing := sorted(set(self.buffers) - set(here)):
            raise ValueError(
                f"the model has no buffers for the saved statistics: {shorten(missing)}"
            )
        now = {n: b.detach().clone() for n, b in here.items()}
        like = next(model.parameters())
        try:
            model.set_submodule(self.name, self.head.to(like.device, like.dtype))
            for n, b in here.items():
                b.copy_(self.buffers[n])
            with evaluating(model):
                yield model
        finally:
            model.set_submodule(self.name, head)
            for n, b in here.items():
                b.copy_(now[n])
