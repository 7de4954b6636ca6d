"""How likely a causal language model finds given continuations: the one engine behind the probes.

What counts as context and what as target follows the conventions of lm-evaluation-harness, so that
the same task gives the same figure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from holdfast._batch import logits_of
from holdfast._progress import progress_bar
from holdfast.forgetting.models import Loaded

__all__ = ["Likelihood", "Request", "encode_pair", "log_likelihoods", "windows"]

_LOGITS = 1 << 27  # at a time: half a gigabyte of float32


class Request(NamedTuple):
    """Tokens to predict, and those that stand before them: at least one."""

    context: list[int]
    target: list[int]


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


def encode(tokenizer: Any, text: str) -> list[int]:
    """A text's tokens, after the BOS token if its tokenizer begins with one."""
    ids: list[int] = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    bos = tokenizer.bos_token_id
    begins = bos is not None and list(tokenizer("")["input_ids"])[:1] == [bos]
    return [bos, *ids] if begins and ids[:1] != [bos] else ids


def encode_pair(loaded: Loaded, context: str, target: str) -> Request:
    """A context and what follows it, cut where the context's own tokens end.

    Spaces at the end of the context belong to the target: most tokenizers join them to the next
    word.
    """
    tokenizer = loaded.need_tokenizer("a text")
    bare = context.rstrip()
    target, context = context[len(bare) :] + target, bare
    if not context:
        ids = encode(tokenizer, target)
        start = loaded.start_token()
        return Request([start], ids[1:] if ids[:1] == [start] else ids)
    whole, before = encode(tokenizer, context + target), encode(tokenizer, context)
    return Request(whole[: len(before)], whole[len(before) :])


def windows(ids: Sequence[int], start: int, limit: int) -> list[Request]:
    """A long text as requests in which each of its tokens is a target once.

    A window's first token is predicted from the one before it. The last window reaches back, so
    that it is as long as the others.

    >>> [list(w) for w in windows([1, 2, 3, 4, 5], start=0, limit=3)]
    [[[0], [1, 2, 3]], [[2, 3], [4, 5]]]
    """
    tokens = [start, *ids]
    requests = []
    for first in range(1, len(tokens), limit):
        last = min(first + limit, len(tokens))
        requests.append(Request(tokens[max(0, last - 1 - limit) : first], tokens[first:last]))
    return requests


@torch.inference_mode()
def log_likelihoods(
    loaded: Loaded, requests: Sequence[Request], name: str = "", *, progress: bool = False
) -> list[Likelihood]:
    """The likelihood of each request's target. Contexts too long for the model lose their begin."""
    if loaded.kind != "causal_lm":
        raise ValueError(
            f"{type(loaded.model).__name__} is no causal language model: it does not predict what "
            f"comes next{f' in {name}' if name else ''}"
        )
    if empty := [i for i, request in enumerate(requests) if not request.target]:
        raise ValueError(f"{name}: answer {empty[0]} has no tokens to predict")
    found: list[Likelihood | None] = [None] * len(requests)
    bar = progress_bar(len(requests), name, shown=progress)
    for rows in _batches(loaded, requests):
        inputs = [_inputs(requests[i], loaded.limit) for i in rows]
        targets = [requests[i].target[-loaded.limit :] for i in rows]
        logits = logits_of(loaded.model, _padded(inputs, loaded.device))
        for row, i in enumerate(rows):
            end, size = len(inputs[row]), len(targets[row])
            wanted = torch.tensor(targets[row], device=logits.device)
            said = logits[row, end - size : end].float()
            losses = F.cross_entropy(said, wanted, reduction="none")
            greedy = bool((said.argmax(-1) == wanted).all())
            found[i] = Likelihood(losses.tolist(), greedy)
        bar.update(len(rows))
    bar.close()
    return [likelihood for likelihood in found if likelihood is not None]


def _inputs(request: Request, limit: int) -> list[int]:
    return [*request.context, *request.target][:-1][-limit:]


def _batches(loaded: Loaded, requests: Sequence[Request]) -> Iterator[list[int]]:
    """Which requests to run together: of like length, longest first."""
    config: Any = getattr(loaded.model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = getattr(text, "vocab_size", None) or 1 << 16
    lengths = [len(_inputs(request, loaded.limit)) for request in requests]
    order = sorted(range(len(requests)), key=lambda i: -lengths[i])
    start = 0
    while start < len(order):
        size = max(1, min(64, _LOGITS // (vocabulary * max(1, lengths[order[start]]))))
        yield order[start : start + size]
        start += size


def _padded(rows: Sequence[list[int]], device: torch.device) -> dict[str, Tensor]:
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = 1
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
