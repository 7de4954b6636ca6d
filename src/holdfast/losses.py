"""Losses per sample, and the weighted loss to train on.

In every task a sample has a sum of losses and a number of targets. The loss of a sample is their
quotient. The training loss is the weighted sum over all samples, divided by the number of targets
in the whole batch.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from holdfast._torch.adapters import without_peft
from holdfast._torch.layout import rank_and_world
from holdfast._torch.multimodal import is_text_generator

Task = Literal["causal_lm", "classification", "regression", "multi_label", "token_classification"]
Count = Tensor | float  # a number of targets, perhaps on the device
LossFunction = Callable[[nn.Module, Any], Tensor]  # the user's: one loss per sample
TOKEN_TASKS = ("causal_lm", "token_classification")
CLASS_TASKS = (*TOKEN_TASKS, "classification")  # each target is one class of several
IGNORED = -100  # the label that transformers and torch ignore


class TokenLosses(NamedTuple):
    """The losses of all targets of a batch, and which sample each belongs to."""

    values: Tensor
    sample: Tensor

    def sums(self, samples: int) -> Tensor:
        """The sum of losses of each sample."""
        return self.values.new_zeros(samples).index_add(0, self.sample, self.values)


class Predicted(NamedTuple):
    """What a model predicts for the labels of a batch, without gradients.

    Attributes:
        labels: the labels of the batch.
        where: which labels are targets, in the shape of the labels.
        losses: the loss of every target, in order.
        outputs: a row of logits per target; None if a host has not computed them.
    """

    labels: Tensor
    where: Tensor
    losses: Tensor
    outputs: Tensor | None

    def along_labels(self, values: Tensor) -> Tensor:
        """Values of the targets at the positions of their labels, and 0 elsewhere."""
        return values.new_zeros(self.labels.shape).masked_scatter(self.where, values)


def per_sample_loss(logits: Tensor, labels: Tensor, task: Task) -> Tensor:
    """The loss of each sample.

    | task                 | labels                           | loss of a sample                |
    | -------------------- | -------------------------------- | ------------------------------- |
    | causal_lm            | (batch, length), −100 is ignored | mean NLL of the next tokens     |
    | token_classification | (batch, length), −100 is ignored | mean NLL of the labeled tokens  |
    | classification       | (batch,) class indices           | NLL                             |
    | multi_label          | (batch, classes) of 0 and 1      | mean binary cross-entropy       |
    | regression           | (batch,) or (batch, outputs)     | mean squared error              |

    A sample without targets (all labels −100) has no loss: NaN.

    Example:
        >>> import torch
        >>> per_sample_loss(torch.zeros(2, 4), torch.tensor([0, 3]), "classification")
        tensor([1.3863, 1.3863])
    """
    losses = token_losses(logits, labels, task)
    return losses.sums(len(labels)) / count_targets(labels, task)


def token_losses(logits: Tensor, labels: Tensor, task: Task) -> TokenLosses:
    """The loss of every target, in order; tasks without tokens have one target per sample."""
    losses, sample, _ = _every_loss(logits, labels, task)
    if sample is not None:
        return TokenLosses(losses, sample)
    where = target_mask(labels, task)
    sample = torch.arange(len(labels), device=labels.device)
    return TokenLosses(losses[where], sample[where])


def _every_loss(logits: Tensor, labels: Tensor, task: Task) -> tuple[Tensor, Tensor | None, Tensor]:
    """The losses of all targets, their samples and outputs; without samples, one per sample or 0.

    Only the selection of targets synchronizes with a GPU.
    """
    where = target_mask(labels, task)
    if task == "classification":
        outputs = _wide(logits)
        nll = F.cross_entropy(outputs, labels.long(), reduction="none", ignore_index=IGNORED)
        return nll, None, outputs
    if task in ("regression", "multi_label"):
        outputs = target_outputs(logits, labels, task)
        wanted = labels.to(outputs).reshape(len(labels), -1)
        if outputs.shape != wanted.shape:
            raise ValueError(
                f"{task} compares outputs {tuple(outputs.shape)} with labels "
                f"{tuple(wanted.shape)}: the shapes must be equal"
            )
        if task == "regression":
            return (outputs - wanted).square().mean(1), None, outputs
        loss = F.binary_cross_entropy_with_logits(outputs, wanted, reduction="none")
        return loss.mean(1), None, outputs
    targets = where.flatten().nonzero().squeeze(1)
    # The logits at t of a causal model predict the label at t + 1.
    rows = targets - 1 if task == "causal_lm" else targets
    outputs = _wide(logits.flatten(0, 1)[rows])
    nll = F.cross_entropy(outputs, labels.flatten()[targets].long(), reduction="none")
    return nll, targets // labels.shape[1], outputs


def target_outputs(logits: Tensor, labels: Tensor, task: Task) -> Tensor:
    """The outputs for every target: one row each, in order, in at least float32."""
    if task in ("regression", "multi_label"):
        return _wide(logits).reshape(len(labels), -1)
    where = target_mask(labels, task)
    if task == "causal_lm":  # the logits at t predict the label at t + 1
        logits, where = logits[:, :-1], where[:, 1:]
    return _wide(logits[where])


def target_mask(labels: Tensor, task: Task) -> Tensor:
    """The labels that are targets: not −100, and in a causal model not the first position."""
    if task not in get_args(Task):
        raise ValueError(f"task must be one of {', '.join(get_args(Task))}, got {task!r}")
    if task in ("regression", "multi_label"):
        return torch.ones(len(labels), dtype=torch.bool, device=labels.device)
    dims = 1 if task == "classification" else 2
    if labels.dim() != dims or labels.is_floating_point():
        hint = "; for vectors of 0 and 1 the task is multi_label" if dims == 1 else ""
        raise ValueError(
            f"the labels of {task} must be integers with {dims} dimension(s), got {labels.dtype} "
            f"of shape {tuple(labels.shape)}{hint}"
        )
    where = labels != IGNORED
    if task == "causal_lm":
        where = where.clone()
        where[:, 0] = False
    return where


def count_targets(labels: Tensor, task: Task) -> Tensor:
    """The number of targets of each sample: target tokens, or 1."""
    return target_mask(labels, task).reshape(len(labels), -1).sum(1)


def _wide(tensor: Tensor) -> Tensor:
    """At least float32, also for half-precision logits."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def weighted_loss(
    logits: Tensor,
    labels: Tensor,
    weights: Tensor | Callable[[Predicted], Tensor | None] | None,
    task: Task,
    num_targets: Tensor | float | None = None,
) -> Tensor:
    """The loss to train on: Σ weight · loss over all targets, divided by the number of targets.

    Args:
        logits, labels, task: as in :func:`per_sample_loss`.
        weights: one per sample, or for token tasks one per label, in the shape of ``labels``. If
            None, all weights are 1. A function gets what the model predicts, and returns weights.
        num_targets: the number of targets of the *whole* update, over all micro-batches and devices
            (see :func:`global_targets`), so that gradients do not depend on the size of the
            micro-batches. If None, the targets of this batch are counted.

    Example:
        >>> import torch
        >>> logits, labels = torch.zeros(2, 4), torch.tensor([0, 3])
        >>> weighted_loss(logits, labels, torch.tensor([1.0, 0.5]), "classification")
        tensor(1.0397)
    """
    losses, sample, outputs = _every_loss(logits, labels, task)
    if callable(weights):
        where = target_mask(labels, task)
        chosen = ... if sample is not None else where
        found = Predicted(labels, where, losses.detach()[chosen], outputs.detach()[chosen])
        weights = weights(found)
    if weights is not None:
        weights = torch.as_tensor(weights).to(losses)
        if weights.shape == labels.shape[:1]:
            weights = weights if sample is None else weights[sample]
        elif weights.shape == labels.shape and labels.shape == target_mask(labels, task).shape:
            weights = weights[target_mask(labels, task)]
        else:
            raise ValueError(
                "weights must have one value per sample, "
                f"{tuple(labels.shape[:1])}, or one per label, {tuple(labels.shape)}; got "
                f"{tuple(weights.shape)}"
            )
    if num_targets is None:
        num_targets = target_mask(labels, task).sum().clamp(min=1)
    elif not isinstance(num_targets, Tensor) and not num_targets > 0:
        raise ValueError(f"num_targets must be > 0, got {num_targets!r}")
    if isinstance(num_targets, Tensor) and num_targets.dim():
        num_targets = num_targets.to(losses)
    return (losses if weights is None else weights * losses).sum() / num_targets


