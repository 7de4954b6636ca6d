"""A pretrained model and its training samples, by name: what ``finetune`` and ``compare`` train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import nn

from holdfast.evaluate.classify import encoded
from holdfast.evaluate.probes import Completions
from holdfast.io.heads import NewHead, head_for, load_with_head
from holdfast.io.images import Images, image_column
from holdfast.io.labels import texts_of
from holdfast.io.models import Loaded, Loader
from holdfast.io.sources import Rows, labels_of, open_rows
from holdfast.losses import IGNORED
from holdfast.scoring.likelihood import encode, encode_pair

__all__ = ["TrainingData", "samples_of"]

Sample = dict[str, list[int]] | dict[str, Any]


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
            data: as for :func:`holdfast.io.sources.open_rows`.
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
        model, new = load_with_head(self.loader, self.source, self.head)
        return model, tuple(dict.fromkeys((*self.given, *new)))

    def samples(self, model: nn.Module, max_length: int | None = None) -> Sequence[Any]:
        """Encode the rows as training samples of the model."""
        loader = replace(self.loader, max_length=max_length or self.loader.max_length)
        return samples_of(loader.ready(model, self.tokenizer), self.rows, self.data)


def samples_of(loaded: Loaded, rows: Rows, name: str) -> Sequence[Any]:
    """Encode rows as training samples; the model's kind and the rows' columns decide how.

    A causal language model learns conversations (``messages``: the assistant's turns), prompts
    and completions (the completion), or texts (all tokens, in pieces of its full length). A
    classifier learns texts or images and their labels, which may be numbers.
    """
    if not len(rows):
        raise ValueError(f"{name} has no rows")
    if loaded.kind == "image_classifier" or image_column(rows[0]):
        if loaded.kind != "image_classifier":
            raise ValueError(
                f"{name} holds images, but {type(loaded.model).__name__} is no image classifier"
            )
        return cast(Sequence[Any], Images(loaded, rows, name))
    if loaded.kind == "classifier":
        labels_of(rows, name)
        return [encoded(loaded, row, name) for row in rows]
    if loaded.kind != "causal_lm":
        raise ValueError(
            f"{type(loaded.model).__name__} has no head for {name}. Rows with a text and a label "
            "give it a classification head; or train it in your own loop, with holdfast.Run"
        )
    first = rows[0]
    if "messages" in first:
        samples = [_conversation(loaded, row["messages"], name) for row in rows]
    elif set(first) & {"completion", "answer", "response", "output", "target"}:
        pairs = Completions(name, rows)
        samples = [_completion(loaded, *pairs.texts(i)) for i in range(len(rows))]
    elif column := texts_of(first):
        samples = [piece for row in rows for piece in _pieces(loaded, str(row[column[0]]))]
    else:
        raise ValueError(
            f"{name} has the columns {', '.join(map(str, first))}; training needs messages, or "
            "prompt and completion, or text"
        )
    kept = [s for s in samples if any(label != IGNORED for label in s["labels"][1:])]
    if not kept:
        raise ValueError(f"{name}: no row has a target token within {loaded.limit} tokens")
    return kept


def _completion(loaded: Loaded, prompt: str, answer: str) -> Sample:
    context, target = encode_pair(loaded, prompt, answer)
    end = loaded.need_tokenizer("training").eos_token_id
    target = target if end is None else [*target, end]
    ids = [*context, *target]
    labels = [*[IGNORED] * len(context), *target]
    return {"input_ids": ids[: loaded.limit], "labels": labels[: loaded.limit]}


def _pieces(loaded: Loaded, text: str) -> list[Sample]:
    ids = encode(loaded.need_tokenizer("training"), text)
    cut = [ids[i : i + loaded.limit] for i in range(0, len(ids), loaded.limit)]
    return [{"input_ids": piece, "labels": list(piece)} for piece in cut]


def _conversation(loaded: Loaded, messages: Sequence[Mapping[str, str]], name: str) -> Sample:
    """Encode a conversation with the chat template; the assistant's turns are the target."""
    tokenizer = loaded.need_tokenizer("a conversation")
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"{name} holds conversations, but the tokenizer has no chat template")

    def ids_of(turns: Sequence[Mapping[str, str]], *, ask: bool = False) -> list[int]:
        made = tokenizer.apply_chat_template(
            list(turns), add_generation_prompt=ask, tokenize=True, return_dict=True
        )
        return list(made["input_ids"])

    ids: list[int] = []
    labels: list[int] = []
    for i, turn in enumerate(messages):
        if turn["role"] != "assistant":
            continue
        before, after = ids_of(messages[:i], ask=True), ids_of(messages[: i + 1])
        if after[: len(before)] != before or before[: len(ids)] != ids:
            raise ValueError(
                f"{name}: the chat template rewrites earlier turns; use prompt and completion"
            )
        labels += [IGNORED] * (len(before) - len(ids)) + after[len(before) :]
        ids = after
    return {"input_ids": ids[: loaded.limit], "labels": labels[: loaded.limit]}
