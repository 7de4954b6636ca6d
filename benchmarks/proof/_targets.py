"""What a language model learns: GSM8K, MBPP, BoolQ or Shakespeare, divided as in PROTOCOL.md."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "papers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _lm_tests import final, split_answer
from additivity_lm import answers, read

from holdfast.io.encoding import Continuation, tokenize, windows

GSM8K = 3000  # rows of its training split
WINDOW = 256  # tokens of a text
Sample = dict[str, list[int]]
Rows = list[dict[str, str]]


class Target(NamedTuple):
    """A target: what is trained on, and what is tested.

    Attributes:
        epochs: of training.
        train: the samples.
        choose, report: the requests that settings are chosen on, and those that are reported.
        questions: prompts that the model answers in writing; none is none.
        right: whether each text that it wrote after them is right.
        most: the tokens of an answer, at most.
    """

    epochs: int
    train: list[Sample]
    choose: list[Continuation]
    report: list[Continuation]
    questions: list[list[int]]
    right: Callable[[Sequence[str]], list[bool]]
    most: int = 0


def make_target(name: str, tokenizer: Any, folder: Path, samples: int | None = None) -> Target:
    """Read a target; ``samples`` limits the training data."""
    return MAKERS[name](tokenizer, folder, samples)


def _asked(
    tokenizer: Any, train: Rows, choose: Rows, report: Rows, asked: Rows, **rest: Any
) -> Target:
    """A target of questions and answers."""

    def requests(rows: Rows) -> list[Continuation]:
        return [split_answer(sample) for sample in answers(tokenizer, rows)]

    prompts = [request.context for request in requests(asked)]
    data = answers(tokenizer, train)
    return Target(
        train=data, choose=requests(choose), report=requests(report), questions=prompts, **rest
    )


def gsm8k(tokenizer: Any, folder: Path, samples: int | None) -> Target:
    train = read(folder / "gsm8k-train.jsonl.gz")[:GSM8K][:samples]
    test = read(folder / "gsm8k-test.jsonl.gz")
    numbers = [final(row["answer"]) for row in test]

    def right(texts: Sequence[str]) -> list[bool]:
        return [final(text) == number for text, number in zip(texts, numbers, strict=True)]

    return _asked(
        tokenizer, train, test[::2], test[1::2], test, epochs=1, right=right, most=200
    )  # fmt: skip


def mbpp(tokenizer: Any, folder: Path, samples: int | None) -> Target:
    problems: list[dict[str, Any]] = list(read(folder / "mbpp.jsonl.gz"))
    random.Random(0).shuffle(problems)
    trained = {p["text"] for p in problems[:600]}
    problems[600:] = [p for p in problems[600:] if p["text"] not in trained]
    rows = [
        {
            "question": f"{p['text']} Your code should pass this test:\n{p['test_list'][0]}",
            "answer": p["code"].replace("\r", ""),
        }
        for p in problems
    ]
    asked = problems[600:]

    def right(texts: Sequence[str]) -> list[bool]:
        programs = [
            "\n".join([_code(text), p["test_setup_code"], *p["test_list"]])
            for text, p in zip(texts, asked, strict=True)
        ]
        done = subprocess.run(
            [sys.executable, "-I", str(Path(__file__).with_name("_execute.py"))],
            input=json.dumps(programs), capture_output=True, text=True, check=True,
        )  # fmt: skip
        found: list[bool] = json.loads(done.stdout)
        return found

    return _asked(
        tokenizer, rows[:600][:samples], rows[600::2], rows[601::2], rows[600:], epochs=3,
        right=right, most=256,
    )  # fmt: skip


def _code(text: str) -> str:
    """The program of an answer, which may stand in a block of Markdown.

    >>> _code("Here it is:\\n```python\\nx = 1\\n```\\nDone.")
    'x = 1'
    """
    if "```" not in text:
        return text
    block = text.split("```")[1]
    return block.removeprefix("python").removeprefix("py").strip("\n")


def boolq(tokenizer: Any, folder: Path, samples: int | None) -> Target:
    rows = [
        {"question": row["instruction"], "answer": row["answer"]}
        for row in read(folder / "boolq-test.jsonl.gz")
    ]
    random.Random(0).shuffle(rows)
    asked = rows[2270:]

    def right(texts: Sequence[str]) -> list[bool]:
        return [
            text.strip().lower().startswith(row["answer"])
            for text, row in zip(texts, asked, strict=True)
        ]

    target = _asked(
        tokenizer, rows[:2270][:samples], asked[:500], asked[500:], asked, epochs=2, right=right,
        most=4,
    )  # fmt: skip
    return target._replace(choose=_first(target.choose), report=_first(target.report))


def _first(requests: list[Continuation]) -> list[Continuation]:
    """The first token of each answer, which decides it: the others are the form of a chat."""
    return [Continuation(request.context, request.target[:1]) for request in requests]


def shakespeare(tokenizer: Any, folder: Path, samples: int | None) -> Target:
    with gzip.open(folder / "tinyshakespeare.txt.gz", "rt", encoding="utf-8") as file:
        text = file.read()
    cut = len(text) * 9 // 10
    ids = tokenize(tokenizer, text[:cut])
    pieces = [ids[i : i + WINDOW] for i in range(0, len(ids) - WINDOW + 1, WINDOW)][:samples]
    rest = tokenize(tokenizer, text[cut:])
    requests = windows(rest, rest[0], WINDOW)
    return Target(
        epochs=2, train=[{"input_ids": piece, "labels": piece} for piece in pieces],
        choose=requests[::2], report=requests[1::2], questions=[], right=lambda texts: [],
    )  # fmt: skip


MAKERS: dict[str, Callable[[Any, Path, int | None], Target]] = {
    "gsm8k": gsm8k, "mbpp": mbpp, "boolq": boolq, "shakespeare": shakespeare,
}  # fmt: skip
