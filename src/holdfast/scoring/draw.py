"""Draw texts from a causal language model, from its own distribution."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


@torch.inference_mode()
def draw_texts(
    model: nn.Module,
    count: int,
    tokens: int,
    *,
    prefix: Sequence[int],
    seed: int = 0,
    batch_size: int | None = None,
) -> list[list[int]]:
    """Draw texts token by token at temperature 1 from the whole vocabulary.

    Each text is the prefix, usually only BOS, then at most ``tokens`` drawn tokens: it ends earlier
    if an end-of-sequence token is drawn. ``batch_size`` texts are drawn at a time. If None, all are
    drawn together. The global random state is restored afterwards.
    """
    device = next(model.parameters()).device
    ends = _end_tokens(model).to(device)
    size = batch_size or count
    texts: list[list[int]] = []
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for start in range(0, count, size):
            first = torch.tensor([list(prefix)], device=device)
            texts += _draw(model, first.repeat(min(size, count - start), 1), tokens, ends)
    return texts


def _draw(model: Any, drawn: Tensor, tokens: int, ends: Tensor) -> list[list[int]]:
    ended = torch.zeros(len(drawn), dtype=torch.bool, device=drawn.device)
    lengths = torch.full((len(drawn),), drawn.shape[1], device=drawn.device)
    cache: Any = None
    for _ in range(tokens):
        out = model(
            input_ids=drawn if cache is None else drawn[:, -1:],
            attention_mask=torch.ones_like(drawn),
            past_key_values=cache,
            use_cache=True,
        )
        cache = getattr(out, "past_key_values", None)
        following = torch.multinomial(out.logits[:, -1].float().softmax(-1), 1)
        lengths += ~ended
        drawn = torch.cat([drawn, following], 1)
        ended |= torch.isin(following[:, 0], ends)
        if bool(ended.all()):
            break
    return [row[:length] for row, length in zip(drawn.tolist(), lengths.tolist(), strict=True)]


def _end_tokens(model: Any) -> Tensor:
    config = getattr(model, "generation_config", None) or model.config
    end = getattr(config, "eos_token_id", None)
    return torch.tensor([] if end is None else end, dtype=torch.long).reshape(-1)
