"""Masked language models: which tokens are masked, and what the model says of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from holdfast._torch.batch import logits_of
from holdfast._torch.progress import progress_bar
from holdfast.evaluate.stats import Samples
from holdfast.io.models import Loaded

__all__ = ["masked_log_probs", "masked_losses"]

SHARE = 0.15


def masked_losses(loaded: Loaded, text: str, name: str, *, progress: bool) -> Samples:
    """The loss of the masked tokens of each window of a text."""
    values, counts = [], []
    bar = progress_bar(None, name, shown=progress)
    for log_probs, wanted in masked_log_probs(loaded, text):
        values.append(float(F.nll_loss(log_probs, wanted, reduction="sum")))
        counts.append(len(wanted))
        bar.update(1)
    bar.close()
    return Samples(values, counts)


@torch.inference_mode()
def masked_log_probs(loaded: Loaded, text: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each window: the predictions for its masked tokens, a row each, and what they were.

    The choice of tokens depends on the text alone, so that both models are asked the same.
    """
    tokenizer = loaded.need_tokenizer("a text")
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    front = [t for t in [tokenizer.cls_token_id] if t is not None]
    back = [t for t in [tokenizer.sep_token_id] if t is not None]
    room = loaded.limit - len(front) - len(back)
    generator = torch.Generator().manual_seed(0)
    for start in range(0, len(ids), room):
        piece = torch.tensor(ids[start : start + room])
        chosen = torch.rand(len(piece), generator=generator) < SHARE
        chosen[torch.randint(len(piece), (1,), generator=generator)] |= not chosen.any()
        shown = piece.masked_fill(chosen, tokenizer.mask_token_id)
        row = torch.tensor([*front, *shown.tolist(), *back], device=loaded.device)[None]
        inputs = {"input_ids": row, "attention_mask": torch.ones_like(row)}
        logits = logits_of(loaded.model, inputs)[0, len(front) :][: len(piece)]
        log_probs = logits[chosen.to(logits.device)].float().log_softmax(-1)
        yield log_probs, piece[chosen].to(logits.device)
