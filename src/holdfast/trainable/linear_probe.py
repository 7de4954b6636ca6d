"""Linear probing: fit a new head on the frozen features of a pretrained model.

A model that gets a new head knows nothing about it yet, so that it has no losses for FLOW to
score by, and a random head's gradients would distort the body (Kumar et al.,
https://arxiv.org/abs/2202.10054). Fit the head first; the body stays as it is.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from holdfast._batch import evaluating, inputs_and_labels, logits_of, to_device
from holdfast._progress import progress_bar
from holdfast.objective.data import Batches, Collate, Samples, as_source
from holdfast.objective.losses import Task, token_losses

__all__ = ["PretrainedHead", "linear_probe"]


def linear_probe(
    model: nn.Module,
    head: nn.Module,
    data: Any,
    *,
    task: Task = "classification",
    collate: Collate | None = None,
    batch_size: int = 64,
    l2: float = 1e-4,
    max_iterations: int = 200,
    progress: bool = True,
) -> float:
    """Fit ``head``, in place, on features that the frozen model gives; the model is unchanged.

    The features are computed once. The problem is then small and, for a linear head, convex:
    L-BFGS on all of them goes to the minimum without a learning rate to choose.

    Args:
        model: in its pretrained state, run in eval mode.
        head: a part of the model (its features are what the model feeds into it), or a module of
            its own (its features are what the model returns).
        data: as for :func:`holdfast.score`.
        task: classification, regression or multi_label.
        collate, batch_size, progress: as for :func:`holdfast.score`.
        l2: weight of ½·l2·‖head weights‖², which keeps the minimum finite where the classes can
            be separated exactly. Biases are not decayed.
        max_iterations: of L-BFGS; more than enough at the default.

    Returns:
        The mean training loss at the end, without the penalty.

    Example:
        >>> import torch, holdfast
        >>> body, head = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)
        >>> x, y = torch.randn(30, 4), torch.arange(30) % 3
        >>> loss = holdfast.linear_probe(body, head, [(x, y)], progress=False)
        >>> loss <= 1.1
        True
    """
    if l2 < 0:
        raise ValueError(f"l2 must be ≥ 0, got {l2}")
    features, labels = _features(
        model, head, as_source(data, collate, batch_size), progress=progress
    )
    weights = [p for p in head.parameters() if p.dim() > 1]
    trainable = {p: p.requires_grad for p in head.parameters()}
    head.requires_grad_(True)
    optimizer = torch.optim.LBFGS(
        head.parameters(),
        max_iter=max_iterations,
        history_size=20,
        tolerance_grad=1e-6,
        line_search_fn="strong_wolfe",
    )

    def loss_now() -> Tensor:
        return token_losses(head(features), labels, task).values.mean()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_now() + 0.5 * l2 * sum(w.square().sum() for w in weights)
        loss.backward()
        return loss

    with evaluating(head):  # a dropout in the head would make the problem a moving one
        optimizer.step(closure)
        with torch.no_grad():
            final = float(loss_now())
    for p, wanted in trainable.items():
        p.requires_grad_(wanted)
        p.grad = None
    return final


@torch.no_grad()
def _features(
    model: nn.Module, head: nn.Module, source: Samples | Batches, *, progress: bool
) -> tuple[Tensor, Tensor]:
    """What the model feeds into the head (or returns, if the head is no part of it), and labels."""
    device = next(model.parameters()).device
    within = any(module is head for module in model.modules())
    caught: list[Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
    features, labels = [], []
    bar = progress_bar(source.total, "features", shown=progress)
    try:
        with evaluating(model):
            for indices, read in source:
                inputs, targets = inputs_and_labels(model, to_device(read(), device))
                outputs = logits_of(model, inputs)
                features.append(caught.pop() if within else outputs)
                labels.append(targets)
                bar.update(len(indices))
    finally:
        hook.remove()
        bar.close()
    if not features:
        raise ValueError("there is nothing to probe with: the data is empty")
    found, targets = torch.cat(features).float(), torch.cat(labels)
    for what, values in (("features", found), ("labels", targets)):
        if not values.isfinite().all():
            raise ValueError(f"the {what} hold infinite or not-a-number values: nothing was fitted")
    return found, targets


class PretrainedHead:
    """The pretrained head and BatchNorm statistics, kept to see what a tuned body has forgotten.

    Take it before the head is replaced. Later, put it on for a while:

        kept = PretrainedHead.of(model, "classifier")
        model.classifier = nn.Linear(1280, 102)
        ...                                             # fine-tune
        with kept.on(model):
            accuracy_on_imagenet = evaluate(model)      # tuned body, pretrained head and statistics

    Args:
        name: the head's name in the model, such as ``"classifier"`` or ``"classifier.1"``.
        head: a copy of it.
        buffers: the model's other floating-point buffers (running means and variances).
    """

    def __init__(self, name: str, head: nn.Module, buffers: dict[str, Tensor]) -> None:
        self.name, self.head, self.buffers = name, head, buffers

    @classmethod
    def of(cls, model: nn.Module, name: str) -> PretrainedHead:
        """Copy the head called ``name`` and all running statistics of a pretrained model."""
        try:
            head = model.get_submodule(name)
        except AttributeError as error:
            children = ", ".join(n for n, _ in model.named_children())
            raise ValueError(f"the model has no part {name!r}; it has {children}") from error
        buffers = {
            n: b.detach().clone()
            for n, b in model.named_buffers()
            if b.is_floating_point() and not n.startswith(f"{name}.")
        }
        return cls(name, copy.deepcopy(head), buffers)

    @contextlib.contextmanager
    def on(self, model: nn.Module) -> Iterator[nn.Module]:
        """The model with its pretrained head and statistics, in eval mode; afterwards as before."""
        head = model.get_submodule(self.name)
        here = {n: b for n, b in model.named_buffers() if n in self.buffers}
        now = {n: b.detach().clone() for n, b in here.items()}
        device = next(model.parameters()).device
        try:
            model.set_submodule(self.name, self.head.to(device))
            for n, b in here.items():
                b.copy_(self.buffers[n])
            with evaluating(model):
                yield model
        finally:
            model.set_submodule(self.name, head)
            for n, b in here.items():
                b.copy_(now[n])
