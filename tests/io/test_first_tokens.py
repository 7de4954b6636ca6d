"""The first tokens of a long text are those of the whole text."""

import random

import pytest

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

from tokenizers import Tokenizer, models, pre_tokenizers, trainers  # noqa: E402

from holdfast.io.encoding import first_tokens  # noqa: E402

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "two", "1234", "55", "é€", "🙂", "naïve"]


def written(length=4000, seed=0):
    draw = random.Random(seed)
    spaces = [" "] * 6 + ["  ", "\n", "\n\n", ", "]
    return "".join(draw.choice(WORDS) + draw.choice(spaces) for _ in range(length))[:length]


@pytest.fixture(scope="module")
def bytewise():
    """A tokenizer with characters of several tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator([written(seed=seed) for seed in range(1, 4)], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.mark.parametrize("most", [1, 77, 300, 10_000])
def test_the_first_tokens_are_those_of_the_text(most, bytewise):
    text = written()
    cut, ids = first_tokens(bytewise, text, most)
    assert text.startswith(cut)
    assert ids == bytewise(cut)["input_ids"] == bytewise(text)["input_ids"][: len(ids)]
    assert most - 4 < len(ids) <= most or cut == text
