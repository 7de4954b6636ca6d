"""What a language model is asked before and after: its target, and what it should have retained."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "papers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from _lm_tests import Pool, Test, loss_figures, right_answers, share_figures
from _lm_write import write
from _samples import pack
from _targets import Target
from additivity_lm import end_of_answer

from holdfast.io.encoding import Continuation

WRITTEN = 700  # answers that are written side by side
SHOWN = 4  # answers in a record, for a reader
Record = dict[str, Any]


class Exam:
    """All requests of a setting, in batches on the device.

    Args:
        target: its choose and report parts are tested, and its questions answered.
        tests: the retained ones, of ``make_tests``.
        tokenizer: to read what the model writes.
    """

    def __init__(
        self, target: Target, tests: Sequence[Test], tokenizer: Any, device: torch.device
    ) -> None:
        self.target, self.tokenizer = target, tokenizer
        own = {"choose": target.choose, "report": target.report}
        self.tests: list[Test] = [
            {"name": name, "kind": "text", "requests": requests}
            for name, requests in own.items()
            if requests
        ]
        self.tests += tests
        requests = [Continuation(*r) for test in self.tests for r in test["requests"]]
        self.pool = Pool(requests, device)

    @torch.no_grad()
    def take(self, model: Any, *, whole: bool = True, write: bool = True) -> Record:
        """The figures of a model. If ``whole``, also every sample and, if ``write``, answers."""
        nll, greedy = self.pool.answered(model)
        found, samples = dict[str, float](), Record()
        start = 0
        for test in self.tests:
            here = slice(start, start := start + len(test["requests"]))
            name, tokens = test["name"], self.pool.tokens[here]
            if test["kind"] == "text":
                found |= loss_figures(name, nll[here], tokens)
                samples[name] = [round(float(x), 2) for x in nll[here]]
            else:
                right = right_answers(test, nll[here], greedy[here])
                found |= share_figures(name, right)
                samples[name] = pack(right)
        if whole and write and self.target.questions:
            answers = written(model, self.tokenizer, self.target.questions, self.target.most)
            texts = self.tokenizer.batch_decode(answers, skip_special_tokens=True)
            right = np.array(self.target.right(texts))
            found |= share_figures("written", right)
            found["written_ended"] = float(np.mean([len(a) < self.target.most for a in answers]))
            samples |= {"written": pack(right), "texts": texts[:SHOWN]}
        rounded: Record = {name: round(float(value), 6) for name, value in found.items()}
        return rounded | ({"samples": samples} if whole else {})

    def sizes(self) -> Record:
        """The tokens of each request of a text, and the number of rows of the other tests."""
        ends = np.cumsum([len(test["requests"]) for test in self.tests])[:-1]
        tokens = np.split(self.pool.tokens, ends)
        found: Record = {
            test["name"]: here.tolist() if test["kind"] == "text" else rows_of(test)
            for test, here in zip(self.tests, tokens, strict=True)
        }
        return found | {"written": len(self.target.questions)}


def written(
    model: Any, tokenizer: Any, prompts: Sequence[list[int]], most: int
) -> list[list[int]]:  # fmt: skip
    """The tokens that a model writes after prompts, at most so many, up to the end of an answer."""
    found: list[list[int]] = [[]] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for begin in range(0, len(order), WRITTEN):
        some = order[begin : begin + WRITTEN]
        answers = write(model, [prompts[i] for i in some], end_of_answer(tokenizer), most)
        for i, answer in zip(some, answers, strict=True):
            found[i] = answer
    return found


def written_texts(
    model: Any, tokenizer: Any, prompts: Sequence[list[int]], most: int
) -> list[str]:  # fmt: skip
    """What a model writes after prompts, without special tokens."""
    tokens = written(model, tokenizer, prompts, most)
    texts: list[str] = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return texts


def rows_of(test: Test) -> int:
    """The number of questions of a test, each of which may be several requests."""
    return len(test["sizes"] if "sizes" in test else test["requests"])
