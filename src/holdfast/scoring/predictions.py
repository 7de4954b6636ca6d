"""What a language model predicts at each position of given texts: some tokens, for unbiased KL.

The predictions are computed in one pass over the texts, in the precision of the caller, as a
training step computes them: at the same weights, the divergence from them is 0.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from holdfast._torch.dtypes import widen
from holdfast._torch.head_tap import Head, at_head
from holdfast._torch.lm_head import rows_per_chunk
from holdfast._torch.memory import Batches
from holdfast.scoring.draw import OnTokens, inverse_cdf

_TOKENS, _TOKENS_ON_A_CPU = 1 << 16, 1 << 11  # per forward pass; a CPU is faster within its cache


class Kept(NamedTuple):
    """The tokens that are kept per position, and their log-probabilities.

    Attributes:
        ids: positions × k, int32: the likeliest tokens, then some that are sampled from the others.
        log_probs: their log-probabilities, positions × k, in at least float32.
        rest: the probability of all tokens but the likeliest, positions, in the same dtype.
    """

    ids: Tensor
    log_probs: Tensor
    rest: Tensor


def sampled_tokens(kept: int, vocabulary: int) -> int:
    """How many of the tokens that are kept per position are sampled: a quarter."""
    return 0 if kept >= vocabulary else max(1, kept // 4)


def kept_bytes(kept: int, vocabulary: int) -> int:
    """The bytes that are kept per position of a model in float32 or less: ids, log-probs, rest.

    >>> kept_bytes(64, 50_000)
    516
    """
    return 8 * min(kept, vocabulary) + 4


def kept_tokens(logits: Tensor, kept: int, noise: Tensor) -> Kept:
    """Choose the tokens to keep per row of logits.

    The likeliest tokens come first, then tokens that are sampled from the others in proportion to
    their probabilities, at equal distances in their cumulative sum. A token may be sampled more
    than once. ``kept`` is at least 2. ``noise``, one number per row, is uniform in [0, 1), in
    float64: in float32, unlikely tokens would be lost.
    """
    if logits.device.type == "mps":  # which has no float64
        logits = logits.cpu()
    log_probs = widen(logits).log_softmax(-1)
    kept = min(kept, logits.shape[-1])
    sampled = sampled_tokens(kept, logits.shape[-1])
    ids = log_probs.topk(kept - sampled).indices
    others = log_probs.exp().scatter_(-1, ids, 0)
    if sampled:
        noise = noise.to(logits.device, torch.float64, non_blocking=True)[:, None]
        points = (noise + torch.arange(sampled, device=noise.device)) / sampled
        found = inverse_cdf(others, points)
        # If the others have no probability, the likeliest token stands for them.
        found = found.where(others.gather(-1, found) > 0, ids[:, :1])
        ids = torch.cat([ids, found], -1)
    rest = others.sum(-1, dtype=torch.float64)
    return Kept(ids.int(), log_probs.gather(-1, ids), rest.to(log_probs.dtype))


Compared = Callable[[Tensor, slice], Tensor]  # logits of some rows, which ones → those to compare


def kept_at(
    model: nn.Module,
    inputs: Mapping[str, Any],
    where: Tensor,
    top: int,
    noise: Tensor,
    compared: Compared = lambda logits, part: logits,
) -> tuple[Kept, int]:
    """The tokens to keep of a model's predictions at chosen positions, and how many are sampled.

    Args:
        model, inputs: a model with an output per token, and its arguments.
        where: a mask, batch × length, of the positions. One on the CPU saves a synchronization.
        top, noise: the number of tokens to keep, and a number per position, for
            :func:`kept_tokens`.
        compared: called with the logits of some of the positions, in at least float32, and with the
            slice of the positions. The tokens are those of the logits that it returns.

    Returns:
        The tokens in the order of the positions in the flattened batch, on the CPU.
    """
    parts: list[Kept] = []
    sampled = 0

    def keep(states: Tensor, head: Head | None) -> Tensor:
        nonlocal sampled
        parts.clear()  # a job may run twice
        vocabulary = states.shape[-1] if head is None else head.vocabulary
        size = rows_per_chunk(vocabulary, states.device)
        for start in range(0, max(1, len(states)), size):
            part = slice(start, start + size)
            logits = states[part] if head is None else head(states[part])
            chosen = compared(widen(logits), part)
            sampled = sampled_tokens(top, chosen.shape[-1])
            parts.append(kept_tokens(chosen, top, noise[part]))
        return states.new_zeros(())

    at_head(model, inputs, where.shape, where.flatten().nonzero().squeeze(1), keep)
    # Once per pass: the host must not wait for each chunk.
    return Kept(*(torch.cat(part).cpu() for part in zip(*parts, strict=True))), sampled


def positions(lengths: Tensor, starts: Tensor) -> Tensor:
    """The positions that predict a token after the start of each text, texts × longest.

    Position p predicts token p + 1.
    """
    at = torch.arange(int(lengths.max()))
    return (at >= starts[:, None] - 1) & (at < lengths[:, None] - 1)


class Predictor:
    """Computes the predictions of a causal language model for given texts.

    Attributes:
        sampled: how many of the tokens that are kept per position are sampled, after a call.
    """

    sampled = 0

    def __init__(self, model: nn.Module, length: int, top: int) -> None:
        self.model, self.top = model, top
        self.device = next(model.parameters()).device
        most = _TOKENS_ON_A_CPU if self.device.type == "cpu" else _TOKENS
        self.batches = Batches(max(1, most // length), self._free)

    def __call__(
        self,
        tokens: Tensor,
        lengths: Tensor,
        starts: Tensor,
        noise: Tensor,
        on_tokens: OnTokens = lambda _: None,
    ) -> Kept:
        """Return the predictions of all tokens but those at the start of each text.

        Args:
            tokens: texts × longest, padded on the right.
            lengths: the tokens of each text.
            starts: how many of them, the first ones, are not predicted.
            noise: uniform in [0, 1), texts × positions, float64. Each text uses the first ones.
            on_tokens: called with the number of tokens since its last call.

        Returns:
            The predictions of all texts, with dimensions texts × positions. Those after the end of
            a text are 0.
        """

        def predict(part: slice) -> Kept:
            found = self._predict(tokens[part], lengths[part], starts[part], noise[part])
            on_tokens(int((lengths - starts)[part].sum()))
            return found

        parts = self.batches(len(tokens), predict)
        return Kept(*map(torch.cat, zip(*parts, strict=True)))

    def _predict(self, tokens: Tensor, lengths: Tensor, starts: Tensor, noise: Tensor) -> Kept:
        longest = int(lengths.max())
        is_used = torch.arange(noise.shape[1]) < (lengths - starts)[:, None]
        inputs = {
            "input_ids": tokens[:, :longest].long().to(self.device),
            "attention_mask": (torch.arange(longest) < lengths[:, None]).long().to(self.device),
        }
        where = positions(lengths, starts)
        kept, self.sampled = kept_at(self.model, inputs, where, self.top, noise[is_used])
        found = []
        for flat in (kept.ids, kept.log_probs.float(), kept.rest.float()):
            found.append(flat.new_zeros(*is_used.shape, *flat.shape[1:]))
            found[-1][is_used] = flat
        return Kept(*found)

    def _free(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
