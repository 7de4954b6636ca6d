"""Tests with labels: accuracy, squared error, and the agreement of the pretrained head."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from holdfast._torch.batch import inputs_and_labels, logits_of, pad_id_of, to_device
from holdfast._torch.finite import matches
from holdfast._torch.layers import head_of
from holdfast._torch.pretrained_head import PretrainedHead
from holdfast._torch.progress import progress_bar
from holdfast.data import Collate, Source, as_source, pad_collate
from holdfast.evaluate.report import Score
from holdfast.evaluate.stats import Numbers, Outcomes, compare, correlation
from holdfast.io.encoding import Images, encode_labeled, fitting
from holdfast.io.heads import is_regression, model_kind
from holdfast.io.models import Loaded
from holdfast.io.rows import image_column, text_columns


class Answers(NamedTuple):
    """Whether a classifier was correct on each sample, and its loss."""

    correct: Outcomes
    losses: Outcomes | None  # None if a label is not one of the model's classes


@dataclass(frozen=True)
class Classification:
    """The accuracy of a classifier; for the target also its loss.

    A regression model, which predicts a number, is tested by its mean squared error and its
    correlation with the labels. The data are rows with one or two texts or an ``image``, and a
    ``label``; or anything that :func:`holdfast.score` takes, with its ``collate``.
    """

    name: str
    data: Any
    collate: Collate | None = None
    batch_size: int = 32
    role: str = "retained"

    def run(self, loaded: Loaded, *, progress: bool) -> Answers | Numbers:
        numbers = is_regression(getattr(loaded.model, "config", None))
        found: dict[int, tuple[float, float]] = {}
        known = True  # all labels are classes of the model
        with progress_bar(None, self.name, shown=progress) as bar:
            for indices, logits, labels in self._batches(loaded):
                if numbers:
                    one, other = logits.reshape(-1), labels
                else:
                    is_class = (labels >= 0) & (labels < logits.shape[-1])
                    known = known and bool(is_class.all())
                    one, other = matches(logits, labels), _losses(logits, labels.where(is_class, 0))
                rows = zip(one.tolist(), other.tolist(), strict=True)
                found |= dict(zip(indices, rows, strict=True))
                bar.update(len(indices))
        first, second = zip(*(found[i] for i in sorted(found)), strict=True)
        if numbers:
            return Numbers(first, second)
        return Answers(Outcomes(first), Outcomes(second) if known else None)

    def scores(self, before: Answers | Numbers, after: Answers | Numbers) -> list[Score]:
        score = partial(compare, self.name, role=self.role)
        if isinstance(before, Numbers) and isinstance(after, Numbers):
            error = score("mse", _squared(before), _squared(after), lower_is_better=True)
            return [error, correlation(self.name, "pearson", before, after, self.role)]
        if isinstance(before, Numbers) or isinstance(after, Numbers):
            raise ValueError(
                f"{self.name}: one model predicts classes and the other a number, so they cannot "
                "be compared"
            )
        rows = [score("accuracy", before.correct, after.correct, lower_is_better=False)]
        if self.role == "target" and before.losses and after.losses:
            rows.append(score("loss", before.losses, after.losses, lower_is_better=True))
        return rows

    def logits(self, loaded: Loaded) -> list[Tensor]:
        """Return the logits of each sample, in the data's order."""
        found: dict[int, Tensor] = {}
        for indices, logits, _ in self._batches(loaded):
            found |= dict(zip(indices, logits.cpu(), strict=True))
        return [found[i] for i in sorted(found)]

    @torch.no_grad()
    def _batches(self, loaded: Loaded) -> Iterator[tuple[list[int], Tensor, Tensor]]:
        for indices, read in self._source(loaded):
            batch = to_device(read(), loaded.device)
            inputs, labels = inputs_and_labels(loaded.model, batch)
            yield indices, logits_of(loaded.model, inputs), labels

    def lengths(self, loaded: Loaded) -> list[int]:
        """Return the tokens of each sample; none if the samples are no texts."""
        self.check_kind(loaded.model)
        rows = self.data if isinstance(self.data, list) else []
        if not rows or not isinstance(rows[0], Mapping) or not text_columns(rows[0]):
            return []
        encoded = (encode_labeled(loaded, row, i, self.name) for i, row in enumerate(rows))
        return [len(sample["input_ids"]) for sample in encoded]

    def within(self, loaded: Loaded, tokens: int) -> "Classification":
        lengths = self.lengths(loaded)
        return replace(self, data=fitting(self.data, lengths, tokens)) if lengths else self

    def check_kind(self, model: nn.Module) -> None:
        """Refuse a model that predicts tokens; its weights are not needed."""
        if model_kind(model) in ("causal_lm", "masked_lm"):
            raise ValueError(
                f"{self.name} has classes, but {type(model).__name__} predicts tokens: give "
                "both models a classification head, or leave it out"
            )

    def _source(self, loaded: Loaded) -> Source:
        data = self.data
        self.check_kind(loaded.model)
        if hasattr(data, "__len__") and not len(data):
            raise ValueError(f"{self.name} has no rows")
        first = data[0] if hasattr(data, "__getitem__") else None
        if isinstance(first, Mapping) and text_columns(first):
            data = [encode_labeled(loaded, row, i, self.name) for i, row in enumerate(data)]
        elif isinstance(first, Mapping) and image_column(first) and self.collate is None:
            data = Images(loaded, data, self.name)
        own = pad_id_of(loaded.model)
        pad = own if own is not None else getattr(loaded.tokenizer, "pad_token_id", None) or 0
        collate = self.collate
        if collate is None and isinstance(data, list) and "input_ids" in data[0]:
            collate = partial(pad_collate, pad_id=pad)
        return as_source(data, collate, self.batch_size, pad)


