"""Losses per sample, and the weighted loss to train on.

In every task a sample has a sum of losses and a number of targets. The loss of a sample is their
quotient. The training loss is the weighted sum over all samples, divided by the number of targets
in the whole batch. The sum of a causal language model is computed from a chunk of logits at a time.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from holdfast._torch.adapters import without_peft
from holdfast._torch.batch import logits_and_auxiliary
from holdfast._torch.dtypes import widen
from holdfast._torch.head_loss import Chunks, RowLoss, loss_at_head
from holdfast._torch.layout import rank_and_world
from holdfast._torch.multimodal import is_text_generator
from holdfast._torch.teachers import DrawnTokens

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
    """What a model predicts for targets of a batch, all of them or a part, without gradients.

    Attributes:
        labels: the labels of the batch.
        where: which labels are these targets, in the shape of the labels.
        losses: the loss of each of these targets, in order.
        outputs: a row of logits per target; None if they are not kept.
    """

    labels: Tensor
    where: Tensor
    losses: Tensor
    outputs: Tensor | None

    def along_labels(self, values: Tensor) -> Tensor:
        """Values of the targets at the positions of their labels, and 0 elsewhere."""
        return values.new_zeros(self.labels.shape).masked_scatter(self.where, values)


Weights = Tensor | Callable[[Predicted], Tensor | None] | None  # those of weighted_loss
#: Rows of the targets of a batch, their outputs and labels → a sum over them, with a gradient.
OnTargets = Callable[[slice, Tensor, Tensor], Tensor]


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
    losses, targets, _ = _every_loss(logits, labels, task)
    if targets is not None:
        return TokenLosses(losses, targets // labels.shape[1])
    where = target_mask(labels, task)
    sample = torch.arange(len(labels), device=labels.device)
    return TokenLosses(losses[where], sample[where])


def _every_loss(logits: Tensor, labels: Tensor, task: Task) -> tuple[Tensor, Tensor | None, Tensor]:
    """The losses of all targets, their places in the flattened labels, and their outputs.

    In tasks without tokens there are no places, and one loss per sample, 0 without a target. Only
    the selection of targets synchronizes with a GPU.
    """
    where = target_mask(labels, task)
    if task == "classification":
        outputs = widen(logits)
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
    outputs = widen(logits.flatten(0, 1)[rows])
    nll = F.cross_entropy(outputs, labels.flatten()[targets].long(), reduction="none")
    return nll, targets, outputs


def target_outputs(logits: Tensor, labels: Tensor, task: Task) -> Tensor:
    """The outputs for every target: one row each, in order, in at least float32."""
    if task in ("regression", "multi_label"):
        return widen(logits).reshape(len(labels), -1)
    where = target_mask(labels, task)
    if task == "causal_lm":  # the logits at t predict the label at t + 1
        logits, where = logits[:, :-1], where[:, 1:]
    return widen(logits[where])


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


def weighted_loss(
    logits: Tensor,
    labels: Tensor,
    weights: Weights,
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
    return per_target(_weighted_sum(logits, labels, weights, task), labels, task, num_targets)


def summed_loss(
    model: nn.Module,
    inputs: Any,
    labels: Tensor,
    weights: Weights,
    task: Task,
    *,
    needs_batch: bool = False,
    on_targets: OnTargets | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run a model on a batch: Σ weight · loss over all targets, and the model's auxiliary loss.

    A causal language model computes the logits of its targets only, and a chunk of them at a time.

    Args:
        labels, weights, task: as in :func:`weighted_loss`. A function for the weights gets a part
            of the targets at a time.
        needs_batch: whether the function for the weights needs all targets of the batch at once.
            The output layer of a causal language model then runs twice, and the function gets no
            outputs.
        on_targets: returns a sum over some targets to add. It is called until it had all of them.
    """
    if task == "causal_lm":
        loss = _CausalLoss(labels, weights, needs_batch, on_targets)
        return loss_at_head(model, inputs, labels.shape, loss.targets - 1, loss)
    logits, auxiliary = logits_and_auxiliary(model, inputs)
    total = _weighted_sum(logits, labels, weights, task)
    if on_targets is not None:
        outputs = target_outputs(logits, labels, task)
        targets = labels[target_mask(labels, task)]
        total = total + on_targets(slice(0, len(outputs)), outputs, targets)
    return total, auxiliary


