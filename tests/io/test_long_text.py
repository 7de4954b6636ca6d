"""Long texts have the same tokens in parts as in one piece."""

import random

import pytest

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers  # noqa: E402

from holdfast.io import long_text  # noqa: E402
from holdfast.io.encoding import first_tokens, tokenize  # noqa: E402
from small import make_tokenizer  # noqa: E402

WORDS = [
    "the", "cat", "sat", "on", "a", "mat", "and", "two", "dogs", "ran", "1234", "55", "é€", "🙂",
    "naïve", "[MASK]",
]  # fmt: skip


def written(length=4000, seed=0):
    draw = random.Random(seed)
    spaces = [" "] * 6 + ["  ", "\n", "\n\n", ", "]
    return "".join(draw.choice(WORDS) + draw.choice(spaces) for _ in range(length))[:length]


def trained(model, trainer, pre_tokenizer, normalizer=None):
    tokenizer = Tokenizer(model)
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator([written(seed=seed) for seed in range(1, 4)], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def bytewise():
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    return trained(models.BPE(), trainer, pre_tokenizers.ByteLevel(add_prefix_space=False))


def sentencewise():
    special = {"special_tokens": ["<unk>"], "unk_token": "<unk>", "show_progress": False}
    trainer = trainers.UnigramTrainer(vocab_size=80, **special)
    normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    return trained(models.Unigram(), trainer, pre_tokenizers.Metaspace(), normalizer)


def unsplit():
    """As Llama 2's: a text is one word, which begins with a space."""
    trainer = trainers.BpeTrainer(vocab_size=120, show_progress=False, special_tokens=["<unk>"])
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    model, normalizer = models.BPE(unk_token="<unk>"), normalizers.Sequence(spaces)
    return trained(model, trainer, None, normalizer)


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(long_text, "_PART", 500)
    monkeypatch.setattr(long_text, "_OVERLAP", 200)
    monkeypatch.setattr(long_text, "_SAME", 4)


@pytest.mark.parametrize("make", [make_tokenizer, bytewise, sentencewise, unsplit])
def test_parts_have_the_tokens_of_the_whole(make, small_parts):
    tokenizer = make()
    for length in (0, 1, 699, 700, 701, 4000):
        text = written(length)
        whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        found = long_text.Tokenized(tokenizer, text)
        assert found.ids == whole["input_ids"]
        assert [found.span(i) for i in range(len(found.ids))] == whole["offset_mapping"]
        assert tokenize(tokenizer, text) == whole["input_ids"]
    assert len(found._starts) == 8


def test_parts_that_do_not_agree_are_not_used(small_parts):
    """Digits are grouped from the first one, which no part but the first one has."""
    numbers = {word: i for i, word in enumerate(["<unk>", *map(str, range(1000))])}
    words = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d{1,3}"), "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    text = "".join(random.Random(0).choices("123456789", k=4000))
    found = long_text.Tokenized(tokenizer, text)
    assert len(found._starts) == 1
    assert found.ids == tokenizer(text)["input_ids"]


@pytest.mark.parametrize("most", [1, 77, 300, 10_000])
def test_the_first_tokens_are_those_of_the_text(most, small_parts):
    tokenizer, text = bytewise(), written()
    cut, ids = first_tokens(tokenizer, text, most)
    assert text.startswith(cut)
    assert ids == tokenizer(cut)["input_ids"] == tokenizer(text)["input_ids"][: len(ids)]
    assert most - 4 < len(ids) <= most or cut == text
