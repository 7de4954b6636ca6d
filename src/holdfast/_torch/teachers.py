"""What the pretrained model predicts at given positions, and how far a model's logits are from it.

With p the pretrained model's distribution of the next token and q = softmax(z) the model's, all
teachers give KL(p ‖ q) or an estimate of it per position, and its gradient with respect to z.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_MOST_LOG_R = 30.0  # of a sampled token, so that its exponential is finite
_FAR = 5.0  # the noise is canceled by half where KL is 1/5


class Teacher(Protocol):
    """The predictions of the pretrained model at n positions."""

    def __len__(self) -> int: ...

    def compare(self, rows: slice, logits: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        """The divergence at each of the positions ``rows``, and a function for its gradient.

        ``logits`` are those of the model, in float32 or float64; they are not changed. The function
        can be called once.
        """
        ...


@dataclass(frozen=True)
class KeptTokens:
    """The likeliest tokens, and a few sampled from the others: an unbiased estimate of KL.

    With r = q/p, and weights w that are p for the likeliest tokens and P/m for each of the m
    sampled tokens, which stand for the probability P of the others:

        −Σ w·log r  +  c·Σ w·(r − 1),    c = 1 / (1 + 5·Σ p·(r − 1 − log r) over the likeliest)

    The first sum is an unbiased estimate of KL = −Σ p·log r. The mean of the second is 0, because
    Σ p·(r − 1) = 0 over all tokens. It cancels the noise of the first near the pretrained model,
    where log r is about r − 1. Far from it, r has outliers, and c is small.

    KL over the likeliest and "another token" would be a lower bound, and would let the model move
    probability within the others: too many of a language model's tokens are unlikely ones.

    Attributes:
        ids: n × k token ids, the likeliest first.
        log_probs: n × k log-probabilities.
        rest: P, n probabilities.
        sampled: m, the last columns. 0 if k is the size of the vocabulary.
    """

    ids: Tensor
    log_probs: Tensor
    rest: Tensor
    sampled: int

    def __post_init__(self) -> None:
        if self.ids.dim() != 2 or self.ids.shape != self.log_probs.shape:
            raise ValueError(
                "ids and log_probs must both have the shape positions × k, got "
                f"{tuple(self.ids.shape)} and {tuple(self.log_probs.shape)}"
            )

    def __len__(self) -> int:
        return len(self.ids)

    def compare(self, rows: slice, logits: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        """∂/∂z of the terms of a token is (c·w·(r − 1) − (1 − c)·w)·(1 at the token, minus q)."""
        ids = _moved(self.ids[rows], logits.device).long()
        log_p = _moved(self.log_probs[rows], logits.device).to(logits.dtype)
        likeliest = slice(0, ids.shape[1] - self.sampled)
        weights = log_p.exp()
        if self.sampled:
            rest = _moved(self.rest[rows], logits.device).to(logits.dtype)
            weights[:, likeliest.stop :] = rest[:, None] / self.sampled
        log_q = logits.log_softmax(1)
        log_q_kept = log_q.gather(1, ids)
        log_r = (log_q_kept - log_p).masked_fill_(weights == 0, 0)
        grown = log_r.clamp(max=_MOST_LOG_R).expm1_().mul_(weights)  # w·(r − 1)
        grown[:, likeliest] = (log_q_kept.exp_() - weights)[:, likeliest]  # also where p is 0
        apart = weights * log_r
        c = 1 / (1 + _FAR * (grown - apart)[:, likeliest].sum(1, keepdim=True))
        slopes = c * (grown + weights) - weights
        down = slopes.sum(1, keepdim=True)
        values = (c * grown - apart).sum(1)
        return values, lambda: log_q.exp_().mul_(-down).scatter_add_(1, ids, slopes)


@dataclass(frozen=True)
class AllTokens:
    """The whole distribution: KL over the vocabulary.

    Attributes:
        states: the hidden states of the pretrained model at n positions, or its logits.
        head: maps states to logits; None if the states are logits or log-probabilities.
    """

    states: Tensor
    head: Callable[[Tensor], Tensor] | None = None

    def __len__(self) -> int:
        return len(self.states)

    def logits(self, rows: slice) -> Tensor:
        """The logits at some positions."""
        states = self.states[rows]
        with torch.no_grad():
            return states if self.head is None else self.head(states)

    def compare(self, rows: slice, logits: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        """KL = Σ p·log(p/q); ∂KL/∂z = q − p."""
        log_p = _moved(self.logits(rows), logits.device).to(logits.dtype).log_softmax(1)
        p, log_q = log_p.exp(), logits.log_softmax(1)
        return _kl(p, log_p, log_q), lambda: log_q.exp_().sub_(p)


@dataclass(frozen=True)
class DrawnTokens:
    """One token per position, drawn from the pretrained model: log p − log q estimates KL.

    The mean over drawn tokens is unbiased. Its gradient is that of the cross-entropy of the tokens.

    Attributes:
        ids: n token ids.
        log_probs: their n log-probabilities under the pretrained model.
    """

    ids: Tensor
    log_probs: Tensor

    def __post_init__(self) -> None:
        if self.ids.dim() != 1 or self.ids.shape != self.log_probs.shape:
            raise ValueError(
                "ids and log_probs must have one value per position, got the shapes "
                f"{tuple(self.ids.shape)} and {tuple(self.log_probs.shape)}"
            )

    def __len__(self) -> int:
        return len(self.ids)

    def compare(self, rows: slice, logits: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        """The value is log p − log q of the token x; ∂/∂z = q, minus 1 at x."""
        ids = _moved(self.ids[rows], logits.device).long()[:, None]
        log_p = _moved(self.log_probs[rows], logits.device).to(logits.dtype)
        log_q = logits.log_softmax(1)
        ratio = log_p - log_q.gather(1, ids)[:, 0]
        one = torch.ones_like(ids, dtype=logits.dtype)
        return ratio, lambda: log_q.exp_().scatter_add_(1, ids, -one)


def _kl(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Σ p·(log p − log q) of each row, with 0·log 0 = 0."""
    return (log_p - log_q).mul_(p).masked_fill_(p == 0, 0).sum(1)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device, non_blocking=True)
