"""How texts start that a language model writes: with BOS, and at a user's first message."""

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, NamedTuple

from torch import nn

from holdfast._torch.adapters import without_peft
from holdfast._torch.checks import whole_number
from holdfast.io.models import Loaded, Loader
from holdfast.scoring.draw import end_tokens

logger = logging.getLogger(__name__)

_MARK = "holdfastusertext"  # stands for what a user writes
_DATE = datetime(2024, 7, 26)  # some templates show the date; texts must not depend on it


class Start(NamedTuple):
    """How texts start.

    Attributes:
        tokens: their first tokens.
        ends: the number of end tokens after which a text is over. A chat ends with the answer, and
            in most chats the user's message has an end token too.
    """

    tokens: Sequence[int]
    ends: int = 1


def default_starts(
    model: nn.Module, tokenizer: Any = None, *, start: int | None = None, length: int = 128
) -> list[Start]:
    """Return how drawn texts start: one way for all texts, or two ways, each for half of them.

    Texts start at ``start`` if given, else at BOS, else at EOS. If the tokenizer has a chat
    template, half of them start where a user's first message begins, and end with the answer,
    unless the system's message before it takes more than half of the ``length`` of a text.
    """
    tokenizer = text_tokenizer(tokenizer)
    first = Start([first_token(model, tokenizer, start)])
    turn, message_ends = _user_turn(tokenizer, end_tokens(without_peft(model)).tolist())
    if not turn or turn == first.tokens:
        return [first]
    if len(turn) > length // 2:
        logger.warning(
            f"no drawn text starts like a chat: the {len(turn)} tokens before a user's first "
            f"message leave too little of {length} tokens. Set a larger length"
        )
        return [first]
    return [first, Start(turn, message_ends + 1)]


def describe_starts(starts: Sequence[Start], tokenizer: Any = None) -> str:
    """Describe how drawn texts start.

    >>> describe_starts([Start([1]), Start([1, 5, 6])])
    'half of the texts start with the tokens [1], half with [1, 5, 6]'
    """
    tokenizer = text_tokenizer(tokenizer)
    tokens = [list(start.tokens) for start in starts]
    one, *other = tokens if tokenizer is None else [repr(tokenizer.decode(x)) for x in tokens]
    what = "the tokens " if tokenizer is None else ""
    if not other:
        return f"all texts start with {what}{one}"
    return f"half of the texts start with {what}{one}, half with {other[0]}"


def text_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer inside a processor of texts and images."""
    return getattr(tokenizer, "tokenizer", tokenizer)


def first_token(model: nn.Module, tokenizer: Any = None, start: int | None = None) -> int:
    """The first token of texts: ``start``, else BOS, else EOS."""
    tokenizer = text_tokenizer(tokenizer)
    try:
        return replace(loaded(model, 2), tokenizer=tokenizer, start_token=start).first_token()
    except ValueError as error:
        if "BOS" not in str(error):
            raise
        raise ValueError(
            "the model has no BOS or EOS token that texts can start with: set start= to the id of "
            "a token"
        ) from None


def loaded(model: nn.Module, length: int) -> Loaded:
    """A causal model without its adapters, with the length of its texts, which its limit cuts."""
    inner = without_peft(model)
    found = Loader(max_length=whole_number("length", length, 2)).ready(inner, None)
    if found.kind != "causal_lm":
        raise ValueError(
            f"{type(inner).__name__} does not generate texts: drawing needs a causal language model"
        )
    return found


def _user_turn(tokenizer: Any, end: Sequence[int]) -> tuple[list[int], int]:
    """The tokens of a chat before a user's first message, and the number of end tokens after it.

    No tokens if the template has no such place. Spaces at the end are left out: most tokenizers
    join them to the next word.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        return [], 0
    found: tuple[list[int], int] = [], 0
    try:
        message = [{"role": "user", "content": _MARK}]
        template = re.sub(
            r"strftime_now\((['\"])(.*?)\1\)",
            lambda call: repr(_DATE.strftime(call[2])),
            tokenizer.get_chat_template(),
        )
        text = tokenizer.apply_chat_template(message, chat_template=template, tokenize=False)
        before, *after = text.split(_MARK)
        if len(after) == 1:
            before, after = (
                tokenizer(part, add_special_tokens=False)["input_ids"]
                for part in (before.rstrip(" "), after[0])
            )
            found = list(before), sum(token in end for token in after)
    except Exception as error:  # a template is a program
        logger.debug("the chat template failed", exc_info=error)
    if not found[0]:
        logger.warning(
            "no drawn text starts like a chat: the chat template has no place for a user's first "
            "message alone"
        )
    return found
