"""The losses of one batch, without gradients and with little memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from holdfast._batch import inputs_and_labels, logits_of, take, to_device
from holdfast.objective._store import Row
from holdfast.objective.losses import Task, TokenLosses, count_targets, target_mask, token_losses

LossFunction = Callable[[nn.Module, Any], Tensor]
_CHUNK = 1 << 24  # logits in float32 at a time: 64 MB


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
        self.fits: float = float("inf")  # samples × length known to be too much: split before
        self.body_and_head: tuple[nn.Module, nn.Module] | None = None
        self.looked_for_head = False

    def __call__(self, batch: Any, indices: list[int]) -> list[Row]:
        size = len(indices)
        try:
            if size > 1 and _numel(batch) >= self.fits:
                raise torch.OutOfMemoryError
            with torch.autocast(
                self.device.type, dtype=self.autocast, enabled=self.autocast is not None
            ):
                return self._rows(batch, size)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            if size == 1:
                raise RuntimeError(
                    f"sample {indices[0]} alone does not fit into memory; use autocast, another "
                    "device, or a shorter maximum length"
                ) from error
            self.fits = min(self.fits, _numel(batch))
        # Outside the except clause, so that the failed attempt's tensors are gone.
        half = size // 2
        return self(take(batch, slice(0, half)), indices[:half]) + self(
            take(batch, slice(half, None)), indices[half:]
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
            return [Row(loss, 1, None) for loss in losses.double().tolist()]
        inputs, labels = inputs_and_labels(self.model, batch)
        found = self._token_losses(inputs, labels)
        counts = count_targets(labels, self.task)
        means = TokenLosses(found.values.double(), found.sample).sums(size) / counts
        pieces: list[Tensor | None] = [None] * size
        if self.tokens:
            pieces = list(found.values.float().cpu().split(counts.tolist()))
        return list(map(Row._make, zip(means.tolist(), counts.tolist(), pieces, strict=True)))

    def _token_losses(self, inputs: Any, labels: Tensor) -> TokenLosses:
        if self.task not in ("causal_lm", "token_classification"):
            return token_losses(logits_of(self.model, inputs), labels, cast(Task, self.task))
        where = target_mask(labels, self.task)
        predicts = where
        if self.task == "causal_lm":  # position t predicts the label at t + 1
            predicts = where.roll(-1, dims=1)
        body_and_head = self._find_head(inputs) if self.task == "causal_lm" else None
        if body_and_head:
            body, head = body_and_head
            nll = _chunked_nll(body(**inputs).last_hidden_state[predicts], labels[where], head)
        else:
            nll = _chunked_nll(logits_of(self.model, inputs)[predicts], labels[where], None)
        sample = torch.arange(len(labels), device=labels.device)[:, None].expand_as(where)
        return TokenLosses(nll, sample[where])

    def _find_head(self, inputs: Any) -> tuple[nn.Module, nn.Module] | None:
        """The body and the output layer of a transformers model, if its logits are no more.

        Then logits are computed for target positions only, and a few at a time. Some models do
        more (soft-capping, scaling): one sample is run both ways to see.
        """
        if not self.looked_for_head and isinstance(inputs, dict):
            self.looked_for_head = True
            body = getattr(self.model, "base_model", None)
            get_head = getattr(self.model, "get_output_embeddings", None)
            head = get_head() if callable(get_head) else None
            if body is not None and body is not self.model and head is not None:
                one = take(inputs, slice(0, 1))
                with contextlib.suppress(TypeError, AttributeError):
                    ours = head(body(**one).last_hidden_state)
                    if torch.allclose(ours, logits_of(self.model, one), rtol=1e-3, atol=1e-3):
                        self.body_and_head = body, head
        return self.body_and_head


def _chunked_nll(states: Tensor, targets: Tensor, head: nn.Module | None) -> Tensor:
    """Cross-entropy of many rows with few logits in float32 at a time.

    ``states`` are hidden states where there is a head to apply, else logits.
    """
    width = getattr(head, "out_features", None) or states.shape[-1]
    rows = max(1, _CHUNK // int(width))
    pieces = zip(states.split(rows), targets.split(rows), strict=True)
    return torch.cat(
        [states.new_empty(0, dtype=torch.float32)]
        + [
            F.cross_entropy((head(s) if head else s).float(), t, reduction="none")
            for s, t in pieces
        ]
    )


def _numel(batch: Any) -> int:
    """The size of a batch's inputs, to compare what fits into memory."""
    if isinstance(batch, Tensor):
        return batch.numel()
    values = batch.values() if isinstance(batch, Mapping) else batch
    return max((_numel(v) for v in values if isinstance(v, Tensor | Mapping)), default=0)


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
