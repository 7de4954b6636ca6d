"""Predictions of a masked language model for a fixed random choice of tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from holdfast._torch.batch import logits_of
from holdfast.io.models import Loaded

#: The share of tokens that is masked.
SHARE = 0.15


@torch.inference_mode()
def masked_log_probs(loaded: Loaded, text: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the log-probabilities at the masked tokens of each window, and the true tokens.

    The choice of tokens depends only on the text, so all models predict the same tokens.
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
