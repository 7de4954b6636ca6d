"""The skills: tests without data."""

import pytest

pytest.importorskip("transformers", reason="the hf extra is not installed")

from holdfast import measure
from holdfast.evaluate.probes import Completions
from holdfast.evaluate.skills import Continued, skills, sums
from holdfast.io.models import Loader
from small import make_llama, make_tokenizer, noisy

TEMPLATE = "{% for m in messages %}<s> {{ m['content'] }} </s> {% endfor %}"


def measured(model, tuned, tokenizer, **options):
    loader = Loader(tokenizer=tokenizer, device="cpu")
    probes = skills(**options)
    return measure(model, tuned, probes=probes, context_free=0, loader=loader, progress=False)


def test_sums_are_right():
    for row in sums(50):
        *_, question = row["prompt"].split("\n")
        assert eval(question.removesuffix("=")) == int(row["completion"])
    assert sums(5) == sums(5)
    assert sums(5) != sums(5, seed=1)


def test_a_model_forgets_none_of_its_own_skills_and_a_noisy_one_does():
    model, tokenizer = make_llama(limit=128, scale=0.3), make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    same = measured(model, model, tokenizer, texts=8, tokens=8)
    assert {score.name for score in same.scores} == {
        "arithmetic", "code", "English", "French", "German", "Spanish", "chats",
    }  # fmt: skip
    assert all(score.change.value == 0 for score in same.scores)
    worse = measured(model, noisy(model, 0.5), tokenizer, texts=8, tokens=8)
    drawn = [score for score in worse.scores if score.metric == "skill_perplexity"]
    assert len(drawn) == 6
    assert all(score.change.value > 0 for score in drawn)
    assert all(score.change.low is not None and score.change.n == 8 for score in drawn)


def test_without_a_chat_template_chats_are_left_out_with_the_reason(capsys):
    model, loader = make_llama(limit=128), Loader(tokenizer=make_tokenizer(), device="cpu")
    probes = skills(texts=8, tokens=8)
    report = measure(model, model, probes=probes, context_free=0, loader=loader, progress=True)
    assert "chats" not in {score.name for score in report.scores}
    assert report.notes == ("No test of chats: the tokenizer has no chat template.",)
    assert "6 tests, at least" in capsys.readouterr().err


def test_a_target_that_does_not_suit_the_base_has_no_divergence(monkeypatch):
    monkeypatch.setattr(Completions, "unfit", lambda *_: "the base cannot take it")
    model, loader = make_llama(), Loader(tokenizer=make_tokenizer(), device="cpu")
    rows = [{"question": "two plus two is", "answer": "four"}]
    report = measure(model, model, target=rows, context_free=0, loader=loader, progress=False)
    assert report.notes == ("No test of target: the base cannot take it.",)
    assert (report.scores, report.divergences) == ((), ())


def test_the_same_seed_draws_the_same_texts():
    model, loader = make_llama(limit=64), Loader(tokenizer=make_tokenizer(), device="cpu")
    with loader.open(model) as loaded:
        one, same, other = (
            Continued("x", lambda loaded: [[2, 8], [2, 9, 10]], 4, 8, seed) for seed in (0, 0, 1)
        )
        for test in (one, same, other):
            test.run(loaded, progress=False)
    assert one._drawn == same._drawn != other._drawn
    assert [row.context for row in one._drawn][:2] == [[2, 8], [2, 9, 10]]
