"""What a row of data says: its conversation, prompt, answer or text, from columns of known names.

Training, scores and tests read rows here, so that all of them see the same words. A column map
(``{"text1": "question"}``) gives other columns a known name, before anything reads the rows.
"""

import json
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from holdfast._torch.checks import did_you_mean
from holdfast.io.rows import (
    IMAGE_COLUMNS,
    LABEL_COLUMNS,
    PAIRS,
    DatasetRows,
    Rows,
    as_number,
    check_unicode,
    columns_of,
    image_column,
    is_rows,
    open_rows,
    read_text,
    text_columns,
)

Part = Literal[
    "messages", "tools", "system", "context", "question", "input", "answer", "choices", "label",
    "class", "text", "text1", "text2", "image", "score",
]  # fmt: skip
Kind = Literal["conversation", "choice", "completion", "labeled", "pair", "similarity", "text"]

#: The columns that can hold each part of a row; of several, the first one that is not null counts.
COLUMNS: dict[Part, tuple[str, ...]] = {
    "messages": ("messages", "conversations"),
    "tools": ("tools",),
    "system": ("system", "system_prompt"),
    "context": ("context", "passage"),
    "question": ("prompt", "question", "goal", "query", "ctx", "instruction", "input"),
    "input": ("input",),
    "answer": ("completion", "answer", "response", "output", "target"),
    "choices": ("choices",),
    "label": ("label", "gold"),
    "class": LABEL_COLUMNS,
    "text": ("text", "sentence"),
    "text1": tuple(first for first, _ in PAIRS),
    "text2": tuple(second for _, second in PAIRS),
    "image": IMAGE_COLUMNS,
    "score": ("label", "score", "similarity"),
}
_PROMPT: tuple[Part, ...] = ("system", "context", "question", "input")
#: Tasks come before their material, as in the datasets of Alpaca and Dolly; questions come after.
_TASKS = ("instruction",)
_PROMPT_OF_A_TASK: tuple[Part, ...] = ("system", "question", "context", "input")
#: The parts that a row of each kind must have, and those that it may have.
_KINDS: dict[Kind, tuple[tuple[Part, ...], tuple[Part, ...]]] = {
    "conversation": (("messages",), ("system", "tools")),
    "choice": (("choices",), (*_PROMPT, "label")),
    "completion": (("question", "answer"), _PROMPT),
    "labeled": (("class",), ("text", "image")),
    "pair": (("class",), ("text1", "text2")),
    "similarity": (("score",), ("text1", "text2")),
    "text": (("text",), ()),
}
#: Roles of other formats, such as ShareGPT, by the names that chat templates know.
_ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant",
    "bing": "assistant", "model": "assistant", "function_call": "assistant",
    "observation": "tool", "function_response": "tool",
}  # fmt: skip


