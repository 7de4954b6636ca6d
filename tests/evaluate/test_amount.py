"""How much is measured: limits of samples and tokens, and what is announced."""

import json
import re

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

from tokenizers import Tokenizer  # noqa: E402
from tokenizers.models import BPE  # noqa: E402
from tokenizers.pre_tokenizers import ByteLevel  # noqa: E402

import holdfast  # noqa: E402
from holdfast.cli import main  # noqa: E402
from holdfast.evaluate import amount  # noqa: E402
from holdfast.evaluate.classify import Classification  # noqa: E402
from holdfast.evaluate.probes import Completions, MultipleChoice, Similarity, Text  # noqa: E402
from holdfast.evaluate.suite import Suite  # noqa: E402
from holdfast.io.models import Loader  # noqa: E402
from small import make_llama, make_tokenizer, noisy, save  # noqa: E402

TEXT = " ".join(["the cat sat on the mat . a dog ran and two plus three is five ."] * 40)
ROWS = [{"question": "two plus two is", "answer": "four"}] * 6
CHOICES = [{"goal": "the cat sat on", "choices": ["the mat", "two plus"], "label": 0}] * 6
PAIRS = [{"sentence1": "the cat", "sentence2": "a dog", "label": 1.0}] * 6


def opened(model=None):
    return Loader(tokenizer=make_tokenizer()).open(model or make_llama())


@pytest.mark.parametrize(
    ("test", "each", "tokens", "left"),
    [
        (Completions("c", ROWS), 5, 12, 2),
        (Completions("c", ROWS), 5, 1, 1),  # at least one row
        (MultipleChoice("m", CHOICES), 12, 40, 3),
        (Similarity("s", PAIRS), 4, 8, 2),
    ],
)
def test_rows_within_a_number_of_tokens(test, each, tokens, left):
    with opened() as loaded:
        assert test.lengths(loaded) == [each] * 6
        assert len(amount.limited(test, loaded, None, tokens).rows) == left
        assert amount.limited(test, loaded, 3, None) is test  # rows are limited when they are read


def test_a_text_within_a_number_of_tokens_or_samples():
    with opened() as loaded:
        text = Text("t", TEXT)
        assert text.lengths(loaded) == [680]
        cut = amount.limited(text, loaded, None, 5)
        assert (cut.text, cut.lengths(loaded)) == ("the cat sat on the", [5])
        assert amount.limited(text, loaded, 2, None).lengths(loaded) == [256]
        assert amount.limited(text, loaded, 2, 100).lengths(loaded) == [100]
        assert amount.limited(text, loaded, 9, 700).text == TEXT


def bytewise():
    """A tokenizer with one token per byte."""
    letters = {letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="!")


@pytest.mark.parametrize("most", range(1, 12))
def test_a_cut_text_has_the_tokens_that_are_tested(most):
    """A character of several tokens is tested as a whole, or not at all."""
    text, tokenizer = "a é€ 🙂 b", bytewise()
    with Loader(tokenizer=tokenizer).open(make_llama(vocab=300)) as loaded:
        cut = Text("t", text).within(loaded, most)
        assert text.startswith(cut.text)
        assert cut.tokens(loaded) == tokenizer(cut.text)["input_ids"]
        assert most - 4 < len(cut.tokens(loaded)) <= most


@pytest.mark.parametrize("limit", [2, 100])
def test_a_text_is_tokenized_once(monkeypatch, limit):
    tokenizer, seen = make_tokenizer(), []
    call = type(tokenizer).__call__

    def counted(self, text, *args, **options):
        seen.extend([text] if isinstance(text, str) else text)
        return call(self, text, *args, **options)

    monkeypatch.setattr(type(tokenizer), "__call__", counted)
    base = make_llama()
    loader = Loader(tokenizer=tokenizer)
    options = {"loader": loader, "context_free": 0, "drift": False, "progress": False}
    holdfast.measure(base, noisy(base), text={"t": TEXT}, limit=limit, **options)
    assert [text[:7] for text in seen if text] == ["the cat"]


def test_a_classifier_within_a_number_of_tokens():
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_labels=3,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config).eval()
    rows = [{"text": "the cat sat on", "label": i % 3} for i in range(6)]
    with opened(model) as loaded:
        test = Classification("cls", rows)
        assert test.lengths(loaded) == [4] * 6
        assert len(amount.limited(test, loaded, None, 9).data) == 2
        images = Classification("other", [(torch.zeros(2), 1)] * 6)
        assert images.lengths(loaded) == []
        assert amount.limited(images, loaded, None, 9) is images
        assert amount.seconds_per_token(loaded) > 0


@pytest.mark.parametrize(
    ("limits", "texts", "tokens"),
    [
        ({}, 64, 64),
        ({"limit": 10}, 10, 64),
        ({"limit_tokens": 640}, 10, 64),
        ({"limit_tokens": 32}, 1, 32),
        ({"limit": 3, "limit_tokens": 640}, 3, 64),
    ],
)
def test_limits_of_the_texts_that_the_base_generates(limits, texts, tokens):
    free = Suite(**limits).context_free_kl()
    assert (free.texts, free.tokens) == (texts, tokens)


def test_limits_that_are_no_numbers():
    with pytest.raises(ValueError, match="limit_tokens"):
        Suite(limit_tokens=0)


def test_limits_apply_to_everything(tmp_path, capsys):
    base = make_llama()
    save(base, tmp_path / "base", make_tokenizer())
    save(noisy(base), tmp_path / "tuned", make_tokenizer())
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    words = ["measure", str(tmp_path / "base"), str(tmp_path / "tuned"), "--json"]
    words += ["--text", str(tmp_path / "text.txt"), "--target", str(tmp_path / "rows.jsonl")]
    assert main([*words, "--limit", "4", "--limit-tokens", "200"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert {(s["name"], s["before"]["n"]) for s in report["scores"]} == {("text", 2), ("rows", 4)}
    assert [(d["name"], d["kl"]["n"]) for d in report["divergences"]] == [
        ("context-free", 3),
        ("rows", 4),
    ]
    assert report["settings"]["limit_tokens"] == 200
    head, *lines = [line for line in err.splitlines() if re.match("- |.*tests,", line)]
    assert re.fullmatch(r"3 tests, about \S+ s for the base and \S+ s for each other model:", head)
    assert lines == [
        "- text: 200 tokens",
        "- rows: 4 rows, 20 tokens",
        "- context-free: 3 texts of at most 64 tokens",
    ]


def test_completions_run_once_for_divergence_and_likelihood():
    """The losses of the answers are those of the pass that gave the divergence."""
    base = make_llama()
    tuned, rows = noisy(base), [*ROWS[:1], {"question": "the cat", "answer": "sat on the mat ."}]
    options = {"loader": Loader(tokenizer=make_tokenizer()), "context_free": 0, "drift": False}
    seen = []
    with base.model.register_forward_hook(lambda _, args, out: seen.append(out[0].shape)):
        found = holdfast.measure(base, tuned, target=rows, progress=False, **options)
    passes = [shape for shape in seen if shape[0] == len(rows)]
    assert len(passes) == 1
    alone = holdfast.measure(base, tuned, target=rows, kl_samples=0, progress=False, **options)
    for one, other in zip(found.scores, alone.scores, strict=True):
        assert one.before.value == pytest.approx(other.before.value, rel=1e-5)
        assert one.after.value == pytest.approx(other.after.value, rel=1e-5)
