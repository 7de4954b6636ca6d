"""The likelihood of given continuations under a causal language model."""

import math
import re
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from holdfast._torch.batch import to_device
from holdfast._torch.finite import matches
from holdfast._torch.lm_head import Predictions, is_out_of_memory
from holdfast._torch.progress import progress_bar
from holdfast._torch.threads import side_by_side
from holdfast._torch.vocabulary import check_tokens
from holdfast.data import pad_collate
from holdfast.io.encoding import Continuation
from holdfast.io.models import Loaded

_TOKENS, _TOKENS_ON_A_CPU = 1 << 14, 1 << 9  # per forward pass; a CPU is faster within its cache
_LOGITS = 1 << 27  # per forward pass: half a gigabyte of float32


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
    check_requests(requests, name)
    asked: list[int] = []  # the numbers of the requests, in the order of their results
    parts: list[Tensor] = []
    # Equal inputs run once, such as the letters of a question.
    same: dict[tuple[int, ...], list[int]] = {}
    for i, request in enumerate(requests):
        tokens = (*request.context, *request.target)
        if tokens in loaded.losses:
            asked.append(i)
            parts.append(loaded.losses[tokens][:, -len(request.target) :])
        else:
            same.setdefault(tokens[:-1][-loaded.limit :], []).append(i)
    sizes = [part.shape[1] for part in parts]
    rows, owners = list(same), list(same.values())
    with progress_bar(len(requests), name, shown=progress) as bar:
        bar.update(len(asked))
        for numbers, predictions in Runner(loaded)(rows):
            where, wanted = array("q"), array("q")
            for place, number in enumerate(numbers):
                end = place * predictions.states.shape[1] + len(rows[number])
                for i in owners[number]:
                    target = requests[i].target[-loaded.limit :]
                    asked.append(i)
                    sizes.append(len(target))
                    where.extend(range(end - len(target), end))
                    wanted.extend(target)
            bar.update(sum(len(owners[number]) for number in numbers))
            indices, targets = (
                torch.frombuffer(some, dtype=torch.int64) for some in (where, wanted)
            )
            chunks = predictions.logits(indices, targets)
            parts += [losses_and_hits(z.log_softmax(-1), t) for z, t in chunks]
    # Fetched at once: if the host waited for each batch, a GPU would wait for the next one.
    losses, hits = torch.cat(parts, 1).tolist() if parts else ([], [])
    found: dict[int, Likelihood] = {}
    for i, end, size in zip(asked, accumulate(sizes), sizes, strict=True):
        part = slice(end - size, end)
        found[i] = Likelihood(losses[part], math.prod(hits[part]))
    return [found[i] for i in range(len(requests))]


def check_requests(requests: Sequence[Continuation], name: str) -> None:
    """Raise ValueError if nothing is to be predicted, or from nothing."""
    if empty := [i for i, request in enumerate(requests) if not request.target]:
        raise ValueError(f"{name}: answer {empty[0]} has no tokens to predict")
    if empty := [i for i, request in enumerate(requests) if not request.context]:
        raise ValueError(f"{name}: answer {empty[0]} has no context: add at least one token")


def losses_and_hits(log_probs: Tensor, targets: Tensor) -> Tensor:
    """Return two rows: the loss of each target, and whether it is the likeliest token."""
    targets = targets.to(log_probs.device)
    losses = F.nll_loss(log_probs, targets, reduction="none")
    return torch.stack([losses, matches(log_probs, targets).to(losses)])


class Runner:
    """Runs a causal model on token sequences, as many at a time as fit into memory."""

    def __init__(self, loaded: Loaded) -> None:
        self.device = loaded.device
        self.split = loaded.split
        self.tokens = _TOKENS_ON_A_CPU if self.device.type == "cpu" else _TOKENS
        # These positions change tables of the model, by the length of its input.
        config = str(getattr(loaded.model, "config", ""))
        self.is_parallel = not re.search("dynamic|longrope", config)

    def __call__(self, rows: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], Predictions]]:
        """Yield the numbers of the rows that ran together, and the model's predictions for them.

        The longest rows run first. Rows are padded on the right.
        """
        check_tokens(self.split.model, rows)
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))

        def together(start: int) -> list[int]:
            longest = rows[order[start]]
            return order[start : start + max(1, self.room(longest) // len(longest))]

        def run(numbers: list[int]) -> Predictions:
            return self.split(self._batch([rows[i] for i in numbers]))

        start = 0
        if self.device.type == "cpu":
            parts = []
            while start < len(order):
                parts.append(together(start))
                start += len(parts[-1])
            start = 0
            if self.is_parallel and len(parts) >= torch.get_num_threads():
                try:
                    for numbers, predictions in zip(parts, side_by_side(run, parts), strict=True):
                        yield numbers, predictions
                        start += len(numbers)
                except RuntimeError as error:
                    if not is_out_of_memory(error):
                        raise
        while start < len(order):
            numbers = together(start)
            try:
                predictions = run(numbers)
            except RuntimeError as error:
                if not is_out_of_memory(error) or len(numbers) == 1:
                    raise
                self.tokens = len(numbers) * len(rows[numbers[0]]) // 2
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

    def kept(self, row: Sequence[int]) -> int:
        """Return the tokens whose predictions may be kept: more if they are hidden states."""
        room = self.room(row)  # looks for the head
        return max(room, _TOKENS) if self.split.found else room

    def _batch(self, rows: Sequence[Sequence[int]]) -> Any:
        return to_device(pad_collate([{"input_ids": list(row)} for row in rows]), self.device)