class Conversation(NamedTuple):
    """The turns of a conversation, and the tools that the assistant may call."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None

    @property
    def has_answer(self) -> bool:
        """Whether the assistant says something after another turn."""
        return any(turn["role"] == "assistant" for turn in self.messages[1:])


#: A conversation, a prompt and its answer, or a text.
Words = Conversation | tuple[str, str] | str


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
        return next((kind for kind in kinds if self._is(kind, row)), None)

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

    def answered(
        self, row: Mapping[str, Any], number: int, template: str | None = None
    ) -> Conversation | tuple[str, str]:
        """Return the conversation of a row, or its prompt and answer."""
        if template is None and self.kind(row, "conversation"):
            return self.conversation(row, number)
        return self.pair(row, number, template)

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
        given = _parsed(given)
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

    def conversation(self, row: Mapping[str, Any], number: int) -> Conversation:
        """Return the turns of a row, and its tools: a list, or JSON in a text."""
        column = self._column(row, "tools")
        given = row[column] if column else None
        tools = _parsed(_filled_in(given)) if given else None
        if given and not _is_list(tools):
            raise ValueError(f"{self.name}: {column} of row {number} must be a list of tools")
        return Conversation(self.messages(row, number), tools or None)

    def messages(self, row: Mapping[str, Any], number: int) -> list[dict[str, Any]]:
        """Return the turns of a conversation; a system prompt in its own column comes first.

        >>> row = {"conversations": [{"from": "human", "value": "2 + 2"}], "system": "Add."}
        >>> Reader("rows").messages(row, 0)
        [{'role': 'system', 'content': 'Add.'}, {'role': 'user', 'content': '2 + 2'}]
        """
        given = [_parsed(row[column]) for column in self._turns(row)]
        if not given:
            given = [row[self._needed(row, "messages", number)]]
        turns = [_turn(turn) for some in given for turn in (some if _is_list(some) else [some])]
        if not all(turns):
            raise ValueError(
                f"{self.name}: the messages of row {number} must be a list of turns, each with a "
                '"role" and a "content" (or "from" and "value")'
            )
        found = [turn for turn in turns if turn]
        for turn in found:
            check_unicode(turn, f"{self.name}: a message of row {number}")
        system = self._column(row, "system")
        if system is None or not row[system] or (found and found[0]["role"] == "system"):
            return found
        return [{"role": "system", "content": self._text(row, system, number)}, *found]

    def text(self, row: Mapping[str, Any], number: int) -> str:
        """Return the text of a row."""
        return self._text(row, self._needed(row, "text", number), number)

    def training_words(self, rows: Rows) -> tuple[Kind, list[Words]]:
        """Return what a causal language model learns from each row, and the kind of all rows."""
        kind = self.kind(rows[0], "conversation", "completion", "text")
        if kind is None:
            raise ValueError(
                f"{self.name} has the columns {', '.join(map(str, rows[0]))}, but training needs "
                "messages, prompt and completion, or text: give columns these names with --columns "
                "text=COLUMN, or question=COLUMN answer=COLUMN (columns= in Python); labels are "
                "learned with --head classification"
            )
        readers: dict[str, Callable[[Mapping[str, Any], int], Words]] = {
            "conversation": self.conversation, "completion": self.pair, "text": self.text,
        }  # fmt: skip
        return kind, [readers[kind](row, number) for number, row in enumerate(rows)]

    def warn_of_unused(self, rows: Rows, kind: Kind) -> None:
        """Warn of columns with words that rows of a kind do not use."""
        unused: dict[str, None] = {}
        for row in rows:
            used = self.used(row, kind)
            unused |= {c: None for c, x in row.items() if c not in used and _holds_words(x)}
        if unused:
            warnings.warn(
                f"{self.name}: columns that are not used: {', '.join(map(str, unused))}",
                stacklevel=2,
            )

    def used(self, row: Mapping[str, Any], kind: Kind) -> Sequence[str | None]:
        """Return the columns of a row that are read if it is of this kind."""
        must, may = _KINDS[kind]
        if kind in ("labeled", "pair", "similarity"):
            return [*text_columns(row), image_column(row), *(self._column(row, p) for p in must)]
        if kind == "conversation":
            return [*self._turns(row), *(self._column(row, part) for part in may)]
        return [self._column(row, part) for part in (*must, *may)]

    def _is(self, kind: Kind, row: Mapping[str, Any]) -> bool:
        if kind == "conversation":
            return bool(self._turns(row))
        there = all(self._column(row, part) for part in _KINDS[kind][0])
        return there and not (kind == "completion" and self._turns(row))

    def _turns(self, row: Mapping[str, Any]) -> list[str]:
        """Return the columns with turns: messages, or a prompt and completion of messages."""
        if column := self._column(row, "messages"):
            return [column]
        both = self._column(row, "question"), self._column(row, "answer")
        return [c for c in both if c] if all(c and _is_list(row[c]) for c in both) else []

    def _column(self, row: Mapping[str, Any], part: Part) -> str | None:
        """Return the column that holds a part, even if it is null; None if there is none."""
        null = None
        for column in self.columns[part]:
            if column in row:
                if row[column] is not None:
                    return column
                null = null or column
        return null

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


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _parsed(value: Any) -> Any:
    """Return a list that is JSON in a text, such as a cell of a CSV file; else the value."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


def _filled_in(value: Any) -> Any:
    """Return a value without nulls: Arrow adds them so that all rows have the same keys."""
    if isinstance(value, Mapping):
        return {str(key): _filled_in(x) for key, x in value.items() if x is not None}
    return [_filled_in(x) for x in value] if _is_list(value) else value


