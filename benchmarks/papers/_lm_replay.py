"""Self-replay in steps that a CUDA graph can hold: the library's term with fixed shapes.

The library's own term picks the positions that count. Here every text has as many positions as the
one with the most drawn tokens, with weight 0 beyond its end; the sum is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from _lm_train import body_and_head, head_loss, matmul_dtype
from _loop import Batch, Loss
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from holdfast import Run
from holdfast._torch.teachers import AllTokens, KeptTokens, Teacher


def replayed(run: Run, batches: Sequence[Batch], device: torch.device) -> list[Loss]:
    """What a run that replays texts adds to the loss of its batches; of another run, nothing."""
    if not hasattr(run.recall, "pool"):
        return []
    replay = Replay(run, device)
    for update, batch in enumerate(batches, 1):
        replay.add(batch, update)
    return [replay]


class Replay:
    """What the texts of a run's pool add to the loss of a batch. The pool lies on the device."""

    whole: type[AllTokens] = AllTokens  # the teacher without kept predictions

    def __init__(self, run: Run, device: torch.device) -> None:
        self.term, self.model, self.device = cast(Any, run.recall), run.model, device
        pool = self.term.pool
        drawn = torch.arange(pool.rest.shape[1])
        self.tokens, self.ids, self.log_probs, self.rest, self.at, self.counts = (
            tensor.to(device)
            for tensor in (
                pool.tokens, pool.ids, pool.log_probs, pool.rest,
                (pool.starts[:, None] - 1 + drawn).clamp(max=pool.tokens.shape[1] - 1),
                (drawn < pool.counts[:, None]).float(),
            )
        )  # fmt: skip

    def add(self, batch: Batch, update: int) -> None:
        """Tell a batch which texts come with it, and the factor of their divergences."""
        samples = len(batch["input_ids"])
        texts = self.term.texts_of(update, self.term.settings.texts_per_update(samples))
        scale = self.term.strength / self.term.pool.counts[texts].sum()
        batch["texts"], batch["scale"] = texts.to(self.device), scale.to(self.device)

    def __call__(self, batch: Batch) -> Tensor:
        """strength · mean of KL(base ‖ model) over the drawn tokens of a batch's texts."""
        texts = batch["texts"]
        tokens = self.tokens[texts].long()
        row = torch.arange(len(texts), device=self.device)[:, None]
        chosen = (self.at[texts] + row * tokens.shape[1]).flatten()
        weights = (self.counts[texts] * batch["scale"]).flatten()

        def states_of(body: Any) -> Tensor:
            states: Tensor = body(input_ids=tokens, use_cache=False).last_hidden_state
            return states.flatten(0, 1).index_select(0, chosen)

        teacher: Teacher
        if self.term.base is None:
            kept = self.ids, self.log_probs, self.rest
            ids, log_probs, rest = (tensor[texts].flatten(0, 1) for tensor in kept)
            teacher = KeptTokens(ids, log_probs, rest, self.term.pool.sampled)
        else:
            body, head = body_and_head(self.term.base.model)
            w = head.to(matmul_dtype(head))
            with torch.no_grad():
                teacher = self.whole(states_of(body).to(w), lambda states: F.linear(states, w))
        body, head = body_and_head(self.model)
        return head_loss(states_of(body), head, teacher, weights)
