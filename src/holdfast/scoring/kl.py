"""Predictions of language models, and KL(base‖tuned) between those of two models.

The two models are never in memory together: the base's log-probabilities are stored on disk until
the tuned model has made its own.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from holdfast._torch.batch import logits_of
from holdfast._torch.lm_head import CHUNK
from holdfast._torch.vocabulary import TokenRows, check_tokens
from holdfast.io.models import Loaded
from holdfast.scoring.likelihood import Runner, losses_and_hits

DISK = 4 << 30  # the maximum size of stored predictions, in bytes
SHARE = 0.15  # of the tokens are masked


def kl_divergence(base: Tensor, tuned: Tensor) -> Tensor:
    """Return KL(base‖tuned) of each row of log-probabilities, in their dtype.

    >>> half, third = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    >>> round(kl_divergence(half, third).item(), 4)       # ½ log(½/¼) + ½ log(½/¾)
    0.1438
    """
    p = base.exp()
    return (base - tuned).mul_(p).masked_fill_(p == 0, 0).sum(-1)  # 0 log 0 = 0


@torch.no_grad()
def next_token_log_probs(
    loaded: Loaded, sequences: Sequence[Sequence[int]], *, keep: bool = False
) -> Iterator[Tensor]:
    """Yield one table per sequence: the log-probabilities of the next token after each token.

    Sequences are cut at the model's maximum length. Empty sequences are skipped. With ``keep``,
    the losses of the tokens are kept for :func:`~holdfast.scoring.likelihood.log_likelihoods`.
    """
    run = Runner(loaded)
    left = [list(ids[: loaded.limit]) for ids in sequences if len(ids)]
    while left:
        # Only as many sequences as fit, because their hidden states wait until they are yielded.
        some = left[: _fitting(left, run.kept(left[0]))]
        left = left[len(some) :]
        states = {
            number: predictions.states[place, : len(some[number])]
            for numbers, predictions in run(some)
            for place, number in enumerate(numbers)
        }
        waiting = list(enumerate(some))
        while waiting:
            # One product with the head for several sequences: short ones are slow alone.
            size = _fitting([ids for _, ids in waiting], CHUNK // run.split.vocabulary)
            part, waiting = waiting[:size], waiting[size:]
            found = run.split.predictions(torch.cat([states.pop(number) for number, _ in part]))
            tables = found.log_probs().split([len(ids) for _, ids in part])
            for (_, ids), table in zip(part, tables, strict=True):
                if keep and len(ids) > 1:
                    loaded.losses[tuple(ids)] = losses_and_hits(table[:-1], torch.tensor(ids[1:]))
                yield table


def _fitting(sequences: Sequence[Sequence[int]], tokens: int) -> int:
    """Return how many of the first sequences fit into a number of tokens, but at least one."""
    return max(1, sum(end <= tokens for end in itertools.accumulate(map(len, sequences))))


@torch.no_grad()
def masked_log_probs(loaded: Loaded, text: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the log-probabilities at the masked tokens of each window, and the true tokens.

    The choice of tokens depends only on the text, so all models predict the same tokens.
    """
    tokenizer = loaded.need_tokenizer("a text")
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    front = [t for t in [tokenizer.cls_token_id] if t is not None]
    back = [t for t in [tokenizer.sep_token_id] if t is not None]
    room = loaded.limit - len(front) - len(back)
    check_tokens(loaded.model, [ids])
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


def _over(log_probs: Tensor, tokens: int) -> Tensor:
    """Return the distributions over the first tokens only, normalized."""
    if log_probs.shape[-1] == tokens:
        return log_probs
    return log_probs[:, :tokens].log_softmax(-1)


class ComparedTable(NamedTuple):
    """The comparison of two tables of log-probabilities, summed over their rows."""

    kl: float
    rows: int
    columns: TokenRows
    outside: float  # the probability of the tokens that only one of the models has


class StoredPredictions:
    """Tables of log-probabilities in a directory of their own, to compare another model's with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tables = 0

    def save(self, tables: Iterable[Tensor]) -> bool:
        """Store tables until :data:`DISK` is full; return whether all of them were stored."""
        used = 0
        for table in tables:
            values = table.float().cpu().numpy()
            if used + values.nbytes > DISK and self.tables:
                return False
            np.save(self._file(self.tables), values)
            self.tables, used = self.tables + 1, used + values.nbytes
        return True

    def compare(
        self, tables: Iterable[Tensor], *, resized: bool = False
    ) -> Iterator[ComparedTable]:
        """Yield the comparison of each stored table with the given one.

        With ``resized``, a model may have more columns, which are tokens that the other one lacks:
        the divergence is that of the distributions over the tokens of both.
        """
        for number, tuned in enumerate(itertools.islice(tables, self.tables)):
            base = torch.from_numpy(np.load(self._file(number))).to(tuned.device)
            sizes = TokenRows(base.shape[-1], tuned.shape[-1])
            if resized and sizes.tuned < sizes.base:
                base = base[: len(tuned)]  # a text ends where the tuned model lacks a token
            if len(base) != len(tuned) or (sizes.base != sizes.tuned and not resized):
                raise ValueError(
                    f"the base makes {len(base)} predictions over {base.shape[-1]} classes or "
                    f"tokens, the tuned model {len(tuned)} over {tuned.shape[-1]}"
                )
            pairs = zip(base.split(64), tuned.float().split(64), strict=True)
            sums, outside = [], 0.0
            for pair in pairs:
                over = [_over(table, sizes.shared) for table in pair]
                sums.append(kl_divergence(*over).double().sum())
                if sizes.base != sizes.tuned:
                    outside += sum(float(table[:, sizes.shared :].exp().sum()) for table in pair)
            yield ComparedTable(float(torch.stack(sums).sum()), len(base), sizes, outside)

    def _file(self, number: int) -> Path:
        return self.folder / f"{number}.npy"
