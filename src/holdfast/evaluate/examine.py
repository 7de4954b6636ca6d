"""Examine models one after the other: first the base, then each tuned model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.evaluate.classify import HeadAgreement
from holdfast.evaluate.kl import KL
from holdfast.evaluate.report import Divergence, Score
from holdfast.evaluate.suite import Suite, kl_of
from holdfast.io.heads import NewHead
from holdfast.io.models import Loaded

__all__ = ["Answers", "Examination"]


@dataclass
class Answers:
    """The results of one model compared with the base."""

    divergences: list[Divergence] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Examination:
    """The tests of a suite and the results of the base: first :meth:`start`, then :meth:`compare`.

    Args:
        suite: the tests.
        folder: a directory for the base's predictions.
        tokens: the maximum length of the texts that the base generates.
        progress: show progress bars.
    """

    def __init__(
        self, suite: Suite, folder: Path, *, tokens: int = 64, progress: bool = False
    ) -> None:
        self.tests, self.targets = suite.build()
        self.free, self.samples = suite.context_free_kl(tokens), suite.kl_samples
        self.folder, self.progress = folder, progress
        self.kls: list[KL] = []
        self.before: list[Any] = []
        self.notes: list[str] = []

    def start(self, loaded: Loaded, head: NewHead | None = None) -> None:
        """Run the tests on the base, and store its predictions.

        Args:
            loaded: the base.
            head: the base's new head, if it has one.
        """
        if head is not None:
            self.notes.append(
                f"The base has no head for this task. It was tested with a new, untrained head "
                f"({head})."
            )
        if self.free and loaded.kind == "causal_lm":
            self.kls.append(self.free)
        elif self.free:
            self.notes.append("No context-free divergence: the model does not generate texts.")
        for probe in self.targets if self.samples and head is None else ():
            if kl := kl_of(probe, loaded, self.samples):
                self.kls.append(kl)
        for kl in self.kls:
            kl.remember(loaded, self.folder, progress=self.progress)
        for test in self.tests:
            if isinstance(test, HeadAgreement):
                test.begin()
        self.before = [test.run(loaded, progress=self.progress) for test in self.tests]

    def compare(self, loaded: Loaded, *, is_base: bool = False) -> Answers:
        """Run the tests on another model and compare; the base itself does not run again."""
        answers = Answers(notes=list(self.notes))
        for kl in self.kls:
            try:
                answers.divergences.append(kl.compare(loaded, progress=self.progress))
            except ValueError as error:  # a new head has other classes
                answers.notes.append(f"No divergence on {kl.name}: {error}.")
        for test, before in zip(self.tests, self.before, strict=True):
            after = before if is_base else test.run(loaded, progress=self.progress)
            answers.scores += test.scores(before, after)
        return answers
