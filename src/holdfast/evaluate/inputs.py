"""From what the user gives (files, rows, texts) to what the models are tested on."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.evaluate.classify import Classification
from holdfast.evaluate.kl import KL, ClassKL, MaskedKL, TokenKL
from holdfast.evaluate.probes import (
    Completions,
    MultipleChoice,
    Probe,
    Role,
    Text,
)
from holdfast.evaluate.similarity import Similarity
from holdfast.io.encoding import ANSWERS, QUESTIONS, encode, encode_pair, pieces
from holdfast.io.labels import is_regression, text_columns
from holdfast.io.models import Loaded
from holdfast.io.rows import IMAGE_COLUMNS, DatasetRows, Rows, is_text, open_rows, read_text

__all__ = ["Data", "kl_of", "named", "probe_of", "similarity_of", "texts_from"]

PathLike = str | os.PathLike[str]
Data = PathLike | Sequence[Mapping[str, Any]]


def named(given: Any, default: str) -> dict[str, Any]:
    """Name → what was given: a mapping as it is, paths by the names of their files.

    >>> named(["data/piqa-valid.jsonl.gz"], "data")
    {'piqa-valid': 'data/piqa-valid.jsonl.gz'}
    """
    if isinstance(given, Mapping):
        return dict(given)
    if isinstance(given, str | os.PathLike):
        given = [given]
    found: dict[str, Any] = {}
    for item in given:
        if not isinstance(item, str | os.PathLike):  # rows, or a dataset
            return {default: given}
        name = Path(item).name.split(".")[0] or str(item)
        found[name if name not in found else str(item)] = item
    return found


def texts_from(text: Any) -> list[Probe]:
    """Texts to take the perplexity of: name → text, or paths."""
    if isinstance(text, Mapping):
        return [Text(name, words) for name, words in text.items()]
    return [Text(name, read_text(Path(path))) for name, path in named(text, "text").items()]


def probe_of(name: str, data: Any, role: Role, limit: int | None) -> Probe:
    """The test that the data's columns ask for."""
    if isinstance(data, str | os.PathLike) and is_text(path := Path(data)) and path.is_file():
        return Text(name, read_text(path), role=role)
    rows = _rows(name, data, limit)
    first: Any = rows[0]
    if not isinstance(first, Mapping):
        return Classification(name, rows, role=role)
    if "choices" in first:
        return MultipleChoice(name, rows, role=role)
    if any(c in first for c in ANSWERS) and any(c in first for c in QUESTIONS):
        return Completions(name, rows, role=role)
    if any(c in first for c in ("label", "labels")):
        return Classification(name, rows, role=role)
    if column := text_columns(first):
        return Text(name, "\n\n".join(str(row[column[0]]) for row in rows), role=role)
    raise ValueError(
        f"{name}: cannot tell what to test from the columns {', '.join(map(str, first))}. Rows are "
        "multiple choice (question, choices, label), completions (prompt, completion), "
        "classification (text or image, label) or text"
    )


def similarity_of(name: str, data: Any, limit: int | None) -> Similarity:
    """A test of pairs of texts and how alike they are."""
    return Similarity(name, _rows(name, data, limit))


def _rows(name: str, data: Any, limit: int | None) -> Rows:
    """The first rows of what was given; images stay undecoded."""
    if isinstance(data, str | os.PathLike):
        data = open_rows(data)
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise TypeError(f"{name} must be a file or a sequence of rows, got {type(data).__name__}")
    if not len(data):
        raise ValueError(f"{name} has no rows")
    if any(column in IMAGE_COLUMNS for column in getattr(data, "column_names", ())):
        data = DatasetRows(data)
    if isinstance(data, DatasetRows):
        return data[:limit]
    return [data[i] for i in range(min(len(data), limit or len(data)))]


def kl_of(probe: Probe, loaded: Loaded, samples: int) -> KL | None:
    """The divergence of the predictions on a probe's inputs; None where there is none."""
    if isinstance(probe, Classification):
        if is_regression(getattr(loaded.model, "config", None)):
            return None  # a number is no distribution
        some = [probe.data[i] for i in range(min(samples, len(probe.data)))]
        return ClassKL(Classification(probe.name, some, probe.collate, probe.batch_size))
    if loaded.kind == "masked_lm" and isinstance(probe, Text):
        return MaskedKL(probe.name, [probe.text], samples)
    if loaded.kind != "causal_lm":
        return None
    tokenizer = loaded.need_tokenizer(probe.name)
    if isinstance(probe, Text):
        ids = encode(tokenizer, probe.text)
        some = pieces(ids, loaded.limit)[:samples]
        return TokenKL(probe.name, some, "the next token, after each token of the text")
    if isinstance(probe, Completions):
        pairs = [encode_pair(loaded, *probe.texts(i)) for i in range(len(probe.rows[:samples]))]
        return TokenKL(
            probe.name,
            [[*pair.context, *pair.target] for pair in pairs],
            "the next token, after each token of the prompts and their answers",
        )
    return None
