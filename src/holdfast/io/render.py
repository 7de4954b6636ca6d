"""What a row of data says: its conversation, prompt, answer or text, from columns of known names.

Training, scores and tests read rows here, so that all of them see the same words.
"""

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from holdfast.io.rows import (
    LABEL_COLUMNS,
    Rows,
    as_number,
    check_unicode,
    is_rows,
    read_rows,
    read_text,
    text_columns,
)

Part = Literal[
    "messages", "system", "context", "question", "input", "answer", "choices", "label", "class",
    "text",
]  # fmt: skip
Kind = Literal["conversation", "choice", "completion", "text", "labeled"]

#: The columns that can hold each part of a row; of several, the first one that is not null counts.
COLUMNS: dict[Part, tuple[str, ...]] = {
    "messages": ("messages",),
    "system": ("system", "system_prompt"),
    "context": ("context", "passage"),
    "question": ("prompt", "question", "goal", "query", "ctx", "instruction", "input"),
    "input": ("input",),
    "answer": ("completion", "answer", "response", "output", "target"),
    "choices": ("choices",),
    "label": ("label", "gold"),
    "class": LABEL_COLUMNS,
    "text": ("text", "sentence"),
}
_PROMPT: tuple[Part, ...] = ("system", "context", "question", "input")
#: Tasks come before their material, as in the datasets of Alpaca and Dolly; questions come after.
_TASKS = ("instruction",)
_PROMPT_OF_A_TASK: tuple[Part, ...] = ("system", "question", "context", "input")
#: The parts that a row of each kind must have, and those that it may have.
_KINDS: dict[Kind, tuple[tuple[Part, ...], tuple[Part, ...]]] = {
    "conversation": (("messages",), ("system",)),
    "choice": (("choices",), (*_PROMPT, "label")),
    "completion": (("question", "answer"), _PROMPT),
    "labeled": (("class",), ()),
    "text": (("text",), ()),
}