def _turn(given: Any) -> dict[str, Any] | None:
    """Return a turn as chat templates read it; None if it is none."""
    if not isinstance(given, Mapping):
        return None
    turn: dict[str, Any] = _filled_in(given)
    for other, ours in (("from", "role"), ("value", "content")):
        if other in turn and ours not in turn:
            turn[ours] = turn.pop(other)
    if not isinstance(turn.get("role"), str) or not (turn.keys() & {"content", "tool_calls"}):
        return None
    turn["role"] = _ROLES.get(turn["role"], turn["role"])
    for call in turn.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            # OpenAI's are JSON in a text; chat templates write JSON themselves.
            function["arguments"] = _parsed(function["arguments"]) or function["arguments"]
    return turn


def check_columns(columns: Mapping[str, str]) -> None:
    """Raise ValueError if a column map names a part that rows do not have.

    >>> check_columns({"txt": "body"})
    Traceback (most recent call last):
    ...
    ValueError: a column map has no name 'txt'; did you mean 'text'?
    """
    known = [name for names in COLUMNS.values() for name in names]
    for name in columns:
        if name not in known:
            raise ValueError(
                f"a column map has no name {name!r}{did_you_mean(name, dict.fromkeys(known))}"
            )
    if len({*columns.values()}) < len(columns):
        raise ValueError(f"a column map gives a column two names: {_shown(columns)}")
    if not _kinds_with(columns) or len(columns.keys() & {"text1", "text2"}) == 1:
        raise ValueError(
            f"no kind of row consists of {', '.join(columns)}: give a question and an answer, a "
            "text, messages, or text1, text2 and label"
        )


def rename(rows: Rows, columns: Mapping[str, str], name: str, *, optional: bool = False) -> Rows:
    """Return rows in which columns have the names that a column map gives them.

    Columns that would be read instead of a mapped one are left out. ``optional`` returns rows
    without all of the columns unchanged.

    >>> rows = [{"prompt": "x", "ask": "Is it wet?", "reply": True}]
    >>> rename(rows, {"question": "ask", "answer": "reply"}, "rows")
    [{'question': 'Is it wet?', 'answer': True}]
    """
    if not columns:
        return rows
    check_columns(columns)
    there = columns_of(rows)
    if missing := [column for column in columns.values() if column not in there]:
        if optional:
            return rows
        raise ValueError(f"{name} has no column {missing[0]!r}{did_you_mean(missing[0], there)}")
    names = {column: known for known, column in columns.items()}
    hidden = [column for column in there if column not in names and _is_hidden(column, columns)]
    if isinstance(rows, DatasetRows):
        names = {column: known for column, known in names.items() if column != known}
        return DatasetRows(rows.dataset.remove_columns(hidden).rename_columns(names))
    return [{names.get(c, c): x for c, x in row.items() if c not in hidden} for row in rows]


def _kinds_with(names: Mapping[str, str]) -> list[Kind]:
    """Return the kinds of rows that use all of these names."""
    parts = {kind: [*must, *may] for kind, (must, may) in _KINDS.items()}
    return [
        k for k, some in parts.items() if all(any(n in COLUMNS[p] for p in some) for n in names)
    ]


def _is_hidden(column: str, columns: Mapping[str, str]) -> bool:
    """Whether a column would take the place of a mapped one, or make rows another kind."""
    own = [part for part, names in COLUMNS.items() if column in names]
    for part in own:
        names = COLUMNS[part]
        if any(n in names and names.index(column) <= names.index(n) for n in columns):
            return True
    wanted = {part for kind in _kinds_with(columns) for some in _KINDS[kind] for part in some}
    return bool(own) and not wanted & {*own}


def _shown(columns: Mapping[str, str]) -> str:
    return " ".join(f"{name}={column}" for name, column in columns.items())


def read_texts(source: str | os.PathLike[str], columns: Mapping[str, str] | None = None) -> str:
    """Read a text file, or the texts of rows, with a blank line between them."""
    path = Path(source)
    if path.is_file() and not is_rows(path):
        return read_text(path)
    name = str(source)
    rows, reader = rename(open_rows(name), columns or {}, name, optional=True), Reader(name)
    if reader.kind(rows[0], "text") is None:
        raise ValueError(
            f"{name} must be a text file, or have the column text in each row, but its first row "
            f"has {', '.join(map(str, rows[0]))}. Other tests are data= (--retained on the command "
            "line)"
        )
    texts = [reader.text(row, number) for number, row in enumerate(rows)]
    reader.warn_of_unused(rows, "text")
    return "\n\n".join(texts)
