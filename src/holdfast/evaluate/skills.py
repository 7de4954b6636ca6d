"""Tests of a language model's skills that need no data: arithmetic, code, languages, chats.

Sums have one right answer. For the other skills the base model itself continues short openings,
and the test is how well the tuned model predicts what the base wrote: its perplexity rises by the
exponential of the divergence. A language that the base does not write gives texts of another kind,
which are still the base's own.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from holdfast._torch.checks import whole_number
from holdfast.evaluate.asking import Asking
from holdfast.evaluate.probes import Completions, Probe, Role
from holdfast.evaluate.report import Score
from holdfast.evaluate.stats import Outcomes, compare
from holdfast.io import encoding
from holdfast.io.models import Loaded
from holdfast.scoring.draw import draw_texts
from holdfast.scoring.likelihood import Likelihood

#: How the metrics of these tests begin.
SKILL = "skill_"

_CODE = (
    "def fibonacci(n):\n", "import os\nimport sys\n\n\ndef main():\n", "class Stack:\n",
    "def is_prime(number):\n", "for i in range(10):\n", "def read_lines(path):\n",
    "function add(a, b) {\n", "#include <stdio.h>\n\nint main() {\n",
    "SELECT name FROM users\n", "def test_sort():\n",
    "public class Main {\n", "def quicksort(items):\n",
    "const express = require('express');\n", "<html>\n<body>\n", "def count_words(text):\n",
    "if __name__ == '__main__':\n",
)  # fmt: skip
_LANGUAGES = {
    "English": ("The city was", "In the year", "She opened the", "Most people think that"),
    "French": ("La ville était", "En l'année", "Elle ouvrit la", "La plupart des gens"),
    "German": ("Die Stadt war", "Im Jahr", "Sie öffnete die", "Die meisten Menschen"),
    "Spanish": ("La ciudad era", "En el año", "Ella abrió la", "La mayoría de la gente"),
}
_REQUESTS = (
    "Write one sentence about the sea.", "Name three colors.", "What is the capital of France?",
    "Explain what a prime number is.", "Translate 'good morning' into German.",
    "Give me a short recipe for soup.", "How do I sort a list in Python?", "Who wrote Hamlet?",
)  # fmt: skip


def skills(texts: int = 16, tokens: int = 48, *, seed: int = 0) -> list[Probe]:
    """Return the tests, for the argument ``probes`` of :func:`holdfast.measure`.

    Args:
        texts: samples per skill.
        tokens: the maximum length of what the base writes after an opening.
        seed: the random seed.

    Example:
        >>> [test.name for test in skills()][:2]
        ['arithmetic', 'code']
    """
    whole_number("texts", texts, 1), whole_number("tokens", tokens, 1)
    drawn = partial(Continued, texts=texts, tokens=tokens, seed=seed)
    languages = [drawn(name, partial(_openings, some)) for name, some in _LANGUAGES.items()]
    code = drawn("code", partial(_openings, _CODE))
    chats = Chats("chats", _chats, texts, tokens, seed)
    return [Sums("arithmetic", sums(4 * texts, seed)), code, *languages, chats]


def sums(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Return additions and subtractions of numbers with two digits, after three examples."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        *shown, asked = (sorted(draw.sample(range(10, 100), 2)) for _ in range(4))
        lines = [f"{b} - {a} = {b - a}" if draw.random() < 0.5 else f"{a} + {b} = {a + b}"
                 for a, b in (*shown, asked)]  # fmt: skip
        question, _, answer = lines[-1].rpartition(" ")
        rows.append({"prompt": "\n".join([*lines[:-1], question]), "completion": f" {answer}"})
    return rows


class Sums(Completions):
    """Right answers to sums."""

    def scores(self, before: Any, after: Any) -> list[Score]:
        found = super().scores(before, after)
        return [replace(score, metric=f"{SKILL}{score.metric}") for score in found]


@dataclass
class Continued(Asking):
    """The perplexity of what the base model writes after openings. The base must run first."""

    name: str
    openings: Callable[[Loaded], Sequence[list[int]]]
    texts: int = 16
    tokens: int = 48
    seed: int = 0
    role: Role = "retained"
    _drawn: list[encoding.Continuation] | None = field(default=None, repr=False)

    def requests(self, loaded: Loaded) -> list[encoding.Continuation]:
        if self._drawn is None:
            self._drawn = self._draw(loaded)
        return self._drawn

    def graded(self, loaded: Loaded, found: Sequence[Likelihood]) -> Outcomes:
        return Outcomes([f.nll for f in found], [f.tokens for f in found])

    def run_on_another_kind(self, loaded: Loaded, *, progress: bool) -> Outcomes:
        model = type(loaded.model).__name__
        raise ValueError(f"{self.name} needs a model that writes texts, got {model}")

    def _draw(self, loaded: Loaded) -> list[encoding.Continuation]:
        openings = self.openings(loaded)
        starts = [openings[i % len(openings)] for i in range(self.texts)]
        length = min(max(map(len, starts)) + self.tokens, loaded.limit)
        drawn = draw_texts(loaded.model, starts, length, seed=self.seed)
        return [
            encoding.Continuation(text[: len(start)], text[len(start) :])
            for start, text in zip(starts, drawn, strict=True)
            if len(text) > len(start)
        ]

    def scores(self, before: Outcomes, after: Outcomes) -> list[Score]:
        if not self._drawn:
            return []
        score = partial(
            compare, self.name, f"{SKILL}perplexity", lower_is_better=True, role=self.role
        )
        return [score(before, after, transform=np.exp)]


class Chats(Continued):
    """The perplexity of the base model's answers, for tokenizers with a chat template."""

    def unfit(self, loaded: Loaded) -> str:
        template = getattr(loaded.need_tokenizer("testing skills"), "chat_template", None)
        return "" if template else "the tokenizer has no chat template"


def _openings(words: Sequence[str], loaded: Loaded) -> list[list[int]]:
    tokenizer = loaded.need_tokenizer("testing skills")
    first = loaded.first_token()
    found = [encoding.tokenize(tokenizer, text.rstrip()) for text in words]
    return [ids if ids[:1] == [first] else [first, *ids] for ids in found]


def _chats(loaded: Loaded) -> list[list[int]]:
    """Requests up to the answer."""
    tokenizer: Any = loaded.need_tokenizer("testing skills")
    return [
        list(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True,
                return_dict=True,
            )["input_ids"]
        )
        for text in _REQUESTS
    ]  # fmt: skip
