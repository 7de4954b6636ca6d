"""What models are tested on: texts, completions, multiple choice. Each runs one model at a time.

Text("wikitext", text)                         # perplexity
Completions("gsm8k", rows)                     # loss of the reference, and exact match
MultipleChoice("piqa", rows)                   # accuracy
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch

from holdfast.evaluate.report import Score
from holdfast.evaluate.stats import Samples, compare
from holdfast.io.encoding import (
    column_of,
    encode,
    encode_pair,
    prompt_and_answer,
    prompt_of,
    windows,
)
from holdfast.io.models import Loaded
from holdfast.io.rows import Rows
from holdfast.scoring.likelihood import log_likelihoods
from holdfast.scoring.masked import masked_losses

__all__ = ["Completions", "MultipleChoice", "Probe", "Text"]

Role = Literal["retained", "target"]
#: Tokens of a running text that count as one sample.
BLOCK = 128


@runtime_checkable
class Probe(Protocol):
    """Something that both models are tested on.

    ``run`` is called with each model in turn; ``scores`` puts what it returned side by side.
    """

    @property
    def name(self) -> str:
        """What is tested."""

    def run(self, loaded: Loaded, *, progress: bool) -> Any:
        """Test one model: the base first, then the tuned one."""

    def scores(self, before: Any, after: Any) -> list[Score]:
        """The rows of the report, from what ``run`` returned for the base and the tuned model."""


@dataclass(frozen=True)
class Text:
    """The perplexity of a running text.

    A causal model predicts each token once, from windows of its full length; a masked model the
    15 % of tokens that are masked, the same ones for both models.

    Args:
        name: what to call it.
        text: the text.
        metric: ``"perplexity"``, or ``"nll"``: nats a token.
        role: of the row in the report.
    """

    name: str
    text: str
    metric: Literal["perplexity", "nll"] = "perplexity"
    role: Role = "retained"

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise ValueError(f"the text {self.name!r} is empty")

    def run(self, loaded: Loaded, *, progress: bool) -> Samples:
        """The loss of each stretch of :data:`BLOCK` tokens, which intervals resample."""
        tokenizer = loaded.need_tokenizer(f"the text {self.name!r}")
        if loaded.kind == "masked_lm":
            return masked_losses(loaded, self.text, self.name, progress=progress)
        if loaded.kind != "causal_lm":
            raise ValueError(f"{type(loaded.model).__name__} does not predict texts")
        start = loaded.first_token()
        ids = encode(tokenizer, self.text)
        requests = windows(ids[1:] if ids[:1] == [start] else ids, start, loaded.limit)
        found = log_likelihoods(loaded, requests, self.name, progress=progress)
        losses = [loss for likelihood in found for loss in likelihood.losses]
        blocks = [losses[i : i + BLOCK] for i in range(0, len(losses), BLOCK)]
        return Samples([math.fsum(block) for block in blocks], list(map(len, blocks)))

    def scores(self, before: Samples, after: Samples) -> list[Score]:
        """One row."""
        transform = np.exp if self.metric == "perplexity" else None
        return [_row(self, self.metric, before, after, lower=True, transform=transform)]


@dataclass(frozen=True)
class Completions:
    """How likely reference answers are, and how often the model itself would give them.

    An exact match is one that greedy decoding writes token by token; it needs no generation.

    Args:
        name: what to call it.
        rows: each with a prompt (``prompt``, ``question``, …) and its ``completion`` (``answer``,
            …).
        template: of the prompt, with the columns in braces: ``"Question: {question}\\nAnswer:"``.
        role: of the rows in the report.
    """

    name: str
    rows: Rows
    template: str | None = None
    role: Role = "retained"

    def run(self, loaded: Loaded, *, progress: bool) -> tuple[Samples, Samples]:
        """The loss and the match of each answer."""
        requests = [encode_pair(loaded, *self.texts(i)) for i in range(len(_some(self)))]
        found = log_likelihoods(loaded, requests, self.name, progress=progress)
        losses = Samples([f.nll for f in found], [f.tokens for f in found])
        return losses, Samples([float(f.greedy) for f in found])

    def texts(self, number: int) -> tuple[str, str]:
        """The prompt and the answer of a row, with a space between them."""
        return prompt_and_answer(self.rows[number], number, self.name, self.template)

    def scores(
        self, before: tuple[Samples, Samples], after: tuple[Samples, Samples]
    ) -> list[Score]:
        """Two rows."""
        return [
            _row(self, "nll", before[0], after[0], lower=True),
            _row(self, "exact_match", before[1], after[1], lower=False),
        ]


@dataclass(frozen=True)
class MultipleChoice:
    """How often the right one of several answers is the likeliest.

    Args:
        name: what to call it.
        rows: each with a question, ``choices`` (texts) and ``label`` (the index of the right one).
        template: of the question; the choice follows after a space.
        by_length: compare likelihoods divided by the choices' lengths in characters (the harness
            calls it ``acc_norm``).
        role: of the row in the report.
    """

    name: str
    rows: Rows
    template: str | None = None
    by_length: bool = False
    role: Role = "retained"

    def run(self, loaded: Loaded, *, progress: bool) -> Samples:
        """Whether each question was answered right."""
        requests, lengths, labels = [], [], []
        for number, row in enumerate(_some(self)):
            choices = _choices(column_of(row, ("choices",), number, self.name), number, self.name)
            label = int(column_of(row, ("label", "gold"), number, self.name))
            if not 0 <= label < len(choices):
                raise ValueError(
                    f"{self.name}: row {number} has {len(choices)} choices and label {label}"
                )
            prompt = prompt_of(row, self.template, number, self.name)
            requests += [encode_pair(loaded, prompt, f" {choice}") for choice in choices]
            lengths.append([max(1, len(c)) if self.by_length else 1 for c in choices])
            labels.append(label)
        found = iter(log_likelihoods(loaded, requests, self.name, progress=progress))
        right = []
        for sizes, label in zip(lengths, labels, strict=True):
            losses = torch.tensor([next(found).nll / size for size in sizes])
            right.append(float(int(losses.argmin()) == label))
        return Samples(right)

    def scores(self, before: Samples, after: Samples) -> list[Score]:
        """One row."""
        return [_row(self, "accuracy", before, after, lower=False)]


def _row(
    probe: Text | Completions | MultipleChoice,
    metric: str,
    before: Samples,
    after: Samples,
    *,
    lower: bool,
    transform: Callable[..., Any] | None = None,
) -> Score:
    return compare(
        probe.name, metric, before, after,
        lower_is_better=lower, role=probe.role, transform=transform,
    )  # fmt: skip


def _some(probe: Completions | MultipleChoice) -> Rows:
    if not len(probe.rows):
        raise ValueError(f"{probe.name} has no rows")
    return probe.rows


def _choices(given: Any, number: int, name: str) -> list[str]:
    """A list of texts; as JSON in a cell of a CSV file, or as ARC has them."""
    if isinstance(given, Mapping):
        given = given.get("text")
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            given = None
    if not isinstance(given, list | tuple) or len(given) < 2:
        raise ValueError(f"{name}: the choices of row {number} are no list of texts")
    return [str(choice) for choice in given]
