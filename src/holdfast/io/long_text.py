"""The tokens of a long text, whose parts are tokenized side by side.

A tokenizer uses one core per text. Parts of a long text overlap, and two parts are joined at a
token where both have the same tokens on both sides, so that no cut shows.
"""

from typing import Any

_PART, _OVERLAP = 1 << 14, 1 << 10  # characters
_SAME = 16  # tokens before and after a joint that must be the same in both parts


class Tokenized:
    """The tokens of a text, without special tokens.

    Example:
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import PreTrainedTokenizerFast
        >>> words = Tokenizer(models.WordLevel({"a": 0, "cat": 1}, unk_token="a"))
        >>> words.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> found = Tokenized(PreTrainedTokenizerFast(tokenizer_object=words), "a cat")
        >>> found.ids, found.span(1)
        ([0, 1], (2, 5))
    """

    def __init__(self, tokenizer: Any, text: str) -> None:
        is_fast = bool(getattr(tokenizer, "is_fast", False))  # knows the places of tokens
        self._starts = range(0, max(1, len(text) - _OVERLAP), _PART if is_fast else len(text) + 1)
        self._found = _tokenize(tokenizer, text, self._starts)
        joints = self._joints()
        if joints is None:
            self._starts = range(1)
            self._found, joints = _tokenize(tokenizer, text, self._starts), []
        self._used: list[range] = []  # the tokens of each part that are used
        self.ids: list[int] = []
        begin = 0
        for part, ids in enumerate(self._found["input_ids"]):
            end, following = joints[part] if part < len(joints) else (len(ids), 0)
            self._used.append(range(begin, end))
            self.ids += ids[begin:end]
            begin = following

    def span(self, number: int) -> tuple[int, int]:
        """Return the characters of a token: the first one, and the one after the last one."""
        for part, used in enumerate(self._used):
            if number < len(used):
                return self._span(part, used[number])
            number -= len(used)
        raise IndexError(number)

    def _span(self, part: int, number: int) -> tuple[int, int]:
        found = self._found.token_to_chars(part, number)
        return self._starts[part] + found.start, self._starts[part] + found.end

    def _joints(self) -> list[tuple[int, int]] | None:
        """Return where parts end and the next ones go on; None if two parts do not agree."""
        found = [self._joint(part) for part in range(len(self._starts) - 1)]
        joints = [joint for joint in found if joint is not None]
        return joints if len(joints) == len(found) else None

    def _joint(self, part: int) -> tuple[int, int] | None:
        """Return the number of a token in a part, and in the next one."""
        one, other = self._found["input_ids"][part : part + 2]
        middle = self._starts[part + 1] + _OVERLAP // 2
        for place in range(middle, middle + _OVERLAP // 4):
            i, j = (self._found.char_to_token(p, place - self._starts[p]) for p in (part, part + 1))
            if i is None or j is None or min(i, j) < _SAME:  # None: no token, such as a space
                continue
            around = one[i - _SAME : i + _SAME]
            same = len(around) == 2 * _SAME and around == other[j - _SAME : j + _SAME]
            if same and self._span(part, i) == self._span(part + 1, j):
                return i, j
        return None


def _tokenize(tokenizer: Any, text: str, starts: range) -> Any:
    parts = [text[start : start + _PART + _OVERLAP] for start in starts]
    return tokenizer(parts if len(parts) > 1 else [text], add_special_tokens=False)