def _weighted_sum(logits: Tensor, labels: Tensor, weights: Weights, task: Task) -> Tensor:
    losses, targets, outputs = _every_loss(logits, labels, task)
    if callable(weights):
        where = target_mask(labels, task)
        chosen = ... if targets is not None else where
        found = Predicted(labels, where, losses.detach()[chosen], outputs.detach()[chosen])
        weights = weights(found)
    if weights is None:
        return losses.sum()
    return (_of_targets(weights, labels, targets).to(losses) * losses).sum()


class _CausalLoss(RowLoss):
    """Σ weight · loss over the targets of a causal language model, and a sum of a recall.

    Attributes:
        targets: the places of the targets in the flattened labels. The logits one place before
            predict them.
    """

    def __init__(
        self, labels: Tensor, weights: Weights, needs_batch: bool, on_targets: OnTargets | None
    ) -> None:
        self.labels, self.weights, self.on_targets = labels, weights, on_targets
        self.needs_batch = needs_batch
        # A comparison has about ten tensors of the size of the logits, the loss alone two.
        self.parts = 1 if on_targets is None else 4
        self.where = target_mask(labels, "causal_lm")
        self.targets = self.where.flatten().nonzero().squeeze(1)
        self.ids = labels.flatten()[self.targets].long()
        # A token of probability 1 is drawn: the divergence is the loss.
        self.given = DrawnTokens(self.ids, torch.zeros_like(self.ids, dtype=torch.float32))
        self.known: Tensor | None = None  # weights
        if not callable(weights):
            self.known = weights

    def look(self, chunks: Chunks) -> None:
        if callable(self.weights) and self.needs_batch:
            losses = torch.cat([self.given.compare(*chunk)[0] for chunk in chunks])
            found = Predicted(self.labels, self.where, losses.to(self.labels.device), None)
            self.known = self.weights(found)

    def at(self, part: slice, logits: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        losses, slope = self.given.compare(part, logits)
        weights = self._weights(part, losses, logits)
        if weights is None:
            total, gradient = losses.sum(), slope
        else:
            scale = weights[:, None]
            total, gradient = (weights * losses).sum(), lambda: slope().mul_(scale)
        if self.on_targets is None:
            return total, gradient
        outputs = logits.detach().requires_grad_()
        with torch.enable_grad():
            more = self.on_targets(part, outputs, self.ids[part].to(logits.device))
        return total + more.detach(), lambda: gradient().add_(*torch.autograd.grad(more, outputs))

    def _weights(self, part: slice, losses: Tensor, logits: Tensor) -> Tensor | None:
        """The weights of a part of the targets; None if all are 1."""
        targets, weights = self.targets[part], self.known
        if callable(self.weights) and not self.needs_batch:
            where = torch.zeros_like(self.where).flatten().index_fill(0, targets, True)
            where = where.reshape(self.where.shape)
            weights = self.weights(
                Predicted(self.labels, where, losses.to(self.labels.device), logits)
            )
        return None if weights is None else _of_targets(weights, self.labels, targets).to(losses)


def _of_targets(weights: Tensor, labels: Tensor, targets: Tensor | None) -> Tensor:
    """The weights of the targets at these places in the flattened labels; without places, all."""
    weights = torch.as_tensor(weights).to(labels.device)
    if weights.shape == labels.shape[:1]:
        return weights if targets is None else weights[targets // labels.shape[1]]
    if weights.shape == labels.shape and targets is not None:
        return weights.flatten()[targets]
    raise ValueError(
        f"weights must have one value per sample, {tuple(labels.shape[:1])}, or one per label, "
        f"{tuple(labels.shape)}; got {tuple(weights.shape)}"
    )


def per_target(total: Tensor, labels: Tensor, task: Task, num_targets: Count | None) -> Tensor:
    """A sum over targets, divided by their number in the whole update, or in the batch if None."""
    if num_targets is None:
        num_targets = target_mask(labels, task).sum().clamp(min=1)
    elif not isinstance(num_targets, Tensor) and not num_targets > 0:
        raise ValueError(f"num_targets must be > 0, got {num_targets!r}")
    if isinstance(num_targets, Tensor) and num_targets.dim():
        num_targets = num_targets.to(total)
    return total / num_targets


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
