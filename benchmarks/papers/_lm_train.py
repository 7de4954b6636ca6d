"""Training a causal language model in steps that a CUDA graph can hold: batches and their loss.

The library's own loss picks the targets out, and so waits for the GPU to know how many there are.
Here every position has a label and a weight, 0 where there is no target; the sum is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from _loop import Batch, Loss
from torch import Tensor

from holdfast import Run
from holdfast._torch.teachers import DrawnTokens, Teacher

BATCH = 32
LENGTHS = (64, 128, 192, 256, 320, 384, 512)  # that batches are padded to: a CUDA graph for each
PIECE = 1 << 13  # tokens that go through SmolLM2-135M at a time: 9 GB of activations
SMOLLM2 = 30 * 576  # layers times the hidden size
ROWS = 1 << 11  # of logits at a time
ROWS_OF_RECALL = 16  # of a batch at a time


class HeadLoss(torch.autograd.Function):
    """Σ weight · divergence from a teacher, of the output layer's rows, a few at a time.

    The logits of a batch and what a loss keeps of them would be 10 GB. As there is one sum, the
    gradients can be had along with it.
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, head: Tensor, teacher: Teacher, weights: Tensor
    ) -> Tensor:
        dtype = matmul_dtype(head)
        with torch.autocast(states.device.type, enabled=False):
            w, total = head.to(dtype), states.new_zeros(())
            of_states = torch.empty_like(states)
            of_head = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
            for i in range(0, len(states), ROWS):
                part = slice(i, i + ROWS)
                some, scale = states[part].to(dtype), weights[part]
                values, gradient = teacher.compare(part, (some @ w.T).float())
                total = total + (values * scale).sum()
                g = gradient().mul_(scale[:, None]).to(dtype)
                of_states[part] = g @ w
                if of_head is not None:
                    of_head += g.T @ some
        ctx.save_for_backward(of_states, of_head)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        of_states, of_head = ctx.saved_tensors
        return of_states * grads[0], None if of_head is None else of_head * grads[0], None, None


head_loss = cast(Callable[..., Tensor], HeadLoss.apply)


def matmul_dtype(weight: Tensor) -> torch.dtype:
    """What a matrix is multiplied in."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def body_and_head(model: Any) -> tuple[Any, Tensor]:
    """What makes the hidden states, and the matrix that makes logits of them."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inner.model, inner.lm_head.weight


