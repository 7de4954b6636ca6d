"""The tests that models take, built from files, rows and texts."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast._torch.checks import NamedSettings, whole_number
from holdfast.builtin import located
from holdfast.evaluate.classify import Classification
from holdfast.evaluate.harness import Harness
from holdfast.evaluate.kl import KL, MOST_TEXTS, ContextFreeKL, class_kl, masked_kl, token_kl
from holdfast.evaluate.probes import Completions, MultipleChoice, Probe, Role, Similarity, Text
from holdfast.evaluate.skills import skills
from holdfast.io import encoding, rows
from holdfast.io.heads import is_regression
from holdfast.io.models import Loaded
from holdfast.io.render import Reader, check_columns, read_texts, rename

PathLike = str | os.PathLike[str]
Data = PathLike | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Suite(NamedSettings):
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
    limit_tokens: int | None = None
    columns: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.context_free, ContextFreeKL):
            whole_number("context_free", self.context_free, 0, MOST_TEXTS)
        whole_number("kl_samples", self.kl_samples, 0)
        for name in ("limit", "limit_tokens"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), 1)
        check_columns(self.columns)

    def build(self) -> tuple[list[Probe], list[Probe]]:
        """Read the data; return all tests, and those of ``target`` among them."""
        tests: list[Probe] = [*self._texts(), *self._read(self.data, "data", "retained")]
        for name, data in named(self.similarity, "similarity").items():
            tests.append(Similarity(name, self._rows(name, data)))
        targets = self._read(self.target, "target", "target")
        tests += targets
        if self.tasks:
            tests.append(Harness(tuple(self.tasks), self.include_path, self.limit))
        return [*tests, *self.probes], targets

    def context_free_kl(self, tokens: int = 64) -> ContextFreeKL | None:
        """Return the data-free divergence, on texts of this length; None if it is switched off."""
        given = self.context_free
        if not given:
            return None
        free = given if isinstance(given, ContextFreeKL) else ContextFreeKL(given, tokens)
        if self.limit is None and self.limit_tokens is None:
            return free
        tokens = min(free.tokens, self.limit_tokens or free.tokens)
        fit = free.texts if self.limit_tokens is None else self.limit_tokens // tokens
        return ContextFreeKL(min(free.texts, self.limit or free.texts, fit), tokens, free.seed)

    def options(self) -> dict[str, Any] | None:
        """The tests as options of the command line, with FILE for rows and texts in memory.

        None if there are tests that the command line does not have.

        >>> Suite(text="wiki.txt", target=[{"text": "a", "label": 1}], limit=9).options()
        {'target': ['FILE'], 'text': ['wiki.txt'], 'limit': 9}
        """
        free, names = self.context_free, [probe.name for probe in self.probes]
        if names and names != [probe.name for probe in skills()]:
            return None
        texts = free.texts if isinstance(free, ContextFreeKL) else free
        given = {
            "target": _paths(self.target),
            "text": ["FILE"] if isinstance(self.text, Mapping) else _paths(self.text),
            "retained": _paths(self.data), "similarity": _paths(self.similarity),
            "tasks": [*self.tasks], "limit": self.limit, "limit_tokens": self.limit_tokens,
            "context_free": None if texts == Suite.context_free else texts,
            "columns": [f"{name}={column}" for name, column in self.columns.items()],
            "skills": True if names else None,
            "seed": free.seed or None if isinstance(free, ContextFreeKL) else None,
        }  # fmt: skip
        return {name: some for name, some in given.items() if some not in (None, [])}

    def _read(self, given: Any, default: str, role: Role) -> list[Probe]:
        found: list[Probe] = []
        for name, data in named(given, default).items():
            path = Path(data) if isinstance(data, str | os.PathLike) else None
            if path is not None and rows.is_text(path) and path.is_file():
                found.append(Text(name, rows.read_text(path), role=role))
            else:
                found.append(_probe_of(name, self._rows(name, data, role), role))
        return found

    def _texts(self) -> list[Probe]:
        if isinstance(self.text, Mapping):
            return [Text(name, words) for name, words in self.text.items()]
        files = named(self.text, "text").items()
        return [Text(name, read_texts(file, self.columns)) for name, file in files]

    def _rows(self, name: str, data: Any, role: Role = "retained") -> rows.Rows:
        """Return the first rows, with the names of the column map.

        The target must have its columns. Other data may have other columns.
        """
        some = _first_rows(name, data, self.limit)
        first: Any = some[0]
        if not isinstance(first, Mapping):
            return some
        return rename(some, self.columns, name, optional=role != "target")


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
        for path in located(item, "text" if default == "text" else "data"):
            name = Path(path).name.split(".")[0] or path
            found[name if name not in found else path] = path
    return found


def _paths(given: Any) -> list[str]:
    """The paths among data; FILE if some of it is in memory."""
    if isinstance(given, Mapping):
        given = [*given.values()]
    items = [given] if isinstance(given, str | os.PathLike) else given
    if not all(isinstance(item, str | os.PathLike) for item in items):
        return ["FILE"]
    return [str(item) for item in items if item != ""]


def _probe_of(name: str, data: rows.Rows, role: Role) -> Probe:
    """Return the test that fits the columns of the data."""
    first: Any = data[0]
    if not isinstance(first, Mapping):
        return Classification(name, data, role=role)
    reader = Reader(name)
    kind = reader.kind(first, "choice", "conversation", "completion", "labeled", "text")
    if kind is not None and not rows.image_column(first):
        reader.warn_of_unused(data, kind)
    if kind == "choice":
        return MultipleChoice(name, data, role=role)
    if kind in ("conversation", "completion"):
        return Completions(name, data, role=role)
    if kind == "labeled":
        return Classification(name, data, role=role)
    if kind == "text":
        texts = [reader.text(row, number) for number, row in enumerate(data)]
        return Text(name, "\n\n".join(texts), role=role)
    raise ValueError(
        f"{name} has the columns {', '.join(map(str, first))}, which fit no test. Rows hold "
        "multiple choice (question, choices, label), conversations (messages), completions (prompt,"
        " completion), classification (text or image, label) or text; --columns (columns= in "
        "Python) gives other columns these names"
    )


def _first_rows(name: str, data: Any, limit: int | None) -> rows.Rows:
    """Return the first rows; images stay undecoded."""
    if isinstance(data, str | os.PathLike):
        data = rows.open_rows(data, limit)
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise TypeError(f"{name} must be a file or a sequence of rows, got {type(data).__name__}")
    if not len(data):
        raise ValueError(f"{name} has no rows")
    if any(column in rows.IMAGE_COLUMNS for column in getattr(data, "column_names", ())):
        data = rows.DatasetRows(data)
    if isinstance(data, rows.DatasetRows):
        return data[:limit]
    return [data[i] for i in range(min(len(data), limit or len(data)))]


def mentions(probe: Probe, tokens: Sequence[str]) -> bool:
    """Whether a text of a test contains one of the tokens."""
    if isinstance(probe, Text):
        return any(token in probe.text for token in tokens)
    given: Any = getattr(probe, "data" if isinstance(probe, Classification) else "rows", None)
    if not tokens or not (hasattr(given, "__len__") and hasattr(given, "__getitem__")):
        return False
    texts = (text for i in range(len(given)) for text in _strings(given[i]))
    return any(token in text for text in texts for token in tokens)


def _strings(value: Any) -> Iterator[str]:
    """Yield the texts in the columns of a row, of conversations too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(part)


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
    if isinstance(probe, Text):
        some = encoding.pieces(probe.tokens(loaded), loaded.limit)[:samples]
        return token_kl(probe.name, some, "the next token, after each token of the text")
    if isinstance(probe, Completions):
        last = [answers[-1] for answers in probe.answers(loaded, samples)]
        how = "the next token, after each token of the prompts and their answers"
        return token_kl(probe.name, [[*one.context, *one.target] for one in last], how)
    return None
