"""The losses of one batch, without gradients and with little memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from holdfast._batch import inputs_and_labels, logits_of, take, to_device, unwrapped
from holdfast.losses import (
    TOKEN_TASKS,
    LossFunction,
    Task,
    TokenLosses,
    count_targets,
    target_mask,
    token_losses,
)
from holdfast.objective._store import Row

Head = Callable[[Tensor], Tensor]
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
        self.too_much = float("inf")  # elements of a batch that did not fit: halve it before
        self.found: tuple[nn.Module, Head] | None = None
        self.looked = False
        config = getattr(unwrapped(model), "config", None)
        if getattr(config, "is_encoder_decoder", False) and task in TOKEN_TASKS:
            raise ValueError(
                "the decoder's inputs of an encoder-decoder come from its labels: pass task= a "
                "function (model, batch) -> one loss a sample"
            )

    def __call__(self, batch: Any, indices: list[int]) -> list[Row]:
        size = len(indices)
        try:
            if size > 1 and _numel(batch) >= self.too_much:
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
        # Position t of a causal model predicts the label at t + 1.
        predicts = where.roll(-1, dims=1) if self.task == "causal_lm" else where
        body_and_head = self._find_head(inputs) if self.task == "causal_lm" else None
        if body_and_head:
            body, head = body_and_head
            states = _hidden_states(body, inputs)
            nll = _chunked_nll(states[predicts], labels[where].long(), head)
        else:
            logits = logits_of(self.model, inputs)
            nll = _chunked_nll(logits[predicts], labels[where].long(), None)
        sample = torch.arange(len(labels), device=labels.device)[:, None].expand_as(where)
        return TokenLosses(nll, sample[where])

    def _find_head(self, inputs: Any) -> tuple[nn.Module, Head] | None:
        """The body and the output layer of a transformers model, if its logits are no more.

        Then logits are computed for target positions only, and a few at a time. A few positions
        are run both ways to see.
        """
        if self.looked or not isinstance(inputs, dict):
            return self.found
        few = {k: v[:1, :16] if v.dim() > 1 else v[:1] for k, v in inputs.items()}
        try:
            body, head = _body_and_head(self.model)
            ours, theirs = head(_hidden_states(body, few)).float(), logits_of(self.model, few)
            error = (ours - theirs.float()).norm() / theirs.float().norm()
            tolerance = 1e-5 if ours.dtype == theirs.dtype else 1e-2
            self.found = (body, head) if error <= tolerance else None
        except (torch.OutOfMemoryError, RuntimeError, TypeError, ValueError, AttributeError) as e:
            if _is_out_of_memory(e):
                raise
        self.looked = True
        return self.found


def _body_and_head(model: nn.Module) -> tuple[nn.Module, Head]:
    inner: Any = unwrapped(model)
    if hasattr(inner, "get_base_model"):  # PEFT: the model with its adapters inside
        inner = inner.get_base_model()
    body, head = inner.base_model, inner.get_output_embeddings()
    if body is inner or head is None:
        raise AttributeError("no body apart from the head")
    config = inner.config.get_text_config() if hasattr(inner, "config") else None
    settings = config.to_dict() if config is not None else {}
    cap = settings.pop("final_logit_softcapping", None)
    if any("logit" in name and value not in (None, 1, False) for name, value in settings.items()):
        raise AttributeError("the logits are more than the head's output")  # scaled, in some way
    if cap is not None:
        return body, lambda states: cap * torch.tanh(head(states) / cap)
    return body, head


def _hidden_states(body: nn.Module, inputs: dict[str, Any]) -> Tensor:
    if "use_cache" in inspect.signature(body.forward).parameters:
        inputs = {**inputs, "use_cache": False}
    return cast(Tensor, body(**inputs).last_hidden_state)


def _chunked_nll(states: Tensor, targets: Tensor, head: Head | None) -> Tensor:
    """Cross-entropy of many rows with few logits in float32 at a time.

    ``states`` are hidden states where there is a head to apply, else logits.
    """
    pieces, start = [states.new_empty(0, dtype=torch.float32)], 0
    rows = 1 if head else max(1, _CHUNK // states.shape[-1])
    while start < len(states):
        some = states[start : start + rows]
        logits = (head(some) if head else some).float()
        pieces.append(F.cross_entropy(logits, targets[start : start + rows], reduction="none"))
        start += rows
        rows = max(1, _CHUNK // logits.shape[-1])  # known only now where there is a head
    return torch.cat(pieces)


def _numel(batch: Any) -> int:
    """The size of a batch's inputs, to compare what fits into memory."""
    if isinstance(batch, Tensor):
        return batch.numel()
    values = batch.values() if isinstance(batch, Mapping) else batch
    return max((_numel(v) for v in values if isinstance(v, Tensor | Mapping)), default=0)


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
