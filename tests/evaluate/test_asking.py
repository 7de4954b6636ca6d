"""Tests that ask a model together: the results are those of each test by itself."""

import pytest
import torch

pytest.importorskip("transformers", reason="the hf extra is not installed")

from holdfast.evaluate.asking import run_all
from holdfast.evaluate.probes import Completions, MultipleChoice, Text
from holdfast.io.encoding import Continuation
from holdfast.io.models import Loader
from small import make_llama, make_tokenizer

TEXT = " ".join(["the cat sat on the mat . a dog ran and two plus three is five ."] * 20)
ANSWERS = [{"question": "the cat sat", "answer": "on the mat ."}] * 3
CHOICES = [{"goal": "two plus three is", "choices": ["five", "a dog"], "label": 0}] * 5


class OneMore(Text):
    """A text with a run of its own."""

    def run(self, loaded, *, progress):
        return "its own"


class Nothing(Text):
    def requests(self, loaded):
        return [Continuation([1], [])]


def opened(model):
    return Loader(max_length=64, tokenizer=make_tokenizer()).open(model)


def some_tests():
    return [Text("text", TEXT), Completions("answers", ANSWERS), MultipleChoice("choices", CHOICES)]


def passes(model):
    """Counts the calls of a model."""
    found = []
    model.model.register_forward_hook(lambda *_: found.append(1))
    return found


def test_results_are_those_of_each_test_with_fewer_passes(monkeypatch):
    monkeypatch.setattr("holdfast.scoring.likelihood._TOKENS_ON_A_CPU", 1 << 12)
    model = make_llama()
    called = passes(model)
    with opened(model) as loaded:
        alone = [test.run(loaded, progress=False) for test in some_tests()]
        single = len(called)
        together = run_all(some_tests(), loaded, progress=False)
    assert len(called) - single < single
    for one, other in zip(alone, together, strict=True):
        for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (one, other)), strict=True):
            torch.testing.assert_close(torch.tensor(a.values), torch.tensor(b.values))
            assert a.counts == b.counts


def test_a_class_with_its_own_run_keeps_it_and_the_order_stays():
    with opened(make_llama()) as loaded:
        first, own, last = run_all(
            [some_tests()[0], OneMore("own", TEXT), some_tests()[2]], loaded, progress=False
        )
        assert own == "its own"
        assert first == some_tests()[0].run(loaded, progress=False)
        assert last == some_tests()[2].run(loaded, progress=False)
        assert run_all([], loaded, progress=False) == []


def test_an_error_names_its_test():
    with opened(make_llama()) as loaded, pytest.raises(ValueError, match="bad: answer 0 has no"):
        run_all([*some_tests(), Nothing("bad", TEXT)], loaded, progress=False)
