"""The losses of one batch, without gradients and with little memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from holdfast._torch.adapters import unwrapped
from holdfast._torch.batch import inputs_and_labels, logits_of, take, to_device
from holdfast._torch.lm_head import Split, is_out_of_memory, predict
from holdfast.losses import (
    TOKEN_TASKS,
    LossFunction,
    Task,
    TokenLosses,
    count_targets,
    target_mask,
    token_losses,
)
from holdfast.scoring.cache import Row


class Scorer:
    """The losses of one batch, halved until it fits into memory."""

    def __init__(
        self,
        model: nn.Module,
        task: Task | LossFunction,
        tokens: bool,
        autocast: torch.dtype | None,
    ) -> None:
        self.model, self.task, self.tokens = model, task, tokens
        self.device = next(model.parameters()).device
        self.autocast = autocast
        self.too_much = float("inf")  # elements of a batch that did not fit: halve it before
        self.split = Split(model)
        config = getattr(unwrapped(model), "config", None)
        if getattr(config, "is_encoder_decoder", False) and task in TOKEN_TASKS:
            raise ValueError(
                "the decoder's inputs of an encoder-decoder come from its labels: pass task= a "
                "function (model, batch) -> one loss a sample"
            )

    def __call__(self, batch: Any, indices: list[int]) -> list[Row]:
        """Score one batch."""
        size = len(indices)
        try:
            if size > 1 and _numel(batch) >= self.too_much:
                raise torch.OutOfMemoryError
            with torch.autocast(
                self.device.type, dtype=self.autocast, enabled=self.autocast is not None
            ):
                return self._rows(batch, size)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if size == 1:
                raise RuntimeError(
                    f"sample {indices[0]} alone does not fit into memory; use autocast, another "
                    "device, or a shorter maximum length"
                ) from error
            self.too_much = min(self.too_much, _numel(batch))
        # Outside the except clause, so that the failed attempt's tensors are gone.
        half = size // 2
        return self(take(batch, slice(0, half), size), indices[:half]) + self(
            take(batch, slice(half, None), size), indices[half:]
        )

    def _rows(self, batch: Any, size: int) -> list[Row]:
        batch = to_device(batch, self.device)
        if not isinstance(self.task, str):
            losses = self.task(self.model, batch)
            if losses.shape != (size,):
                raise ValueError(
                    f"the loss function must return one loss a sample, {(size,)}, got "
                    f"{tuple(losses.shape)}"
                )
            return [Row(loss, 1, None) for loss in losses.tolist()]
        inputs, labels = inputs_and_labels(self.model, batch)
        found = self._token_losses(inputs, labels)
        values, sample = found.values.float().cpu(), found.sample.cpu()
        counts = count_targets(labels, self.task).cpu()
        means = TokenLosses(values.double(), sample).sums(size) / counts
        pieces: list[Tensor | None] = [None] * size
        if self.tokens:
            # Copies: a view would be pickled with all that it is a view of.
            pieces = [piece.clone() for piece in values.split(counts.tolist())]
        return list(map(Row._make, zip(means.tolist(), counts.tolist(), pieces, strict=True)))

    def _token_losses(self, inputs: Any, labels: Tensor) -> TokenLosses:
        if self.task not in TOKEN_TASKS:
            return token_losses(logits_of(self.model, inputs), labels, cast(Task, self.task))
        where = target_mask(labels, self.task)
        if self.task == "causal_lm":  # position t predicts the label at t + 1
            predictions, predicts = self.split(inputs), where.roll(-1, dims=1)
        else:
            predictions, predicts = predict(self.model, inputs), where
        sample = torch.arange(len(labels), device=labels.device)[:, None].expand_as(where)
        return TokenLosses(predictions.nll(predicts, labels[where].long()), sample[where])


def _numel(batch: Any) -> int:
    """The size of a batch's inputs, to compare what fits into memory."""
    if isinstance(batch, Tensor):
        return batch.numel()
    values = batch.values() if isinstance(batch, Mapping) else batch
    return max((_numel(v) for v in values if isinstance(v, Tensor | Mapping)), default=0)
