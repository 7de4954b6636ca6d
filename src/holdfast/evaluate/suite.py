"""The tests that models take, built from files, rows and texts."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast._torch.checks import whole_number
from holdfast.evaluate.classify import Classification
from holdfast.evaluate.harness import Harness
from holdfast.evaluate.kl import KL, MOST_TEXTS, ContextFreeKL, class_kl, masked_kl, token_kl
from holdfast.evaluate.probes import Completions, MultipleChoice, Probe, Role, Similarity, Text
from holdfast.io import encoding, rows
from holdfast.io.heads import is_regression
from holdfast.io.models import Loaded
from holdfast.io.render import Reader, read_texts

PathLike = str | os.PathLike[str]
Data = PathLike | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Suite:
    """The tests that models take. The arguments of :func:`holdfast.measure` explain the fields.

    Example:
        >>> suite = Suite(text={"prose": "The cat sat on the mat."}, context_free=0)
        >>> tests, targets = suite.build()
        >>> [test.name for test in tests]
        ['prose']
    """

    text: PathLike | Sequence[PathLike] | Mapping[str, str] = ()
    data: PathLike | Sequence[PathLike] | Mapping[str, Data] = ()
    target: Data | Mapping[str, Data] = ()
    similarity: PathLike | Sequence[PathLike] | Mapping[str, Data] = ()
    tasks: Sequence[str] = ()
    include_path: PathLike | None = None
    probes: Sequence[Probe] = ()
    limit: int | None = None
    context_free: int | ContextFreeKL = 64
    kl_samples: int = 64

    def __post_init__(self) -> None:
        if not isinstance(self.context_free, ContextFreeKL):
            whole_number("context_free", self.context_free, 0, MOST_TEXTS)
        whole_number("kl_samples", self.kl_samples, 0)
        if self.limit is not None:
            whole_number("limit", self.limit, 1)

    def build(self) -> tuple[list[Probe], list[Probe]]:
        """Read the data; return all tests, and those of ``target`` among them."""
        tests: list[Probe] = [*_texts(self.text), *self._read(self.data, "data", "retained")]
        for name, data in named(self.similarity, "similarity").items():
            tests.append(Similarity(name, _first_rows(name, data, self.limit)))
        targets = self._read(self.target, "target", "target")
        tests += targets
        if self.tasks:
            tests.append(Harness(tuple(self.tasks), self.include_path, self.limit))
        return [*tests, *self.probes], targets

    def context_free_kl(self, tokens: int = 64) -> ContextFreeKL | None:
        """Return the data-free divergence, on texts of this length; None if it is switched off."""
        if isinstance(self.context_free, ContextFreeKL):
            return self.context_free
        return ContextFreeKL(self.context_free, tokens) if self.context_free else None

    def _read(self, given: Any, default: str, role: Role) -> list[Probe]:
        sources = named(given, default)
        return [_probe_of(name, data, role, self.limit) for name, data in sources.items()]


def named(given: Any, default: str) -> dict[str, Any]:
    """Return name → source: a mapping unchanged, paths by the names of their files.

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


def _texts(text: Any) -> list[Probe]:
    if isinstance(text, Mapping):
        return [Text(name, words) for name, words in text.items()]
    return [Text(name, read_texts(Path(path))) for name, path in named(text, "text").items()]


def _probe_of(name: str, data: Any, role: Role, limit: int | None) -> Probe:
    """Return the test that fits the columns of the data."""
    if isinstance(data, str | os.PathLike) and rows.is_text(path := Path(data)) and path.is_file():
        return Text(name, rows.read_text(path), role=role)
    data = _first_rows(name, data, limit)
    first: Any = data[0]
    if not isinstance(first, Mapping):
        return Classification(name, data, role=role)
    reader = Reader(name)
    kind = reader.kind(first, "choice", "completion", "labeled", "text")
    if kind is not None and not rows.image_column(first):
        reader.warn_of_unused(data, kind)
    if kind == "choice":
        return MultipleChoice(name, data, role=role)
    if kind == "completion":
        return Completions(name, data, role=role)
    if kind == "labeled":
        return Classification(name, data, role=role)
    if kind == "text":
        texts = [reader.text(row, number) for number, row in enumerate(data)]
        return Text(name, "\n\n".join(texts), role=role)
    raise ValueError(
        f"{name} has the columns {', '.join(map(str, first))}, which fit no test. Rows hold "
        "multiple choice (question, choices, label), completions (prompt, completion), "
        "classification (text or image, label) or text"
    )


def _first_rows(name: str, data: Any, limit: int | None) -> rows.Rows:
    """Return the first rows; images stay undecoded."""
    if isinstance(data, str | os.PathLike):
        data = rows.open_rows(data)
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise TypeError(f"{name} must be a file or a sequence of rows, got {type(data).__name__}")
    if not len(data):
        raise ValueError(f"{name} has no rows")
    if any(column in rows.IMAGE_COLUMNS for column in getattr(data, "column_names", ())):
        data = rows.DatasetRows(data)
    if isinstance(data, rows.DatasetRows):
        return data[:limit]
    return [data[i] for i in range(min(len(data), limit or len(data)))]


def kl_of(probe: Probe, loaded: Loaded, samples: int) -> KL | None:
    """Return the divergence of the predictions on a test's inputs; None if there is none."""
    if isinstance(probe, Classification):
        if is_regression(getattr(loaded.model, "config", None)):
            return None  # a number is not a distribution
        some = [probe.data[i] for i in range(min(samples, len(probe.data)))]
        return class_kl(Classification(probe.name, some, probe.collate, probe.batch_size))
    if loaded.kind == "masked_lm" and isinstance(probe, Text):
        return masked_kl(probe.name, probe.text, samples)
    if loaded.kind != "causal_lm":
        return None
    tokenizer = loaded.need_tokenizer(probe.name)
    if isinstance(probe, Text):
        some = encoding.pieces(encoding.tokenize(tokenizer, probe.text), loaded.limit)[:samples]
        return token_kl(probe.name, some, "the next token, after each token of the text")
    if isinstance(probe, Completions):
        texts = (probe.texts(i) for i in range(min(samples, len(probe.rows))))
        pairs = [encoding.encode_pair(loaded, *text) for text in texts]
        how = "the next token, after each token of the prompts and their answers"
        return token_kl(probe.name, [[*pair.context, *pair.target] for pair in pairs], how)
    return None
