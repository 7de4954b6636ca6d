"""Contexts of 1,024 tokens, eight times as long as the texts that self-replay draws."""

from __future__ import annotations

import gzip
import itertools
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "papers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _lm_tests import LIMIT, Test
from forgetting_lm import lambada_rows
from torch import nn

from holdfast.io.encoding import Continuation, encode_pairs, tokenize, windows
from holdfast.io.models import Loaded

WINDOWS = 160  # of WikiText-2's test split
ROWS = 1000  # of LAMBADA
PARTS = (0, 128, 256, 512, LIMIT)  # of a window: from one to the next
CHANCE = {"lambada": 0.0, "lambada_far": 0.0}


def make_tests(tokenizer: Any, folder: Path, limit: int = ROWS) -> list[Test]:
    """WikiText-2 by the position in a window, and LAMBADA alone and after an unrelated text."""
    loaded = Loaded(nn.Identity(), "causal_lm", tokenizer, LIMIT)
    tokens = min(WINDOWS, limit) * LIMIT
    text = tokenize(tokenizer, _read(folder / "wikitext2-test.txt.gz")[: 9 * tokens])
    whole = windows(text[: min(tokens, len(text) // LIMIT * LIMIT)], loaded.first_token(), LIMIT)
    rows = lambada_rows(folder / "lambada-test.jsonl.gz")
    rows = random.Random(0).sample(rows, min(ROWS, limit, len(rows)))
    near = encode_pairs(loaded, [(row["prompt"], row["completion"]) for row in rows])
    other = tokenize(tokenizer, _read(folder / "wikitext2-valid.txt.gz"))
    return [
        *(
            {"name": f"wikitext_{begin}", "kind": "text",
             "requests": [part(window, begin, end) for window in whole]}
            for begin, end in itertools.pairwise(PARTS)
        ),
        {"name": "lambada", "kind": "greedy", "requests": near},
        {"name": "lambada_far", "kind": "greedy",
         "requests": far(near, other, tokenize(tokenizer, "\n\n"))},
    ]  # fmt: skip


def part(window: Continuation, begin: int, end: int) -> Continuation:
    """The tokens of a window from one position to another, after all before them.

    >>> part(Continuation([9], [1, 2, 3, 4]), 1, 3)
    Continuation(context=[9, 1], target=[2, 3])
    """
    context, target = window
    return Continuation([*context, *target[:begin]], target[begin:end])


def far(
    requests: Sequence[Continuation], text: Sequence[int], between: Sequence[int]
) -> list[Continuation]:
    """Requests after pieces of a text, which fill the context of the model.

    >>> [found] = far([Continuation([1, 2], [3])], text=[9] * 5000, between=[0])
    >>> len(found.context), found.context[-4:], found.target
    (1024, [9, 0, 1, 2], [3])
    """
    rng, found = random.Random(0), []
    for context, target in requests:
        room = LIMIT + 1 - len(between) - len(context) - len(target)
        begin = rng.randrange(len(text) - room)
        found.append(Continuation([*text[begin : begin + room], *between, *context], target))
    return found


def _read(path: Path) -> str:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return file.read()
