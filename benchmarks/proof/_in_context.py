"""Tasks that a model learns from its context alone, and that it does not write about by itself.

The answer of each row stands beside wrong ones of the same form, so a model that has only learned
the form is at chance.
"""

from __future__ import annotations

import codecs
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "papers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _lm_tests import LIMIT, Test
from torch import nn

from holdfast.io.encoding import Continuation, encode_pairs
from holdfast.io.models import Loaded

ROWS = 300  # of a test
SHOTS = 8  # examples in the context
COPIED = 48  # random tokens that are repeated
_WORDS = """
    actor adult agent alarm album angle apple apron arrow badge baker beach berry blade block board
    brain bread brick brush cabin camel candy cargo chain chair chalk chest clock cloud coach coral
    crown daisy dance diary dream dress drill eagle earth fairy fence field flame flute ghost globe
    glove grape green heart hotel house image ivory jelly juice knife label lemon light magic maple
    medal mouse music night north nurse ocean olive onion opera organ panda paper pearl piano pilot
    pizza plant plate queen quiet radio river robot round salad scarf sheep shirt skirt smoke snake
    spoon stone storm sugar sword table tiger tower train truck tulip uncle value voice wagon water
    whale wheel white yacht young zebra
"""
#: Words of five letters, so that all answers of a task are equally long.
WORDS = _WORDS.split()

#: A prompt, its answer, and wrong answers.
Row = tuple[str, str, list[str]]


def rot13(rng: random.Random) -> Row:
    """Each letter moves by 13; the wrong answers are other words in the same code."""
    words = rng.sample(WORDS, SHOTS + 4)
    return _asked(words[: SHOTS + 1], _rot13, [_spaced(_rot13(w)) for w in words[SHOTS + 1 :]])


def reversal(rng: random.Random) -> Row:
    """The letters of a word from the last to the first; the wrong answers are other orders."""
    words = rng.sample(WORDS, SHOTS + 1)
    return _asked(words, _reversed, [_spaced(order) for order in _orders(words[-1], rng)])


def reversal_words(rng: random.Random) -> Row:
    """Three words from the last to the first; the wrong answers are other orders."""
    lists = [rng.sample(WORDS, 3) for _ in range(SHOTS + 1)]
    return _asked(lists, _reversed, [_spaced(order) for order in _orders(lists[-1], rng)])


def lookup(rng: random.Random) -> Row:
    """The word that stood beside another one; the wrong answers are those beside the others."""
    words = rng.sample(WORDS, 2 * SHOTS)
    keys, values = words[:SHOTS], words[SHOTS:]
    asked = rng.randrange(SHOTS)
    pairs = zip(keys, values, strict=True)
    prompt = "".join(f"{key}: {value}\n" for key, value in pairs) + f"{keys[asked]}:"
    return prompt, values[asked], values[:asked] + values[asked + 1 :]


#: Tasks with several answers, and the accuracy of guessing.
TASKS: dict[str, tuple[Callable[[random.Random], Row], float]] = {
    "rot13": (rot13, 1 / 4),
    "reversal": (reversal, 1 / 4),
    "reversal_words": (reversal_words, 1 / 4),
    "lookup": (lookup, 1 / SHOTS),
}
CHANCE = {name: chance for name, (_, chance) in TASKS.items()} | {"copy": 0.0}


def make_tests(tokenizer: Any, limit: int = ROWS) -> list[Test]:
    """Per task, a test of its accuracy, and one of the loss of its right answers, ``*_answer``."""
    loaded, rows = Loaded(nn.Identity(), "causal_lm", tokenizer, LIMIT), min(ROWS, limit)
    found: list[Test] = []
    for name, (make, _) in TASKS.items():
        rng, pairs, labels, sizes = random.Random(0), [], [], []
        for _ in range(rows):
            prompt, right, answers = make(rng)
            # At a random place: of equal losses, or of none that is a number, the first counts.
            labels.append(rng.randrange(len(answers) + 1))
            answers.insert(labels[-1], right)
            sizes.append(len(answers))
            pairs += [(prompt, f" {answer}") for answer in answers]
        requests = encode_pairs(loaded, pairs)
        first = range(0, len(requests), sizes[0])
        right_ones = [requests[i + label] for i, label in zip(first, labels, strict=True)]
        found += [
            {
                "name": name, "kind": "choice", "requests": requests, "sizes": sizes,
                "lengths": [1] * len(requests), "labels": labels,
            },
            {"name": f"{name}_answer", "kind": "text", "requests": right_ones},
        ]  # fmt: skip
    copied = [*copies(tokenizer, loaded.first_token(), rows)]
    return [
        *found,
        {"name": "copy", "kind": "greedy", "requests": copied},
        {"name": "copy_answer", "kind": "text", "requests": copied},
    ]


def copies(tokenizer: Any, start: int, rows: int) -> Iterator[Continuation]:
    """Random tokens, the same again, and the next one; some of them have been repeated before."""
    rng = random.Random(0)
    ids = sorted({*range(len(tokenizer))} - {*tokenizer.all_special_ids})
    for _ in range(rows):
        tokens = rng.sample(ids, COPIED)
        known = rng.randrange(COPIED // 4, COPIED)
        yield Continuation([start, *tokens, *tokens[:known]], [tokens[known]])


def _asked(
    items: Sequence[Any], answer: Callable[[Any], Sequence[str]], wrong: list[str]
) -> Row:  # fmt: skip
    """Examples with their answers; the last item is asked for. Spaces make each part a token."""
    *shots, last = items
    prompt = "".join(f"{_spaced(shot)} -> {_spaced(answer(shot))}\n" for shot in shots)
    return f"{prompt}{_spaced(last)} ->", _spaced(answer(last)), wrong


def _orders(items: Sequence[str], rng: random.Random) -> list[list[str]]:
    """Three orders that differ from each other and from the reversed one."""
    found: list[list[str]] = []
    while len(found) < 3:
        order = rng.sample([*items], len(items))
        if order != [*items][::-1] and order not in found:
            found.append(order)
    return found


def _spaced(items: Sequence[str]) -> str:
    return " ".join(items)


def _reversed(items: Sequence[str]) -> Sequence[str]:
    return items[::-1]


def _rot13(word: str) -> str:
    return codecs.encode(word, "rot13")
