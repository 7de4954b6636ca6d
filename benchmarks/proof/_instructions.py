"""Instructions that ask for a format, and programs that check whether an answer keeps to it.

SmolLM2-135M keeps to each of these formats sometimes. It never kept to some others, which are not
here: only capital letters, no capital letters, a given last word, one word only, four words
separated by commas, a poem of exactly four lines, two paragraphs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

TOPICS = (
    "dogs", "the moon", "coffee", "bicycles", "trees", "music", "rain", "bread", "trains", "books",
    "gardens", "winter", "football", "the sea", "mountains", "cheese",
)  # fmt: skip
SPANISH = {"el", "los", "las", "una", "es", "y", "por", "con", "para", "del", "está", "como", "más"}
ENGLISH = {"the", "is", "and", "of", "to", "in", "that", "with", "for", "are", "it"}


class Instruction(NamedTuple):
    """A request about a topic.

    Attributes:
        kind: the name of the format.
        text: the request.
        question: a request without the format.
    """

    kind: str
    text: str
    question: str


def three_points(answer: str) -> bool:
    """Three items with bullets or numbers.

    >>> three_points("Here they are:\\n- one\\n- two\\n- three"), three_points("- one\\n- two")
    (True, False)
    """
    return len(re.findall(r"^\s*(?:[-*•]|\d+[.)])\s+\S", answer, re.MULTILINE)) == 3


def five_numbers(answer: str) -> bool:
    """Items that are numbered from 1 to 5."""
    return re.findall(r"^\s*(\d+)[.)]\s+\S", answer, re.MULTILINE) == ["1", "2", "3", "4", "5"]


def json_only(answer: str) -> bool:
    """An object with both keys and nothing beside it; it may stand in a block of Markdown."""
    text = re.sub(r"^```(?:json)?\s*(.*?)\s*```$", r"\1", answer.strip(), flags=re.DOTALL)
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return isinstance(found, dict) and {*found} == {"name", "description"}


def in_spanish(answer: str) -> bool:
    """Spanish function words, more than English ones."""
    words = re.findall(r"\w+", answer.lower())
    own = sum(word in SPANISH for word in words)
    return own >= 2 and own > sum(word in ENGLISH for word in words)


def begins_in_short(answer: str) -> bool:
    return answer.strip().strip('"').startswith("In short")


def has_history(answer: str) -> bool:
    return bool(re.search(r"\bhistory\b", answer, re.IGNORECASE))


def one_sentence(answer: str) -> bool:
    """One line of at least four words, with one end of a sentence.

    >>> one_sentence("The moon orbits the earth."), one_sentence("It shines. It is the moon.")
    (True, False)
    """
    text = answer.strip()
    return (
        "\n" not in text
        and len(text.split()) > 3
        and len(re.findall(r"[.!?][\"'”]?(?=\s|$)", text)) == 1
        and text.rstrip("\"'”")[-1:] in {*".!?"}
    )


def question_only(answer: str) -> bool:
    return one_sentence(answer) and answer.strip().endswith("?")


def yes_or_no(answer: str) -> bool:
    return answer.strip().rstrip(".!").lower() in ("yes", "no")


def in_quotes(answer: str) -> bool:
    """The whole answer is in double quotes."""
    return bool(re.fullmatch(r"[\"“][^\"“”\n]+[\"”]", answer.strip()))


def title_only(answer: str) -> bool:
    """One line of at most 15 words without a full stop; a line of code is none."""
    text = answer.strip().strip('"*#').strip()
    return bool(re.fullmatch(r"[A-Z][\w ,:;'’\"!?&–—-]*", text)) and len(text.split()) <= 15


def letter_to_anna(answer: str) -> bool:
    return answer.strip().startswith("Dear Anna")


def verse(answer: str) -> bool:
    """At least four lines of at most 12 words, which begin with a capital; a program is none."""
    lines = [line for line in answer.split("\n") if line.strip()]
    return len(lines) >= 4 and all(
        re.match(r"[\"'“‘]?[A-Z][^=(){}]*$", line) and len(line.split()) <= 12
        for line in lines[:-1]  # the last one may be cut
    )


#: Formats: a request, with the topic in braces, and its program.
FORMATS: dict[str, tuple[str, Callable[[str], bool]]] = {
    "three_points": ("Give exactly three bullet points about {}.", three_points),
    "five_numbers": ("List five facts about {} as a numbered list.", five_numbers),
    "json": (
        'Describe {} as a JSON object with the keys "name" and "description". '
        "Answer with JSON only.", json_only,
    ),
    "spanish": ("Write one sentence about {} in Spanish.", in_spanish),
    "beginning": ('Write about {}. Begin your answer with the words "In short".', begins_in_short),
    "word": ('Write one sentence about {} that contains the word "history".', has_history),
    "sentence": ("Describe {} in one sentence.", one_sentence),
    "question": ("Ask me one question about {}. Answer with the question only.", question_only),
    "yes_or_no": ("Do many people like {}? Answer only yes or no.", yes_or_no),
    "quotes": ("Write one sentence about {} and put it in double quotes.", in_quotes),
    "title": (
        "Write a short title for an article about {}. Answer with the title only.", title_only,
    ),
    "letter": ('Write a short letter about {}. Begin with "Dear Anna".', letter_to_anna),
    "verse": ("Write a poem about {}.", verse),
}  # fmt: skip


def instructions(limit: int = len(TOPICS)) -> list[Instruction]:
    """Every format with every topic, or with the first ones."""
    return [
        Instruction(kind, text.format(topic), f"Tell me about {topic}.")
        for kind, (text, _) in FORMATS.items()
        for topic in TOPICS[:limit]
    ]


def followed(asked: Sequence[Instruction], answers: Sequence[str]) -> list[bool]:
    """Whether each answer keeps to the format that was asked for."""
    return [FORMATS[one.kind][1](answer) for one, answer in zip(asked, answers, strict=True)]
