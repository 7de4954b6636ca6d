"""Linear probing: only the head may change; the body is frozen.

Kumar et al., *Fine-Tuning can Distort Pretrained Features and Underperform Out-of-Distribution*,
ICLR 2022, https://arxiv.org/abs/2202.10054, compare it with full fine-tuning.

:class:`LinearProbe` trains the head in a recipe. :func:`linear_probe` fits a new head directly, as
a convex problem.
"""

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from holdfast._torch.batch import evaluating, inputs_and_labels, logits_of, pad_id_of, to_device
from holdfast._torch.checks import at_least_zero, named_settings
from holdfast._torch.layers import head_parts, submodule, within
from holdfast._torch.names import shorten
from holdfast._torch.progress import progress_bar
from holdfast.data import Collate, Source, as_source
from holdfast.io.heads import mark_trained
from holdfast.losses import Task, weighted_loss
from holdfast.methods._freezing import Freezing, set_phases, stay_in_eval
from holdfast.stages import Run


@dataclass(frozen=True)
class LinearProbe(Freezing):
    """Train only the head: the model forgets nothing, and learns the least.

    The features stay the pretrained ones to the last bit: the body also stays in eval mode, so that
    its dropout does not act and BatchNorm's statistics do not change.

    Args:
        head: the name of the part to train, such as ``"classifier"``. If None, it is the new part
            of the model (``new=`` of the run), or the head found by the model's structure.

    Example:
        >>> from holdfast import LinearProbe, Recipe
        >>> Recipe(trainable=LinearProbe(head="classifier")).name
        'linear-probe'
    """

    neutral: ClassVar[dict[str, Any] | None] = None
    needs_pretrained_start: ClassVar[str] = "freezes the body"
    trains_only_head: ClassVar[bool] = True

    head: str | None = None

    def unfit(self, model: nn.Module, has_old_data: bool) -> str | None:
        """Judged by the head that the structure shows; a run may name another one."""
        return None if self.head is not None else _shared(model, head_parts(model))

    def prepare(self, run: Run) -> nn.Module:
        model = run.model
        heads = heads_of(run, self.head)
        if reason := _shared(model, heads):
            raise ValueError(reason)
        if left := [part for part in run.new if not within(part, heads)]:
            raise ValueError(
                f"{shorten(left)} is new, but is not part of the head {', '.join(heads)}: it "
                "would be frozen at random values. Name a part that contains both in the "
                "setting head of the recipe"
            )
        set_phases(model, [[n for n, _ in model.named_parameters() if not within(n, heads)]])
        stay_in_eval(model, [n for n, _ in model.named_modules() if not within(n, heads)])
        return model


@named_settings
def linear_probe(
    model: nn.Module,
    head: nn.Module | str,
    data: Any,
    *,
    task: Task = "classification",
    collate: Collate | None = None,
    batch_size: int = 64,
    l2: float = 1e-4,
    max_iterations: int = 200,
    progress: bool = True,
) -> float:
    """Fit ``head``, in place, on the features of the frozen model.

    The features are computed once. The remaining problem is small and, for a linear head, convex:
    L-BFGS on all standardized features, in float64, finds the minimum without a learning rate. The
    features are collected on the CPU. The fit keeps them on the model's device, with 8 bytes per
    value.

    Args:
        model: the pretrained model, run in eval mode.
        head: a part of the model or its name (the features are its input), or a separate module
            (the features are the model's output).
        data: as for :func:`holdfast.score`.
        task: classification, regression or multi_label.
        collate, batch_size, progress: as for :func:`holdfast.score`.
        l2: the weight of ½·l2·‖head weights‖², which keeps the minimum finite for separable
            classes. Biases are not penalized.
        max_iterations: the limit of L-BFGS; a warning is shown if it is too low.

    Returns:
        The final mean training loss, without the penalty.

    Example:
        >>> import torch, holdfast
        >>> body, head = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)
        >>> x, y = torch.randn(30, 4), torch.arange(30) % 3
        >>> loss = holdfast.linear_probe(body, head, [(x, y)], progress=False)
        >>> loss <= 1.1
        True
    """
    at_least_zero("l2", l2)
    head = submodule(model, head) if isinstance(head, str) else head
    if task not in ("classification", "regression", "multi_label"):
        raise ValueError(f"task must be classification, regression or multi_label, got {task!r}")
    source = as_source(data, collate, batch_size, pad_id_of(model))
    features, labels = _features(model, head, source, progress=progress)
    if labels.is_floating_point():
        labels = labels.double()

    # Fit a copy, so that an error does not change the head, in float64 for any dtype of the head.
    fitted = copy.deepcopy(head).double().requires_grad_(True)
    if isinstance(fitted, nn.Linear):
        # In z = (x − mean)/scale, with W′ = W·scale, the same problem is well conditioned.
        # A feature that is nearly constant (a dead unit) is not scaled.
        spread = features.std(0, unbiased=False)
        scale = torch.where(spread > 1e-6 * spread.max(), spread, torch.ones_like(spread))
        mean = features.mean(0) if fitted.bias is not None else torch.zeros_like(scale)
        _shift(fitted, +mean)
        fitted.weight.data *= scale
        features.sub_(mean).div_(scale)  # in place: they may fill the memory
        final, gradient = _fit(fitted, features, labels, task, l2 / scale**2, max_iterations)
        fitted.weight.data /= scale
        _shift(fitted, -mean)
    else:
        decay = torch.full((), l2, dtype=torch.float64, device=features.device)
        final, gradient = _fit(fitted, features, labels, task, decay, max_iterations)
    if gradient > 1e-4:
        warnings.warn(
            f"the probe has not converged after {max_iterations} iterations (gradient "
            f"{gradient:.1g}): increase max_iterations or l2",
            stacklevel=3,
        )
    head.load_state_dict(fitted.state_dict())
    mark_trained(head)
    return final


