"""Training a causal language model in steps that a CUDA graph can hold: batches and their loss.

The library's own loss picks the targets out, and so waits for the GPU to know how many there are.
Here every position has a label and a weight, 0 where there is no target; the sum is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from _loop import Batch, Loss
from torch import Tensor

from holdfast import Run

BATCH = 32
LENGTHS = (128, 192, 256, 320, 384, 512)  # that batches are padded to: a CUDA graph for each
PIECE = 1 << 13  # tokens that go through the model at a time: 9 GB of activations
ROWS = 1 << 11  # of logits at a time


class HeadLoss(torch.autograd.Function):
    """Σ weight · cross-entropy of the output layer, its gradients taken a few rows at a time.

    The logits of a batch and what cross-entropy keeps of them would be 10 GB. As there is one sum,
    the gradients can be had along with it.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        kind = states.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else head.dtype
        with torch.autocast(kind, enabled=False):
            w, total = head.to(dtype), states.new_zeros(())
            of_states = torch.empty_like(states)
            of_head = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
            for i in range(0, len(states), ROWS):
                some, y = states[i : i + ROWS].to(dtype), labels[i : i + ROWS, None]
                scale = weights[i : i + ROWS, None]
                logs = (some @ w.T).float().log_softmax(-1)
                total = total - (logs.gather(1, y) * scale).sum()
                g = logs.exp_().scatter_add_(1, y, -torch.ones_like(scale)).mul_(scale).to(dtype)
                of_states[i : i + ROWS] = g @ w
                if of_head is not None:
                    of_head += g.T @ some
        ctx.save_for_backward(of_states, of_head)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        of_states, of_head = ctx.saved_tensors
        return of_states * grads[0], None if of_head is None else of_head * grads[0], None, None


head_loss = cast(Callable[..., Tensor], HeadLoss.apply)


def loss_of(model: Any) -> Loss:
    """The training loss of a batch, without anything that waits for the GPU.

    Of a batch of long rows all pieces but the last leave their gradients at once.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    body, head = inner.model, inner.lm_head.weight

    def of_piece(ids: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        states = body(input_ids=ids, use_cache=False).last_hidden_state
        return head_loss(states.flatten(0, 1), head, labels.flatten(), weights.flatten())

    def loss(batch: Batch) -> Tensor:
        ids, weights = batch["input_ids"], batch["weights"] / batch["targets"]
        rows, done = max(1, PIECE // ids.shape[1]), torch.zeros((), device=ids.device)
        parts = (t.split(rows) for t in (ids, batch["labels"], weights))
        *first, last = zip(*parts, strict=True)
        for piece in first:
            part = of_piece(*piece)
            with torch.autocast(ids.device.type, enabled=False):
                part.backward()
            done = done + part.detach()
        return of_piece(*last) + done

    return loss


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
    batches = [_batch([samples[i] for i in some], [weights[i] for i in some]) for some in rows]
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