def global_targets(micro_batches: Iterable[Tensor], task: Task) -> Tensor:
    """The number of targets of one update, given the labels of all its micro-batches.

    On several ranks this is the total over all ranks divided by the number of ranks, because
    DistributedDataParallel averages the gradients instead of adding them.

    Example:
        >>> import torch
        >>> global_targets([torch.tensor([0, 3]), torch.tensor([1])], "classification")
        tensor(3.)
    """
    if isinstance(micro_batches, Tensor):
        raise TypeError("pass a list of label tensors, one per micro-batch of the update")
    counts = [target_mask(labels, task).sum() for labels in micro_batches]
    if not counts:
        raise ValueError("no micro-batches to count targets in")
    total = torch.stack(counts).sum()
    _, world = rank_and_world()
    if world > 1:
        if torch.distributed.get_backend() == "nccl":  # NCCL cannot reduce CPU tensors
            total = total.cuda()
        torch.distributed.all_reduce(total)
    return total.clamp(min=1).float() / world


def count_all(micro_batches: Sequence[Tensor], task: Task | LossFunction) -> Tensor:
    """:func:`global_targets`, also for a user's loss function, with one target per sample."""
    if isinstance(task, str):
        return global_targets(micro_batches, task)
    return global_targets(
        [torch.zeros(len(x), device=x.device) for x in micro_batches], "regression"
    )


def infer_task(model: Any) -> Task:
    """The task of a transformers model, from its class and configuration."""
    model = without_peft(model)
    name, config = type(model).__name__, getattr(model, "config", None)
    known = "ForCausalLM" in name or name in ("GPT2LMHeadModel", "BertLMHeadModel")
    if known or is_text_generator(type(model), config):
        return "causal_lm"
    if "ForTokenClassification" in name:
        return "token_classification"
    if "Classification" in name and config is not None:
        problem = getattr(config, "problem_type", None)
        if problem == "multi_label_classification":
            return "multi_label"
        if problem == "regression" or (problem is None and config.num_labels == 1):
            return "regression"
        return "classification"
    raise ValueError(
        f"the task of {name} is not known: pass task= one of {', '.join(get_args(Task))}, "
        "or a function (model, batch) -> one loss per sample"
    )
