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
        some_tests()[0].run(loaded, progress=False)  # looks for the head
        called.clear()
        alone = [test.run(loaded, progress=False) for test in some_tests()]
        assert len(called) == 3
        called.clear()
        together = run_all(some_tests(), loaded, progress=False)
        assert len(called) == 1
    for one, other in zip(alone, together, strict=True):
        for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (one, other)), strict=True):
            torch.testing.assert_close(torch.tensor(a.values), torch.tensor(b.values))
            assert a.counts == b.counts


def test_a_run_of_its_own_is_kept_and_so_is_the_order():
    with opened(make_llama()) as loaded:
        text, _, choices = some_tests()
        found = run_all([text, OneMore("own", TEXT), choices], loaded, progress=False)
        assert found[1] == "its own"
        assert sum(found[0].counts) == sum(text.run(loaded, progress=False).counts)
        assert found[2] == choices.run(loaded, progress=False)
        assert run_all([], loaded, progress=False) == []


def test_an_error_names_its_test():
    with opened(make_llama()) as loaded, pytest.raises(ValueError, match="bad: answer 0 has no"):
        run_all([*some_tests(), Nothing("bad", TEXT)], loaded, progress=False)
