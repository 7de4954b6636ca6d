"""How much each coordinate matters: a mean over samples of a function of each one's gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from holdfast._batch import batch_length, evaluating, inputs_and_labels, take, to_device
from holdfast._progress import progress_bar
from holdfast.objective.data import Collate, as_source
from holdfast.reference import Reference

_ELEMENTS = 1 << 28  # of per-sample gradients at a time: 1 GB in float32


def mean_over_samples(
    model: nn.Module,
    data: Any,
    collate: Collate | None,
    batch_size: int,
    relabel: Callable[[Any, Tensor], Tensor],
    scalar: Callable[[Tensor, Tensor], Tensor],
    transform: Callable[[Tensor], Tensor],
    *,
    normalize: bool,
    progress: bool,
) -> Reference:
    """E[transform(∂ scalar(logits, labels)/∂θ)] over the samples, by parameter name.

    ``relabel`` gives the labels of a batch of inputs; ``scalar`` sees one sample at a time, as a
    batch of one.
    """
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    buffers = dict(model.named_buffers())
    totals = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in parameters.items()}
    device = next(iter(parameters.values())).device
    pad_id = getattr(getattr(model, "config", None), "pad_token_id", None)
    source = as_source(data, collate, batch_size, pad_id)

    def of_one(weights: dict[str, Tensor], inputs: Any, labels: Tensor) -> Tensor:
        one = _map(inputs, lambda t: t.unsqueeze(0))
        args, kwargs = ((), dict(one)) if isinstance(one, Mapping) else ((one,), {})
        outputs = functional_call(model, (weights, buffers), args, kwargs)
        logits = outputs if isinstance(outputs, Tensor) else outputs.logits
        return scalar(logits, labels.unsqueeze(0))

    rows = max(1, _ELEMENTS // sum(p.numel() for p in parameters.values()))
    together = vmap(grad(of_one), (None, 0, 0), chunk_size=rows, randomness="different")
    samples, works_together = 0, True
    bar = progress_bar(source.total, "importance", shown=progress)
    with evaluating(model):
        for indices, read in source:
            batch = to_device(read(), device)
            inputs, labels = inputs_and_labels(model, batch)
            labels = relabel(inputs, labels)
            size = batch_length((inputs, labels))
            if works_together:
                try:
                    gradients = [together(parameters, inputs, labels)]
                except RuntimeError:  # the model does something that cannot be mapped over samples
                    works_together = False
            if not works_together:
                singles = [take(inputs, slice(i, i + 1), size) for i in range(size)]
                gradients = [
                    {name: g[None] for name, g in grad(of_one)(parameters, x, y).items()}
                    for x, y in zip((_map(s, _first) for s in singles), labels, strict=True)
                ]
            for some in gradients:
                for name, g in some.items():
                    totals[name] += transform(g.float()).sum(0)
            samples += size
            bar.update(len(indices))
    bar.close()
    if not samples:
        raise ValueError("there is nothing to take importance from: the data is empty")
    found = {name: total / samples for name, total in totals.items()}
    if not all(bool(f.isfinite().all()) for f in found.values()):
        raise ValueError("the importance is not finite: look at the data and at the model's dtype")
    if normalize:
        mean = sum(float(f.sum()) for f in found.values()) / sum(f.numel() for f in found.values())
        if mean == 0:
            raise ValueError("the importance is 0 everywhere: it cannot be scaled to a mean of 1")
        found = {name: f / mean for name, f in found.items()}
    return Reference(found)


def _map(inputs: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(inputs, Mapping):
        return {name: function(t) for name, t in inputs.items()}
    return function(inputs)


def _first(tensor: Tensor) -> Tensor:
    return tensor[0]
