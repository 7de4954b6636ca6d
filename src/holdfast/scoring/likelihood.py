"""The likelihood of given continuations under a causal language model."""

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.rnn import pad_sequence

from holdfast._torch.batch import to_device
from holdfast._torch.finite import matches
from holdfast._torch.lm_head import Predictions, Split, is_out_of_memory
from holdfast._torch.progress import progress_bar
from holdfast.data import pad_collate
from holdfast.io.encoding import Continuation
from holdfast.io.models import Loaded

_TOKENS, _TOKENS_ON_A_CPU = 1 << 14, 1 << 11  # per forward pass; a CPU is faster within its cache
_LOGITS = 1 << 27  # per forward pass: half a gigabyte of float32
_KEPT = 1 << 26  # elements of hidden states: a quarter of a gigabyte of float32


class Likelihood(NamedTuple):
    losses: list[float]  # the negative log-likelihood of each token, in nats
    greedy: float  # 1 if greedy decoding would generate the target, else 0; NaN if it cannot

    @property
    def nll(self) -> float:
        return math.fsum(self.losses)

    @property
    def tokens(self) -> int:
        return len(self.losses)


@torch.no_grad()  # not inference_mode: FSDP2 trains on with the tensors that it gathers here
def log_likelihoods(
    loaded: Loaded, requests: Sequence[Continuation], name: str = "", *, progress: bool = False
) -> list[Likelihood]:
    """Return the likelihood of each target. A context that is too long is cut at its beginning."""
    if loaded.kind != "causal_lm":
        raise ValueError(
            f"{f'{name} needs' if name else 'likelihoods need'} a causal language model, got "
            f"{type(loaded.model).__name__}"
        )
    if empty := [i for i, request in enumerate(requests) if not request.target]:
        raise ValueError(f"{name}: answer {empty[0]} has no tokens to predict")
    if empty := [i for i, request in enumerate(requests) if not request.context]:
        raise ValueError(f"{name}: answer {empty[0]} has no context: add at least one token")
    # Equal inputs run once, such as the letters of a question.
    same: dict[tuple[int, ...], list[int]] = {}
    for i, request in enumerate(requests):
        inputs = (*request.context, *request.target)[:-1]
        same.setdefault(inputs[-loaded.limit :], []).append(i)
    rows, owners = list(same), list(same.values())
    found: dict[int, Likelihood] = {}
    with progress_bar(len(requests), name, shown=progress) as bar:
        for numbers, predictions in Runner(loaded)(rows):
            asked: list[tuple[int, int]] = []
            where: list[int] = []
            wanted: list[int] = []
            for place, number in enumerate(numbers):
                end = place * predictions.states.shape[1] + len(rows[number])
                for i in owners[number]:
                    target = requests[i].target[-loaded.limit :]
                    asked.append((i, len(target)))
                    where += range(end - len(target), end)
                    wanted += target
            losses, hits = map(iter, _losses_and_hits(predictions, where, wanted).tolist())
            for i, size in asked:
                found[i] = Likelihood(list(islice(losses, size)), math.prod(islice(hits, size)))
            bar.update(len(asked))
    return [found[i] for i in range(len(requests))]


def _losses_and_hits(predictions: Predictions, where: list[int], wanted: list[int]) -> Tensor:
    """Return two rows: the loss of each target, and whether it is the likeliest token."""
    pieces = []
    for logits, targets in predictions.logits(torch.tensor(where), torch.tensor(wanted)):
        losses = F.cross_entropy(logits, targets, reduction="none")
        pieces.append(torch.stack([losses, matches(logits, targets).to(losses)]))
    return torch.cat(pieces, 1)


class Runner:
    """Runs a causal model on token sequences, as many at a time as fit into memory.

    With ``keep``, hidden states are kept, so that a sequence without its last token need not run
    again: the likelihood of an answer is computed from it.
    """

    def __init__(self, loaded: Loaded, *, keep: bool = False) -> None:
        self.device, self.kept, self.keep = loaded.device, loaded.states, keep
        self.split = Split(loaded.model)
        self.tokens = _TOKENS_ON_A_CPU if self.device.type == "cpu" else _TOKENS

    def __call__(self, rows: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], Predictions]]:
        """Yield the numbers of the rows that ran together, and the model's predictions for them.

        The longest rows run first. Rows are padded on the right.
        """
        is_kept = [tuple(row) in self.kept for row in rows]
        order = sorted(range(len(rows)), key=lambda i: (is_kept[i], -len(rows[i])))
        start, first_kept = 0, is_kept.count(False)
        while start < len(order):
            longest = rows[order[start]]
            size = max(1, self.room(longest) // len(longest))
            end = first_kept if start < first_kept else len(order)
            numbers = order[start : min(start + size, end)]
            try:
                predictions = self._predict([rows[i] for i in numbers], start >= first_kept)
            except RuntimeError as error:
                if not is_out_of_memory(error) or len(numbers) == 1:
                    raise
                self.tokens = len(numbers) * len(longest) // 2
                continue
            yield numbers, predictions
            start += len(numbers)

    def room(self, row: Sequence[int]) -> int:
        """Return the tokens per forward pass; fewer if the head cannot be applied separately."""
        if not self.split.looked:
            self.split.look(self._batch([row]))
        if self.split.found:
            return self.tokens
        return min(self.tokens, _LOGITS // self.split.vocabulary)

    def _predict(self, rows: Sequence[Sequence[int]], are_kept: bool) -> Predictions:
        if are_kept:
            states = pad_sequence([self.kept[tuple(row)] for row in rows], batch_first=True)
            return self.split.predictions(states)
        found = self.split(self._batch(rows))
        left = _KEPT - sum(states.numel() for states in self.kept.values())
        if self.keep and found.head is not None and found.states.numel() <= left:
            parts = zip(rows, found.states, strict=True)
            self.kept.update((tuple(row[:-1]), part[: len(row) - 1]) for row, part in parts)
        return found

    def _batch(self, rows: Sequence[Sequence[int]]) -> Any:
        return to_device(pad_collate([{"input_ids": list(row)} for row in rows]), self.device)