def _fit(
    head: nn.Module, features: Tensor, labels: Tensor, task: Task, decay: Tensor, iterations: int
) -> tuple[float, float]:
    """Minimize loss + ½·decay·W² by L-BFGS. Return the loss and the largest final gradient."""
    weights = [p for p in head.parameters() if p.dim() > 1]
    optimizer = torch.optim.LBFGS(
        head.parameters(),
        max_iter=iterations,
        max_eval=4 * iterations,
        history_size=50,
        tolerance_grad=1e-7,
        tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = weighted_loss(head(features), labels, None, task)
        loss = loss + 0.5 * sum((decay * w.square()).sum() for w in weights)
        loss.backward()
        return loss

    with evaluating(head):  # dropout in the head would change the problem between evaluations
        optimizer.step(closure)
        closure()
        gradient = max(float(p.grad.abs().max()) for p in head.parameters() if p.grad is not None)
        with torch.no_grad():
            return float(weighted_loss(head(features), labels, None, task)), gradient


@torch.no_grad()
def _shift(head: nn.Linear, by: Tensor) -> None:
    """Change the bias so that the outputs stay the same after subtracting ``by`` from features."""
    if head.bias is not None:
        head.bias.add_(head.weight @ by)


@torch.no_grad()
def _features(
    model: nn.Module, head: nn.Module, source: Source, *, progress: bool
) -> tuple[Tensor, Tensor]:
    """The input of the head (or the model's output, if the head is separate), and the labels."""
    device = next(model.parameters()).device
    inside = any(module is head for module in model.modules())
    caught: list[Any] = []

    def catch(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caught.append(args[0] if args else next(iter(kwargs.values())))

    features: list[Tensor] = []
    labels: list[Tensor] = []
    bar = progress_bar(source.total, "features", shown=progress)
    with bar, evaluating(model), head.register_forward_pre_hook(catch, with_kwargs=True):
        for indices, read in source:
            inputs, targets = inputs_and_labels(model, to_device(read(), device))
            outputs = logits_of(model, inputs, features=True)
            if inside and not caught:
                raise ValueError("the model did not run the head: check the argument head=")
            found = caught.pop() if inside else outputs
            if isinstance(head, nn.Linear) and found.dim() == 3 and isinstance(inputs, Mapping):
                found = _last(found, inputs)
            if inside and not features and found.dim() == 2 and not _computes(head, found, outputs):
                raise ValueError(
                    f"the outputs of {type(model).__name__} are not those of the part that is to "
                    "be fitted: name the layer that computes them in the setting head of the recipe"
                )
            features.append(found.cpu())
            labels.append(targets)
            bar.update(len(indices))
    if not features:
        raise ValueError("the data is empty: there is nothing to fit")
    if features[0].dim() != 2:
        raise ValueError(
            f"the head gets features of shape {tuple(features[0].shape)}, but needs one row per "
            "sample: pass the innermost linear layer, such as model.classifier.out_proj"
        )
    found, targets = torch.cat(features).to(device, torch.float64), torch.cat(labels)
    for what, values in (("features", found), ("labels", targets)):
        if not values.isfinite().all():
            raise ValueError(f"the {what} contain infinite or NaN values: nothing was fitted")
    return found, targets


def _computes(head: nn.Module, features: Tensor, outputs: Tensor) -> bool:
    """Whether a head makes the outputs of its model from these features, or both are not finite."""
    made = head.forward(features)  # without the hook
    if made.shape != outputs.shape:
        return False
    tolerance = 1e-4 if made.dtype.itemsize >= 4 else 1e-1
    return not (made - outputs).norm() > tolerance * outputs.norm()


def _last(features: Tensor, inputs: Mapping[str, Any]) -> Tensor:
    """The last position of each sequence that is not padding, which a decoder's head uses."""
    mask = inputs.get("attention_mask")
    if mask is None:
        return features[:, -1]
    places = torch.arange(mask.shape[1], device=mask.device)
    return features[torch.arange(len(mask), device=mask.device), (mask * places).argmax(1)]


def heads_of(run: Run, head: str | None) -> tuple[str, ...]:
    """The parts of the head: the given one, the new ones, or those found by structure."""
    heads = (head,) if head is not None else run.new or head_parts(run.model)
    if not heads:
        children = ", ".join(n for n, _ in run.model.named_children())
        raise ValueError(
            f"the head of {type(run.model).__name__} is not known: name it in new= (--new on the "
            f"command line) if it is new, else in the setting head of the recipe: {children}"
        )
    for name in heads:
        if not any(True for _ in submodule(run.model, name).parameters()) or not name:
            raise ValueError(f"the head {name!r} must be a part of the model with parameters")
    return heads


def _shared(model: nn.Module, heads: Sequence[str]) -> str | None:
    """Return why the head cannot be trained alone: the body uses its weights."""
    ours = {id(p) for head in heads for p in submodule(model, head).parameters()}
    shared = [
        name
        for name, p in model.named_parameters(remove_duplicate=False)
        if id(p) in ours and not within(name, heads)
    ]
    if not shared:
        return None
    return (
        f"the head {', '.join(heads)} shares weights with {shorten(shared)}: training it would "
        "change the body. Give the head its own weights, or name another part in the setting head "
        "of the recipe"
    )
