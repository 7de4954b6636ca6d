"""Classifiers, of texts and of images: accuracy, and what the pretrained head still sees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from holdfast._batch import inputs_and_labels, logits_of, pad_id_of, to_device
from holdfast._layers import head_of
from holdfast._progress import progress_bar
from holdfast.data import Batches, Collate, Samples, as_source, pad_collate
from holdfast.forgetting import stats
from holdfast.forgetting.models import Loaded
from holdfast.forgetting.report import Score
from holdfast.trainable.linear_probe import PretrainedHead

__all__ = ["Classification", "HeadAgreement"]

#: Pairs of columns that are two texts of one sample.
TEXTS = (("sentence1", "sentence2"), ("premise", "hypothesis"), ("question", "sentence"))


@dataclass(frozen=True)
class Classification:
    """The accuracy of a classifier.

    Args:
        name: what to call it.
        data: rows with a text (``text``, ``sentence``, or a pair such as ``sentence1`` and
            ``sentence2``) and a ``label``; or anything that :func:`holdfast.score` takes, images
            included.
        collate: makes a batch of samples, where the default does not.
        batch_size: samples at a time.
        role: of the row in the report.
    """

    name: str
    data: Any
    collate: Collate | None = None
    batch_size: int = 32
    role: str = "retained"

    def run(self, loaded: Loaded, *, progress: bool) -> stats.Samples:
        """Whether each sample was classified right."""
        right: dict[int, float] = {}
        bar = progress_bar(None, self.name, shown=progress)
        for indices, logits, labels in self._batches(loaded):
            found = (logits.argmax(-1) == labels).tolist()
            right |= dict(zip(indices, map(float, found), strict=True))
            bar.update(len(indices))
        bar.close()
        return stats.Samples([right[i] for i in sorted(right)])

    def scores(self, before: stats.Samples, after: stats.Samples) -> list[Score]:
        """One row."""
        return [
            stats.compare(
                self.name, "accuracy", before, after, lower_is_better=False, role=self.role
            )
        ]

    def logits(self, loaded: Loaded) -> list[Tensor]:
        """Of each sample, in the data's order."""
        found: dict[int, Tensor] = {}
        for indices, logits, _ in self._batches(loaded):
            found |= dict(zip(indices, logits.cpu(), strict=True))
        return [found[i] for i in sorted(found)]

    @torch.inference_mode()
    def _batches(self, loaded: Loaded) -> Iterator[tuple[list[int], Tensor, Tensor]]:
        for indices, read in self._source(loaded):
            batch = to_device(read(), loaded.device)
            inputs, labels = inputs_and_labels(loaded.model, batch)
            yield indices, logits_of(loaded.model, inputs), labels

    def _source(self, loaded: Loaded) -> Samples | Batches:
        data = self.data
        if loaded.kind in ("causal_lm", "masked_lm"):
            raise ValueError(
                f"{self.name} has classes, and {type(loaded.model).__name__} predicts tokens: give "
                "both models a head for it, or leave it out"
            )
        if hasattr(data, "__len__") and not len(data):
            raise ValueError(f"{self.name} has no rows")
        first = data[0] if hasattr(data, "__getitem__") else None
        if isinstance(first, Mapping) and texts_of(first):
            data = [encoded(loaded, row, self.name) for row in cast(Sequence[Any], data)]
        own = pad_id_of(loaded.model)
        pad = own if own is not None else getattr(loaded.tokenizer, "pad_token_id", None) or 0
        collate = self.collate
        if collate is None and isinstance(data, list) and "input_ids" in data[0]:
            collate = partial(pad_collate, pad_id=pad)
        return as_source(data, collate, self.batch_size, pad)


@dataclass
class HeadAgreement:
    """How often the tuned body, under the pretrained head, still says what the base said.

    For models whose head was replaced: the pretrained head is kept and put on the tuned body, with
    the pretrained BatchNorm statistics. Where the labels are the base's own classes, the accuracy
    is told as well.

    Args:
        task: the data. Its labels may be of other classes: then only agreement is told.
        head: the head's name; None finds it.
        labelled: whether the labels are classes of the base.
    """

    task: Classification
    head: str | None = None
    labelled: bool = False
    _kept: PretrainedHead | None = field(default=None, repr=False)
    _said: list[int] = field(default_factory=list, repr=False)

    @property
    def name(self) -> str:
        """As the data's."""
        return self.task.name

    def begin(self) -> None:
        """Forget another base."""
        self._kept, self._said = None, []

    def run(self, loaded: Loaded, *, progress: bool) -> list[stats.Samples]:
        """The base first, whose head and answers are kept; then the tuned model."""
        if self._kept is None:
            head = self.head or head_of(loaded.model)
            if head is None:
                raise ValueError(
                    f"cannot tell which part of {type(loaded.model).__name__} is its head: pass "
                    "head="
                )
            self._kept = PretrainedHead.of(loaded.model, head)
            logits = self.task.logits(loaded)
            self._said = [int(row.argmax()) for row in logits]
        else:
            with self._kept.on(loaded.model):
                logits = self.task.logits(loaded)
        agrees = [
            float(int(row.argmax()) == said) for row, said in zip(logits, self._said, strict=True)
        ]
        found = [stats.Samples(agrees)]
        if self.labelled:
            with self._kept.on(loaded.model):
                found.append(self.task.run(loaded, progress=progress))
        return found

    def scores(self, before: list[stats.Samples], after: list[stats.Samples]) -> list[Score]:
        """Agreement, which is 1 for the base, and accuracy under the pretrained head."""
        metrics = ["agreement of the pretrained head", "accuracy of the pretrained head"]
        return [
            stats.compare(self.name, metric, old, new, lower_is_better=False, role=self.task.role)
            for metric, old, new in zip(metrics, before, after, strict=False)
        ]


def texts_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The text columns of a row: a pair or one; none if it holds no text."""
    for pair in TEXTS:
        if all(isinstance(row.get(column), str) for column in pair):
            return pair
    return next(((c,) for c in ("text", "sentence") if isinstance(row.get(c), str)), ())


def encoded(loaded: Loaded, row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A row of texts as the model takes it."""
    tokenizer = loaded.need_tokenizer(name)
    columns = texts_of(row)
    label = row.get("label", row.get("labels"))
    if not columns or label is None:
        raise ValueError(f"{name}: a row needs texts and a label, and has {', '.join(row)}")
    out = tokenizer(*(row[c] for c in columns), truncation=True, max_length=loaded.limit)
    return {**{k: list(v) for k, v in out.items()}, "labels": label_id(loaded.model, label, name)}


def label_id(model: nn.Module, label: Any, name: str) -> int:
    """The index of a class that a row names by number or by the model's own word for it."""
    classes = getattr(getattr(model, "config", None), "num_labels", None)
    if isinstance(label, str):
        known: dict[str, int] = getattr(getattr(model, "config", None), "label2id", None) or {}
        if label not in known and not label.strip().isdigit():
            raise ValueError(f"{name}: {label!r} is none of the model's labels: {', '.join(known)}")
        label = known.get(label, label)
    if classes == 1:
        raise ValueError(f"{name}: the model has one output, a regression: it has no accuracy")
    number = int(label)
    if number != float(label) or not 0 <= number < (classes or number + 1):
        raise ValueError(f"{name}: label {label} is none of the model's {classes} classes")
    return number
