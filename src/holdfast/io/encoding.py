"""Rows, texts and images as the inputs of a model, for training and for evaluation.

The split between context and target follows lm-evaluation-harness, so that the same task gives the
same figure.
"""

from __future__ import annotations

import functools
import io
import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

from torch import nn
from torch.utils.data import Dataset

from holdfast._torch.fingerprint import arrow_fingerprint, content_fingerprint
from holdfast._torch.imports import require
from holdfast.io.files import first_line
from holdfast.io.heads import NewHead, head_for, target_of
from holdfast.io.models import Loaded, Loader
from holdfast.io.render import Conversation, Reader, Words, rename
from holdfast.io.rows import (
    DatasetRows,
    Rows,
    Sources,
    check_unicode,
    columns_of,
    hold_out,
    image_column,
    label_of,
    labels_of,
    name_of,
    open_rows,
    text_columns,
)
from holdfast.losses import IGNORED

logger = logging.getLogger(__name__)


_MARGIN = 64  # tokens at the end of a part of a text, which its cut may change


class Continuation(NamedTuple):
    """Target tokens to predict, and the context tokens before them (at least one)."""

    context: list[int]
    target: list[int]


def tokenize(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text, after the BOS token if the tokenizer adds one."""
    return tokenize_all(tokenizer, [text])[0]


def tokenize_all(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Tokenize texts in one call, which is several times faster than one call per text."""
    if not texts:
        return []
    found = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    return _after_bos(tokenizer, found)


def _after_bos(tokenizer: Any, found: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return token sequences after the BOS token, if the tokenizer adds one."""
    bos = tokenizer.bos_token_id
    begins = bos is not None and list(tokenizer("")["input_ids"])[:1] == [bos]
    return [[bos, *ids] if begins and ids[:1] != [bos] else list(ids) for ids in found]


def encode_pair(loaded: Loaded, context: str, target: str) -> Continuation:
    """Encode a context and its continuation together, and cut where the context's tokens end.

    Spaces at the end of the context move to the target: most tokenizers join them to the next word.
    """
    return encode_pairs(loaded, [(context, target)])[0]


def encode_pairs(loaded: Loaded, pairs: Sequence[tuple[str, str]]) -> list[Continuation]:
    """Encode contexts and their continuations as :func:`encode_pair` does, in one call."""
    tokenizer = loaded.need_tokenizer("a text")
    contexts = [context.rstrip() for context, _ in pairs]
    wholes = tokenize_all(tokenizer, [context + target for context, target in pairs])
    distinct = list(dict.fromkeys(context for context in contexts if context))
    before = dict(zip(distinct, map(len, tokenize_all(tokenizer, distinct)), strict=True))
    found = []
    for context, whole in zip(contexts, wholes, strict=True):
        if context:
            found.append(Continuation(whole[: before[context]], whole[before[context] :]))
        else:
            start = loaded.first_token()
            found.append(Continuation([start], whole[1:] if whole[:1] == [start] else whole))
    return found


def first_tokens(tokenizer: Any, text: str, most: int) -> tuple[str, list[int]]:
    """Return the beginning of a text with at most this many tokens, and its tokens.

    The tokens are those of :func:`tokenize`. A BOS token does not count.
    """
    characters = 5 * (most + _MARGIN)  # about as many as these tokens have
    while True:
        found = tokenizer(text[:characters], add_special_tokens=False, verbose=False)
        ids = found["input_ids"]
        if len(ids) > most + _MARGIN or characters >= len(text):
            break
        characters *= 2
    if len(ids) > most:
        if getattr(tokenizer, "is_fast", False):
            span = found.token_to_chars
            # Several tokens may be parts of one character, which is left out then.
            while most > 1 and span(most).start < span(most - 1).end:
                most -= 1
            text = text[: span(most - 1).end]
        else:
            text = str(tokenizer.decode(ids[:most]))
    return text, _after_bos(tokenizer, [ids[:most]])[0]


def fitting(rows: Rows, lengths: Sequence[int], tokens: int) -> Rows:
    """Return as many of the first rows as fit into a number of tokens, but at least one."""
    return rows[: max(1, sum(end <= tokens for end in accumulate(lengths)))]


def pieces(ids: Sequence[int], limit: int) -> list[list[int]]:
    return [list(ids[i : i + limit]) for i in range(0, len(ids), limit)]


def windows(ids: Sequence[int], start: int, limit: int) -> list[Continuation]:
    """Cut a long text into windows so that each of its tokens is a target exactly once.

    The first token of a window is predicted from the token before it. The last window reaches back
    so that it is as long as the others.

    >>> [list(w) for w in windows([1, 2, 3, 4, 5], start=0, limit=3)]
    [[[0], [1, 2, 3]], [[2, 3], [4, 5]]]
    """
    tokens = [start, *ids]
    found = []
    for first in range(1, len(tokens), limit):
        last = min(first + limit, len(tokens))
        found.append(Continuation(tokens[max(0, last - 1 - limit) : first], tokens[first:last]))
    return found


def encode_text(loaded: Loaded, texts: Sequence[str], where: str) -> dict[str, list[int]]:
    """Encode a text, or a pair of texts, for an encoder; ``where`` names it in errors."""
    tokenizer = loaded.need_tokenizer(where)
    out = tokenizer(*texts, truncation=True, max_length=loaded.limit)
    if not out["input_ids"]:
        raise ValueError(f"{where} has no tokens: its text is empty")
    return {name: list(values) for name, values in out.items()}


def encode_labeled(
    loaded: Loaded, row: Mapping[str, Any], number: int, name: str
) -> dict[str, Any]:
    columns, label = text_columns(row), label_of(row)
    if not columns or label is None:
        there = [str(column) for column, value in row.items() if value is not None]
        raise ValueError(
            f"{name}: row {number} needs a text and a label, but it has "
            f"{', '.join(there) or 'no columns'}"
        )
    target = target_of(getattr(loaded.model, "config", None), label, name)
    where = f"{name}: row {number}"
    for column in columns:
        check_unicode(row[column], where)
    return {**encode_text(loaded, [row[c] for c in columns], where), "labels": target}


def training_samples(loaded: Loaded, rows: Rows, name: str) -> tuple[Sequence[int], Sequence[Any]]:
    """Encode rows as training samples for a model, by its kind and the rows' columns.

    Return the number of each sample's row, and the samples.

    A causal language model learns the assistant's turns of conversations (``messages``), the
    completions of prompts, or whole texts in pieces of its maximum length. A classifier learns the
    labels of texts or images; its labels may be numbers.
    """
    if not len(rows):
        raise ValueError(f"{name} has no rows")
    model = type(loaded.model).__name__
    if loaded.kind == "image_classifier" or image_column(rows[0]):
        if loaded.kind != "image_classifier":
            raise ValueError(f"{name} holds images, but {model} is not an image classifier")
        return range(len(rows)), Images(loaded, rows, name)  # type: ignore[return-value]
    if loaded.kind == "classifier":
        labels_of(rows, name)
        encoded = [encode_labeled(loaded, row, i, name) for i, row in enumerate(rows)]
        Reader(name).warn_of_unused(rows, "labeled")
        return range(len(rows)), encoded
    if loaded.kind != "causal_lm":
        advice = "give rows with a text and a label to get a new head"
        if text_columns(rows[0]) and label_of(rows[0]) is not None:
            advice = "ask for a new one with --head classification or regression"
        raise ValueError(
            f"{model} has no head for {name}: {advice}, or train it in your own loop with "
            "holdfast.Run"
        )
    kept = _causal_samples(loaded, rows, name)
    return [i for i, _ in kept], [sample for _, sample in kept]


def _causal_samples(
    loaded: Loaded, rows: Rows, name: str
) -> list[tuple[int, dict[str, list[int]]]]:
    """Encode rows for a causal language model, each sample with the number of its row.

    A row without a target within the maximum length gives no sample, a long text gives several.
    """
    reader = Reader(name)
    kind, words = reader.training_words(rows)
    samples: list[tuple[int, dict[str, list[int]]]] = []
    for i, said in enumerate(words):
        samples += [(i, sample) for sample in _samples(loaded, said, f"{name}: row {i}")]
    reader.warn_of_unused(rows, kind)
    _warn_of_tools(loaded, words, name)
    long = {i for i, sample in samples if len(sample["input_ids"]) > loaded.limit}
    samples = [(i, {n: x[: loaded.limit] for n, x in sample.items()}) for i, sample in samples]
    kept = [(i, s) for i, s in samples if any(label != IGNORED for label in s["labels"][1:])]
    if not kept:
        raise ValueError(f"{name}: no row has a target within {loaded.limit} tokens")
    if long:
        lost = len(long - {i for i, _ in kept})
        without = f"; {lost} of them have no target left and are not used" if lost else ""
        _say_once(
            f"{name}: {len(long)} of {len(rows)} rows are cut to {loaded.limit} tokens{without}"
        )
    return kept


@functools.cache
def _say_once(message: str) -> None:
    logger.info(message)


def _warn_of_tools(loaded: Loaded, words: Sequence[Words], name: str) -> None:
    """Warn if the first conversation with tools is the same without them."""
    for said in words:
        if isinstance(said, Conversation) and said.tools:
            both = [_samples(loaded, one, name) for one in (said, said._replace(tools=None))]
            if both[0] == both[1]:
                warnings.warn(
                    f"{name}: the chat template ignores the tools of the rows", stacklevel=2
                )
            return


def _samples(loaded: Loaded, words: Words, where: str) -> list[dict[str, list[int]]]:
    """Encode the words of a row as samples: the answers, or all of a text, are the targets."""
    tokenizer = loaded.need_tokenizer("training")
    if isinstance(words, str):
        cut = pieces(tokenize(tokenizer, words), loaded.limit)
        return [{"input_ids": piece, "labels": list(piece)} for piece in cut]
    end = [] if isinstance(words, Conversation) else [tokenizer.eos_token_id]
    samples: list[dict[str, list[int]]] = []
    ids: list[int] = []
    for context, target in encode_answers(loaded, words, where):
        target = [*target, *(token for token in end if token is not None)]
        if not samples or context[: len(ids)] != ids:  # the template rewrites earlier turns
            samples.append({"input_ids": [], "labels": []})
            ids = []
        samples[-1]["labels"] += [*[IGNORED] * (len(context) - len(ids)), *target]
        samples[-1]["input_ids"] = ids = [*context, *target]
    return samples


def encode_answers(
    loaded: Loaded, words: Conversation | tuple[str, str], where: str
) -> list[Continuation]:
    """Encode the answer to a prompt, or each turn of the assistant, with all that comes before."""
    if not isinstance(words, Conversation):
        return [encode_pair(loaded, *words)]
    tokenizer = loaded.need_tokenizer("a conversation")
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"{where} is a conversation, but the tokenizer has no chat template: use a model with "
            "one, or prompt and completion rows"
        )

    def ids_of(turns: Sequence[Mapping[str, Any]], *, ask: bool = False) -> list[int]:
        try:
            made = tokenizer.apply_chat_template(
                list(turns), tools=words.tools, add_generation_prompt=ask, tokenize=True,
                return_dict=True,
            )  # fmt: skip
        except Exception as error:  # templates raise many types, also on purpose
            reason = first_line(error)
            raise ValueError(f"{where} does not fit the chat template: {reason}") from error
        return list(made["input_ids"])

    found = []
    for i, turn in enumerate(words.messages):
        if i and turn["role"] == "assistant":  # templates render no empty conversations
            before, after = words.messages[:i], ids_of(words.messages[: i + 1])
            contexts = (ids_of(before, ask=ask) for ask in (True, False))
            known = next((len(c) for c in contexts if after[: len(c)] == c), None)
            if known is None:
                raise ValueError(
                    f"{where}: the chat template changes what comes before an answer: use prompt "
                    "and completion rows"
                )
            found.append(Continuation(after[:known], after[known:]))
    return found


class Images(Dataset[dict[str, Any]]):
    """Rows with an image and a label for an image classifier; images are decoded on access."""

    def __init__(self, loaded: Loaded, rows: Rows, name: str) -> None:
        labels = labels_of(rows, name)
        column = image_column(rows[0])
        if labels is None or column is None:
            columns = ", ".join(map(str, rows[0])) or "no columns"
            raise ValueError(f"{name}: a row needs an image and a label, but it has {columns}")
        if "pixel_values" not in getattr(loaded.tokenizer, "model_input_names", ()):
            raise ValueError(
                f"{name} holds images, but {type(loaded.model).__name__} has no image processor: "
                "save its preprocessor_config.json next to its weights"
            )
        self.rows, self.name, self.column = rows, name, column
        self.processor = loaded.tokenizer
        config = getattr(loaded.model, "config", None)
        self.labels: Sequence[int | float] = [target_of(config, x, name) for x in labels]

    def __len__(self) -> int:
        return len(self.rows)

    def fingerprint(self) -> str | None:
        """A fingerprint of all rows and of the processor, for which no image is decoded."""
        rows: Any = self.rows
        if isinstance(rows, DatasetRows):
            return content_fingerprint([arrow_fingerprint(rows.dataset), str(self.processor)])
        stored = (
            (_stored(row[self.column]), label) for row, label in zip(rows, self.labels, strict=True)
        )
        return content_fingerprint([*stored, str(self.processor)])

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = open_image(self.rows[index][self.column], f"{self.name}, row {index}")
        made = self.processor(images=image, return_tensors="pt")
        return {"pixel_values": made["pixel_values"][0], "labels": self.labels[index]}


def _stored(image: Any) -> Any:
    """An image as it is stored; of a file, its name, size and time."""
    if not isinstance(image, str | os.PathLike):
        return image
    about = os.stat(image)
    return os.fspath(image), about.st_size, about.st_mtime_ns


def open_image(given: Any, name: str) -> Any:
    pillow = require("PIL.Image", extra="hf", what="reading images")
    if isinstance(given, Mapping):  # the form in Parquet files of datasets
        given = given.get("bytes") or given.get("path")
    try:
        if isinstance(given, bytes):
            given = pillow.open(io.BytesIO(given))
        elif isinstance(given, str | os.PathLike):
            name = str(given)
            given = pillow.open(given)
        elif not isinstance(given, pillow.Image):
            given = pillow.fromarray(given)
        return given.convert("RGB")
    except FileNotFoundError:
        raise FileNotFoundError(f"no such file: {name}") from None
    except Exception as error:  # a damaged file makes Pillow raise many types
        raise ValueError(f"{name} cannot be read as an image: {error}") from error


@dataclass(frozen=True)
class TrainingData:
    """A pretrained model by name, and the rows to fine-tune it on."""

    source: str  # directory or hub name of a transformers model
    data: str  # name of the rows, for errors
    rows: Rows
    loader: Loader
    tokenizer: Any  # or the image processor
    head: NewHead | None = None  # if the rows have labels that the model has no head for
    given: tuple[str, ...] = ()  # parts of the model that the user declared new
    columns: Mapping[str, str] = field(default_factory=dict)  # the column map
    all_columns: Sequence[str] = ()  # of the data, by their own names
    validation: Rows = ()  # rows that are not trained on

    @classmethod
    def open(
        cls,
        source: str,
        data: Sources,
        loader: Loader,
        *,
        head: str = "auto",
        new: Sequence[str] = (),
        columns: Mapping[str, str] | None = None,
        validation: str | os.PathLike[str] | float | None = None,
    ) -> TrainingData:
        """Read the rows, and decide with ``head_for`` whether the model needs a new head.

        ``validation`` are other rows, or a share of the rows to hold out.
        """
        name, columns = name_of(data), columns or {}
        given = open_rows(data)
        rows = rename(given, columns, name)
        trust = loader.trust_remote_code
        needed = head_for(head, source, rows, name, trust_remote_code=trust)
        tokenizer = loader.tokenizer_of(source)
        if needed is not None and not needed.images and tokenizer is not None:
            if tokenizer.pad_token is None:
                tokenizer.pad_token = tokenizer.eos_token
            needed = replace(needed, pad=tokenizer.pad_token_id)
        own = columns_of(given)
        others: Rows = ()
        if isinstance(validation, str | os.PathLike):
            others = rename(open_rows(validation), columns, os.fspath(validation))
        elif validation is not None:
            rows, others = hold_out(rows, validation)
        return cls(source, name, rows, loader, tokenizer, needed, tuple(new), columns, own, others)

    def load(self) -> tuple[nn.Module, tuple[str, ...]]:
        """Load the pretrained model; also return its new parts, the new head among them."""
        if self.head is None:
            return self.loader.load(self.source), self.given
        model, new = self.loader.load_with_head(self.source, self.head)
        return model, tuple(dict.fromkeys((*self.given, *new)))

    def samples(
        self, model: nn.Module, max_length: int | None = None, other: str | None = None
    ) -> Sequence[Any]:
        """Encode the rows, or ``other`` ones, by the kind of the model and the rows' columns.

        A causal language model learns the assistant's turns of conversations (``messages``), the
        completions of prompts, or whole texts in pieces of its maximum length. A classifier learns
        the labels of texts or images.
        """
        loader = replace(self.loader, max_length=max_length or self.loader.max_length)
        rows, name = self.rows, self.data
        if other is not None:
            rows, name = rename(open_rows(other), self.columns, other, optional=True), other
        return training_samples(loader.ready(model, self.tokenizer), rows, name)[1]
