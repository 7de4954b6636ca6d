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

    With r = q/p, KL = Σ p·(r − 1 − log r), because Σ p·(r − 1) = 0. No term is negative, and all
    are 0 where q = p, so that their sum over some tokens has little noise near the pretrained
    model, unlike that of p·log(p/q). Each of the m sampled tokens stands for an m-th of the
    probability that the others have, P:

        Σ p·(r − 1 − log r) over the likeliest  +  P/m · Σ (r − 1 − log r) over the sampled

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
        """The estimate is Σ w·(r − 1 − log r); ∂/∂z of a term is w·(r − 1)·(its token − q)."""
        ids = _moved(self.ids[rows], logits.device).long()
        log_p = _moved(self.log_probs[rows], logits.device).to(logits.dtype)
        weights = log_p.exp()
        if self.sampled:
            rest = _moved(self.rest[rows], logits.device).to(logits.dtype)
            weights[:, -self.sampled :] = rest[:, None] / self.sampled
        log_q = logits.log_softmax(1)
        log_q_kept = log_q.gather(1, ids)
        log_r = log_q_kept - log_p
        change = log_q_kept.exp() - weights  # w·(r − 1) of the likeliest, also where p is 0
        if self.sampled:
            of_sampled = log_r[:, -self.sampled :].clamp(max=_MOST_LOG_R).expm1()
            change[:, -self.sampled :] = of_sampled * weights[:, -self.sampled :]
        total = change.sum(1, keepdim=True)
        values = total[:, 0] - (log_r * weights).masked_fill_(weights == 0, 0).sum(1)
        return values, lambda: log_q.exp_().mul_(-total).scatter_add_(1, ids, change)


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

    def compare(self, rows: slice, logits: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        """KL = Σ p·log(p/q); ∂KL/∂z = q − p."""
        states = self.states[rows]
        with torch.no_grad():
            theirs = states if self.head is None else self.head(states)
        log_p = _moved(theirs, logits.device).to(logits.dtype).log_softmax(1)
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