def tokens_at_a_time(config: Any) -> int:
    """How many tokens go through a model: fewer of a larger one, for the memory.

    >>> from types import SimpleNamespace as Config
    >>> [tokens_at_a_time(Config(num_hidden_layers=30, hidden_size=x)) for x in (64, 576, 1152)]
    [8192, 8192, 4096]
    """
    width: int = config.num_hidden_layers * config.hidden_size
    return min(PIECE, PIECE * SMOLLM2 // width)


def loss_of(model: Any, *more: Loss) -> Loss:
    """The training loss of a batch and more terms, without anything that waits for the GPU.

    All terms and pieces of a batch but the last leave their gradients at once.
    """
    body, head = body_and_head(model)
    most = tokens_at_a_time(body.config)

    def of_piece(ids: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        states = body(input_ids=ids, use_cache=False).last_hidden_state
        certain = DrawnTokens(labels.flatten(), torch.zeros_like(weights).flatten())
        return head_loss(states.flatten(0, 1), head, certain, weights.flatten())

    def loss(batch: Batch) -> Tensor:
        ids, weights = batch["input_ids"], batch["weights"] / batch["targets"]
        rows, done = max(1, most // ids.shape[1]), torch.zeros((), device=ids.device)
        parts = (t.split(rows) for t in (ids, batch["labels"], weights))
        terms = [partial(term, batch) for term in more]
        terms += [partial(of_piece, *piece) for piece in zip(*parts, strict=True)]
        *first, last = terms
        for term in first:
            part = term()
            with torch.autocast(ids.device.type, enabled=False):
                part.backward()
            done = done + part.detach()
        return last() + done

    return loss


def own_loss_of(run: Run) -> Loss:
    """The library's own loss of a batch, for methods that use the model's predictions.

    Objectives may look at the whole batch. Recalls add up, and need the memory: a few rows at a
    time, of which all but the last leave their gradients at once.
    """
    rows = ROWS_OF_RECALL if run.recall.uses_outputs else BATCH

    def loss(batch: Batch) -> Tensor:
        labels = torch.full_like(batch["labels"], -100)
        labels[:, 1:] = torch.where(batch["weights"] > 0, batch["labels"], -100)[:, :-1]
        whole = {"input_ids": batch["input_ids"], "labels": labels}
        whole |= {name: _column(run, name, batch) for name in run.recall.columns}
        parts = zip(*(tensor.split(rows) for tensor in whole.values()), strict=True)
        *first, last = (dict(zip(whole, part, strict=True)) for part in parts)
        done = torch.zeros((), device=labels.device)
        for part in first:
            value = run.criterion.loss(run.model, part, batch["targets"], 0)
            with torch.autocast(labels.device.type, enabled=False):
                value.backward()
            done = done + value.detach()
        return run.criterion.loss(run.model, last, batch["targets"], 0) + done

    return loss


def _column(run: Run, name: str, batch: Batch) -> Tensor:
    """What a recall has given each label of a batch's samples."""
    values = torch.zeros_like(batch["labels"])
    for row, sample in enumerate(batch["samples"].tolist()):
        given = torch.as_tensor(run.criterion.data[sample][name], device=values.device)
        values[row, : len(given)] = given
    return values


def weights_of(run: Run) -> list[Any]:
    """What the objective has given each sample: a weight, or one for each of its labels."""
    data, column = run.criterion.data, run.criterion.column
    return [1.0 if column is None else data[i][column] for i in range(len(data))]


def make_batches(
    samples: Sequence[dict[str, list[int]]], weights: Sequence[Any], seed: int, device: torch.device
) -> list[Batch]:
    """An epoch of full batches, of rows of like length; the same rows whatever the weights."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(samples), generator=generator).tolist()
    order = order[: len(order) // BATCH * BATCH]
    cut = [order[i : i + 50 * BATCH] for i in range(0, len(order), 50 * BATCH)]
    order = [i for some in cut for i in sorted(some, key=lambda i: len(samples[i]["input_ids"]))]
    rows = [order[i : i + BATCH] for i in range(0, len(order), BATCH)]
    rows = [rows[i] for i in torch.randperm(len(rows), generator=generator).tolist()]
    batches = [
        {"samples": torch.tensor(some)}
        | _batch([samples[i] for i in some], [weights[i] for i in some])
        for some in rows
    ]
    return [{name: t.to(device) for name, t in batch.items()} for batch in batches]


def _batch(samples: Sequence[dict[str, list[int]]], weights: Sequence[Any]) -> Batch:
    """Padded on the right. A label and its weight stand where the label is predicted."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    width = next(length for length in LENGTHS if length >= longest)
    ids = torch.zeros(len(samples), width, dtype=torch.long)
    labels, scales = torch.full_like(ids, -100), torch.zeros(ids.shape)
    for row, (sample, weight) in enumerate(zip(samples, weights, strict=True)):
        n = len(sample["input_ids"])
        ids[row, :n] = torch.tensor(sample["input_ids"])
        labels[row, : n - 1] = torch.tensor(sample["labels"][1:])
        given = torch.as_tensor(weight, dtype=torch.float32)
        scales[row, : n - 1] = given[1:] if given.dim() else given
    wanted = labels != -100
    return {
        "input_ids": ids, "labels": labels.clamp(min=0), "weights": scales * wanted,
        "targets": wanted.sum().float(),
    }  # fmt: skip