@dataclass
class HeadAgreement:
    """How often the tuned body with the pretrained head still predicts what the base predicted.

    For models whose head was replaced. The pretrained head and the pretrained BatchNorm statistics
    are put onto the tuned body. If the labels are classes of the base, pass ``labeled=True`` to
    report the accuracy too.
    """

    task: Classification
    head: str | None = None  # the module name of the head; None finds it
    labeled: bool = False
    _kept: PretrainedHead | None = field(default=None, repr=False)
    _predicted: list[Tensor] = field(default_factory=list, repr=False)

    @property
    def name(self) -> str:
        return self.task.name

    def begin(self) -> None:
        """Discard the head and the predictions of an earlier base."""
        self._kept, self._predicted = None, []

    def run(self, loaded: Loaded, *, progress: bool) -> list[Outcomes]:
        if self._kept is None:
            head = self.head or head_of(loaded.model)
            if head is None:
                raise ValueError(
                    f"cannot find the head of {type(loaded.model).__name__}: pass head='NAME'"
                )
            self._kept = PretrainedHead.of(loaded.model, head)
            logits = self.task.logits(loaded)
            self._predicted = [row.argmax() for row in logits]
        else:
            with self._kept.on(loaded.model):
                logits = self.task.logits(loaded)
        both = zip(logits, self._predicted, strict=True)
        found = [Outcomes([float(matches(row, before)) for row, before in both])]
        if self.labeled:
            with self._kept.on(loaded.model):
                answers = self.task.run(loaded, progress=progress)
            if isinstance(answers, Numbers):
                raise ValueError(f"{self.name}: a regression has no accuracy: pass labeled=False")
            found.append(answers.correct)
        return found

    def scores(self, before: list[Outcomes], after: list[Outcomes]) -> list[Score]:
        metrics = ["agreement of the pretrained head", "accuracy of the pretrained head"]
        return [
            compare(self.name, metric, old, new, lower_is_better=False, role=self.task.role)
            for metric, old, new in zip(metrics, before, after, strict=False)
        ]


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels.long(), reduction="none")


def _squared(numbers: Numbers) -> Outcomes:
    pairs = zip(numbers.predicted, numbers.true, strict=True)
    return Outcomes([(predicted - true) ** 2 for predicted, true in pairs])
