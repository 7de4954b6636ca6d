"""Tests of language models and encoders. Each runs one model at a time."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from holdfast._torch.adapters import without_peft
from holdfast._torch.batch import pad_id_of, to_device
from holdfast._torch.finite import matches
from holdfast._torch.progress import progress_bar
from holdfast.data import IndexedSource, pad_collate
from holdfast.evaluate.asking import Asking
from holdfast.evaluate.report import Score
from holdfast.evaluate.stats import Numbers, Outcomes, compare, correlation
from holdfast.io import encoding
from holdfast.io.models import Loaded
from holdfast.io.render import Conversation, Reader
from holdfast.io.rows import Rows, as_number, check_unicode, text_columns
from holdfast.scoring.kl import masked_log_probs
from holdfast.scoring.likelihood import Likelihood

Role = Literal["retained", "target"]
Encoded = TypeVar("Encoded")
_ENCODED = "_encoded_data"
_SCORES = ("label", "score", "similarity")
#: Tokens of a running text that count as one sample.
BLOCK = 128


@runtime_checkable
class Probe(Protocol):
    """A test that both models take.

    ``run`` is called with each model in turn; ``scores`` compares the two results. The classes
    that holdfast has take ``name`` and ``role``, which are those of the scores in the report. They
    are also :class:`Sized`. Those that need likelihoods run together, before all other tests.
    """

    @property
    def name(self) -> str: ...

    def run(self, loaded: Loaded, *, progress: bool) -> Any:
        """Test one model: first the base, then the tuned model."""

    def scores(self, before: Any, after: Any) -> list[Score]:
        """Return the rows of the report, from the results of the base and of the tuned model."""


@runtime_checkable
class Sized(Protocol):
    """A test whose tokens can be counted and limited."""

    def lengths(self, loaded: Loaded) -> list[int]:
        """Return the tokens of each sample; of a text, those of all of it."""

    def within(self, loaded: Loaded, tokens: int) -> Any:
        """Return the test on the beginning of its data, with at most this many tokens."""


def encoded_once(test: Any, loaded: Loaded, encode: Callable[[Loaded], Encoded]) -> Encoded:
    """Encode the data of a test once for all models that share a tokenizer."""
    tokenizer, first, found = vars(test).get(_ENCODED, (None, None, None))
    if tokenizer is None or tokenizer is not loaded.tokenizer or first != _first(loaded):
        found = encode(loaded)
        keep_encoded(test, loaded, found)
    return cast(Encoded, found)


def keep_encoded(test: Any, loaded: Loaded, found: object) -> None:
    """Keep the data of a test as :func:`encoded_once` would encode them."""
    vars(test)[_ENCODED] = loaded.tokenizer, _first(loaded), found


def _first(loaded: Loaded) -> list[Any]:
    """Return the tokens that can be the first one of a text."""
    config: Any = getattr(loaded.model, "config", None)
    named = (getattr(config, name, None) for name in ("bos_token_id", "eos_token_id"))
    return [loaded.start_token, *named]


@dataclass(frozen=True)
class Text(Asking):
    """The perplexity of a running text.

    A causal model predicts each token once, from windows of its maximum length. A masked model
    predicts the 15 % of tokens that are masked, which are the same for both models. The metric
    ``"nll"`` is in nats per token.
    """

    name: str
    text: str
    metric: Literal["perplexity", "nll"] = "perplexity"
    role: Role = "retained"

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise ValueError(f"the text {self.name!r} is empty")

    def requests(self, loaded: Loaded) -> list[encoding.Continuation]:
        ids, start = self.tokens(loaded), loaded.first_token()
        return encoding.windows(ids[1:] if ids[:1] == [start] else ids, start, loaded.limit)

    def graded(self, loaded: Loaded, found: Sequence[Likelihood]) -> Outcomes:
        losses = [loss for likelihood in found for loss in likelihood.losses]
        blocks = [losses[i : i + BLOCK] for i in range(0, len(losses), BLOCK)]
        return Outcomes([math.fsum(block) for block in blocks], list(map(len, blocks)))

    def lengths(self, loaded: Loaded) -> list[int]:
        return [len(self.tokens(loaded))]

    def tokens(self, loaded: Loaded) -> list[int]:
        """Return the tokens of the text."""
        tokenizer = loaded.need_tokenizer(f"the text {self.name!r}")
        return encoded_once(self, loaded, lambda _: encoding.tokenize(tokenizer, self.text))

    def within(self, loaded: Loaded, tokens: int) -> "Text":
        tokenizer = loaded.need_tokenizer(f"the text {self.name!r}")
        text, ids = encoding.first_tokens(tokenizer, self.text, tokens)
        test = replace(self, text=text)
        keep_encoded(test, loaded, ids)
        return test

    def run_on_another_kind(self, loaded: Loaded, *, progress: bool) -> Outcomes:
        loaded.need_tokenizer(f"the text {self.name!r}")
        if loaded.kind != "masked_lm":
            model = type(loaded.model).__name__
            raise ValueError(f"the text {self.name!r} needs a language model, got {model}")
        values, counts = [], []
        with progress_bar(None, self.name, shown=progress) as bar:
            for log_probs, wanted in masked_log_probs(loaded, self.text):
                values.append(float(F.nll_loss(log_probs, wanted, reduction="sum")))
                counts.append(len(wanted))
                bar.update(1)
        return Outcomes(values, counts)

    def scores(self, before: Outcomes, after: Outcomes) -> list[Score]:
        score = partial(compare, self.name, self.metric, lower_is_better=True, role=self.role)
        return [score(before, after, transform=np.exp if self.metric == "perplexity" else None)]


@dataclass(frozen=True)
class Completions(Asking):
    """The likelihood of reference answers, and how often the model would generate them.

    An exact match is an answer that greedy decoding would produce. No text is generated to test it.

    Each row has a prompt (``prompt``, ``question``, …) and a ``completion`` (``answer``, …).
    ``system``, ``context`` and ``input`` are parts of the prompt. ``template`` is the prompt with
    columns in braces: ``"Question: {question}\\nAnswer:"``. Or each row is a conversation
    (``messages``), whose answers are the turns of the assistant.
    """

    name: str
    rows: Rows
    template: str | None = None
    role: Role = "retained"

    def __post_init__(self) -> None:
        _check_rows(self.name, self.rows)
        for number, words in enumerate(self._words):
            if isinstance(words, Conversation) and not words.has_answer:
                raise ValueError(f"{self.name}: row {number} has no turn of the assistant")

    def requests(self, loaded: Loaded) -> list[encoding.Continuation]:
        return [answer for some in self.answers(loaded) for answer in some]

    def graded(self, loaded: Loaded, found: Sequence[Likelihood]) -> tuple[Outcomes, Outcomes]:
        following = iter(found)
        rows = [[next(following) for _ in some] for some in self.answers(loaded)]
        losses = [math.fsum(f.nll for f in row) for row in rows]
        counts = [sum(f.tokens for f in row) for row in rows]
        return Outcomes(losses, counts), Outcomes(
            [math.prod(f.greedy for f in row) for row in rows]
        )

    def lengths(self, loaded: Loaded) -> list[int]:
        return [sum(len(one) for pair in row for one in pair) for row in self.answers(loaded)]

    def within(self, loaded: Loaded, tokens: int) -> "Completions":
        return replace(self, rows=encoding.fitting(self.rows, self.lengths(loaded), tokens))

    def answers(self, loaded: Loaded, most: int | None = None) -> list[list[encoding.Continuation]]:
        """Encode the answers of each row, or of the first ones."""
        return encoded_once(self, loaded, self._encode)[:most]

    def _encode(self, loaded: Loaded) -> list[list[encoding.Continuation]]:
        pairs = [some for some in self._words if not isinstance(some, Conversation)]
        alone = iter(encoding.encode_pairs(loaded, pairs))
        return [
            encoding.encode_answers(loaded, some, f"{self.name}: row {i}")
            if isinstance(some, Conversation)
            else [next(alone)]
            for i, some in enumerate(self._words)
        ]

    @cached_property
    def _words(self) -> list[Conversation | tuple[str, str]]:
        reader = Reader(self.name)
        return [reader.answered(self.rows[i], i, self.template) for i in range(len(self.rows))]

    def scores(self, before: Sequence[Outcomes], after: Sequence[Outcomes]) -> list[Score]:
        nll, match = zip(before, after, strict=True)
        return [
            compare(self.name, "nll", *nll, lower_is_better=True, role=self.role),
            compare(self.name, "exact_match", *match, lower_is_better=False, role=self.role),
        ]


@dataclass(frozen=True)
class MultipleChoice(Asking):
    """How often the correct choice is the likeliest.

    Each row has a question, ``choices`` (texts) and ``label`` (the correct index). ``template`` is
    the question with columns in braces. ``by_length`` divides log-likelihoods by the choices'
    lengths in characters (``acc_norm`` in lm-evaluation-harness).
    """

    name: str
    rows: Rows
    template: str | None = None
    by_length: bool = False
    role: Role = "retained"

    def __post_init__(self) -> None:
        _check_rows(self.name, self.rows)
        _ = self._questions  # raises at once

    def requests(self, loaded: Loaded) -> list[encoding.Continuation]:
        return [answer for row in self._encoded(loaded) for answer in row]

    def graded(self, loaded: Loaded, found: Sequence[Likelihood]) -> Outcomes:
        following, likelihoods = iter(found), []
        for _, choices, _ in self._questions:
            sizes = [max(1, len(c)) if self.by_length else 1 for c in choices]
            likelihoods.append([-next(following).nll / size for size in sizes])
        most = max(map(len, likelihoods))
        # A choice that a row does not have is never the likeliest.
        table = torch.tensor([[*row, *[-math.inf] * (most - len(row))] for row in likelihoods])
        labels = torch.tensor([label for *_, label in self._questions])
        return Outcomes(matches(table, labels).tolist())

    def scores(self, before: Outcomes, after: Outcomes) -> list[Score]:
        score = partial(compare, self.name, "accuracy", lower_is_better=False, role=self.role)
        return [score(before, after)]

    def lengths(self, loaded: Loaded) -> list[int]:
        return [sum(len(one) for pair in row for one in pair) for row in self._encoded(loaded)]

    def within(self, loaded: Loaded, tokens: int) -> "MultipleChoice":
        return replace(self, rows=encoding.fitting(self.rows, self.lengths(loaded), tokens))

    def _encoded(self, loaded: Loaded) -> list[list[encoding.Continuation]]:
        return encoded_once(self, loaded, self._encode)

    def _encode(self, loaded: Loaded) -> list[list[encoding.Continuation]]:
        rows = self._questions
        pairs = [(prompt, f" {choice}") for prompt, choices, _ in rows for choice in choices]
        found = iter(encoding.encode_pairs(loaded, pairs))
        return [[next(found) for _ in choices] for _, choices, _ in rows]

    @cached_property
    def _questions(self) -> list[tuple[str, list[str], int]]:
        """The question of each row, its choices, and the index of the correct one."""
        found, reader = [], Reader(self.name)
        for i in range(len(self.rows)):
            row = self.rows[i]
            found.append((reader.prompt(row, i, self.template), *reader.choices(row, i)))
        return found


@dataclass(frozen=True)
class Similarity:
    """How well the similarity of embeddings agrees with human ratings.

    The embedding of a text is the mean of the body's last hidden states over its tokens. Two texts
    are compared by their cosine similarity. The model's head, if any, is not used. Each row has two
    texts and a number (``label``, ``score`` or ``similarity``) that grows with the similarity.
    """

    name: str
    rows: Rows
    batch_size: int = 64
    role: Role = "retained"

    def __post_init__(self) -> None:
        _check_rows(self.name, self.rows)
        for number in range(len(self.rows)):
            self._row(number)

    def run(self, loaded: Loaded, *, progress: bool) -> Numbers:
        pairs = [self._row(i) for i in range(len(self.rows))]
        texts = sorted({text for one, other, _ in pairs for text in (one, other)})
        ids = [{"input_ids": self._ids(loaded, text)} for text in texts]
        found = dict(zip(texts, self._embedded(loaded, ids, progress), strict=True))
        predicted = [F.cosine_similarity(found[a], found[b], dim=0).item() for a, b, _ in pairs]
        return Numbers(predicted, [number for *_, number in pairs])

    def scores(self, before: Numbers, after: Numbers) -> list[Score]:
        return [correlation(self.name, "spearman", before, after, self.role)]

    def lengths(self, loaded: Loaded) -> list[int]:
        pairs = (self._row(i)[:2] for i in range(len(self.rows)))
        return [sum(len(self._ids(loaded, text)) for text in pair) for pair in pairs]

    def within(self, loaded: Loaded, tokens: int) -> "Similarity":
        return replace(self, rows=encoding.fitting(self.rows, self.lengths(loaded), tokens))

    def _ids(self, loaded: Loaded, text: str) -> list[int]:
        return encoding.encode_text(loaded, [text], f"{self.name}: a text")["input_ids"]

    @torch.no_grad()
    def _embedded(self, loaded: Loaded, ids: list[Any], progress: bool) -> list[Tensor]:
        model = without_peft(loaded.model)  # PEFT's own base_model is not the body
        body: Any = getattr(model, "base_model", model)
        collate = partial(pad_collate, pad_id=pad_id_of(loaded.model) or 0)
        found: dict[int, Tensor] = {}
        with progress_bar(len(ids), self.name, shown=progress) as bar:
            for indices, read in IndexedSource(ids, collate, self.batch_size):
                batch = to_device(read(), loaded.device)
                states = getattr(body(**batch), "last_hidden_state", None)
                if states is None:
                    kind = type(body).__name__
                    raise ValueError(f"{self.name} needs hidden states, but {kind} returns none")
                mask = batch["attention_mask"][:, :, None].to(torch.float32)
                means = (states.float() * mask).sum(1) / mask.sum(1)
                found |= dict(zip(indices, means.cpu(), strict=True))
                bar.update(len(indices))
        return [found[i] for i in range(len(ids))]

    def _row(self, number: int) -> tuple[str, str, float]:
        row = self.rows[number]
        columns = text_columns(row)
        score = next((as_number(row[c]) for c in _SCORES if row.get(c) is not None), None)
        if len(columns) != 2 or score is None:
            raise ValueError(
                f"{self.name}: row {number} needs two texts (sentence1, sentence2) and a number "
                f"({', '.join(_SCORES)}), but has {', '.join(map(str, row)) or 'no columns'}"
            )
        check_unicode([row[c] for c in columns], f"{self.name}: row {number}")
        return row[columns[0]], row[columns[1]], score


def _check_rows(name: str, rows: Rows) -> None:
    if not len(rows):
        raise ValueError(f"{name} has no rows")
