"""A pretrained model and its training samples, by name: what ``finetune`` and ``compare`` train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from holdfast.io.encoding import training_samples
from holdfast.io.heads import NewHead, head_for
from holdfast.io.models import Loader
from holdfast.io.rows import Rows, open_rows

__all__ = ["TrainingData"]


@dataclass(frozen=True)
class TrainingData:
    """A pretrained model by name, and the rows to fine-tune it on.

    Attributes:
        source: directory or hub name of a transformers model.
        data: name of the rows, for errors.
        rows: the training rows.
        loader: loads the model.
        tokenizer: the model's tokenizer or image processor.
        head: the new head, if the rows have labels that the model has no head for.
        given: parts of the model that the user declared new.
    """

    source: str
    data: str
    rows: Rows
    loader: Loader
    tokenizer: Any
    head: NewHead | None = None
    given: tuple[str, ...] = ()

    @classmethod
    def open(
        cls, source: str, data: str, loader: Loader, *, head: str = "auto", new: Sequence[str] = ()
    ) -> TrainingData:
        """Read the rows, and decide whether the model needs a new head for them.

        Args:
            source: directory or hub name of the model.
            data: as for :func:`holdfast.io.rows.open_rows`.
            loader: loads the model.
            head: as for :func:`holdfast.io.heads.head_for`.
            new: parts of the model without pretrained weights.
        """
        rows = open_rows(data)
        needed = head_for(head, source, rows, data)
        tokenizer = loader.tokenizer_of(source)
        if needed is not None and not needed.images and tokenizer is not None:
            if tokenizer.pad_token is None:
                tokenizer.pad_token = tokenizer.eos_token
            needed = replace(needed, pad=tokenizer.pad_token_id)
        return cls(source, data, rows, loader, tokenizer, needed, tuple(new))

    def load(self) -> tuple[nn.Module, tuple[str, ...]]:
        """Load the pretrained model; also return its new parts, the new head among them."""
        if self.head is None:
            return self.loader.load(self.source), self.given
        model, new = self.loader.load_with_head(self.source, self.head)
        return model, tuple(dict.fromkeys((*self.given, *new)))

    def samples(self, model: nn.Module, max_length: int | None = None) -> Sequence[Any]:
        """Encode the rows as training samples of the model."""
        loader = replace(self.loader, max_length=max_length or self.loader.max_length)
        return training_samples(loader.ready(model, self.tokenizer), self.rows, self.data)