@dataclass(frozen=True)
class Reader:
    """Reads the words of rows.

    Attributes:
        name: the name of the data, for errors.
        columns: the columns that can hold each part of a row.
    """

    name: str
    columns: Mapping[Part, tuple[str, ...]] = field(default_factory=lambda: COLUMNS)

    def kind(self, row: Mapping[str, Any], *kinds: Kind) -> Kind | None:
        """Return the first of these kinds whose parts a row has.

        >>> Reader("rows").kind({"question": "2 + 2", "answer": "4"}, "conversation", "completion")
        'completion'
        """
        return next((k for k in kinds if all(self._column(row, p) for p in _KINDS[k][0])), None)

    def prompt(self, row: Mapping[str, Any], number: int, template: str | None = None) -> str:
        """Return all that comes before the answer: a template filled with columns, or all parts.

        >>> row = {"instruction": "Add.", "input": "2 and 2", "output": "4"}
        >>> Reader("rows").prompt(row, 0)
        'Add.\\n\\n2 and 2'
        >>> Reader("rows").prompt({"context": "It rains.", "question": "Is it dry?"}, 0)
        'It rains.\\n\\nIs it dry?'
        """
        if template is not None:
            return self._filled(template, row, number)
        question = self._needed(row, "question", number)
        order = _PROMPT_OF_A_TASK if question in _TASKS else _PROMPT
        found = [column for part in order if (column := self._column(row, part))]
        texts = [
            self._text(row, column, number)
            for column in dict.fromkeys(found)  # "input" may be the question
            if column == question or row[column] is not None
        ]
        return "\n\n".join(text for text in texts if text)

    def pair(
        self, row: Mapping[str, Any], number: int, template: str | None = None
    ) -> tuple[str, str]:
        """Return the prompt and the answer of a row, with a space between them."""
        prompt = self.prompt(row, number, template)
        answer = self._text(row, self._needed(row, "answer", number), number)
        spaced = not prompt or prompt[-1].isspace() or answer[:1].isspace()
        return prompt, answer if spaced else f" {answer}"

    def choices(self, row: Mapping[str, Any], number: int) -> tuple[list[str], int]:
        """Return the choices of a row, and the index of the correct one.

        The choices are a list, JSON in a cell of a CSV file, or a mapping as in ARC.
        """
        given = row[self._needed(row, "choices", number)]
        if isinstance(given, Mapping):
            given = given.get("text")
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except (ValueError, RecursionError):
                given = None
        if not isinstance(given, list | tuple) or len(given) < 2:
            raise ValueError(
                f"{self.name}: the choices of row {number} must be a list of at least two texts"
            )
        texts = [_words(x, f"{self.name}: a choice of row {number}") for x in given]
        label = row[self._needed(row, "label", number)]
        index = as_number(label)
        if index is None or index not in range(len(texts)):
            raise ValueError(
                f"{self.name}: row {number} has {len(texts)} choices, so its label must be a whole "
                f"number from 0 to {len(texts) - 1}, got {label!r}"
            )
        return texts, int(index)

    def messages(self, row: Mapping[str, Any], number: int) -> list[Mapping[str, Any]]:
        """Return the turns of a conversation; a system prompt in its own column comes first."""
        turns = row[self._needed(row, "messages", number)]
        if not isinstance(turns, list | tuple) or not all(map(_is_turn, turns)):
            raise ValueError(
                f"{self.name}: the messages of row {number} must be a list of turns, each with a "
                '"role" and a "content"'
            )
        for turn in turns:
            check_unicode(turn, f"{self.name}: a message of row {number}")
        system = self._column(row, "system")
        if system is None or not row[system] or (turns and turns[0]["role"] == "system"):
            return list(turns)
        return [{"role": "system", "content": self._text(row, system, number)}, *turns]

    def text(self, row: Mapping[str, Any], number: int) -> str:
        """Return the text of a row."""
        return self._text(row, self._needed(row, "text", number), number)

    def training_words(self, rows: Rows) -> tuple[Kind, list[Any]]:
        """Return what a causal language model learns from each row, and the kind of all rows."""
        kind = self.kind(rows[0], "conversation", "completion", "text")
        if kind is None:
            raise ValueError(
                f"{self.name} has the columns {', '.join(map(str, rows[0]))}, but training needs "
                "messages, prompt and completion, or text"
            )
        readers: dict[str, Callable[[Mapping[str, Any], int], Any]] = {
            "conversation": self.messages, "completion": self.pair, "text": self.text,
        }  # fmt: skip
        return kind, [readers[kind](row, number) for number, row in enumerate(rows)]

    def warn_of_unused(self, rows: Rows, kind: Kind) -> None:
        """Warn of columns with words that rows of a kind do not use."""
        unused: dict[str, None] = {}
        for row in rows:
            used = self._used(row, kind)
            unused |= {c: None for c, x in row.items() if c not in used and _holds_words(x)}
        if unused:
            warnings.warn(
                f"{self.name}: columns that are not used: {', '.join(map(str, unused))}",
                stacklevel=2,
            )

    def _used(self, row: Mapping[str, Any], kind: Kind) -> Sequence[str | None]:
        parts = [part for some in _KINDS[kind] for part in some]
        pair = text_columns(row) if kind == "labeled" else ()
        return [*pair, *(self._column(row, part) for part in parts)]

    def _column(self, row: Mapping[str, Any], part: Part) -> str | None:
        """Return the column that holds a part, even if it is null; None if there is none."""
        there = [column for column in self.columns[part] if column in row]
        return next((c for c in there if row[c] is not None), there[0] if there else None)

    def _needed(self, row: Mapping[str, Any], part: Part, number: int) -> str:
        column = self._column(row, part)
        if column is None:
            raise ValueError(
                f"{self.name}: row {number} needs one of the columns "
                f"{', '.join(self.columns[part])}, but it has "
                f"{', '.join(map(str, row)) or 'no columns'}"
            )
        return column

    def _text(self, row: Mapping[str, Any], column: str, number: int) -> str:
        return _words(row[column], f"{self.name}: {column} of row {number}")

    def _filled(self, template: str, row: Mapping[str, Any], number: int) -> str:
        given = {str(column): value for column, value in row.items() if value is not None}
        try:
            filled = template.format(**given)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(
                f"{self.name}: the template {template!r} does not fit row {number}, which has the "
                f"columns {', '.join(given)}: {error}"
            ) from error
        return _words(filled, f"{self.name}: the prompt of row {number}")


def _words(value: Any, what: str) -> str:
    """Return a value as text: text unchanged, a number by its digits."""
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return str(value)
    if not isinstance(value, str):
        given = "null" if value is None else f"{value!r:.60}"
        raise ValueError(f"{what} must be text, got {given}")
    check_unicode(value, what)
    return value


def _holds_words(value: Any) -> bool:
    return isinstance(value, str | list | Mapping) and bool(value)


def _is_turn(turn: Any) -> bool:
    if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str):
        return False
    return turn.get("content") is not None or bool(turn.get("tool_calls"))


def read_texts(path: Path) -> str:
    """Read a text file, or the texts in a file of rows, with a blank line between them."""
    if not is_rows(path):
        return read_text(path)
    rows, reader = read_rows(path), Reader(str(path))
    if reader.kind(rows[0], "text") is None:
        raise ValueError(
            f"{path} must be a text file, or have the column text in each row, but its first row "
            f"has {', '.join(map(str, rows[0]))}. Other tests are data= (--retained on the command "
            "line)"
        )
    texts = [reader.text(row, number) for number, row in enumerate(rows)]
    reader.warn_of_unused(rows, "text")
    return "\n\n".join(texts)
