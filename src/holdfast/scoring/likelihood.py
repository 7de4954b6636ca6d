"""How likely a causal language model finds given continuations: the one engine behind the probes.

What counts as context and what as target follows the conventions of lm-evaluation-harness, so that
the same task gives the same figure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from holdfast._torch.batch import to_device
from holdfast._torch.lm_head import Predictions, Split, is_out_of_memory
from holdfast._torch.progress import progress_bar
from holdfast.data import pad_collate
from holdfast.io.encoding import Continuation
from holdfast.io.models import Loaded

__all__ = ["Likelihood", "Runner", "log_likelihoods"]

_TOKENS, _TOKENS_ON_A_CPU = 1 << 14, 1 << 11  # at a time: a CPU has caches, a GPU needs work
_LOGITS = 1 << 27  # at a time: half a gigabyte of float32


class Likelihood(NamedTuple):
    """Of a target: the negative log-likelihood of each token, in nats, and whether it is what the
    model itself would have written."""

    losses: list[float]
    greedy: bool

    @property
    def nll(self) -> float:
        """Of the whole target."""
        return math.fsum(self.losses)

    @property
    def tokens(self) -> int:
        """How long it is."""
        return len(self.losses)


@torch.inference_mode()
def log_likelihoods(
    loaded: Loaded, requests: Sequence[Continuation], name: str = "", *, progress: bool = False
) -> list[Likelihood]:
    """The likelihood of each request's target. Contexts too long for the model lose their begin."""
    if loaded.kind != "causal_lm":
        raise ValueError(
            f"{type(loaded.model).__name__} is no causal language model: it does not predict what "
            f"comes next{f' in {name}' if name else ''}"
        )
    if empty := [i for i, request in enumerate(requests) if not request.target]:
        raise ValueError(f"{name}: answer {empty[0]} has no tokens to predict")
    if empty := [i for i, request in enumerate(requests) if not request.context]:
        raise ValueError(f"{name}: nothing stands before answer {empty[0]}: begin with a token")
    same: dict[tuple[int, ...], list[int]] = {}  # run once: the letters of a question
    for i, request in enumerate(requests):
        same.setdefault(tuple(_inputs(request, loaded.limit)), []).append(i)
    rows, askers = list(same), list(same.values())
    found: dict[int, Likelihood] = {}
    bar = progress_bar(len(requests), name, shown=progress)
    for numbers, predictions in Runner(loaded)(rows):
        asked: list[tuple[int, int]] = []
        where: list[int] = []
        wanted: list[int] = []
        for place, number in enumerate(numbers):
            end = place * predictions.states.shape[1] + len(rows[number])
            for i in askers[number]:
                target = requests[i].target[-loaded.limit :]
                asked.append((i, len(target)))
                where += range(end - len(target), end)
                wanted += target
        losses, hits = map(iter, _said(predictions, where, wanted).tolist())
        for i, size in asked:  # all of its hits are taken, whatever the first is
            found[i] = Likelihood(list(islice(losses, size)), all([*islice(hits, size)]))
        bar.update(len(asked))
    bar.close()
    return [found[i] for i in range(len(requests))]


def _inputs(request: Continuation, limit: int) -> list[int]:
    return [*request.context, *request.target][:-1][-limit:]


def _said(predictions: Predictions, where: list[int], wanted: list[int]) -> Tensor:
    """Of each target its loss, and whether it is the likeliest token: two rows."""
    pieces = []
    for logits, targets in predictions.logits(torch.tensor(where), torch.tensor(wanted)):
        losses = F.cross_entropy(logits, targets, reduction="none")
        pieces.append(torch.stack([losses, (logits.argmax(-1) == targets).to(losses)]))
    return torch.cat(pieces, 1)


class Runner:
    """Runs a causal model on sequences of tokens, as many at a time as there is room for."""

    def __init__(self, loaded: Loaded) -> None:
        self.device = loaded.device
        self.split = Split(loaded.model)
        self.tokens = _TOKENS_ON_A_CPU if self.device.type == "cpu" else _TOKENS

    def __call__(self, rows: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], Predictions]]:
        """Which rows were run together, longest first, and what the model said of them.

        They are padded on the right.
        """
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        start = 0
        while start < len(order):
            longest = rows[order[start]]
            size = max(1, self.room(longest) // len(longest))
            numbers = order[start : start + size]
            try:
                predictions = self.split(self._batch([rows[i] for i in numbers]))
            except RuntimeError as error:
                if not is_out_of_memory(error) or len(numbers) == 1:
                    raise
                self.tokens = len(numbers) * len(longest) // 2
                continue
            yield numbers, predictions
            start += len(numbers)

    def room(self, row: Sequence[int]) -> int:
        """How many tokens to run at a time; fewer where each comes with all its logits."""
        if not self.split.looked:
            self.split.look(self._batch([row]))
        if self.split.found:
            return self.tokens
        return min(self.tokens, _LOGITS // self.split.vocabulary)

    def _batch(self, rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        return cast(
            dict[str, Tensor],
            to_device(pad_collate([{"input_ids": list(row)} for row in rows]), self.device),
        )
