"""Solutions of GSM8K in the base's own words, for training (self-distillation, 2402.13669)."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "papers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _exam import written_texts
from _lm_tests import final, split_answer
from additivity_lm import answers

PROMPT = (
    "{question}\n\nA solution is:\n{answer}\n\n"
    "Write this solution in your own words, step by step, with all calculations. "
    "End with the result."
)
MOST = 256  # tokens of a solution


def rewrite(model: Any, tokenizer: Any, rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """The rows, with the solution of the model where its final number is right."""
    asked = [
        {"question": PROMPT.format(**row | {"answer": without_marks(row["answer"])}), "answer": ""}
        for row in rows
    ]
    prompts = [split_answer(sample).context for sample in answers(tokenizer, asked)]
    texts = written_texts(model, tokenizer, prompts, MOST)
    return [
        row | {"answer": chosen(row["answer"], text)} for row, text in zip(rows, texts, strict=True)
    ]


def chosen(given: str, own: str) -> str:
    """The own solution if its last number is right, with the mark of the result; else the given.

    >>> chosen("2 + 2 = <<2+2=4>>4\\n#### 4", "Two and two make 4.")
    'Two and two make 4.\\n#### 4'
    >>> chosen("#### 4", "It is 5.")
    '#### 4'
    """
    own = without_marks(own)
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", own)
    if not numbers or float(numbers[-1].replace(",", "")) != final(given):
        return given
    return f"{own}\n#### {given.rpartition('####')[2].strip()}"


def without_marks(solution: str) -> str:
    """A solution without its calculator notes and the mark of its result.

    >>> without_marks("2 + 2 = <<2+2=4>>4\\n#### 4")
    '2 + 2 = 4\\n4'
    """
    return re.sub(r"<<.*?>>", "", solution).replace("#### ", "").strip()
